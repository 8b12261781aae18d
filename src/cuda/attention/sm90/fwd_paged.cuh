// Attention forward for Hopper over the pages of a cache, for sequences with many queries: the
// consumers of fwd.cuh, with a producer that loads K and V page by page.
//
//   tile of keys   | page | page | page | page |     pages of 8 keys and more: two warps have K and
//                  | box  | box  | box  | box  |     two have V, each issues every other TMA
//
//                  |key|key|key| ...                 any page: the same warps copy rows by
//                                                    cp.async, as TMA would lay them out
//
// What matters is how soon after a stage is empty it is full again, and how few instructions that
// takes: consumers are on the same schedulers. So entries of the table are looked up while the tile
// before is on its way, a lane issues what it has looked up itself, and K, which is needed first,
// has a stage more at D = 128. Boxes are few where each has whole rows, all columns
// (tma/operand.cuh). For pages of 16 one warp that issued all boxes of 64 columns took 163 us, four
// took 128, with whole rows 115, and 110 without asking other lanes (1 x 512 queries over 8,192
// keys, H200, 2026-11). docs/log/paged.md has what else was tried.
//
// fwd_paged_fp8.cuh has a producer for fp8 caches.
//
// A task is a tile of queries of one head, found as in paged_work.cuh. Boxes or rows beyond the
// keys that a tile's rows see repeat the first or the last that they do see: nothing else is looked
// up, and every tile has the same number of bytes. What rows do not see is masked, and rows that a
// NaN behind a mask reached are computed once more (fwd_epilogue.cuh).
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

  // To copy, or to know where boxes come from, takes more than one TMA of a tile. Consumers have
  // the rest.
  static constexpr int kProducerRegisters = 56;
  static constexpr int kConsumerRegisters = 224;
  static_assert(FwdPagedConfig::kAllWarpgroups == 2);

  // Threads that fill K, and V, where rows are copied.
  static constexpr int kCopiers = kWarpgroupThreads / 2;

  // All warps of the producer but the first read tasks too. `writers` fill K, and V.
  static __device__ __forceinline__ void init_barriers(uint32_t smem, int writers) {
    using Base = FwdConfig<T, kChunkTile>;
    constexpr int kReaders = kWarpgroupWarps * Base::kWarpgroups;
    for (int i = 0; i < Base::kBarriers; ++i) {
      if (i < Base::kQBarrier) {
        Base::slot(smem, i).init(1, kWarpgroupThreads * (Base::kWarpgroups + 1) - 32);
      } else if (i < Base::kKBarrier) {
        Base::slot(smem, i).init(1, kReaders);
      } else {
        Base::slot(smem, i).init(writers, kReaders);
      }
    }
    ptx::fence_mbarrier_init();
  }

  // Row `key` of K or V, through the block table. (The table is sound: seq.valid says so.)
  template <class Number = uint16_t>
  static __device__ __forceinline__ const Number* key_row(const void* tensor, int key_head,
                                                          const FwdTask& task, int key,
                                                          const Sm90FwdParams& params) {
    const PagedParams& p = static_cast<const Sm90PagedParams&>(params).pages;
    const bool values = tensor == p.value;
    const Strides& strides = values ? p.value_strides : p.key_strides;
    const int page = page_of(key, p);
    const int64_t block =
        read_length(p.block_table, task.seq.token_k + page * p.table_column, p.table_is_int64);
    return static_cast<const Number*>(tensor) + block * (values ? p.value_block : p.key_block) +
           (key - page * p.page) * strides.row + key_head * strides.head;
  }
};

