// The guarded way of the sm90 backward pass. A NaN or infinity in Q, K, V or dO must not reach what
// does not see it, but in an MMA a 0 of P or dS times NaN is NaN. So K and V are looked at when a
// task begins, by the consumers or up to D = 64 by a warp beside them; lse and delta show the same
// of Q and dO; and tiles in which a mask hides something not finite are multiplied number by
// number, with hidden numbers left out. A bias may be -inf anywhere, so with a bias any tile in
// which something is not finite is.
#pragma once

#include "cuda/attention/sm90/bias_rows.cuh"
#include "cuda/attention/sm90/bwd_scores.cuh"
#include "cuda/attention/sm90/bwd_warpgroup.cuh"

namespace flashmoe::cuda::sm90 {

// K and V are looked at only where there is a mask or a bias.
__device__ __forceinline__ bool any_mask(const Sm90BwdParams& p) {
  return p.left < kNoLimit || p.right < kNoLimit;
}

// Whether something is not finite of the bytes that thread `thread` of kThreads reads of
// [from, end).
template <class C, int kThreads>
__device__ __forceinline__ bool any_nonfinite(uint32_t from, uint32_t end, uint32_t thread) {
  uint32_t zero = 0;                    // two numbers times 0, added up
#pragma unroll(kThreads == 32 ? 2 : 4)  // a warp beside the consumers has few registers
  for (from += thread * 16; from < end; from += kThreads * 16) {
    const uint4 eight = ptx::ld_shared_v4(from);
    for (const uint32_t two : {eight.x, eight.y, eight.z, eight.w}) {
      zero = C::kBf16 ? ptx::fma_rn_bf16x2(two, 0, zero) : ptx::fma_rn_f16x2(two, 0, zero);
    }
  }
  return zero & 0x7fff7fff;
}
// The same for all threads of the warpgroup.
template <class C>
__device__ __forceinline__ bool warpgroup_any_nonfinite(const BwdWarpgroup<C>& wg, uint32_t from,
                                                        uint32_t bytes) {
  return ptx::bar_red_or(
      C::kWarpgroupBarrier + wg.index, kWarpgroupThreads,
      any_nonfinite<C, kWarpgroupThreads>(from, from + bytes, warpgroup_thread()));
}

// Whether some of `count` keys are seen by no row, or lie past the end of the sequence.
template <class C>
__device__ __forceinline__ bool any_unseen(const BwdWarpgroup<C>& wg, const BwdTask& task,
                                           int first_key, int count) {
  return task.seq.begin(0, wg.p) > first_key ||
         task.seq.end(task.seq.len_q - 1, wg.p) <
             (wg.p.blocks ? first_key + count : min(first_key + count, wg.p.len_k));
}
// Zeroes keys that no row sees: they may hold anything, above all past the end of the sequence. Of
// 64 keys, in rows from `tile_row` on of K or V at `keys`.
template <class C, class Keys = typename C::Keys>
__device__ __forceinline__ void clear_unseen_keys(const BwdWarpgroup<C>& wg, const BwdTask& task,
                                                  int first_key, uint32_t keys, int tile_row) {
  const int begin = task.seq.begin(0, wg.p), end = task.seq.end(task.seq.len_q - 1, wg.p);
  if (!any_unseen(wg, task, first_key, 64)) return;
#pragma unroll 1
  for (int i = warpgroup_thread(); i < 64 * Keys::kBlocks * Keys::kChunks; i += kWarpgroupThreads) {
    const int r = i / Keys::kChunks % 64, block = i / (64 * Keys::kChunks);
    if (first_key + r >= begin && first_key + r < end) continue;
    const uint32_t at =
        block * Keys::kBlockBytes + (tile_row + r) * Keys::kRowBytes + i % Keys::kChunks * 16;
    ptx::st_shared_v4(keys + at, uint4{0, 0, 0, 0});
  }
  ptx::fence_proxy_async_shared();
  wg.sync();
}

// K and V of a task, which nobody else reads, to L2 long before their places are free.
template <class C>
__device__ __forceinline__ void prefetch_keys(const BwdTask& task, const Sm90BwdParams& p) {
  if (lane() > 0) return;
#pragma unroll 1
  for (int i = 0; i < C::Keys::kBlocks; ++i) {
    const int token = static_cast<int>(task.seq.token_k) + task.first_key;
    ptx::tma_prefetch(&p.key_map, 64 * i, token, task.key_head, task.batch);
    ptx::tma_prefetch(&p.value_map, 64 * i, token, task.key_head, task.batch);
  }
}

// Looks at K and V of a task, by the warp beside the consumers that has time to: at keys that some
// row sees, since consumers zero the others meanwhile.
template <class C>
__device__ __forceinline__ void look_at_keys(uint32_t smem, const BwdTask& task,
                                             const Sm90BwdParams& p) {
  using Keys = typename C::Keys;
  using Smem = typename C::Smem;
  if (task.tiles == 0) return;  // nothing is loaded
  smem = ptx::opaque(smem);     // else ptxas keeps addresses in registers that there are not
  const tma::Slot k = C::slot(smem, C::kKBarrier), v = C::slot(smem, C::kVBarrier);
  ptx::mbarrier_wait(k.full, task.keys_parity);
  ptx::mbarrier_wait(v.full, task.keys_parity);
  if (any_mask(p)) {
    const int begin = max(task.seq.begin(0, p) - task.first_key, 0);
    const int end = min(task.seq.end(task.seq.len_q - 1, p) - task.first_key, C::kBlockK);
    uint32_t block = smem + offsetof(Smem, sK);  // and V behind it
    bool bad = false;
#pragma unroll 1
    for (int i = 0; i < 2 * Keys::kBlocks; ++i, block += Keys::kBlockBytes) {
      bad |= any_nonfinite<C, 32>(block + begin * Keys::kRowBytes, block + end * Keys::kRowBytes,
                                  lane());
    }
    if (bad) ptx::st_shared_u32(smem + offsetof(Smem, nonfinite_task), task.index + 1);
  }
  warp_arrive(C::slot(smem, C::kLookBarrier).full);
  warp_arrive(k.empty);
  warp_arrive(v.empty);
}

// Whether K or V of the tile is not finite: all consumers find the same. One CTA without a warp
// that looks. Where dV and dK leave through sdS, none returns before all are here.
template <class C>
__device__ __forceinline__ bool nonfinite_keys(const BwdWarpgroup<C>& wg, const BwdTask& task) {
  const bool matters = C::kBias || any_mask(wg.p);
  if (!matters && C::kOwnGrads) return false;
  constexpr int kThreads = C::kWarpgroups * kWarpgroupThreads;
  if (matters && any_unseen(wg, task, task.first_key, C::kBlockK)) {
    ptx::bar_sync(C::kAgreeBarrier, kThreads);  // all have cleared
  }
  const uint32_t keys = wg.opaque_smem() + offsetof(typename C::Smem, sK);
  const bool bad = matters && any_nonfinite<C, kThreads>(keys, keys + 2 * C::Keys::kBytes,
                                                         threadIdx.x % kThreads);
  return ptx::bar_red_or(C::kAgreeBarrier, kThreads, bad);
}

// The bias of a head: the number of its first query and key. Rows have neighbouring keys, so that
// is all there is to know. Null without a bias.
template <class C>
__device__ __forceinline__ const void* bias_of(const BwdWarpgroup<C>& wg, const BwdTask& task,
                                               int head) {
  if constexpr (!C::kBias) return nullptr;
  return static_cast<const char*>(wg.p.bias) +
         offset(wg.p, wg.p.bias_strides, task.batch, head, 0) * C::kBiasBytes;
}
// Whether a query sees a key: neither a mask nor a bias of -inf hides it.
template <class C>
__device__ __forceinline__ bool sees(const BwdWarpgroup<C>& wg, const BwdTask& task, int query,
                                     int key, const void* bias) {
  return key >= task.seq.begin(query, wg.p) && key < task.seq.end(query, wg.p) &&
         query < task.seq.len_q &&
         (!C::kBias || bias_number<typename C::Type, C::kTile.bias>(
                           bias, query * wg.p.bias_strides.row + key) != -INFINITY);
}

// A number of P or dS, and whether the query sees the key.
struct GuardedNumber {
  bool seen;
  float value;
};
// From the tile of dS in shared memory at `tile`, whose first query is `first`. `bias` is that of
// its head.
template <class C>
__device__ __forceinline__ GuardedNumber ds_at(const BwdWarpgroup<C>& wg, const BwdTask& task,
                                               int first, uint32_t tile, int query, int key,
                                               const void* bias = nullptr) {
  return {sees(wg, task, first + query, task.first_key + key, bias),
          C::Type::unpack(ptx::ld_shared_u16(tile + C::ScoreTile::at(query, key)))};
}
// From what store_ds() left of this tile of queries.
template <class C>
__device__ __forceinline__ GuardedNumber ds_at(const BwdWarpgroup<C>& wg, const BwdTask& task,
                                               int query, int key, const void* bias = nullptr) {
  return ds_at(wg, task, wg.first_query(), wg.ds_tile(wg.stage), query, key, bias);
}

// Which of the thread's numbers of P and dS are hidden: a bit for each. Without a bias nobody asks.
template <class C>
__device__ __forceinline__ uint32_t find_hidden(const BwdWarpgroup<C>& wg, const BwdTask& task,
                                                const void* bias) {
  if constexpr (!C::kBias) return 0;
  static_assert(!C::kBias || C::kBlockQ / 2 <= 32);
  uint32_t hidden = 0;
#pragma unroll 1
  for (int i = 0; i < C::kBlockQ / 2; ++i) {
    const int query = wg.first_query() + fragment_column() + i / 4 * 8 + i % 2;
    const int key = task.first_key + wg.first_key() + fragment_row() + i % 4 / 2 * 8;
    hidden |= static_cast<uint32_t>(!sees(wg, task, query, key, bias)) << i;
  }
  return hidden;
}
// Writes 0 over the hidden numbers of P or dS, where a NaN of K, V, Q or dO may show.
template <int kCount>
__device__ __forceinline__ void clear_hidden(float (&x)[kCount], uint32_t hidden) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (hidden >> i & 1) x[i] = 0;
  }
}
// The same of numbers that are packed already.
template <int kSteps>
__device__ __forceinline__ void clear_hidden(uint32_t (&packed)[kSteps][4], uint32_t hidden) {
#pragma unroll
  for (int i = 0; i < 8 * kSteps; ++i) {
    if (hidden >> i & 1) packed[i / 8][i / 2 % 4] &= i % 2 ? 0x0000ffffu : 0xffff0000u;
  }
}

