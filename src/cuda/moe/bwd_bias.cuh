// The gradients of biases and of routing weights: sums of what products leave behind, each in a
// fixed order.
#pragma once

#include "cuda/moe/experts.cuh"
#include "cuda/tile/dtype.cuh"
#include "cuda/tile/scan.cuh"

namespace flashmoe::cuda::moe {

// Parts of a bias's gradient: column sums of a tile of rows. Grid: (slots, blocks of columns, which
// bias); a thread for each column.
template <class T>
__device__ __forceinline__ void moe_bwd_bias(const BwdBiasParams& p) {
  const BiasSum& sum = p.sums[blockIdx.z];
  const int columns = sum.halves * sum.columns;
  const int column = blockIdx.y * kBiasThreads + threadIdx.x;
  const ExpertTile tile = p.tiles[blockIdx.x];
  if (tile.expert < 0 || column >= columns) return;
  const int half = column / sum.columns;
  const char* const from = static_cast<const char*>(sum.rows) + half * sum.half_bytes +
                           (column - half * sum.columns) * T::kBytes;
  float total = 0;
#pragma unroll 4
  for (int i = 0; i < tile.rows; ++i) {
    int64_t row = tile.first + i;
    float scale = 1;
    if (sum.gathered) {
      const int pair = p.pairs[row];
      row = pair / p.top_k;
      scale = weight_of(sum.scale, pair, p.top_k);
    }
    total += scale *
             T::unpack(*reinterpret_cast<const typename T::Storage*>(from + row * sum.row_bytes));
  }
  sum.parts[int64_t{blockIdx.x} * columns + column] = total;
}

// The sum of the parts, in the order of the tiles. Grid: (experts, blocks of columns, which bias).
template <class T>
__device__ __forceinline__ void moe_bwd_bias_sum(const BwdBiasParams& p) {
  const BiasSum& sum = p.sums[blockIdx.z];
  const int columns = sum.halves * sum.columns;
  const int column = blockIdx.y * kBiasThreads + threadIdx.x;
  if (column >= columns) return;
  const int expert = blockIdx.x;
  float total = 0;
#pragma unroll 4
  for (int tile = p.first_tile[expert]; tile < p.first_tile[expert + 1]; ++tile) {
    total += sum.parts[int64_t{tile} * columns + column];
  }
  static_cast<typename T::Storage*>(sum.out)[expert * sum.out_expert + column * sum.out_col] =
      static_cast<typename T::Storage>(T::pack(total, 0.f));
}

// The gradient of a routing weight: dA . a of its row, of which each tile of columns left its part,
// and dOut . bias of its expert. Grid: CTAs of kRowThreads, a warp for each pair.
template <class T>
__device__ __forceinline__ void moe_bwd_scale(const BwdScaleParams& p) {
  const int lane = threadIdx.x % 32;
  const int64_t pair = int64_t{blockIdx.x} * (kRowThreads / 32) + threadIdx.x / 32;
  if (pair >= p.pairs) return;
  const int64_t token = pair / p.top_k;
  const int row = p.row_of[pair];
  float sum = 0;
  if (row >= 0) {
    for (int part = lane; part < p.parts; part += 32) {
      sum += p.row_sums[part * p.row_sums_stride + row];
    }
    if (p.bias) {
      const int expert = expert_of(p.ids, static_cast<int>(pair), p.top_k);
      const char* const grad = static_cast<const char*>(p.grad_out) + token * p.grad_out_row_bytes;
      for (int c = lane; c < p.width; c += 32) {
        sum += T::unpack(reinterpret_cast<const typename T::Storage*>(grad)[c]) *
               bias_at<T>(p.bias, expert * p.bias_expert + c * p.bias_col);
      }
    }
  }
  sum = sum_of_lanes(sum);
  if (lane == 0) p.grad_weights[token * p.grad_row + (pair - token * p.top_k) * p.grad_col] = sum;
}

}  // namespace flashmoe::cuda::moe