// The items of this kernel: tiles of queries of one head.
template <class C>
struct ChunkItems {
  using Task = FwdTask;
  static constexpr bool kTickets = false;
  static __device__ __forceinline__ int lanes(const PagedParams&) { return 1; }
  static __device__ __forceinline__ PagedWork find(int i, const PagedParams& p) {
    PagedWork w = find_sequence(i, p);
    w.tiles = w.chunk ? ceil_div(w.len_q, C::kBlockQ) : 0;
    w.cost = cost_of(w.len_k, p);
    return w;
  }
  static __device__ __forceinline__ void note(int, const PagedWork&, const PagedParams&) {}
  static __device__ __forceinline__ int count(const PagedWork& w, const PagedParams& p) {
    return w.tiles * p.heads_q;
  }
  static __device__ __forceinline__ void take(FwdTask& task, int sequence, const PagedWork& w,
                                              int item, int, const PagedParams& p) {
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

// The keys that the rows of a task see, by the boxes that have them. A box has `keys` keys, a power
// of two.
struct SeenKeys {
  bool any;
  int first, last;  // where the first and the last of these boxes begin

  template <class C>
  static __device__ __forceinline__ SeenKeys of(const FwdTask& task, const Sm90FwdParams& p,
                                                int keys = 1) {
    const int last_row = min(task.first_row + C::kBlockQ, task.seq.len_q) - 1;
    const int begin = task.seq.begin(task.first_row, p), end = task.seq.end(last_row, p);
    return {begin < end, begin & -keys, (end - 1) & -keys};
  }
  // Of the boxes that have such keys, the nearest to one that begins at `key`.
  __device__ __forceinline__ int nearest(int key) const { return min(max(key, first), last); }
};

// What both ways of loading share: tasks, and Q.
template <class C>
class FwdPagedTasks {
  using Smem = typename C::Smem;
  using Schedule = PagedSchedule<C::kThreads, ChunkItems<C>>;

 public:
  __device__ __forceinline__ FwdPagedTasks(Smem& shared, uint32_t smem, const Schedule& schedule,
                                           const Sm90PagedParams& p)
      : shared_(shared), smem_(smem), schedule_(schedule), p_(p) {}

  // load(task) for each of them, by all threads of the producer's warps: the first warp finds them.
  template <class Load>
  __device__ __forceinline__ void for_each(const Load& load) {
    const bool gives = threadIdx.x < 32;
    if (threadIdx.x == 0) {
      ptx::prefetch_tensormap(&p_.query_map);
      ptx::prefetch_tensormap(&p_.out_map);
    }
#pragma unroll 1
    for (;;) {
      FwdTask& task = gives ? give() : take();
      if (!task.more) return;
      load(task);
      if (!gives) release();
    }
  }
  // By one thread.
  __device__ __forceinline__ void load_queries(const FwdTask& task) {
    const tma::Slot q = C::slot(smem_, C::kQBarrier);
    queries_.wait_empty(q);
    tma::fill<typename C::Rows>(q, smem_ + offsetof(Smem, sQ), p_.query_map, 0,
                                task.first_token(p_), task.head, 0);
    queries_.advance();
  }

 private:
  // By a warp: finds the next task and hands it to everyone.
  __device__ __forceinline__ FwdTask& give() {
    FwdTask& task = shared_.tasks[ring_.at()];
    const tma::Slot slot = C::slot(smem_, C::kTaskBarrier + ring_.at());
    ring_.wait_empty(slot);
    if (threadIdx.x == 0) {
      task.more = schedule_.next(task, p_.pages);
      if (task.more) FwdScheduler<C>{p_}.find_key_tiles(task, task.seq, task.first_row);
      ptx::mbarrier_arrive(slot.full);
    }
    __syncwarp();  // the task is there for the other lanes too
    ring_.advance();
    return task;
  }
  // By a thread of another warp: waits for the next task.
  __device__ __forceinline__ FwdTask& take() {
    FwdTask& task = shared_.tasks[ring_.at()];
    ring_.wait_full(C::slot(smem_, C::kTaskBarrier + ring_.at()));
    ring_.advance();
    return task;
  }
  __device__ __forceinline__ void release() const {
    const tma::Ring<2> last(ring_.count() - 1);
    ptx::mbarrier_arrive(C::slot(smem_, C::kTaskBarrier + last.at()).empty);
  }

  Smem& shared_;
  const uint32_t smem_;
  Schedule schedule_;
  const Sm90PagedParams& p_;
  tma::Ring<2> ring_;
  tma::Ring<1> queries_;
};

// A thread of the four warps that load by TMA: two have K and two have V. A lane looks up the page
// of a box and issues it; of boxes with 64 columns each warp has every other one of a page's, of
// whole rows every other page. Which box it is is known before there is room for it.
template <class C>
class FwdPagedProducer {
  using Smem = typename C::Smem;
  using Keys = typename C::Keys;
  // The boxes that have the same rows of a page.
  static constexpr int kBoxesOfRows = C::kTile.whole_rows ? 1 : Keys::kBlocks;

 public:
  __device__ __forceinline__ FwdPagedProducer(uint32_t smem, FwdPagedTasks<C>& tasks,
                                              const Sm90PagedParams& p)
      : smem_(smem),
        tasks_(tasks),
        p_(p),
        warp_(__shfl_sync(0xffffffffu, threadIdx.x / 32, 0)),
        lane_(threadIdx.x % 32),
        looks_up_(lane_ < C::kBlockK / p.box_keys),
        issues_(looks_up_ && (kBoxesOfRows > 1 || lane_ % 2 == warp_ % 2)),
        place_(lane_ * (p.box_keys / 8) * Keys::kEightBytes) {
    static_assert(C::kBlockK / kLeastBoxKeys <= 32);
    if (threadIdx.x == 0) {
      ptx::prefetch_tensormap(&p.key_map);
      ptx::prefetch_tensormap(&p.value_map);
    }
  }

  __device__ __forceinline__ void load(FwdTask& task) {
    if (warp_ < 2) {
      load(task, keys_, C::kKBarrier, offsetof(Smem, sK), p_.key_map, p_.key_block_heads);
    } else {
      load(task, values_, C::kVBarrier, offsetof(Smem, sV), p_.value_map, p_.value_block_heads);
    }
  }

 private:
  // The warp's part of all tiles of K or of V.
  template <class Ring>
  __device__ __forceinline__ void load(FwdTask& task, Ring& ring, int barrier, uint32_t stages,
                                       const TensorMap& map, int block_heads) {
    const SeenKeys keys = SeenKeys::of<C>(task, p_, p_.box_keys);
    const bool leads = warp_ % 2 == 0;
    const int key_head = task.head / p_.group;
    PageRow page;
    look_up(page, task.key_end - 1, keys, task);
#pragma unroll 1
    for (int n = task.key_end - 1; n >= task.key_begin; --n, ring.advance()) {
      const tma::Slot slot = C::slot(smem_, barrier + ring.at());
      const uint32_t to = smem_ + stages + ring.at() * sizeof(Keys) + place_;
      // A block out of the cache is one where TMA reads zeros, and the results become NaN.
      if (looks_up_ && keys.any && !page.sound(p_.pages)) {
        page.low = p_.pages.blocks;
        task.seq.valid = false;
      }
      const int head = C::kTile.whole_rows ? page.low * block_heads + key_head : key_head;
      __syncwarp();  // `valid` is written before the arrival
      ring.wait_empty(slot);
      if (leads && lane_ == 0) {
        if (keys.any) {
          ptx::mbarrier_arrive_expect_tx(slot.full, Keys::kBytes);
        } else {
          ptx::mbarrier_arrive(slot.full);
        }
      }
      if (issues_ && keys.any) issue(slot, to, map, page, head);
      if (n == task.key_end - 1 && threadIdx.x == 0) tasks_.load_queries(task);
      __syncwarp();
      if (n > task.key_begin) look_up(page, n - 1, keys, task);
    }
  }

  __device__ __forceinline__ void look_up(PageRow& page, int n, const SeenKeys& keys,
                                          const FwdTask& task) const {
    if (!looks_up_ || !keys.any) return;
    page.look_up(keys.nearest(n * C::kBlockK + lane_ * p_.box_keys), task.seq.token_k, p_.pages);
  }
  __device__ __forceinline__ void issue(const tma::Slot& slot, uint32_t to, const TensorMap& map,
                                        const PageRow& page, int head) const {
    if constexpr (C::kTile.whole_rows) {
      ptx::tma_load(to, &map, slot.full, 0, 0, 0, page.row >> 3, head);
    } else {
#pragma unroll
      for (int i = 0; i < (kBoxesOfRows + 1) / 2; ++i) {
        const int block = kBoxesOfRows > 1 ? 2 * i + warp_ % 2 : 0;
        ptx::tma_load(to + block * Keys::kBlockBytes, &map, slot.full, block * Keys::kBlockCols,
                      head, page.row, page.low);
      }
    }
  }

  const uint32_t smem_;
  FwdPagedTasks<C>& tasks_;
  const Sm90PagedParams& p_;
  const int warp_, lane_;
  const bool looks_up_, issues_;
  const uint32_t place_;  // of the lane's box in a stage
  tma::Ring<C::kKeyStages> keys_;
  tma::Ring<C::kStages> values_;
};

// A thread of the four warps that load by cp.async: two have K and two have V, half of the rows of
// a tile each. A lane looks up keys, and its warp copies the rows of those. The fence after a tile
// seems to wait for all copies of its thread (docs/log/paged.md), so a warp has one tile on its
// way, and none of the other kind.
template <class C>
class FwdPagedCopier {
  using Smem = typename C::Smem;
  using Keys = typename C::Keys;
  static constexpr int kWarpKeys = C::kBlockK / 2;  // of a tile, of a warp
  static constexpr int kLaneKeys = kWarpKeys / 32;  // that a lane looks up
  static constexpr int kRowLanes = C::kDim / 8;     // that copy a row
  static constexpr int kRowsAtOnce = 32 / kRowLanes;
  static_assert(kWarpKeys % 32 == 0 && kRowLanes <= 32 && kRowsAtOnce <= 8);

 public:
  __device__ __forceinline__ FwdPagedCopier(uint32_t smem, FwdPagedTasks<C>& tasks,
                                            const Sm90PagedParams& p)
      : smem_(smem),
        tasks_(tasks),
        p_(p),
        warp_(__shfl_sync(0xffffffffu, threadIdx.x / 32, 0)),
        lane_(threadIdx.x % 32) {}

  __device__ __forceinline__ void load(FwdTask& task) {
    const PagedParams& p = p_.pages;
    if (warp_ < 2) {
      load(task, keys_, C::kKBarrier, offsetof(Smem, sK),
           {static_cast<const char*>(p.key), p.key_block, p.key_strides, p.head_dim});
    } else {
      load(task, values_, C::kVBarrier, offsetof(Smem, sV),
           {static_cast<const char*>(p.value), p.value_block, p.value_strides, p.head_dim_v});
    }
  }

 private:
  struct Cache {
    const char* data;
    int64_t block;
    const Strides& strides;
    int dim;
  };

  // The warp's rows of all tiles of K or of V.
  template <class Ring>
  __device__ __forceinline__ void load(FwdTask& task, Ring& ring, int barrier, uint32_t stages,
                                       const Cache& cache) {
    const SeenKeys keys = SeenKeys::of<C>(task, p_);
    const char* const head = cache.data + task.head / p_.group * cache.strides.head * 2;
    PageRow page[kLaneKeys];
    look_up(page, task.key_end - 1, keys, task);
#pragma unroll 1
    for (int n = task.key_end - 1; n >= task.key_begin; --n, ring.advance()) {
      const tma::Slot slot = C::slot(smem_, barrier + ring.at());
      const uint32_t to = smem_ + stages + ring.at() * sizeof(Keys);
      int64_t offset[kLaneKeys];  // bytes of a row from `head`
#pragma unroll
      for (int i = 0; i < kLaneKeys; ++i) {
        offset[i] = -1;
        if (!keys.any) continue;
        if (page[i].sound(p_.pages)) {
          offset[i] = page[i].template offset<2>(cache.block, cache.strides.row);
        } else {
          task.seq.valid = false;  // the results become NaN
          __threadfence_block();   // before the stage is full
        }
      }
      __syncwarp();
      ring.wait_empty(slot);
      if (keys.any) copy(to, head, offset, cache.dim);
      if (n == task.key_end - 1 && threadIdx.x == 0) tasks_.load_queries(task);
      __syncwarp();
      if (n > task.key_begin) look_up(page, n - 1, keys, task);
      ptx::cp_async_commit_group();
      ptx::cp_async_wait_group<0>();
      // wgmma is to see what this thread has written; consumers need no fence then.
      ptx::fence_proxy_async_shared();
      ptx::mbarrier_arrive(slot.full);
    }
  }

  __device__ __forceinline__ int first_row() const { return warp_ % 2 * kWarpKeys; }

  __device__ __forceinline__ void look_up(PageRow (&page)[kLaneKeys], int n, const SeenKeys& keys,
                                          const FwdTask& task) const {
    if (!keys.any) return;
#pragma unroll
    for (int i = 0; i < kLaneKeys; ++i) {
      page[i].look_up(keys.nearest(n * C::kBlockK + first_row() + i * 32 + lane_), task.seq.token_k,
                      p_.pages);
    }
  }

  // Copies the warp's rows. Zeros where an offset is negative, and beyond `dim`.
  __device__ __forceinline__ void copy(uint32_t to, const char* head,
                                       const int64_t (&offset)[kLaneKeys], int dim) const {
    const int chunk = lane_ % kRowLanes, row = lane_ / kRowLanes;
    const bool exists = chunk * 8 < dim;
    head += chunk * 16;
    to += Keys::at(first_row() + row, chunk * 8);
#pragma unroll
    for (int i = 0; i < kLaneKeys; ++i) {
#pragma unroll 1
      for (int eight = 0; eight < 32; eight += 8, to += Keys::kEightBytes) {
#pragma unroll
        for (int below = 0; below < 8; below += kRowsAtOnce) {
          const int64_t where = __shfl_sync(0xffffffffu, offset[i], eight + below + row);
          ptx::cp_async_cg_16(Keys::below(to, below), head + where, exists && where >= 0);
        }
      }
    }
  }

  const uint32_t smem_;
  FwdPagedTasks<C>& tasks_;
  const Sm90PagedParams& p_;
  const int warp_, lane_;
  tma::Ring<C::kKeyStages> keys_;
  tma::Ring<C::kStages> values_;
};

template <class C>
__device__ __forceinline__ void attention_fwd_paged(const Sm90PagedParams& p) {
  extern __shared__ __align__(1024) char shared_memory[];
  auto& shared = *reinterpret_cast<typename C::Smem*>(shared_memory);
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared_memory));
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroupThreads, 0);
  const bool copies = p.box_keys == 0;  // K and V come by threads, not by TMA
  if (threadIdx.x == 0) C::init_barriers(smem, copies ? C::kCopiers : 1);
  ptx::griddepcontrol_launch_dependents();  // the kernel for all other sequences
  PagedSchedule<C::kThreads, ChunkItems<C>> schedule{
      reinterpret_cast<int*>(shared_memory + C::kSmemWork)};
  schedule.start(p.pages);
  __syncthreads();  // the barriers are initialised
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<C::kProducerRegisters>();
    FwdPagedTasks<C> tasks(shared, smem, schedule, p);
    if constexpr (requires { typename C::Loader; }) {
      typename C::Loader loader(smem, tasks, p);
      tasks.for_each([&](FwdTask& task) { loader.load(task); });
    } else if (copies) {
      FwdPagedCopier<C> copier(smem, tasks, p);
      tasks.for_each([&](FwdTask& task) { copier.load(task); });
    } else {
      FwdPagedProducer<C> producer(smem, tasks, p);
      tasks.for_each([&](FwdTask& task) { producer.load(task); });
    }
  } else {
    ptx::setmaxnreg_inc<C::kConsumerRegisters>();
    FwdConsumer<C>(shared, smem, warpgroup - 1, p).run();
  }
}

}  // namespace flashmoe::cuda::sm90
