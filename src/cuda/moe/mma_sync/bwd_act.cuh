// dA = dOut down, for the rows of an expert with dOut gathered by token, and in the epilogue all
// that follows from it number by number, with the activation computed once more from the
// pre-activations h:
//
//   dh              weight * dA * act'(h), for gate and up
//   weighted act    weight * act(h), which the gradient of down needs
//   row sums        of dA * act(h): the gradient of the routing weight, a part for each tile of
//                   columns
//
// The grid is slots x tiles of columns: see find_task(). Shared memory: the main loop's, and
// row_table_bytes().
#pragma once

#include "cuda/moe/activation.cuh"
#include "cuda/moe/experts.cuh"
#include "cuda/tile/chunk.cuh"
#include "cuda/tile/gemm.cuh"

namespace flashmoe::cuda::moe {

// kAlong: down lies as (n, d); else as (d, n).
template <class Chip, class T, GemmTile kTile, bool kAlong>
__device__ __forceinline__ void moe_bwd_act(const BwdActParams& p) {
  using G = Gemm<Chip, T, kTile, true, kAlong>;
  extern __shared__ __align__(1024) char shared[];
  float* const sScale = reinterpret_cast<float*>(shared + G::kSharedBytes);
  const auto [tile, column] = find_task(p.tiles);
  if (tile.expert < 0) return;

  const int first = column * G::kBlockN;
  for (int i = threadIdx.x; i < tile.rows; i += G::kThreads) {
    sScale[i] = weight_of(p.scale, p.pairs[tile.first + i], p.top_k);
  }

  const char* const gOut = static_cast<const char*>(p.grad_out);
  const char* const gW =
      static_cast<const char*>(p.weights.data) + tile.expert * p.weights.expert_bytes;
  typename G::Sums sums;
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  with_partial(p.partial, [&](auto partial) {
    constexpr bool kPartial = decltype(partial)::value;
    const typename G::template LoaderA<kPartial> rows(tile.rows, [&](int i) {
      return gOut + p.pairs[tile.first + i] / p.top_k * p.grad_out_row_bytes;
    });
    const auto left = weight_loader<G, kAlong, kPartial>(gW, p.weights.row_bytes, first, p.inner);
    const auto right =
        weight_loader<G, kAlong, kPartial>(gW, p.weights.row_bytes, first + G::kHalfN, p.inner);
    G::run(sums, smem, (p.width + G::kDepth - 1) / G::kDepth, [&](uint32_t stage, int step) {
      const int at = step * G::kDepth;
      rows.load(stage, at, p.width);
      left.load(stage + G::kBytesA, at, p.width);
      right.load(stage + G::kBytesA + G::kBytesB, at, p.width);
    });
  });
  float* const sSums = reinterpret_cast<float*>(shared);
  G::store(sSums, sums);

  constexpr int kChunks = G::kBlockN / 8;  // of a row, in neighbouring lanes of one warp
  static_assert(kChunks <= 32 && 32 % kChunks == 0 && G::kBlockM * kChunks % G::kThreads == 0);
#pragma unroll 2
  for (int i = threadIdx.x; i < G::kBlockM * kChunks; i += G::kThreads) {
    const int row = i / kChunks, col = i % kChunks * 8, left = p.inner - first - col;
    const int64_t at = tile.first + row;
    const int64_t bytes = int64_t{first + col} * T::kBytes;
    float row_sum = 0;
    if (row < tile.rows && left > 0) {
      const float scale = sScale[row];
      const char* const gPre = static_cast<const char*>(p.pre) + at * p.pre_row_bytes + bytes;
      float grad[8], gate[8], up[8], act[8];
      G::sums_at(grad, sSums, row, col);
      load_chunk<T>(gate, gPre, left);
      if (p.gated) load_chunk<T>(up, gPre + p.pre_half_bytes, left);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const Curve curve = activation_curve(p.kind, gate[e]);
        const float factor = p.gated ? up[e] : 1.f;
        act[e] = curve.value * factor;
        if (e < left) row_sum += grad[e] * act[e];
        act[e] *= scale;
        gate[e] = scale * grad[e] * curve.slope * factor;
        up[e] = scale * grad[e] * curve.value;
      }
      if (p.grad_pre) {
        char* const gTo = static_cast<char*>(p.grad_pre) + at * p.grad_pre_row_bytes + bytes;
        store_chunk<T>(gTo, gate, left);
        if (p.gated) store_chunk<T>(gTo + p.grad_pre_half_bytes, up, left);
      }
      if (p.weighted_act) {
        char* const gAct = static_cast<char*>(p.weighted_act) + at * p.weighted_act_row_bytes;
        store_chunk<T>(gAct + bytes, act, left);
      }
    }
    if (p.row_sums) {
#pragma unroll
      for (int step = kChunks / 2; step > 0; step /= 2) {
        row_sum += __shfl_xor_sync(0xffffffffu, row_sum, step);
      }
      if (col == 0 && row < tile.rows) p.row_sums[column * p.row_sums_stride + at] = row_sum;
    }
  }
}

}  // namespace flashmoe::cuda::moe
