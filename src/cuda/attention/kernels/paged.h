// The tiles over pages of every family, apart from the other tables: these change without them.
// First those for sequences with few rows, then those for all others. Of the former the ones with 8
// rows are for calls in which no sequence has more.
#pragma once

#include "cuda/attention/paged.h"

// A row is a line.
// clang-format off

namespace flashmoe::cuda::sm90 {

// With 8 rows three CTAs on an SM or more: 12 warps hide more of what a warp waits for than 8. With
// 16 rows registers are for two, each with two tiles of a team or more on their way: 128 KB of an
// SM's at D = 128. Tiles of one head dim that differ in their rows
// have the same keys and teams, in every family: a request has the same bits in both.
inline constexpr PagedTile kPagedDecode[] = {
    // head_dim, block_q, block_k, warps, teams, stages, ctas, cache_bytes
    {64, 8, 64, 4, 4, 3, 4, 2},
    {64, 16, 64, 4, 4, 6, 2, 2},
    {128, 8, 64, 4, 4, 2, 3, 2},
    {128, 16, 64, 4, 4, 3, 2, 2},
    {256, 8, 32, 4, 2, 2, 3, 2},
    {256, 16, 32, 4, 2, 2, 2, 2},
    {512, 8, 16, 4, 1, 2, 3, 2},
    {512, 16, 16, 4, 1, 2, 2, 2},
};
inline constexpr PagedTile kPagedDecodeFp8[] = {
    // head_dim, block_q, block_k, warps, teams, stages, ctas, cache_bytes
    {64, 8, 128, 4, 4, 3, 4, 1},
    {64, 16, 128, 4, 4, 6, 2, 1},
    {128, 8, 128, 4, 4, 2, 3, 1},
    {128, 16, 128, 4, 4, 3, 2, 1},
    {256, 8, 64, 4, 2, 2, 3, 1},
    {256, 16, 64, 4, 2, 2, 2, 1},
    {512, 8, 32, 4, 1, 2, 3, 1},
    {512, 16, 32, 4, 1, 2, 2, 1},
};
inline constexpr PagedTile kPaged[] = {
    // head_dim, block_q, block_k, warps, teams, stages, ctas, cache_bytes
    {64, 64, 64, 4, 1, 6, 2, 2},
    {128, 64, 64, 4, 1, 3, 2, 2},
    {256, 64, 32, 4, 1, 2, 2, 2},
    {512, 32, 16, 4, 1, 2, 2, 2},
};
inline constexpr PagedTile kPagedFp8[] = {
    // head_dim, block_q, block_k, warps, teams, stages, ctas, cache_bytes
    {64, 64, 64, 4, 1, 6, 2, 1},
    {128, 64, 64, 4, 1, 3, 2, 1},
    {256, 64, 32, 4, 1, 2, 2, 1},
    {512, 32, 32, 4, 1, 2, 2, 1},
};

}  // namespace flashmoe::cuda::sm90

namespace flashmoe::cuda::sm80 {

// Shared memory for one CTA on every chip from Ampere on, up to D = 128 for two on an A100. Above,
// two warps or four share a tile's rows, or O would not fit in their registers.
inline constexpr PagedTile kPagedDecode[] = {
    // head_dim, block_q, block_k, warps, teams, stages, ctas, cache_bytes
    {64, 8, 64, 4, 4, 4, 2, 2},
    {64, 16, 64, 4, 4, 4, 2, 2},
    {128, 8, 64, 4, 4, 2, 2, 2},
    {128, 16, 64, 4, 4, 2, 2, 2},
    {256, 8, 32, 4, 2, 2, 2, 2},
    {256, 16, 32, 4, 2, 2, 2, 2},
    {512, 8, 16, 4, 1, 2, 2, 2},
    {512, 16, 16, 4, 1, 2, 2, 2},
};
inline constexpr PagedTile kPagedDecodeFp8[] = {
    // head_dim, block_q, block_k, warps, teams, stages, ctas, cache_bytes
    {64, 8, 128, 4, 4, 4, 2, 1},
    {64, 16, 128, 4, 4, 4, 2, 1},
    {128, 8, 128, 4, 4, 2, 2, 1},
    {128, 16, 128, 4, 4, 2, 2, 1},
    {256, 8, 64, 4, 2, 2, 2, 1},
    {256, 16, 64, 4, 2, 2, 2, 1},
    {512, 8, 32, 4, 1, 2, 2, 1},
    {512, 16, 32, 4, 1, 2, 2, 1},
};
inline constexpr PagedTile kPaged[] = {
    // head_dim, block_q, block_k, warps, teams, stages, ctas, cache_bytes
    {64, 64, 64, 4, 1, 4, 2, 2},
    {128, 64, 64, 4, 1, 2, 2, 2},
    {256, 64, 32, 4, 1, 2, 2, 2},
    {512, 32, 16, 4, 1, 2, 2, 2},
};
inline constexpr PagedTile kPagedFp8[] = {
    // head_dim, block_q, block_k, warps, teams, stages, ctas, cache_bytes
    {64, 64, 64, 4, 1, 4, 2, 1},
    {128, 64, 64, 4, 1, 2, 2, 1},
    {256, 64, 32, 4, 1, 2, 2, 1},
    {512, 32, 32, 4, 1, 2, 2, 1},
};

}  // namespace flashmoe::cuda::sm80

namespace flashmoe::cuda::sm75 {

// Turing copies nothing in the background: one stage.
inline constexpr PagedTile kPagedDecode[] = {
    // head_dim, block_q, block_k, warps, teams, stages, ctas, cache_bytes
    {64, 8, 64, 4, 4, 1, 2, 2},
    {64, 16, 64, 4, 4, 1, 2, 2},
    {128, 8, 64, 4, 4, 1, 1, 2},
    {128, 16, 64, 4, 4, 1, 1, 2},
    {256, 8, 16, 4, 1, 1, 1, 2},
    {256, 16, 16, 4, 1, 1, 1, 2},
    {512, 8, 16, 4, 1, 1, 1, 2},
    {512, 16, 16, 4, 1, 1, 1, 2},
};
inline constexpr PagedTile kPagedDecodeFp8[] = {
    // head_dim, block_q, block_k, warps, teams, stages, ctas, cache_bytes
    {64, 8, 128, 4, 4, 1, 2, 1},
    {64, 16, 128, 4, 4, 1, 2, 1},
    {128, 8, 128, 4, 4, 1, 1, 1},
    {128, 16, 128, 4, 4, 1, 1, 1},
    {256, 8, 32, 4, 1, 1, 1, 1},
    {256, 16, 32, 4, 1, 1, 1, 1},
    {512, 8, 32, 4, 1, 1, 1, 1},
    {512, 16, 32, 4, 1, 1, 1, 1},
};
inline constexpr PagedTile kPaged[] = {
    // head_dim, block_q, block_k, warps, teams, stages, ctas, cache_bytes
    {64, 64, 64, 4, 1, 1, 2, 2},
    {128, 64, 64, 4, 1, 1, 1, 2},
    {256, 64, 16, 4, 1, 1, 1, 2},
    {512, 16, 16, 4, 1, 1, 1, 2},
};
inline constexpr PagedTile kPagedFp8[] = {
    // head_dim, block_q, block_k, warps, teams, stages, ctas, cache_bytes
    {64, 64, 64, 4, 1, 1, 2, 1},
    {128, 64, 64, 4, 1, 1, 1, 1},
    {256, 64, 32, 4, 1, 1, 1, 1},
    {512, 16, 32, 4, 1, 1, 1, 1},
};

}  // namespace flashmoe::cuda::sm75

// clang-format on
