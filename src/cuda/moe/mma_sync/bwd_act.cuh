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

#include "cuda/moe/act_gradient.cuh"
#include "cuda/moe/experts.cuh"
#include "cuda/ptx/cache.cuh"
#include "cuda/tile/chunk.cuh"
#include "cuda/tile/gemm.cuh"

namespace flashmoe::cuda::moe {

// kAlong: down lies as (n, d); else as (d, n).
template <class Chip, class T, GemmTile kTile, bool kAlong>
__device__ __forceinline__ void moe_bwd_act(const BwdActParams& p) {
  using G = Gemm<Chip, T, kTile, true, kAlong>;
  extern __shared__ __align__(1024) char shared[];
  float* const sScale = reinterpret_cast<float*>(shared + G::kSharedBytes);
  const auto [tile, column] = find_task(p.tiles, blockIdx.x);
  if (tile.expert < 0) return;

  const int first = column * G::kBlockN;
  for (int i = threadIdx.x; i < tile.rows; i += G::kThreads) {
    sScale[i] = weight_of(p.scale, p.pairs[tile.first + i], p.top_k);
  }
  // The epilogue's h to L2 while the main loop runs.
  constexpr int kChunks = G::kBlockN / 8;  // of a row, in neighbouring lanes of one warp
  const char* const gPre = static_cast<const char*>(p.pre);
  constexpr int kSectors = G::kBlockN * T::kBytes / 32;
  for (int i = threadIdx.x; i < tile.rows * kSectors; i += G::kThreads) {
    const int at = first + i % kSectors * 16;
    if (at >= p.inner) continue;
    const char* const sector =
        gPre + (int64_t{tile.first} + i / kSectors) * p.pre_row_bytes + int64_t{at} * T::kBytes;
    ptx::prefetch_l2(sector);
    if (p.gated) ptx::prefetch_l2(sector + p.pre_half_bytes);
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

  // A thread has one chunk of every kStep-th row, and reads h of kAtOnce of them before it needs
  // the first.
  constexpr int kStep = G::kThreads / kChunks, kEach = G::kBlockM / kStep;
  constexpr int kAtOnce = kEach < 4 ? kEach : 4;
  static_assert(kChunks <= 32 && 32 % kChunks == 0 && G::kBlockM % (kStep * kAtOnce) == 0);
  const int col = threadIdx.x % kChunks * 8, left = p.inner - first - col;
  const int64_t bytes = int64_t{first + col} * T::kBytes;
  const auto finish = [&](auto partial, auto kind) {
    constexpr bool kPartial = decltype(partial)::value;
    constexpr Kind kKind = decltype(kind)::value;
#pragma unroll 1
    for (int top = threadIdx.x / kChunks; top < G::kBlockM; top += kStep * kAtOnce) {
      uint4 h[kAtOnce][2];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int row = top + i * kStep, count = row < tile.rows ? left : 0;
        const char* const from = gPre + (tile.first + row) * p.pre_row_bytes + bytes;
        h[i][0] = read_chunk<T, kPartial>(from, count);
        h[i][1] = read_chunk<T, kPartial>(from + p.pre_half_bytes, p.gated ? count : 0);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int row = top + i * kStep;
        const int64_t at = tile.first + row;
        float row_sum = 0;
        if (row < tile.rows && left > 0) {
          float grad[8];
          G::sums_at(grad, sSums, row, col);
          row_sum =
              store_act_gradient<kKind, T, kPartial>(p, grad, h[i], sScale[row], at, bytes, left);
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
  };
  with_partial(p.partial,
               [&](auto partial) { with_kind(p.kind, [&](auto kind) { finish(partial, kind); }); });
}

}  // namespace flashmoe::cuda::moe
