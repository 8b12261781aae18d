// Attention forward for Hopper over the pages of a cache, for sequences with many queries: the
// consumers of fwd.cuh, with a producer that loads K and V page by page.
//
//   tile of keys   | page | page | page | page |     a lane of the producer's warp for each box: it
//                  | box  | box  | box  | box  |     looks up its block one tile ahead, and issues
//                                                    its own TMA
//
// A task is a tile of queries of one head, found as in paged_work.cuh. Boxes beyond the keys that a
// tile's rows see repeat the first or the last that they do see: nothing else is looked up, and
// every tile has the same number of bytes. What rows do not see is masked, and rows that a NaN
// behind a mask reached are computed once more (fwd_epilogue.cuh).
#pragma once

#include "cuda/attention/paged_work.cuh"
#include "cuda/attention/sm90/fwd.cuh"
#include "cuda/attention/sm90/paged.h"

namespace flashmoe::cuda::sm90 {

template <class T, Sm90ChunkTile kChunkTile>
struct FwdPagedConfig : FwdConfig<T, kChunkTile> {
  static constexpr bool kPaged = true;
  static constexpr int kThreads = kChunkTile.threads();
  static constexpr uint32_t kSmemWork = kChunkTile.Sm90FwdTile::shared_bytes();

  // Row `key` of K or V, through the block table. (The table is sound: seq.valid says so.)
  static __device__ __forceinline__ const uint16_t* key_row(const void* tensor, int key_head,
                                                            const FwdTask& task, int key,
                                                            const Sm90FwdParams& params) {
    const PagedParams& p = static_cast<const Sm90PagedParams&>(params).pages;
    const bool values = tensor == p.value;
    const Strides& strides = values ? p.value_strides : p.key_strides;
    const int page = key / p.page;
    const int64_t block =
        read_length(p.block_table, task.seq.token_k + page * p.table_column, p.table_is_int64);
    return static_cast<const uint16_t*>(tensor) + block * (values ? p.value_block : p.key_block) +
           (key - page * p.page) * strides.row + key_head * strides.head;
  }
};

// The items of this kernel: tiles of queries of one head.
template <class C>
struct ChunkItems {
  using Task = FwdTask;
  static __device__ __forceinline__ PagedWork find(int i, const PagedParams& p) {
    PagedWork w = find_work<C::kBlockQ>(i, p);
    w.tiles = ceil_div(w.len_q, C::kBlockQ);
    w.cost = ceil_div(w.len_k, p.cost_keys) + 1;
    return w;
  }
  static __device__ __forceinline__ int count(const PagedWork& w, const PagedParams& p) {
    return w.chunk ? w.tiles * p.heads_q : 0;
  }
  static __device__ __forceinline__ void take(FwdTask& task, int sequence, const PagedWork& w,
                                              int item, const PagedParams& p) {
    Sequence seq;
    seq.token_q = w.token_q;
    seq.token_k = sequence * p.table_row;  // where its row of the table begins
    seq.len_q = w.len_q;
    seq.len_k = w.len_k;
    seq.shift = w.len_k - w.len_q;
    task.seq = seq;
    task.batch = 0;
    task.head = item / w.tiles;
    task.first_row = folded_tile(item % w.tiles, w.tiles) * C::kBlockQ;
    task.lse = w.token_q * p.lse_strides.row + task.head * p.lse_strides.head;
  }
};

// A warp. All its lanes wait for stages, lane 0 arrives, and each lane has a box of every tile.
template <class C>
class FwdPagedProducer {
  using Smem = typename C::Smem;
  using Keys = typename C::Keys;
  using Schedule = PagedSchedule<C::kThreads, ChunkItems<C>>;

 public:
  __device__ __forceinline__ FwdPagedProducer(Smem& shared, uint32_t smem, const Schedule& schedule,
                                              const Sm90PagedParams& p)
      : shared_(shared), smem_(smem), schedule_(schedule), p_(p), lane_(threadIdx.x % 32) {}

  __device__ __forceinline__ void run() {
    if (lane_ == 0) {
      for (const TensorMap* map : {&p_.query_map, &p_.key_map, &p_.value_map, &p_.out_map}) {
        ptx::prefetch_tensormap(map);
      }
    }
#pragma unroll 1
    for (;;) {
      FwdTask& task = shared_.tasks[tasks_.at()];
      const tma::Slot slot = C::slot(smem_, C::kTaskBarrier + tasks_.at());
      tasks_.wait_empty(slot);
      if (lane_ == 0) {
        task.more = schedule_.next(task, p_.pages);
        if (task.more) FwdScheduler<C>{p_}.find_key_tiles(task, task.seq, task.first_row);
        ptx::mbarrier_arrive(slot.full);
      }
      __syncwarp();  // the task is there for the other lanes too
      tasks_.advance();
      if (!task.more) return;
      load(task);
    }
  }

