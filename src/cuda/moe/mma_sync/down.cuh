// Sorted rows times the weights of their expert: y = a down^T in the forward pass, dX of each pair
// = dh gate_up in the backward pass. Rows stay where they are, for moe_combine to add up; with one
// expert a token (k = 1) they go straight to their token, weighted.
//
// The depth may come in halves that are apart in the rows (dh of the gate, dh of up) and side by
// side in the weights. The grid is slots x tiles of columns: see find_task(). Shared memory: the
// main loop's, and row_table_bytes().
#pragma once

#include "cuda/moe/experts.cuh"
#include "cuda/tile/chunk.cuh"
#include "cuda/tile/gemm.cuh"

namespace flashmoe::cuda::moe {

// kAlong: weights lie as (columns, depth); else as (depth, columns).
template <class Chip, class T, GemmTile kTile, bool kAlong>
__device__ __forceinline__ void moe_down(const DownParams& p) {
  using G = Gemm<Chip, T, kTile, true, kAlong>;
  extern __shared__ __align__(1024) char shared[];
  int64_t* const sTo = reinterpret_cast<int64_t*>(shared + G::kSharedBytes);
  float* const sScale = reinterpret_cast<float*>(sTo + G::kBlockM);
  float* const sBias = sScale + G::kBlockM;
  const auto [tile, column] = find_task(p.tiles, blockIdx.x);
  if (tile.expert < 0) return;

  const int first = column * G::kBlockN;
  for (int i = threadIdx.x; i < tile.rows; i += G::kThreads) {
    const int row = tile.first + i;
    const int to = p.pairs ? p.pairs[row] : row;  // k = 1: a pair is a token
    sTo[i] = to * p.out_row_bytes;
    sScale[i] = p.pairs ? weight_of(p.scale, to, 1) : 1.f;
  }
  for (int i = threadIdx.x; i < G::kBlockN; i += G::kThreads) {
    const bool there = p.bias && first + i < p.columns;
    sBias[i] =
        there ? bias_at<T>(p.bias, tile.expert * p.bias_expert + (first + i) * p.bias_col) : 0.f;
  }

  const char* const gRows = static_cast<const char*>(p.rows) + tile.first * p.row_bytes;
  const char* const gW =
      static_cast<const char*>(p.weights.data) + tile.expert * p.weights.expert_bytes;
  const int steps = (p.depth + G::kDepth - 1) / G::kDepth;  // of a half
  typename G::Sums sums;
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  with_partial(p.partial, [&](auto partial) {
    constexpr bool kPartial = decltype(partial)::value;
    const typename G::template LoaderA<kPartial> rows(
        tile.rows, [&](int i) { return gRows + i * p.row_bytes; });
    const auto left = weight_loader<G, kAlong, kPartial>(gW, p.weights.row_bytes, first, p.columns);
    const auto right =
        weight_loader<G, kAlong, kPartial>(gW, p.weights.row_bytes, first + G::kHalfN, p.columns);
    G::run(sums, smem, p.halves * steps, [&](uint32_t stage, int step) {
      int at = step * G::kDepth, depth = p.depth, row_at = at, row_depth = depth;
      if (kPartial && step >= steps) {  // the second half: beside the first one in the weights only
        at -= steps * G::kDepth;
        row_at = at + static_cast<int>(p.half_bytes / T::kBytes);
        row_depth = depth + static_cast<int>(p.half_bytes / T::kBytes);
        at += depth;
        depth *= p.halves;
      }
      rows.load(stage, row_at, row_depth);
      left.load(stage + G::kBytesA, at, depth);
      right.load(stage + G::kBytesA + G::kBytesB, at, depth);
    });
  });
  float* const sSums = reinterpret_cast<float*>(shared);
  G::store(sSums, sums);

  constexpr int kChunks = G::kBlockN / 8;
#pragma unroll 4
  for (int i = threadIdx.x; i < G::kBlockM * kChunks; i += G::kThreads) {
    const int row = i / kChunks, col = i % kChunks * 8, left = p.columns - first - col;
    if (row >= tile.rows || left <= 0) continue;
    float y[8];
    G::sums_at(y, sSums, row, col);
#pragma unroll
    for (int e = 0; e < 8; ++e) y[e] = sScale[row] * (y[e] + sBias[col + e]);
    // Rows of the workspace have whole chunks, and are read by these.
    store_chunk<T>(static_cast<char*>(p.out) + sTo[row] + (first + col) * T::kBytes, y,
                   p.pairs ? left : 8);
  }
}

}  // namespace flashmoe::cuda::moe
