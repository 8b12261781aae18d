// The guarded path of the kernels that go through the keys of a tile of queries (guard.cuh tells
// why): zeros take the place of what is not finite in V, and at the end each row is given what it
// really sees.
#pragma once

#include "cuda/attention/guard.cuh"
#include "cuda/attention/mma_sync/fwd_tile.cuh"

namespace flashmoe::cuda {

// Whether this is the guarded pass. At D = 256 there is no register for it: it is read in shared
// memory.
template <class C>
using GuardFlag = std::conditional_t<C::kDim == 256, const bool&, bool>;

// Puts zeros in place of what is not finite in a tile of V (of K, for dQ).
template <class C>
__device__ __forceinline__ void drop_nonfinite(uint32_t sV) {
  using Storage = typename C::Type::Storage;
  Storage* values = static_cast<Storage*>(__cvta_shared_to_generic(sV));
#pragma unroll 1
  for (int i = ptx::opaque_thread(); i < C::kBlockK * C::kDim; i += C::kThreads) {
    if ((values[i] & C::Type::kExponent) == C::Type::kExponent) values[i] = 0;
  }
  __syncthreads();  // the tile is finite
}

// Adds what drop_nonfinite() left out, times `factor`, to the rows that see it and have not dropped
// it. `values` are the rows it comes from, of `dim` elements.
template <class C>
__device__ __forceinline__ void add_nonfinite(float (&o)[C::kRowTiles][C::kDimTiles][4],
                                              const KeyRows& values, int dim, float factor,
                                              const FwdTask& task, const AttentionParams& p) {
  const Sequence& seq = task.seq;
  const int lane = ptx::opaque_thread() % 32, row = task.first_row + warp_row<C>() + lane / 4;
  const int end = min(task.key_end * C::kBlockK, seq.len_k);
#pragma unroll 1
  for (int key = task.key_begin * C::kBlockK; key < end; ++key) {
    const char* row_of_key = values.address(key);
    uint32_t dropped = 0;  // a bit for each of the lane's rows
    if constexpr (C::kDropout) {
#pragma unroll 1  // D = 256 has no register for more, nor for what they share
      for (int i = 0; i < 2 * C::kRowTiles; ++i) {
        const DropoutOfHead dropout(task.seed, task.batch, ptx::opaque(task.head));
        dropped |= uint32_t{!keeps_pair(row + 8 * i, key, dropout, p)} << i;
      }
    }
#pragma unroll
    for (int d = 0; d < C::kDimTiles; ++d) {
      const int column = 8 * d + lane % 4 * 2, there = dim - column;
      if (there <= 0) continue;
      uint32_t two = *reinterpret_cast<const uint32_t*>(row_of_key + column * C::Type::kBytes);
      if (there == 1) two &= 0xffff;
      if (!has_nonfinite<typename C::Type>(two)) continue;
#pragma unroll
      for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int r = row + 16 * m + 8 * half;
          if (!sees<typename C::Type, C::kBias>(r, key, seq, task.bias, p)) continue;
          if (dropped >> (2 * m + half) & 1) continue;
          o[m][d][2 * half] += factor * infinity_or_nan<typename C::Type>(two & 0xffff);
          o[m][d][2 * half + 1] += factor * infinity_or_nan<typename C::Type>(two >> 16);
        }
      }
    }
  }
}

}  // namespace flashmoe::cuda
