// Sizes that kernels and planner agree on, besides the tiles of the products. Read by nvcc and by
// the host compiler.
#pragma once

#include "cuda/tile/gemm_tile.h"

namespace flashmoe::cuda::moe {

// A warp sorts by counters in shared memory, one for each expert, and a router keeps a token's
// scores there: 32 KB of the 48 that every chip has without asking.
inline constexpr int kMaxExperts = 8192;

// Kernels that go row by row.
inline constexpr int kRowThreads = 256;
// Threads that share a row of the result when a token's rows are added up: a chunk of 8 numbers
// each.
constexpr int combine_lanes(int width) {
  int lanes = 1;
  while (lanes * 8 < width && lanes < kRowThreads) lanes *= 2;
  return lanes;
}
// The router: a warp for each token, as many as have shared memory for their scores, and at most 8.
inline constexpr int kRouteWarps = 8, kRouteSharedBytes = 48 * 1024;
constexpr int route_warps(int experts) {
  int warps = kRouteWarps;
  while (warps > 1 && warps * experts * 4 > kRouteSharedBytes) warps /= 2;
  return warps;
}
// Experts of a lane, where the router keeps a token's scores in registers.
inline constexpr int kRouteEach = 8;
// Chunks of pairs that are sorted apart, at most, and threads that count one.
inline constexpr int kMaxChunks = 512, kCountThreads = 128;
// The CTA that adds up the counts and lists the tiles.
inline constexpr int kScanThreads = 1024;
constexpr int scan_shared_bytes(int experts) { return (32 + experts + 1) * 4; }
// The CTA that sorts alone has a chunk for each warp, and the counters of all in shared memory.
inline constexpr int kSortPairs = 8192, kSortSharedBytes = 48 * 1024;
constexpr int sort_shared_bytes(int experts) {
  return scan_shared_bytes(experts) + kScanThreads / 32 * experts * 4;
}
// CTAs that are neighbours share columns of the weights over this many tiles of rows: see
// find_task().
inline constexpr int kRasterRows = 8;
// Columns of a bias's gradient that a CTA adds up.
inline constexpr int kBiasThreads = 128;

// Few rows an expert: tiles of 8 or 16 rows and 16 columns, without TMA. The warps of up share the
// depth of a tile. Those of down share the tiles of all experts, each in kFewSplits parts of the
// depth, and the sums of at most kFewPairs pairs are in shared memory.
struct FewTile {
  int block_m, block_n;
};
inline constexpr int kFewColumns = 16, kFewUpWarps = 8, kFewDownWarps = 16;
inline constexpr int kFewSplits = 2, kFewPairs = 1024;
constexpr int few_up_shared_bytes(int tokens) {
  return kFewUpWarps * 2 * tokens * (kFewColumns + 1) * 4;
}
constexpr int few_down_shared_bytes(int pairs) { return pairs * kFewSplits * kFewColumns * 4; }

// Shared memory of a product beside the main loop's: where its rows go, their weights, a bias of
// the tile's columns.
constexpr int row_table_bytes(const GemmTile& tile) {
  return tile.block_m * (8 + 4) + tile.block_n * 4;
}
// Of the product over rows of tokens: which rows of both operands, for each stage.
constexpr int depth_table_bytes(const GemmTile& tile) { return tile.stages * tile.depth * 2 * 4; }

}  // namespace flashmoe::cuda::moe
