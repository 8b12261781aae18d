// The sm80 family's kernels, listed once: the .cu files instantiate these tables, the catalogue
// plans with them, and the tests hold them against what was really compiled. Within a head dim the
// best tile comes first; the planner takes the first that suits the chip and the call.
#pragma once

#include "cuda/attention/tiles.h"

namespace flashmoe::cuda::sm80 {

// A line for each head dim.
// clang-format off

// 32 rows a warp where registers allow: each fragment of K and V read from shared memory then feeds
// two products, and reading stays below the 128 bytes a clock that shared memory gives. 128 keys
// where they fit beside the output: half the barriers (D = 64 on an H200: 335 TFLOP/s, 312 with 64;
// at D = 32 64 keys and three CTAs are faster, 218 for 195). 128 x 64 at D = 128 leaves two CTAs on
// an SM of Hopper, one on an A100. 64 rows are for short queries and for one query over many keys,
// 32 x 32 is for thousands of short sequences, as many of them on an SM as fit: by one warp up to
// D = 32 (4,096 crystals, 48 heads of 16 on an H200: 1.04 ms, 1.26 by two; 8 of 64: 0.31 and 0.27).
inline constexpr FwdTile kFwd[] = {
    // head_dim, block_q, block_k, warps, q_steps, stages, ctas
    {16, 128, 64, 4, 1, 2, 3}, {16, 64, 64, 4, 1, 2, 5}, {16, 32, 32, 1, 1, 2, 20},
    {32, 128, 64, 4, 2, 2, 3}, {32, 64, 64, 4, 2, 2, 4}, {32, 32, 32, 1, 2, 2, 16},
    {48, 128, 128, 4, 3, 2, 2}, {48, 64, 64, 4, 3, 2, 4}, {48, 32, 32, 2, 3, 2, 10},
    {64, 128, 128, 4, 0, 2, 2}, {64, 64, 64, 4, 4, 2, 3}, {64, 32, 32, 2, 0, 2, 10},
    {96, 128, 64, 4, 0, 2, 2}, {96, 64, 64, 4, 6, 2, 2},
    {128, 128, 64, 4, 0, 2, 2}, {128, 64, 64, 4, 8, 2, 2},
    // 16 rows a warp, and K and V in turns: two CTAs fit on an SM of Hopper (328 TFLOP/s at
    // D = 256, 305 with one of 128 rows and two stages), and one on every chip.
    {192, 64, 64, 4, 0, 1, 2},
    {256, 64, 64, 4, 0, 1, 2},
};

// With a bias, whose tile takes room and bandwidth of its own.
inline constexpr FwdTile kFwdBias[] = {
    // head_dim, block_q, block_k, warps, q_steps, stages, ctas
    {16, 128, 64, 4, 1, 2, 3}, {16, 64, 64, 4, 1, 2, 5}, {16, 32, 32, 2, 1, 2, 16},
    {32, 128, 64, 4, 2, 2, 3}, {32, 64, 64, 4, 2, 2, 4}, {32, 32, 32, 2, 2, 2, 8},
    {48, 128, 64, 4, 3, 2, 2}, {48, 64, 64, 4, 3, 2, 3}, {48, 32, 32, 2, 3, 2, 10},
    {64, 128, 64, 4, 0, 2, 2}, {64, 64, 64, 4, 4, 2, 3}, {64, 32, 32, 2, 0, 2, 8},
    {96, 64, 64, 4, 6, 2, 2},
    {128, 64, 64, 4, 8, 2, 2},
    {192, 64, 64, 4, 0, 1, 2},
    {256, 64, 32, 4, 0, 1, 2},
};

// Transposed (score_rows 0) up to D = 64: 321 TFLOP/s at D = 64 on an H200, 239 with 64 x 64 and P
// through shared memory. At D = 128 one CTA of eight warps and 128 keys (298) instead of two of
// four and 64 keys (261): half the sums of dQ. The later tiles of a head dim, the 32 x 32 of short
// sequences aside, are for chips with less shared memory than Hopper has.
inline constexpr BwdTile kBwd[] = {
    // head_dim, block_q, block_k, warps, stages, ctas, score_rows, grad_key_rows, grad_query_rows
    {16, 64, 128, 4, 2, 3, 0, 4, 4}, {16, 32, 32, 2, 2, 12, 0, 2, 2},
    {32, 64, 128, 4, 2, 3, 0, 4, 4}, {32, 32, 32, 2, 2, 8, 0, 2, 2},
    {48, 64, 128, 4, 2, 2, 0, 4, 4}, {48, 32, 32, 2, 2, 8, 0, 2, 2},
    {64, 64, 128, 4, 2, 2, 0, 4, 2}, {64, 32, 128, 4, 2, 2, 0, 4, 2},
    {64, 32, 32, 2, 2, 6, 0, 2, 2},
    {96, 64, 64, 4, 2, 2, 2, 2, 2},
    {128, 64, 128, 8, 2, 1, 2, 4, 2}, {128, 32, 64, 4, 2, 2, 2, 2, 2},
    {192, 64, 64, 8, 2, 1, 2, 2, 2}, {192, 32, 64, 8, 1, 1, 2, 2, 2},
    // 64 x 64 with dQ in two parts: 241 TFLOP/s, 197 with 32 x 64.
    {256, 64, 64, 8, 2, 1, 2, 2, 2}, {256, 32, 64, 8, 2, 1, 2, 2, 2},
    {256, 32, 32, 8, 1, 1, 2, 2, 2},
};

// With a bias: the same, as far as its tile leaves room.
inline constexpr BwdTile kBwdBias[] = {
    // head_dim, block_q, block_k, warps, stages, ctas, score_rows, grad_key_rows, grad_query_rows
    {16, 64, 128, 4, 2, 3, 0, 4, 4}, {16, 32, 32, 2, 2, 12, 0, 2, 2},
    {32, 64, 128, 4, 2, 3, 0, 4, 4}, {32, 32, 32, 2, 2, 8, 0, 2, 2},
    {48, 64, 128, 4, 2, 2, 0, 4, 4}, {48, 32, 32, 2, 2, 8, 0, 2, 2},
    {64, 64, 128, 4, 2, 2, 0, 4, 2}, {64, 32, 128, 4, 2, 2, 0, 4, 2},
    {64, 32, 32, 2, 2, 6, 0, 2, 2},
    {96, 64, 64, 4, 2, 2, 2, 2, 2}, {96, 32, 64, 4, 2, 2, 2, 2, 2},
    {128, 64, 128, 8, 2, 1, 2, 4, 2}, {128, 32, 64, 4, 2, 2, 2, 2, 2},
    {192, 32, 64, 8, 1, 1, 2, 2, 2},
    {256, 32, 32, 8, 1, 1, 2, 2, 2},
};

// With dropout, and a bias or none: head dims are rounded up further, each has the tile of kFwdBias
// that most calls get (at D = 32 two CTAs, as registers are needed for drawing), and short sequences
// have none of their own. That keeps the time low that compiling takes.
inline constexpr FwdTile kFwdDropout[] = {
    // head_dim, block_q, block_k, warps, q_steps, stages, ctas
    {32, 128, 64, 4, 2, 2, 2},
    {64, 128, 64, 4, 0, 2, 2},
    {128, 64, 64, 4, 8, 2, 2},
    {256, 64, 32, 4, 0, 1, 2},
};

inline constexpr BwdTile kBwdDropout[] = {
    // head_dim, block_q, block_k, warps, stages, ctas, score_rows, grad_key_rows, grad_query_rows
    {32, 64, 128, 4, 2, 3, 0, 4, 4},
    {64, 64, 128, 4, 2, 2, 0, 4, 2}, {64, 32, 128, 4, 2, 2, 0, 4, 2},
    {128, 64, 128, 8, 2, 1, 2, 4, 2}, {128, 32, 64, 4, 2, 2, 2, 2, 2},
    {256, 32, 32, 8, 1, 1, 2, 2, 2},
};

// The sum of a shared bias's gradient. All CTAs go through the batch together, so what a step reads
// is seldom in a cache, and several steps must be on their way.
inline constexpr BiasSumTile kBiasSum[] = {
    // head_dim, block_q, block_k, warps, cols, stages, ctas
    {16, 128, 64, 8, 2, 4, 2},
    {32, 128, 64, 8, 2, 3, 2},
    {48, 128, 64, 8, 2, 2, 1},
    {64, 64, 64, 4, 2, 2, 3},
    {96, 64, 64, 4, 2, 1, 1},
    {128, 64, 64, 4, 2, 1, 1},
    {192, 32, 64, 4, 2, 1, 1},
    {256, 32, 32, 4, 2, 1, 1},
};

// clang-format on

}  // namespace flashmoe::cuda::sm80
