// The gradients of gate_up and down by wgmma: products whose depth is the rows of an expert.
//
//   dGate_up[e] = dh^T x          dDown[e] = dOut^T (weighted act)
//
// Both operands lie across the depth: a row of a tile is a row of tokens, and wgmma transposes. A
// is the operand that is gathered by token, the narrower one of a tile: each of its chunks is a
// copy of its own. B is sorted and comes by TMA. So dGate_up is computed as its transpose, and
// turned on its way out. Beyond the last row of a slice both need zeros, and other experts' rows
// follow it: the last stage of a slice is copied row by row where it is not whole.
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
  int rows_a;  // columns that A has from the tile's first on

  __device__ __forceinline__ int steps() const {
    return (slice.rows + TmaGemmTile::kDepth - 1) / TmaGemmTile::kDepth;
  }
  __device__ __forceinline__ int rows() const { return rows_a; }
};

// A tile as this kernel computes it.
struct TurnedTile {
  const WeightProduct& w;
  const TensorMap& sorted_map;  // B
  const bool turned;            // whether it is the transpose of the gradient's tile
  int first_a, first_b;         // columns of both operands
  int left_a, left_b;           // columns up to their ends

  __device__ __forceinline__ TurnedTile(const WeightTile& t, const Sm90BwdWeightsParams& p)
      : w(p.products[t.product]),
        sorted_map(p.rows_maps[t.product]),
        turned(w.right.gathered),
        first_a(turned ? t.first_n : t.first_m),
        first_b(turned ? t.first_m : t.first_n),
        left_a(turned ? t.left_n : t.left_m),
        left_b(turned ? t.left_m : t.left_n) {}
  __device__ __forceinline__ const RowOperand& gathered() const {
    return turned ? w.right : w.left;
  }
  __device__ __forceinline__ const RowOperand& sorted() const { return turned ? w.left : w.right; }
};

template <class G>
class WeightTasks {
 public:
  __device__ __forceinline__ explicit WeightTasks(const Sm90BwdWeightsParams& p)
      : p_(p), tiles_(weight_tiles(p)), total_(*p.slice_count * tiles_) {}
  __device__ __forceinline__ int total() const { return total_; }
  __device__ __forceinline__ WeightTask find(int number) const {
    const int slot = number / tiles_, index = number - slot * tiles_;
    return {p_.slices[slot], index, tile(index).left_a};
  }
  __device__ __forceinline__ TurnedTile tile(int index) const {
    return TurnedTile(find_weight_tile(p_, index), p_);
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
  using CopyA = TokenCopy<typename G::TileA, G::kBlockM, 0>;
  using CopyB = TokenCopy<typename G::TileB, G::kBlockN, 16>;
  const int lane = threadIdx.x % 32;
  const int my_row = lane < 16 ? CopyA::row_of_lane(lane) : CopyB::row_of_lane(lane - 16);
  const Divider token_of(p.top_k);
#pragma unroll 1
  for (int number = blockIdx.x; number < tasks.total(); number += gridDim.x) {
    const WeightTask task = tasks.find(number);
    const TurnedTile t = tasks.tile(task.index);
    const ExpertTile& slice = task.slice;
    const RowOperand &gathered = t.gathered(), &sorted = t.sorted();
    const char* const gA = static_cast<const char*>(gathered.data) + t.first_a * 2;
    const char* const gB = static_cast<const char*>(sorted.data) + t.first_b * 2;
    // The place of this lane's row of a stage: of A a token, of B a row as it is sorted.
    const auto look_up = [&](int step) {
      const int i = step * G::kDepth + my_row;
      int place = slice.first + i;
      if (lane < 16 && i < slice.rows) place = static_cast<int>(token_of(p.pairs[place]));
      return place;
    };
    int place = look_up(0);
#pragma unroll 1
    for (int step = 0; step < task.steps(); ++step) {
      const int next = look_up(step + 1);  // needed in the next step only
      const int first = step * G::kDepth, rows = slice.rows - first;
      const bool whole = rows >= G::kDepth;
      producer.fill_stage([&](uint32_t full, uint32_t sA, uint32_t sB) {
        if (threadIdx.x == 0) {
          ptx::mbarrier_arrive_expect_tx(full, whole ? G::TileB::kBytes : 0);
          if (whole) {
#pragma unroll
            for (int i = 0; i < G::TileB::kBlocks; ++i) {
              ptx::tma_load(sB + i * G::TileB::kBlockBytes, &t.sorted_map, full, t.first_b + 64 * i,
                            slice.first + first);
            }
          }
        }
        __syncwarp();
        CopyA::copy(sA, place, gA, static_cast<uint32_t>(gathered.row_bytes), rows, t.left_a);
        if (!whole) {
          CopyB::copy(sB, place, gB, static_cast<uint32_t>(sorted.row_bytes), rows, t.left_b);
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
  const TurnedTile t = tasks.tile(task.index);
  if (task.slice.sum >= 0) {  // as moe_bwd_weights_sum reads them: in the gradient's rows
    float* const gSums = p.slice_sums + (int64_t{task.slice.sum} * tasks.tiles() + task.index) *
                                            (G::kBlockM * G::kBlockN);
    const int row = top + tma::fragment_row(), column = tma::fragment_column();
    if (t.turned) {
      float* const to = gSums + column * G::kBlockM + row;
#pragma unroll
      for (int i = 0; i < G::kBlockN / 2; ++i) {
        to[(i / 4 * 8 + i % 2) * G::kBlockM + i % 4 / 2 * 8] = sums[0][i];
      }
    } else {
      float* const to = gSums + row * G::kBlockN + column;
#pragma unroll
      for (int j = 0; j < G::kBlockN / 8; ++j) {
        const float* const x = &sums[0][4 * j];
        *reinterpret_cast<float2*>(to + 8 * j) = {x[0], x[1]};
        *reinterpret_cast<float2*>(to + 8 * G::kBlockN + 8 * j) = {x[2], x[3]};
      }
    }
    return;
  }
  char* const out = static_cast<char*>(t.w.out) + task.slice.expert * t.w.out_expert_bytes;
  const int64_t row_bytes = t.w.out_row_bytes;
#pragma unroll
  for (int q = 0; q < G::kPieces; ++q) {
    const auto value = [&](int i) { return sums[0][32 * q + i]; };
    if (t.turned) {
      char* const to =
          out + (int64_t{t.first_b} + 64 * q) * row_bytes + (int64_t{t.first_a} + top) * T::kBytes;
      consumer.template send<true>(value, [&](int, int row, int column, const uint4& chunk) {
        if (64 * q + row >= t.left_b || top + column >= t.left_a) return;
        *reinterpret_cast<uint4*>(to + row * row_bytes + column * T::kBytes) = chunk;
      });
    } else {
      char* const to =
          out + (int64_t{t.first_a} + top) * row_bytes + (int64_t{t.first_b} + 64 * q) * T::kBytes;
      consumer.send(value, [&](int, int row, int column, const uint4& chunk) {
        if (top + row >= t.left_a || 64 * q + column >= t.left_b) return;
        *reinterpret_cast<uint4*>(to + row * row_bytes + column * T::kBytes) = chunk;
      });
    }
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
