// The gradients of gate_up and down by wgmma: products whose depth is the rows of an expert.
//
//   dGate_up[e] = dh^T x          dDown[e] = dOut^T (weighted act)
//
// Both operands lie across the depth: a row of a tile is a row of tokens, and wgmma transposes. One
// operand of each product is sorted and comes by TMA, the other is gathered by token. Beyond the
// last row of a slice both need zeros, and other experts' rows follow it: the last stage of a slice
// is copied row by row where it is not whole.
//
// Slices, and what becomes of their sums: see weight_tiles.cuh. Tiles of a slice follow each other,
// so that they share its rows in L2.
#pragma once

#include "cuda/moe/experts.cuh"
#include "cuda/moe/sm90/params.h"
#include "cuda/moe/weight_tiles.cuh"
#include "cuda/ptx/arithmetic.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/tma/gemm.cuh"

namespace flashmoe::cuda::moe::sm90 {

struct WeightTask {
  ExpertTile slice;
  int index;   // of both gradients' tiles
  int rows_m;  // that the gradient has from the tile's first on

  __device__ __forceinline__ int steps() const {
    return (slice.rows + TmaGemmTile::kDepth - 1) / TmaGemmTile::kDepth;
  }
  __device__ __forceinline__ int rows() const { return rows_m; }
};

template <class G>
class WeightTasks {
 public:
  __device__ __forceinline__ explicit WeightTasks(const Sm90BwdWeightsParams& p)
      : p_(p), tiles_(weight_tiles(p)), total_(*p.slice_count * tiles_) {}
  __device__ __forceinline__ int total() const { return total_; }
  __device__ __forceinline__ WeightTask find(int number) const {
    const int slot = number / tiles_, index = number - slot * tiles_;
    return {p_.slices[slot], index, tile(index).left_m};
  }
  __device__ __forceinline__ WeightTile tile(int index) const {
    return find_weight_tile<G::kBlockM, G::kBlockN>(p_, index);
  }
  __device__ __forceinline__ int tiles() const { return tiles_; }

 private:
  const Sm90BwdWeightsParams& p_;
  const int tiles_, total_;
};

// A thread's share of 64 rows of an operand with kColumns columns: a warp has kRows rows at once,
// and 16 in all, those of its lanes from kFirstLane on.
template <class Tile, int kColumns, int kFirstLane>
struct TokenCopy {
  static constexpr int kChunks = kColumns / 8, kRows = 32 / kChunks, kStep = 4 * kRows;
  static constexpr int kEach = 64 / kStep;
  static_assert(kRows * kEach == 16);

