// h = x W^T + bias and a = act(h), for the rows of an expert: the first product of the forward
// pass.
//
//                     gate_up[e]^T
//                  gate columns | up columns        without a gate: neighbouring columns
//                  +------------+------------+
//   x[token]       |   gate     |    up      |  ->  h (pre-activations), a = act(gate) * up
//                  +------------+------------+
//
// Gate and up columns of the same numbers are the two halves of B, so that weights are read as they
// lie and the activation is in the epilogue. Rows of x are gathered by token while they are copied.
// The grid is slots x tiles of columns: see find_task(). Shared memory: the main loop's, and
// row_table_bytes().
#pragma once

#include "cuda/moe/activation.cuh"
#include "cuda/moe/experts.cuh"
#include "cuda/tile/chunk.cuh"
#include "cuda/tile/gemm.cuh"

namespace flashmoe::cuda::moe {

// kAlong: the weights of a column lie side by side, (G n, d); else those of one input do.
template <class Chip, class T, GemmTile kTile, bool kAlong>
__device__ __forceinline__ void moe_up(const UpParams& p) {
  using G = Gemm<Chip, T, kTile, true, kAlong>;
  extern __shared__ __align__(1024) char shared[];
  float* const sBias = reinterpret_cast<float*>(shared + G::kSharedBytes);
  const auto [tile, column] = find_task(p.tiles, blockIdx.x);
  if (tile.expert < 0) return;

  // The halves of B begin at columns first and second of the weights; the result has `wide` columns
  // of n, from `first` on.
  const int wide = p.gated ? G::kHalfN : G::kBlockN, first = column * wide;
  const int second = p.gated ? p.inner + first : first + G::kHalfN;
  const int columns = p.gated ? 2 * p.inner : p.inner;
  const int end = p.gated ? p.inner : columns;  // of the first half's columns
  for (int i = threadIdx.x; i < G::kBlockN; i += G::kThreads) {
    const int at = i < G::kHalfN ? first + i : second + i - G::kHalfN;
    const bool there = p.bias && at < (i < G::kHalfN ? end : columns);
    sBias[i] = there ? bias_at<T>(p.bias, tile.expert * p.bias_expert + at * p.bias_col) : 0.f;
  }

  const char* const gX = static_cast<const char*>(p.x);
  const char* const gW =
      static_cast<const char*>(p.weights.data) + tile.expert * p.weights.expert_bytes;
  typename G::Sums sums;
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  with_partial(p.partial, [&](auto partial) {
    constexpr bool kPartial = decltype(partial)::value;
    const typename G::template LoaderA<kPartial> rows(
        tile.rows, [&](int i) { return gX + p.pairs[tile.first + i] / p.top_k * p.x_row_bytes; });
    const auto left = weight_loader<G, kAlong, kPartial>(gW, p.weights.row_bytes, first, end);
    const auto right = weight_loader<G, kAlong, kPartial>(gW, p.weights.row_bytes, second, columns);
    G::run(sums, smem, (p.width + G::kDepth - 1) / G::kDepth, [&](uint32_t stage, int step) {
      const int at = step * G::kDepth;
      rows.load(stage, at, p.width);
      left.load(stage + G::kBytesA, at, p.width);
      right.load(stage + G::kBytesA + G::kBytesB, at, p.width);
    });
  });
  float* const sSums = reinterpret_cast<float*>(shared);
  G::store(sSums, sums);

  constexpr int kChunks = G::kBlockN / 8, kHalfChunks = G::kHalfN / 8;
#pragma unroll 2
  for (int i = threadIdx.x; i < G::kBlockM * (wide / 8); i += G::kThreads) {
    const int row = p.gated ? i / kHalfChunks : i / kChunks;
    const int col = (p.gated ? i % kHalfChunks : i % kChunks) * 8, left = p.inner - first - col;
    if (row >= tile.rows || left <= 0) continue;
    const int64_t to = tile.first + row;
    char* const gPre = static_cast<char*>(p.pre) + to * p.pre_row_bytes + (first + col) * T::kBytes;
    float gate[8], up[8], act[8];
    G::sums_at(gate, sSums, row, col);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      gate[e] += sBias[col + e];
      act[e] = activation_curve(p.kind, gate[e]).value;
    }
    if (p.pre) store_chunk<T>(gPre, gate, left);
    if (p.gated) {
      G::sums_at(up, sSums, row, G::kHalfN + col);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        up[e] += sBias[G::kHalfN + col + e];
        act[e] *= up[e];
      }
      if (p.pre) store_chunk<T>(gPre + p.pre_half_bytes, up, left);
    }
    store_chunk<T>(static_cast<char*>(p.act) + to * p.act_row_bytes + (first + col) * T::kBytes,
                   act, left);
  }
}

}  // namespace flashmoe::cuda::moe
