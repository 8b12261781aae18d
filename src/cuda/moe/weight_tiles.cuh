// The tiles of the gradients of weights, and the sum of an expert's slices.
#pragma once

#include "cuda/moe/params.h"
#include "cuda/moe/tiles.h"
#include "cuda/tile/chunk.cuh"

namespace flashmoe::cuda::moe {

// One tile of a gradient: where its columns are in both operands.
struct WeightTile {
  int product, index;    // which gradient; which tile of both gradients
  int half_m, half_n;    // of the operands
  int first_m, first_n;  // columns within the half
  int left_m, left_n;    // columns up to its end
};

__device__ __forceinline__ WeightTile find_weight_tile(const BwdWeightsParams& p, int index) {
  WeightTile t;
  t.index = index;
  const int of_first = p.products[0].tiles_m * p.products[0].tiles_n;
  t.product = index >= of_first ? 1 : 0;
  const WeightProduct& w = p.products[t.product];
  const int within = index - t.product * of_first;
  const int m = within / w.tiles_n, n = within - m * w.tiles_n;
  const int tiles_m = w.tiles_m / w.left.halves, tiles_n = w.tiles_n / w.right.halves;
  t.half_m = m / tiles_m;
  t.half_n = n / tiles_n;
  t.first_m = (m - t.half_m * tiles_m) * w.tile_m;
  t.first_n = (n - t.half_n * tiles_n) * w.tile_n;
  t.left_m = w.left.columns - t.first_m;
  t.left_n = w.right.columns - t.first_n;
  return t;
}

__device__ __forceinline__ int weight_tiles(const BwdWeightsParams& p) {
  return p.products[0].tiles_m * p.products[0].tiles_n +
         p.products[1].tiles_m * p.products[1].tiles_n;
}

// Stores eight numbers of a tile; nothing where the gradient has no such row or column.
template <class T>
__device__ __forceinline__ void store_weights(const BwdWeightsParams& p, const WeightTile& t,
                                              int expert, int row, int col, const float (&x)[8]) {
  if (row >= t.left_m || col >= t.left_n) return;
  const WeightProduct& w = p.products[t.product];
  const int64_t to_row = int64_t{t.half_m} * w.left.columns + t.first_m + row;
  const int64_t to_col = int64_t{t.half_n} * w.right.columns + t.first_n + col;
  store_chunk<T>(static_cast<char*>(w.out) + expert * w.out_expert_bytes +
                     to_row * w.out_row_bytes + to_col * T::kBytes,
                 x, t.left_n - col);
}

// Adds up the slices of an expert, in their order. Grid: sliced experts x tiles of both gradients.
template <class T, int kTileElems>
__device__ __forceinline__ void moe_bwd_weights_sum(const BwdWeightsParams& p) {
  const int tiles = weight_tiles(p);
  const int slot = blockIdx.x / tiles;
  const SlicedExpert expert = p.sliced[slot];
  if (expert.expert < 0) return;
  const WeightTile t = find_weight_tile(p, static_cast<int>(blockIdx.x) - slot * tiles);
  const int chunks = p.products[t.product].tile_n / 8;  // of a row
  const float* const gSums = p.slice_sums + (int64_t{expert.first} * tiles + t.index) * kTileElems;
  for (int i = threadIdx.x; i < kTileElems / 8; i += kRowThreads) {
    float x[8] = {};
#pragma unroll 4
    for (int slice = 0; slice < expert.slices; ++slice) {
      const float4* const from =
          reinterpret_cast<const float4*>(gSums + int64_t{slice} * tiles * kTileElems + i * 8);
      const float4 low = from[0], high = from[1];
      x[0] += low.x, x[1] += low.y, x[2] += low.z, x[3] += low.w;
      x[4] += high.x, x[5] += high.y, x[6] += high.z, x[7] += high.w;
    }
    store_weights<T>(p, t, expert.expert, i / chunks, i % chunks * 8, x);
  }
}

}  // namespace flashmoe::cuda::moe