  // The row of a stage whose place lane kFirstLane + i of the warp knows.
  static __device__ __forceinline__ int row_of_lane(int i) {
    return i / kRows * kStep + threadIdx.x / 32 * kRows + i % kRows;
  }
  // `place` is what this lane knows; `rows` and `columns` are those that exist, from the stage's
  // and the tile's first on. `from` is the tile's first column in row 0.
  static __device__ __forceinline__ void copy(uint32_t tile, int place, const char* from,
                                              uint32_t row_bytes, int rows, int columns) {
    const int lane = threadIdx.x % 32, column = lane % kChunks * 8;
#pragma unroll 8
    for (int i = 0; i < kEach; ++i) {  // all at once would need more registers than there are
      const int at = __shfl_sync(0xffffffffu, place, kFirstLane + i * kRows + lane / kChunks);
      const int row = row_of_lane(i * kRows + lane / kChunks);
      ptx::cp_async_cg_16(tile + Tile::at(row, column),
                          ptx::mad_wide(at, row_bytes, from + column * 2),
                          row < rows && column < columns);
    }
  }
};

template <class G>
__device__ __forceinline__ void produce_tokens(tma::GemmProducer<G> producer,
                                               const WeightTasks<G>& tasks,
                                               const Sm90BwdWeightsParams& p) {
  static_assert(G::kCopied && !G::kAlongA && !G::kAlongB && G::Type::kBytes == 2);
  using Left = TokenCopy<typename G::TileA, G::kBlockM, 0>;
  using Right = TokenCopy<typename G::TileB, G::kBlockN, 16>;
  const int lane = threadIdx.x % 32;
  const int my_row = lane < 16 ? Left::row_of_lane(lane) : Right::row_of_lane(lane - 16);
  const Divider token_of(p.top_k);
#pragma unroll 1
  for (int number = blockIdx.x; number < tasks.total(); number += gridDim.x) {
    const WeightTask task = tasks.find(number);
    const WeightTile t = tasks.tile(task.index);
    const WeightProduct& w = p.products[t.product];
    const TensorMap& map = p.rows_maps[t.product];
    const ExpertTile& slice = task.slice;
    const char* const gLeft = static_cast<const char*>(w.left.data) + t.first_m * 2;
    const char* const gRight = static_cast<const char*>(w.right.data) + t.first_n * 2;
    const bool gathered = (lane < 16 ? w.left : w.right).gathered;
    // The place of this lane's row of a stage: a token, or a row as it is sorted.
    const auto look_up = [&](int step) {
      const int i = step * G::kDepth + my_row;
      int place = slice.first + i;
      if (gathered && i < slice.rows) place = static_cast<int>(token_of(p.pairs[place]));
      return place;
    };
    int place = look_up(0);
#pragma unroll 1
    for (int step = 0; step < task.steps(); ++step) {
      const int next = look_up(step + 1);  // needed in the next step only
      const int first = step * G::kDepth, rows = slice.rows - first;
      const bool whole = rows >= G::kDepth;
      const bool copies_left = w.left.gathered || !whole, copies_right = w.right.gathered || !whole;
      producer.fill_stage([&](uint32_t full, uint32_t sA, uint32_t sB) {
        if (threadIdx.x == 0) {
          ptx::mbarrier_arrive_expect_tx(
              full, (copies_left ? 0 : G::TileA::kBytes) + (copies_right ? 0 : G::TileB::kBytes));
          if (!copies_left) {
#pragma unroll
            for (int i = 0; i < G::TileA::kBlocks; ++i) {
              ptx::tma_load(sA + i * G::TileA::kBlockBytes, &map, full, t.first_m + 64 * i,
                            slice.first + first);
            }
          }
          if (!copies_right) {
#pragma unroll
            for (int i = 0; i < G::TileB::kBlocks; ++i) {
              ptx::tma_load(sB + i * G::TileB::kBlockBytes, &map, full, t.first_n + 64 * i,
                            slice.first + first);
            }
          }
        }
        __syncwarp();
        if (copies_left) {
          Left::copy(sA, place, gLeft, static_cast<uint32_t>(w.left.row_bytes), rows, t.left_m);
        }
        if (copies_right) {
          Right::copy(sB, place, gRight, static_cast<uint32_t>(w.right.row_bytes), rows, t.left_n);
        }
      });
      place = next;
    }
  }
}

template <class G>
__device__ __forceinline__ void finish_weights(tma::GemmConsumer<G>& consumer,
                                               const WeightTask& task, const typename G::Sums& sums,
                                               const WeightTasks<G>& tasks,
                                               const Sm90BwdWeightsParams& p) {
  using T = typename G::Type;
  static_assert(G::kParts == 1);
  const int top = consumer.first_row(0);
  if (task.slice.sum >= 0) {  // as moe_bwd_weights_sum reads them
    float* const to =
        p.slice_sums +
        (int64_t{task.slice.sum} * tasks.tiles() + task.index) * (G::kBlockM * G::kBlockN) +
        (top + tma::fragment_row()) * G::kBlockN + tma::fragment_column();
#pragma unroll
    for (int j = 0; j < G::kBlockN / 8; ++j) {
      const float* const x = &sums[0][4 * j];
      *reinterpret_cast<float2*>(to + 8 * j) = {x[0], x[1]};
      *reinterpret_cast<float2*>(to + 8 * G::kBlockN + 8 * j) = {x[2], x[3]};
    }
    return;
  }
  const WeightTile t = tasks.tile(task.index);
  const WeightProduct& w = p.products[t.product];
  char* const to = static_cast<char*>(w.out) + task.slice.expert * w.out_expert_bytes +
                   (int64_t{t.first_m} + top) * w.out_row_bytes + int64_t{t.first_n} * T::kBytes;
#pragma unroll
  for (int q = 0; q < G::kPieces; ++q) {
    consumer.send([&](int i) { return sums[0][32 * q + i]; },
                  [&](int, int row, int column, const uint4& chunk) {
                    if (top + row >= t.left_m || 64 * q + column >= t.left_n) return;
                    *reinterpret_cast<uint4*>(to + row * w.out_row_bytes +
                                              (64 * q + column) * T::kBytes) = chunk;
                  });
  }
}

template <class T, TmaGemmTile kTile>
__device__ __forceinline__ void moe_bwd_weights(const Sm90BwdWeightsParams& p) {
  using G = tma::Gemm<T, kTile, false, false, true>;
  extern __shared__ __align__(1024) char shared[];
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const WeightTasks<G> tasks(p);
  G::run(
      smem, [&](tma::GemmProducer<G> producer) { produce_tokens(producer, tasks, p); },
      [&](tma::GemmConsumer<G> consumer) {
        consumer.for_each_tile(
            tasks.total(), [&](int number) { return tasks.find(number); },
            [&](const WeightTask& task, typename G::Sums& sums) {
              finish_weights(consumer, task, sums, tasks, p);
            });
      });
}

}  // namespace flashmoe::cuda::moe::sm90
