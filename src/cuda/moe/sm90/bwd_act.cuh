// dA = dOut down by wgmma, for the rows of an expert with dOut gathered by token, and in the
// epilogue all that follows from it number by number, with the activation computed once more from
// the pre-activations h:
//
//   dh              weight * dA * act'(h), for gate and up
//   weighted act    weight * act(h), which the gradient of down needs
//   row sums        of dA * act(h): the gradient of the routing weight, a part for each tile of
//                   columns
//
// dA goes through shared memory in fp32, 64 x 64 at a time; h is read and everything else written
// in chunks of 16 bytes.
#pragma once

#include "cuda/moe/act_gradient.cuh"
#include "cuda/moe/sm90/params.h"
#include "cuda/moe/sm90/producer.cuh"
#include "cuda/ptx/cache.cuh"

namespace flashmoe::cuda::moe::sm90 {

// The epilogue's h to L2 while the main loop runs, a share of it in each step.
template <class G>
__device__ __forceinline__ void prefetch_pre(const ProductTask& task, int step,
                                             const BwdActParams& p) {
  constexpr int kSectors = G::kBlockN * G::Type::kBytes / 32;
#pragma unroll 1
  for (int i = step * tma::kWarpgroupThreads + threadIdx.x; i < task.rows() * kSectors;
       i += task.steps() * tma::kWarpgroupThreads) {
    const int at = task.column * G::kBlockN + i % kSectors * 16;
    if (at >= p.inner) continue;
    const char* const sector = static_cast<const char*>(p.pre) +
                               (int64_t{task.tile.first} + i / kSectors) * p.pre_row_bytes +
                               int64_t{at} * G::Type::kBytes;
    ptx::prefetch_l2(sector);
    if (p.gated) ptx::prefetch_l2(sector + p.pre_half_bytes);
  }
}

// Piece by piece, in a loop: unrolled, its code was 200 KB, more than instruction caches hold.
template <class G, Kind kKind>
__device__ __forceinline__ void finish_act(tma::GemmConsumer<G>& consumer, const ProductTask& task,
                                           const typename G::Sums& sums,
                                           const Sm90BwdActParams& p) {
  using T = typename G::Type;
  const int parts =
      G::kPingPong ? (task.rows() + tma::kWarpgroupRows - 1) / tma::kWarpgroupRows : 1;
  // Of piece `number` of all parts a thread has a chunk of four rows.
  const auto top_of = [&](int number) { return consumer.first_row(number / G::kPieces); };
  const auto column_of = [&](int number) {
    return task.column * G::kBlockN + number % G::kPieces * 64 + consumer.outlet_column();
  };
  uint4 h[2][2];  // two rows ahead, also across pieces: it takes long to come
  const auto load_pre = [&](int number, int i) {
    const int row = top_of(number) + consumer.outlet_row(i), column = column_of(number);
    const int count = row < task.rows() ? p.inner - column : 0;
    const char* const from = static_cast<const char*>(p.pre) +
                             (int64_t{task.tile.first} + row) * p.pre_row_bytes +
                             int64_t{column} * T::kBytes;
    h[i % 2][0] = read_chunk<T, false>(from, count);
    h[i % 2][1] = read_chunk<T, false>(from + p.pre_half_bytes, p.gated ? count : 0);
  };
  load_pre(0, 0);
  load_pre(0, 1);
  float row_sums[4];
#pragma unroll 1
  for (int number = 0; number < parts * G::kPieces; ++number) {
    const int top = top_of(number), left = task.rows() - top, column = column_of(number);
    const int64_t first = int64_t{task.tile.first} + top;
    if (number % G::kPieces == 0) {
#pragma unroll
      for (float& sum : row_sums) sum = 0;
    }
    consumer.put_piece(sums, number);
    consumer.take_floats([&](int i, int row, int, float(&grad)[8]) {
      if (row < left && column < p.inner) {
        row_sums[i] +=
            store_act_gradient<kKind, T, false>(p, grad, h[i % 2], consumer.table(top + row),
                                                first + row, int64_t{column} * T::kBytes, 8);
      }
      if (i < 2) {
        load_pre(number, i + 2);
      } else if (number + 1 < parts * G::kPieces) {
        load_pre(number + 1, i - 2);
      }
    });
    if (!p.row_sums || number % G::kPieces + 1 < G::kPieces) continue;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float sum = row_sums[i];  // of eight neighbouring lanes
#pragma unroll
      for (int step = 4; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
      const int row = consumer.outlet_row(i);
      if (consumer.outlet_column() == 0 && row < left) {
        p.row_sums[task.column * p.row_sums_stride + first + row] = sum;
      }
    }
  }
}

// kAlong: down lies as (n, d); else as (d, n).
template <class T, TmaGemmTile kTile, bool kAlong>
__device__ __forceinline__ void moe_bwd_act(const Sm90BwdActParams& p) {
  using G = tma::Gemm<T, kTile, true, kAlong, true>;
  extern __shared__ __align__(1024) char shared[];
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const ProductTasks tasks(p.tiles, p.tile_count, p.width, G::kDepth);
  G::run(
      smem,
      [&](tma::GemmProducer<G> producer) {
        const TokenRows rows{static_cast<const char*>(p.grad_out),
                             static_cast<uint32_t>(p.grad_out_row_bytes), p.pairs, p.top_k};
        produce_gathered(
            producer, tasks, rows, p.width, p.weights_map,
            [](int column) {
              return Halves{column * G::kBlockN, column * G::kBlockN + G::kHalfN};
            },
            [&](const ProductTask& task, int step) { prefetch_pre<G>(task, step, p); });
      },
      [&](tma::GemmConsumer<G> consumer) {
        consumer.for_each_tile(
            tasks.total(), [&](int number) { return tasks.find(number); },
            [&](const ProductTask& task, typename G::Sums& sums) {
              static_assert(G::kBlockM <= G::kBlockN);
              consumer.load_table([&](int i) {  // weights of the rows
                return i < task.rows() ? weight_of(p.scale, p.pairs[task.tile.first + i], p.top_k)
                                       : 0.f;
              });
              with_kind(p.kind, [&](auto kind) {
                finish_act<G, decltype(kind)::value>(consumer, task, sums, p);
              });
            });
      });
}

}  // namespace flashmoe::cuda::moe::sm90
