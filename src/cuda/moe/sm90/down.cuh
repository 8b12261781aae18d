// Sorted rows times the weights of their expert, by wgmma: y = a down^T in the forward pass, dX of
// each pair = dh gate_up in the backward pass. Rows stay where they are, for moe_combine to add up;
// with one expert a token (k = 1) they go straight to their token, weighted.
#pragma once

#include "cuda/moe/sm90/params.h"
#include "cuda/moe/sm90/producer.cuh"

namespace flashmoe::cuda::moe::sm90 {

template <class G>
__device__ __forceinline__ void finish_down(tma::GemmConsumer<G>& consumer, const ProductTask& task,
                                            typename G::Sums& sums, const Sm90DownParams& p) {
  using T = typename G::Type;
  const int first = task.column * G::kBlockN;
  if (p.bias) {
    consumer.load_table([&](int i) {
      return first + i < p.columns
                 ? bias_at<T>(p.bias, task.tile.expert * p.bias_expert + (first + i) * p.bias_col)
                 : 0.f;
    });
    consumer.add_columns(sums);
  }
#pragma unroll
  for (int part = 0; part < G::kParts; ++part) {
    const int top = consumer.first_row(part), left = task.rows() - top;
    if (left <= 0) break;
    const int32_t* const pairs = p.pairs ? p.pairs + task.tile.first + top : nullptr;
    if (pairs && p.scale.data) {  // k = 1: a pair is a token
      float scale[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = min(tma::fragment_row() + 8 * half, left - 1);
        scale[half] = weight_of(p.scale, pairs[row], 1);
      }
#pragma unroll
      for (int i = 0; i < G::kBlockN / 2; ++i) sums[part][i] *= scale[i % 4 / 2];
    }
    char* to[4];  // a chunk of four rows
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = min(consumer.outlet_row(i), left - 1);
      const int64_t at = pairs ? pairs[row] : task.tile.first + top + row;
      to[i] = static_cast<char*>(p.out) + at * p.out_row_bytes +
              (first + consumer.outlet_column()) * T::kBytes;
    }
#pragma unroll
    for (int q = 0; q < G::kPieces; ++q) {
      consumer.send([&](int i) { return sums[part][32 * q + i]; },
                    [&](int i, int row, int column, const uint4& chunk) {
                      if (row >= left || first + 64 * q + column >= p.columns) return;
                      *reinterpret_cast<uint4*>(to[i] + 64 * q * T::kBytes) = chunk;
                    });
    }
  }
}

// kAlong: weights lie as (columns, depth); else as (depth, columns).
template <class T, TmaGemmTile kTile, bool kAlong>
__device__ __forceinline__ void moe_down(const Sm90DownParams& p) {
  using G = tma::Gemm<T, kTile, true, kAlong, false>;
  extern __shared__ __align__(1024) char shared[];
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const ProductTasks tasks(p.tiles, p.tile_count, p.halves * p.depth, G::kDepth);
  G::run(
      smem,
      [&](tma::GemmProducer<G> producer) {
        produce_rows(producer, tasks, p.rows_map, p.weights_map, [](int column) {
          return Halves{column * G::kBlockN, column * G::kBlockN + G::kHalfN};
        });
      },
      [&](tma::GemmConsumer<G> consumer) {
        consumer.for_each_tile(
            tasks.total(), [&](int number) { return tasks.find(number); },
            [&](const ProductTask& task, typename G::Sums& sums) {
              finish_down(consumer, task, sums, p);
            });
      });
}

}  // namespace flashmoe::cuda::moe::sm90
