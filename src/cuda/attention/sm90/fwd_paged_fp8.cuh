// Attention forward for Hopper over the pages of an fp8 cache (e4m3), for sequences with many
// queries: the consumers of fwd.cuh and the tasks of fwd_paged.cuh, with a producer that makes 16
// bits of what it copies.
//
//   pages --cp.async--> two tiles as they come, --a lane's 16 bytes--> K or V in 16 bits, as TMA
//                       K or V                     at a time           would lay them out
//
// The four warps of the producer take the tiles of K and V in turns. A lane converts what it has
// copied itself, so nobody waits for anybody between the two; and what it has read makes room for
// its part of the tile after the next. Bytes pass through shared memory and not through registers
// alone: there ptxas moves what was loaded before it is needed, and so waits for it.
//
// No instruction makes bf16 of e4m3, and by way of float it takes 2.5 times what fp16 takes: of a
// warp's instructions for a tile of 128 x 128 some 510 for bf16 and 315 for fp16, of which 320 and
// 125 convert. So V is fp16 whatever the queries are, and so is P. Four warps are on four
// schedulers, and the MMAs of a step, which needs two tiles, take 2,048 cycles.
//
// Scales: that of the keys is a factor of the scores' scale, that of the values one of O. A scale
// of keys that is not positive, or with which that product is not a normal number, makes all of O
// NaN. Rows that are NaN are computed once more key by key (fwd_epilogue.cuh), by the scale as it
// is: right, and slow.
#pragma once

#include <cfloat>

#include "cuda/attention/sm90/fwd_paged.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/tile/e4m3.cuh"

namespace flashmoe::cuda::sm90 {

template <class C>
class FwdPagedConverter;

template <class T, Sm90ChunkTile kChunkTile>
struct FwdPagedFp8Config : FwdPagedConfig<T, kChunkTile> {
  using Base = FwdPagedConfig<T, kChunkTile>;
  using Loader = FwdPagedConverter<FwdPagedFp8Config>;
  static constexpr bool kFp8 = true;
  static constexpr int kCopiers = kWarpgroupThreads;  // each fills K and V
  // To convert takes more than to copy.
  static constexpr int kProducerRegisters = 88;
  static constexpr int kConsumerRegisters = 208;
  static constexpr uint32_t kSmemRaw = Base::kSmemWork + paged_work_bytes(kChunkTile.threads());
  static_assert(kSmemRaw % 16 == 0 && kSmemRaw + kChunkTile.raw_bytes() <= kSm90SharedBytes);
  using ValueType = Fp16;

  // Scores are products times scale_log2, which has the scale of the head's keys.
  struct Rule : ScoreRule<Sm90FwdParams> {
    float scale;
    __device__ __forceinline__ Rule(const Sm90FwdParams& p, float scale)
        : ScoreRule<Sm90FwdParams>(p), scale(scale) {}
    __device__ __forceinline__ float scale_log2() const { return scale; }
    __device__ __forceinline__ float probability(float product, float lse) const {
      return ptx::ex2_approx_ftz(product * scale - lse);
    }
  };
  template <class Warpgroup>
  static __device__ __forceinline__ Rule rule(const Warpgroup& wg) {
    return Rule(wg.p, wg.scales.scale_log2);
  }

  // Of the keys of a head, and of its values.
  static __device__ __forceinline__ float key_scale(int key_head, const Sm90FwdParams& params) {
    const PagedParams& p = static_cast<const Sm90PagedParams&>(params).pages;
    return p.k_scale ? p.k_scale[key_head * p.k_scale_stride] : 1;
  }
  static __device__ __forceinline__ float value_scale(int key_head, const Sm90FwdParams& params) {
    const PagedParams& p = static_cast<const Sm90PagedParams&>(params).pages;
    return p.v_scale ? p.v_scale[key_head * p.v_scale_stride] : 1;
  }
  struct TaskScales {
    float scale_log2;  // of products, by which they are scores in base 2
    float value;       // of O
  };
  static __device__ __forceinline__ TaskScales find_scales(int key_head, const Sm90FwdParams& p) {
    const float scale = key_scale(key_head, p) * p.scale_log2;
    return {scale >= FLT_MIN && scale < INFINITY ? scale : NAN, value_scale(key_head, p)};
  }

