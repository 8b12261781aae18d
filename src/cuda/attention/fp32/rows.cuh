// Rows of fp32 results on their way out, and NaN and infinity behind a mask (guard.cuh tells why).
//
// The kernels of this room all accumulate F B, where a hidden pair has a factor F of 0, over tiles
// of B that are in shared memory. A kernel whose results are not finite starts over, guarded: zeros
// take the place of what is not finite in B, and at the end each row is given what it really sees.
#pragma once

#include "cuda/attention/fp32/pairs.cuh"
#include "cuda/tile/float_product.cuh"

namespace flashmoe::cuda {

// The address of a sequence's first row in an fp32 tensor, to write to.
__device__ __forceinline__ float* float_rows(void* tensor, const AttentionParams& p,
                                             const Strides& strides, int batch, int head,
                                             int64_t token) {
  return static_cast<float*>(tensor) + offset(p, strides, batch, head, token);
}
// The rows of a sequence to read.
__device__ __forceinline__ Rows rows_to_read(const void* tensor, const AttentionParams& p,
                                             const Strides& strides, int batch, int head,
                                             int64_t token) {
  return {rows_of<4>(tensor, p, strides, batch, head, token), static_cast<int>(strides.row) * 4};
}

// Stores a warp's accumulators, whose first row is `row`, times factor(m, half). Rows are 16-byte
// aligned and have `dim` floats; those from `end` on do not exist.
template <int kM, int kN, class Factor>
__device__ __forceinline__ void store_float_rows(const float (&acc)[kM][kN][4],
                                                 const Factor& factor, float* to, int64_t stride,
                                                 int row, int end, int dim) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float times = factor(m, half);
      const int r = row + 16 * m + 8 * half + lane / 4;
      if (r >= end) continue;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const int col = 8 * n + lane % 4 * 2;
        float* const two = to + r * stride + col;
        const float x = acc[m][n][2 * half] * times, y = acc[m][n][2 * half + 1] * times;
        if (col + 1 < dim) {
          *reinterpret_cast<float2*>(two) = {x, y};
        } else if (col < dim) {
          *two = x;
        }
      }
    }
  }
}

// Sets rows [first, end) to one value.
__device__ __forceinline__ void fill_float_rows(float* rows, int64_t stride, int first, int end,
                                                int dim, float value) {
  for (int row = first; row < end; ++row) {
    for (int i = threadIdx.x; i < dim; i += blockDim.x) rows[row * stride + i] = value;
  }
}

// Puts zeros in place of what is not finite in a tile. Ends with a barrier.
template <class Tile, int kRows>
__device__ __forceinline__ void drop_nonfinite(uint32_t tile) {
#pragma unroll 1
  for (int i = threadIdx.x; i < kRows * Tile::kCols; i += blockDim.x) {
    if (!isfinite(ptx::ld_shared_f32(tile + 4 * i))) ptx::st_shared_f32(tile + 4 * i, 0);
  }
  __syncthreads();  // the tile is finite
}

// Adds what drop_nonfinite() left out of rows [begin, end) of `from`, times `factor`, to the
// results that see it: seen(row of the tile, row of from). The warp's accumulators, from row `row`
// on, go through `tile` in shared memory, which no warp reads any more: the loops in there take no
// registers from others. All threads take part.
template <class Tile, int kRows, int kM, int kN, class Seen>
__device__ __forceinline__ void add_nonfinite(float (&acc)[kM][kN][4], uint32_t tile, int row,
                                              const Rows& from, int begin, int end, int dim,
                                              float factor, const Seen& seen) {
  store_accumulators<Tile>(tile, acc, row);
  __syncthreads();  // all results are there
#pragma unroll 1
  for (int col = threadIdx.x; col < dim; col += blockDim.x) {
#pragma unroll 1
    for (int i = begin; i < end; ++i) {
      const float x = reinterpret_cast<const float*>(from.address(i))[col];
      if (isfinite(x)) continue;
#pragma unroll 1
      for (int r = 0; r < kRows; ++r) {
        const uint32_t at = tile + Tile::at_element(r, col);
        if (seen(r, i)) ptx::st_shared_f32(at, ptx::ld_shared_f32(at) + factor * x);
      }
    }
  }
  __syncthreads();  // what was left out is added
  load_accumulators<Tile>(acc, tile, row);
}

// Whether a row sees a key: neither the mask nor -inf in the bias hides it.
template <bool kBias>
__device__ __forceinline__ bool sees_key(int row, int key, const Sequence& seq,
                                         const BiasRows& bias, const AttentionParams& p) {
  return row < seq.len_q && !mask_hides(row, key, seq, p) &&
         !(kBias && pair_bias(bias, row, key, seq) == -INFINITY);
}

// Whether there may be keys that some rows of a tile see and others do not, or that none sees.
template <bool kBias>
__device__ __forceinline__ bool may_hide(const AttentionParams& p) {
  return kBias || p.left < kNoLimit || p.right < kNoLimit;
}

}  // namespace flashmoe::cuda
