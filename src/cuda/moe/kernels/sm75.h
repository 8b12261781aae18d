// The sm75 family's tiles, listed once: the .cu files instantiate these tables, the catalogue plans
// with them, and the tests hold them against what was really compiled. Largest first; the planner
// takes the first that suits the chip and the call.
#pragma once

#include "cuda/tile/gemm_tile.h"

namespace flashmoe::cuda::moe::sm75 {

// A line for each tile.
// clang-format off

// Products over rows of experts. Turing copies at once, so a second stage is all that is of use;
// its 64 KB of shared memory hold 128 x 64 in fp32.
inline constexpr GemmTile kRows[] = {
    // block_m, block_n, depth, stages, warps_m, warps_n, ctas
    {128, 64, 32, 2, 2, 2, 2},
    {64, 64, 32, 2, 2, 2, 2},
    {16, 64, 64, 2, 1, 4, 4},
};

// Products over tokens: the gradients of the weights.
inline constexpr GemmTile kTokens[] = {
    // block_m, block_n, depth, stages, warps_m, warps_n, ctas
    {128, 64, 32, 2, 2, 2, 2},
    {64, 64, 32, 2, 2, 2, 2},
};
// clang-format on

}  // namespace flashmoe::cuda::moe::sm75
