// What producers of the sm90 kernels load: weights by TMA, rows by TMA or gathered by token.
#pragma once

#include "cuda/moe/sm90/tasks.cuh"
#include "cuda/ptx/arithmetic.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/tma/gemm.cuh"

namespace flashmoe::cuda::moe::sm90 {

// The columns of weights where the halves of B begin.
struct Halves {
  int first, second;
};

// B of a stage, [at, at + 64) of the depth, by one thread.
template <class G>
__device__ __forceinline__ void load_weights(const TensorMap& map, uint32_t full, uint32_t sB,
                                             const Halves& halves, int at, int expert) {
  if constexpr (G::kAlongB) {
    ptx::tma_load(sB, &map, full, at, halves.first, expert);
    ptx::tma_load(sB + G::kHalfN * G::TileB::kRowBytes, &map, full, at, halves.second, expert);
  } else {
    constexpr int kBoxes = G::TileB::kBlocks, kOfHalf = kBoxes / 2;
#pragma unroll
    for (int i = 0; i < kBoxes; ++i) {
      const int column = i < kOfHalf ? halves.first + 64 * i : halves.second + 64 * (i - kOfHalf);
      ptx::tma_load(sB + i * G::TileB::kBlockBytes, &map, full, column, at, expert);
    }
  }
}

// A tensor whose rows are tokens.
struct TokenRows {
  const char* data;
  uint32_t row_bytes;
  const int32_t* pairs;
  int top_k;
};

// A gathered by token, B by TMA. halves_of(column) are the columns of a tile's B; beside(task,
// step) is called by all threads in every step. A thread has chunk thread % 8 of rows thread / 8 +
// 16 i.
template <class G, class HalvesOf, class Beside>
__device__ __forceinline__ void produce_gathered(tma::GemmProducer<G> producer,
                                                 const ProductTasks& tasks, const TokenRows& rows,
                                                 int depth, const TensorMap& weights,
                                                 const HalvesOf& halves_of, const Beside& beside) {
  static_assert(G::kCopied && G::kAlongA && G::TileA::kBlocks == 1);
  constexpr int kRowsAtOnce = tma::kWarpgroupThreads / 8, kEach = G::kBlockM / kRowsAtOnce;
  const int row = threadIdx.x / 8, column = threadIdx.x % 8 * 8;
  const uint32_t to = G::TileA::at(row, column);  // the others are kRowsAtOnce rows on
  static_assert(kRowsAtOnce % 8 == 0);
  const Divider token_of(rows.top_k);
  // Rows that the tile does not have repeat its last.
  const auto find_tokens = [&](int(&tokens)[kEach], const ExpertTile& tile) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int at = min(row + i * kRowsAtOnce, tile.rows - 1);
      tokens[i] = static_cast<int>(token_of(rows.pairs[tile.first + at]));
    }
  };
  int tokens[kEach], next_tokens[kEach];
  bool begins = true;
  for_each_task(tasks, [&](const ProductTask& task, const ProductTask& next) {
    if (begins) find_tokens(next_tokens, task.tile);
    begins = false;
#pragma unroll
    for (int i = 0; i < kEach; ++i) tokens[i] = next_tokens[i];
    const Halves halves = halves_of(task.column);
    const int steps = task.steps();
    // Tokens of the next tile are asked for when its entry in the list has come.
    const int ask = min(2, steps - 1);
    const char* from = rows.data + column * G::Type::kBytes;
#pragma unroll 1
    for (int step = 0; step < steps; ++step, from += G::kDepth * G::Type::kBytes) {
      const int at = step * G::kDepth;
      producer.fill_stage([&](uint32_t full, uint32_t sA, uint32_t sB) {
        if (threadIdx.x == 0) {
          ptx::mbarrier_arrive_expect_tx(full, G::TileB::kBytes);
          load_weights<G>(weights, full, sB, halves, at, task.tile.expert);
        }
        const bool there = at + column < depth;
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
          if (i * kRowsAtOnce >= tma::kWarpgroupRows && task.rows() <= tma::kWarpgroupRows) break;
          ptx::cp_async_cg_16(sA + to + i * kRowsAtOnce * G::TileA::kRowBytes,
                              ptx::mad_wide(tokens[i], rows.row_bytes, from), there);
        }
      });
      if (step == ask) find_tokens(next_tokens, next.tile);
      beside(task, step);
    }
  });
}

// A and B by TMA, by one thread. Parts of A without a row are not loaded.
template <class G, class HalvesOf>
__device__ __forceinline__ void produce_rows(tma::GemmProducer<G> producer,
                                             const ProductTasks& tasks, const TensorMap& rows,
                                             const TensorMap& weights, const HalvesOf& halves_of) {
  static_assert(!G::kCopied && G::kAlongA && G::TileA::kBlocks == 1);
  for_each_task(tasks, [&](const ProductTask& task, const ProductTask&) {
    const Halves halves = halves_of(task.column);
    const int parts = (task.rows() + tma::kWarpgroupRows - 1) / tma::kWarpgroupRows;
#pragma unroll 1
    for (int step = 0; step < task.steps(); ++step) {
      const int at = step * G::kDepth;
      producer.fill_stage([&](uint32_t full, uint32_t sA, uint32_t sB) {
        ptx::mbarrier_arrive_expect_tx(full, G::TileB::kBytes + parts * G::kPartBytes);
        load_weights<G>(weights, full, sB, halves, at, task.tile.expert);
        for (int part = 0; part < parts; ++part) {
          ptx::tma_load(sA + part * G::kPartBytes, &rows, full, at,
                        task.tile.first + part * tma::kWarpgroupRows);
        }
      });
    }
  });
}

}  // namespace flashmoe::cuda::moe::sm90