  static __device__ __forceinline__ const uint8_t* key_row(const void* tensor, int key_head,
                                                           const FwdTask& task, int key,
                                                           const Sm90FwdParams& p) {
    return Base::template key_row<uint8_t>(tensor, key_head, task, key, p);
  }
};

// A thread of the four warps that copy, convert and store K and V. It looks up one key of a tile;
// its warp has the rows of those that its lanes have looked up.
template <class C>
class FwdPagedConverter {
  using Smem = typename C::Smem;
  using Keys = typename C::Keys;
  static constexpr int kWarpKeys = C::kBlockK / kWarpgroupWarps;  // of a tile, of a warp
  static constexpr int kBlocks = C::kDim / 64;                    // of columns, of a stage
  static constexpr int kRowsAtOnce = 8 / kBlocks;                 // four lanes have 64 columns
  static constexpr int kPieces = kWarpKeys / kRowsAtOnce;         // of a lane, of a tile
  static constexpr int kAhead = kRawTiles;                        // tiles on their way
  static_assert(kWarpKeys <= 32 && kWarpKeys % 8 == 0 && C::kDim % 64 == 0);

 public:
  __device__ __forceinline__ FwdPagedConverter(uint32_t smem, FwdPagedTasks<C>& tasks,
                                               const Sm90PagedParams& p)
      : smem_(smem), tasks_(tasks), p_(p) {}

  __device__ __forceinline__ void load(FwdTask& task) {
    const SeenKeys keys = SeenKeys::of<C>(task, p_);
    const int64_t key_head = task.head / p_.group;
    const Heads heads = {
        static_cast<const char*>(p_.pages.key) + key_head * p_.pages.key_strides.head + column(),
        static_cast<const char*>(p_.pages.value) + key_head * p_.pages.value_strides.head +
            column()};
    Order copied(task), stored(task);
    PageRow page;
    look_up(page, copied, keys, task);
#pragma unroll 1
    for (int i = 0; i < kAhead; ++i) copy_next(i, page, copied, keys, heads, task);
    int raw = 0;  // which of the tiles on their way is next
#pragma unroll 1
    for (; stored.any(); stored.advance(), raw = raw + 1 < kAhead ? raw + 1 : 0) {
      const bool values = stored.is_values();
      const tma::Slot slot =
          C::slot(smem_, values ? C::kVBarrier + values_.at() : C::kKBarrier + keys_.at());
      const uint32_t to = smem_ + (values ? offsetof(Smem, sV) + values_.at() * sizeof(Keys)
                                          : offsetof(Smem, sK) + keys_.at() * sizeof(Keys));
      ptx::cp_async_wait_group<kAhead - 1>();
      const auto wait_empty = [&] {
        ptx::mbarrier_wait(slot.empty, (values ? values_.parity() : keys_.parity()) ^ 1);
      };
      if (values) {
        convert<typename C::ValueType>(raw, to, wait_empty);
      } else {
        convert<typename C::Type>(raw, to, wait_empty);
      }
      ptx::fence_proxy_async_shared();  // wgmma is to see what this thread has written
      ptx::mbarrier_arrive(slot.full);
      copy_next(raw, page, copied, keys, heads, task);
      if (!values && stored.keys == task.key_end - 1 && threadIdx.x == 0) {
        tasks_.load_queries(task);
      }
      __syncwarp();
      if (values) {
        values_.advance();
      } else {
        keys_.advance();
      }
    }
  }

 private:
  // Where the lane's columns are in row 0 of block 0 of the task's head.
  struct Heads {
    const char *keys, *values;
  };
  // The order of tiles, from the last to the first: K, then in turns the next K and V. Consumers
  // leave the K of a tile and the V of the one after it at about the same time, and need a K first.
  struct Order {
    int keys, values, begin;  // the next tiles
    __device__ __forceinline__ explicit Order(const FwdTask& task)
        : keys(task.key_end - 1), values(task.key_end - 1), begin(task.key_begin) {}
    __device__ __forceinline__ bool any() const { return values >= begin; }
    __device__ __forceinline__ bool is_values() const { return keys < begin || values - keys > 1; }
    __device__ __forceinline__ int tile() const { return is_values() ? values : keys; }
    __device__ __forceinline__ void advance() {
      if (is_values()) {
        --values;
      } else {
        --keys;
      }
    }
  };

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int first_row() { return threadIdx.x / 32 * kWarpKeys; }
  // Of a lane's first piece: the row, of the warp's, and the first of its 16 columns. Eight lanes
  // have rows of both parities: they store to all banks, since swizzled chunks of even number lie
  // at even places in even rows and at odd ones in odd rows.
  static __device__ __forceinline__ int row() { return lane() / 4 % kRowsAtOnce; }
  static __device__ __forceinline__ int column() {
    return lane() / 4 / kRowsAtOnce * 64 + lane() % 4 * 16;
  }
  // The lane's piece `i` as it was copied, of one of the tiles on their way.
  __device__ __forceinline__ uint32_t raw_piece(int raw, int i) const {
    return smem_ + C::kSmemRaw + raw * C::kBlockK * C::kDim +
           (i * kWarpgroupThreads + threadIdx.x) * 16;
  }

