// The sm75 family's kernels: see sm80.h. Tiles are for 64 KB of shared memory, all that an SM of
// Turing has; without copies in the background, one CTA's computing hides another's loading, or
// else nothing does.
#pragma once

#include "cuda/attention/tiles.h"

namespace flashmoe::cuda::sm75 {

// A line for each head dim.
// clang-format off

inline constexpr FwdTile kFwd[] = {
    // head_dim, block_q, block_k, warps, q_steps, stages, ctas
    {16, 64, 64, 4, 1, 2, 2}, {16, 32, 32, 2, 1, 1, 8},
    {32, 64, 64, 4, 2, 2, 2}, {32, 32, 32, 2, 2, 1, 8},
    {48, 64, 64, 4, 3, 2, 2}, {48, 32, 32, 2, 3, 1, 6},
    {64, 128, 64, 8, 4, 2, 1}, {64, 32, 32, 2, 4, 1, 6},
    {96, 64, 32, 4, 6, 2, 2},
    {128, 64, 32, 4, 8, 2, 2},
    {192, 64, 16, 4, 0, 2, 2},
    {256, 48, 16, 3, 0, 2, 2},
};

// With a bias, whose tile takes its share of the 64 KB.
inline constexpr FwdTile kFwdBias[] = {
    // head_dim, block_q, block_k, warps, q_steps, stages, ctas
    {16, 64, 64, 4, 1, 2, 2}, {16, 32, 32, 2, 1, 1, 8},
    {32, 64, 64, 4, 2, 2, 2}, {32, 32, 32, 2, 2, 1, 8},
    {48, 64, 64, 4, 3, 2, 2}, {48, 32, 32, 2, 3, 1, 6},
    {64, 64, 64, 4, 4, 2, 2}, {64, 32, 32, 2, 4, 1, 6},
    {96, 64, 32, 4, 6, 2, 2},
    {128, 64, 32, 4, 8, 2, 2},
    {192, 64, 16, 4, 0, 2, 2},
    {256, 48, 16, 3, 0, 2, 2},
};

inline constexpr BwdTile kBwd[] = {
    // head_dim, block_q, block_k, warps, stages, ctas, score_rows, grad_key_rows, grad_query_rows
    {16, 64, 64, 4, 1, 2, 2, 4, 4}, {16, 32, 32, 2, 1, 4, 2, 2, 2},
    {32, 64, 64, 4, 1, 2, 2, 4, 4}, {32, 32, 32, 2, 1, 4, 2, 2, 2},
    {48, 64, 64, 4, 1, 2, 2, 4, 4}, {48, 32, 32, 2, 1, 4, 2, 2, 2},
    {64, 64, 64, 4, 1, 2, 2, 2, 2}, {64, 32, 32, 2, 1, 4, 2, 2, 2},
    {96, 32, 64, 4, 1, 2, 2, 2, 2},
    {128, 32, 64, 8, 1, 1, 2, 4, 2},
    {192, 32, 32, 4, 1, 2, 2, 2, 2},
    {256, 32, 16, 4, 1, 2, 2, 1, 2},
};

inline constexpr BwdTile kBwdBias[] = {
    // head_dim, block_q, block_k, warps, stages, ctas, score_rows, grad_key_rows, grad_query_rows
    {16, 64, 64, 4, 1, 2, 2, 4, 4}, {16, 32, 32, 2, 1, 4, 2, 2, 2},
    {32, 64, 64, 4, 1, 2, 2, 4, 4}, {32, 32, 32, 2, 1, 4, 2, 2, 2},
    {48, 64, 64, 4, 1, 2, 2, 4, 4}, {48, 32, 32, 2, 1, 4, 2, 2, 2},
    {64, 32, 64, 4, 1, 2, 2, 2, 2}, {64, 32, 32, 2, 1, 4, 2, 2, 2},
    {96, 32, 64, 4, 1, 2, 2, 2, 2},
    {128, 32, 32, 4, 1, 2, 2, 2, 2},
    {192, 32, 32, 4, 1, 2, 2, 2, 2},
    {256, 32, 16, 4, 1, 2, 2, 1, 2},
};

// With dropout, and a bias or none: head dims are rounded up further, see sm80.h.
inline constexpr FwdTile kFwdDropout[] = {
    // head_dim, block_q, block_k, warps, q_steps, stages, ctas
    {32, 64, 64, 4, 2, 2, 2},
    {64, 64, 64, 4, 4, 2, 2},
    {128, 64, 32, 4, 8, 2, 2},
    {256, 48, 16, 3, 0, 2, 2},
};

inline constexpr BwdTile kBwdDropout[] = {
    // head_dim, block_q, block_k, warps, stages, ctas, score_rows, grad_key_rows, grad_query_rows
    {32, 64, 64, 4, 1, 2, 2, 4, 4},
    {64, 32, 64, 4, 1, 2, 2, 2, 2},
    {128, 32, 32, 4, 1, 2, 2, 2, 2},
    {256, 32, 16, 4, 1, 2, 2, 1, 2},
};

inline constexpr BiasSumTile kBiasSum[] = {
    // head_dim, block_q, block_k, warps, cols, stages, ctas
    {16, 64, 64, 4, 2, 1, 2},
    {32, 64, 64, 4, 2, 1, 2},
    {48, 64, 64, 4, 2, 1, 2},
    {64, 64, 64, 4, 2, 1, 2},
    {96, 64, 64, 4, 2, 1, 2},
    {128, 32, 64, 4, 2, 1, 2},
    {192, 32, 32, 4, 2, 1, 2},
    {256, 32, 16, 2, 1, 1, 2},
};

// clang-format on

}  // namespace flashmoe::cuda::sm75