// Adds a product to 64 rows of wgmma's accumulators, number by number. left(row, d) is a
// GuardedNumber; `right` is the address of a Right tile with a row for each step of the depth, read
// from `column` on. Transposed, the accumulators have a row for each column of the product. Slow,
// and rarely needed.
template <class C, class Right, bool kTransposed = false, int kCount, class Left>
__device__ __forceinline__ void multiply_guarded(float (&sums)[kCount], int depth, const Left& left,
                                                 uint32_t right, int column) {
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    const int across = 8 * i + fragment_column();
    const int row = kTransposed ? across : fragment_row();
    const int first = column + (kTransposed ? fragment_row() : across);
#pragma unroll 1
    for (int d = 0; d < depth; ++d) {  // the inner loop, or there would be too few registers
      const GuardedNumber factors[2] = {left(row, d), left(row + (kTransposed ? 1 : 8), d)};
      float numbers[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint32_t at = Right::at(d, first + (kTransposed ? 8 : 1) * j);
        numbers[j] = C::Type::unpack(ptx::ld_shared_u16(right + at));
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const GuardedNumber& factor = factors[kTransposed ? j % 2 : j / 2];
        if (factor.seen) sums[4 * i + j] += factor.value * numbers[kTransposed ? j / 2 : j % 2];
      }
    }
  }
}

// dV += P^T dO; P passes through the place where dS will be.
template <class C>
__device__ __forceinline__ void add_dv_guarded(const BwdWarpgroup<C>& wg, float (&dv)[C::kDim / 2],
                                               const PackedTile<C>& rP, const BwdTask& task,
                                               const void* bias = nullptr) {
  store_ds<C>(wg, rP, wg.first_key());
  wg.sync();  // P is there
  multiply_guarded<C, typename C::Rows>(
      dv, C::kBlockQ,
      [&](int key, int query) { return ds_at(wg, task, query, wg.first_key() + key, bias); },
      wg.stage_grad_out(), 0);
  wg.sync();  // P is done with
}

}  // namespace flashmoe::cuda::sm90
