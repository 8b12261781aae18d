// h = x W^T + bias and a = act(h), for the rows of an expert: the first product of the forward
// pass, by wgmma.
//
//                     gate_up[e]^T
//                  gate columns | up columns        without a gate: neighbouring columns
//                  +------------+------------+
//   x[token]       |   gate     |    up      |  ->  h (pre-activations), a = act(gate) * up
//                  +------------+------------+
//
// Gate and up columns of the same numbers are the two halves of B, so that a thread has both in its
// registers. Rows of x are gathered by token while they are copied.
#pragma once

#include "cuda/moe/activation.cuh"
#include "cuda/moe/sm90/params.h"
#include "cuda/moe/sm90/producer.cuh"

namespace flashmoe::cuda::moe::sm90 {

template <class G>
__device__ __forceinline__ Halves up_halves(const UpParams& p, int column) {
  const int first = column * (p.gated ? G::kHalfN : G::kBlockN);
  return {first, p.gated ? p.inner + first : first + G::kHalfN};
}

// Sums to activations, in place: those of a gate in the first half of the columns.
template <class G>
__device__ __forceinline__ void activate(typename G::Sums& sums, Kind kind, bool gated) {
  constexpr int kCount = G::kBlockN / 2, kHalf = kCount / 2;
  with_kind(kind, [&](auto known) {
#pragma unroll
    for (auto& part : sums) {
#pragma unroll
      for (int i = 0; i < kHalf; ++i)
        part[i] = activation_curve(decltype(known)::value, part[i]).value;
      if (gated) {
#pragma unroll
        for (int i = 0; i < kHalf; ++i) part[i] *= part[kHalf + i];
      } else {
#pragma unroll
        for (int i = kHalf; i < kCount; ++i)
          part[i] = activation_curve(decltype(known)::value, part[i]).value;
      }
    }
  });
}

template <class G>
__device__ __forceinline__ void finish_up(tma::GemmConsumer<G>& consumer, const ProductTask& task,
                                          typename G::Sums& sums, const Sm90UpParams& p) {
  using T = typename G::Type;
  const Halves halves = up_halves<G>(p, task.column);
  const int end = p.gated ? 2 * p.inner : p.inner;  // of all columns
  if (p.bias) {
    consumer.load_table([&](int i) {
      const int at = i < G::kHalfN ? halves.first + i : halves.second + i - G::kHalfN;
      return at < end ? bias_at<T>(p.bias, task.tile.expert * p.bias_expert + at * p.bias_col)
                      : 0.f;
    });
    consumer.add_columns(sums);
  }
  // Piece q of a part to rows of `to`, from column `first` on.
  const auto send = [&](int part, int q, char* to, int64_t row_bytes, int first) {
    const int top = consumer.first_row(part);
    consumer.send([&](int i) { return sums[part][32 * q + i]; },
                  [&](int, int row, int column, const uint4& chunk) {
                    if (top + row >= task.rows() || first + column >= p.inner) return;
                    *reinterpret_cast<uint4*>(to +
                                              (int64_t{task.tile.first} + top + row) * row_bytes +
                                              (first + column) * T::kBytes) = chunk;
                  });
  };
  constexpr int kHalfPieces = G::kPieces / 2;
  if (p.pre) {
#pragma unroll
    for (int part = 0; part < G::kParts; ++part) {
      if (consumer.first_row(part) >= task.rows()) break;
#pragma unroll
      for (int q = 0; q < G::kPieces; ++q) {
        const bool is_up = p.gated && q >= kHalfPieces;
        send(part, q, static_cast<char*>(p.pre) + (is_up ? p.pre_half_bytes : 0), p.pre_row_bytes,
             halves.first + 64 * (is_up ? q - kHalfPieces : q));
      }
    }
  }
  activate<G>(sums, p.kind, p.gated);
#pragma unroll
  for (int part = 0; part < G::kParts; ++part) {
    if (consumer.first_row(part) >= task.rows()) break;
#pragma unroll
    for (int q = 0; q < G::kPieces; ++q) {
      if (p.gated && q >= kHalfPieces) break;
      send(part, q, static_cast<char*>(p.act), p.act_row_bytes, halves.first + 64 * q);
    }
  }
}

// kAlong: the weights of a column lie side by side, (G n, d); else those of one input do.
template <class T, TmaGemmTile kTile, bool kAlong>
__device__ __forceinline__ void moe_up(const Sm90UpParams& p) {
  using G = tma::Gemm<T, kTile, true, kAlong, true>;
  extern __shared__ __align__(1024) char shared[];
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const ProductTasks tasks(p.tiles, p.tile_count, p.width, G::kDepth);
  G::run(
      smem,
      [&](tma::GemmProducer<G> producer) {
        const TokenRows rows{static_cast<const char*>(p.x), static_cast<uint32_t>(p.x_row_bytes),
                             p.pairs, p.top_k};
        produce_gathered(
            producer, tasks, rows, p.width, p.weights_map,
            [&](int column) { return up_halves<G>(p, column); }, [](const ProductTask&, int) {});
      },
      [&](tma::GemmConsumer<G> consumer) {
        consumer.for_each_tile(
            tasks.total(), [&](int number) { return tasks.find(number); },
            [&](const ProductTask& task, typename G::Sums& sums) {
              finish_up(consumer, task, sums, p);
            });
      });
}

}  // namespace flashmoe::cuda::moe::sm90