 private:
  // Where a lane's box of a tile is in the cache.
  struct Box {
    int block, row;
  };

  __device__ __forceinline__ int boxes() const { return C::kBlockK / p_.box_keys; }

  // Looks up the lane's box of tile n. A block out of the cache is one where TMA reads zeros, and
  // the results become NaN.
  __device__ __forceinline__ Box look_up(int n, int first, int last, FwdTask& task) const {
    const PagedParams& p = p_.pages;
    const int key = min(max(n * C::kBlockK + lane_ * p_.box_keys, first), last);
    const int page = key / p.page;
    int64_t block =
        read_length(p.block_table, task.seq.token_k + page * p.table_column, p.table_is_int64);
    if (block < 0 || block >= p.blocks) {
      task.seq.valid = false;
      block = p.blocks;
    }
    return {static_cast<int>(block), key - page * p.page};
  }
  __device__ __forceinline__ void fill(const tma::Slot& slot, uint32_t to, const TensorMap& map,
                                       const Box& box, bool any, int key_head) const {
    __syncwarp();  // what look_up() wrote comes before the arrival
    if (lane_ == 0) {
      if (any) {
        ptx::mbarrier_arrive_expect_tx(slot.full, Keys::kBytes);
      } else {
        ptx::mbarrier_arrive(slot.full);
      }
    }
    __syncwarp();  // the bytes are expected
    if (!any || lane_ >= boxes()) return;
#pragma unroll
    for (int i = 0; i < Keys::kBlocks; ++i) {
      ptx::tma_load(to + i * Keys::kBlockBytes + lane_ * p_.box_keys * Keys::kRowBytes, &map,
                    slot.full, i * Keys::kBlockCols, key_head, box.row, box.block);
    }
  }

  __device__ __forceinline__ void load(FwdTask& task) {
    const int last_row = min(task.first_row + C::kBlockQ, task.seq.len_q) - 1;
    const int begin = task.seq.begin(task.first_row, p_), end = task.seq.end(last_row, p_);
    const bool any = begin < end;  // whether any row sees any key
    const int first = begin / p_.box_keys * p_.box_keys;
    const int last = (end - 1) / p_.box_keys * p_.box_keys;
    const int key_head = task.head / p_.group;
    Box box{};
    if (any) box = look_up(task.key_end - 1, first, last, task);
#pragma unroll 1
    for (int n = task.key_end - 1; n >= task.key_begin; --n, keys_.advance()) {
      const uint32_t stage = keys_.at() * sizeof(Keys);
      const tma::Slot k = C::slot(smem_, C::kKBarrier + keys_.at());
      const tma::Slot v = C::slot(smem_, C::kVBarrier + keys_.at());
      keys_.wait_empty(k);
      fill(k, smem_ + offsetof(Smem, sK) + stage, p_.key_map, box, any, key_head);
      if (n == task.key_end - 1) {
        const tma::Slot q = C::slot(smem_, C::kQBarrier);
        queries_.wait_empty(q);
        if (lane_ == 0) {
          tma::fill<typename C::Rows>(q, smem_ + offsetof(Smem, sQ), p_.query_map, 0,
                                      task.first_token(p_), task.head, 0);
        }
        queries_.advance();
      }
      const Box here = box;
      if (any && n > task.key_begin) box = look_up(n - 1, first, last, task);
      keys_.wait_empty(v);
      fill(v, smem_ + offsetof(Smem, sV) + stage, p_.value_map, here, any, key_head);
    }
  }

  Smem& shared_;
  const uint32_t smem_;
  Schedule schedule_;
  const Sm90PagedParams& p_;
  const int lane_;
  tma::Ring<2> tasks_;
  tma::Ring<1> queries_;
  tma::Ring<C::kStages> keys_;
};

template <class C>
__device__ __forceinline__ void attention_fwd_paged(const Sm90PagedParams& p) {
  extern __shared__ __align__(1024) char shared_memory[];
  auto& shared = *reinterpret_cast<typename C::Smem*>(shared_memory);
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared_memory));
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroupThreads, 0);
  if (threadIdx.x == 0) C::init_barriers(smem);
  const PagedSchedule<C::kThreads, ChunkItems<C>> schedule(
      reinterpret_cast<int*>(shared_memory + C::kSmemWork), p.pages);
  __syncthreads();  // the barriers are initialised
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<C::kProducerRegisters>();
    if (threadIdx.x < 32) FwdPagedProducer<C>(shared, smem, schedule, p).run();
  } else {
    ptx::setmaxnreg_inc<C::kConsumerRegisters>();
    FwdConsumer<C>(shared, smem, warpgroup - 1, p).run();
  }
}

}  // namespace flashmoe::cuda::sm90