  __device__ __forceinline__ void look_up(PageRow& page, const Order& order, const SeenKeys& keys,
                                          const FwdTask& task) const {
    if (lane() >= kWarpKeys || !order.any() || !keys.any) return;
    page.look_up(keys.nearest(order.tile() * C::kBlockK + first_row() + lane()), task.seq.token_k,
                 p_.pages);
  }

  // Begins to copy the lane's pieces of the next tile, whose pages have been looked up, and looks
  // up those of the one after. Zeros where rows see no key, the cache has no such block or rows no
  // such columns; where no tile is left, the group has no copies.
  __device__ __forceinline__ void copy_next(int raw, PageRow& page, Order& order,
                                            const SeenKeys& keys, const Heads& heads,
                                            FwdTask& task) const {
    if (order.any()) {
      const PagedParams& p = p_.pages;
      const bool values = order.is_values();
      const char* const head = values ? heads.values : heads.keys;
      int64_t offset = -1;  // bytes of the lane's row from `head`
      if (keys.any && lane() < kWarpKeys) {
        if (page.sound(p)) {
          offset = page.offset<1>(values ? p.value_block : p.key_block,
                                  values ? p.value_strides.row : p.key_strides.row);
        } else {
          task.seq.valid = false;  // the results become NaN
        }
      }
      __syncwarp();
      const bool exists = column() < (values ? p.head_dim_v : p.head_dim);
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const int64_t from = __shfl_sync(0xffffffffu, offset, i * kRowsAtOnce + row());
        ptx::cp_async_cg_16(raw_piece(raw, i), head + from, exists && from >= 0);
      }
      order.advance();
      look_up(page, order, keys, task);
    }
    ptx::cp_async_commit_group();
  }

  // Two chunks of 16 bytes beside each other.
  struct Converted {
    uint4 low, high;
  };
  template <class T>
  static __device__ __forceinline__ Converted convert(const uint4& piece) {
    Converted made;
    E4m3::unpack_pairs_as<T>(piece.x, made.low.x, made.low.y);
    E4m3::unpack_pairs_as<T>(piece.y, made.low.z, made.low.w);
    E4m3::unpack_pairs_as<T>(piece.z, made.high.x, made.high.y);
    E4m3::unpack_pairs_as<T>(piece.w, made.high.z, made.high.w);
    return made;
  }
  // The lane's pieces of a tile to the stage at `to`, as T: half of them are ready before the stage
  // is empty.
  template <class T, class WaitEmpty>
  __device__ __forceinline__ void convert(int raw, uint32_t to, const WaitEmpty& wait_empty) const {
    Converted ready[kPieces / 2];
#pragma unroll
    for (int i = 0; i < kPieces / 2; ++i)
      ready[i] = convert<T>(ptx::ld_shared_v4(raw_piece(raw, i)));
    wait_empty();
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      store(to, i, i < kPieces / 2 ? ready[i] : convert<T>(ptx::ld_shared_v4(raw_piece(raw, i))));
    }
  }
  static __device__ __forceinline__ void store(uint32_t to, int i, const Converted& piece) {
    const int rows = i * kRowsAtOnce;
    const uint32_t first = to + Keys::at(first_row() + row(), column());
    const uint32_t at = Keys::below(first, rows % 8) + rows / 8 * Keys::kEightBytes;
    ptx::st_shared_v4(at, piece.low);
    ptx::st_shared_v4(at ^ 16, piece.high);
  }

  const uint32_t smem_;
  FwdPagedTasks<C>& tasks_;
  const Sm90PagedParams& p_;
  tma::Ring<C::kKeyStages> keys_;
  tma::Ring<C::kStages> values_;
};

}  // namespace flashmoe::cuda::sm90
