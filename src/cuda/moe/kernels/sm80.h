// The sm80 family's tiles, listed once: the .cu files instantiate these tables, the catalogue plans
// with them, and the tests hold them against what was really compiled. Largest first; the planner
// takes the first that suits the chip and the call.
#pragma once

#include "cuda/tile/gemm_tile.h"

namespace flashmoe::cuda::moe::sm80 {

// A line for each tile.
// clang-format off

// Products over rows of experts: up, down, dA and dX. 64 x 64 a warp: a fragment read from shared
// memory feeds four MMAs of each operand. 128 x 128 leaves two CTAs on an SM of an A100 or a Hopper
// chip, so that one multiplies while the other is in its epilogue. 16 rows are for decoding.
inline constexpr GemmTile kRows[] = {
    // block_m, block_n, depth, stages, warps_m, warps_n, ctas
    {128, 256, 32, 4, 2, 4, 1},
    {128, 128, 32, 4, 2, 2, 2},
    {64, 64, 64, 3, 2, 2, 4},
    {16, 64, 64, 4, 1, 4, 4},
};

// Products over tokens: the gradients of the weights.
inline constexpr GemmTile kTokens[] = {
    // block_m, block_n, depth, stages, warps_m, warps_n, ctas
    {128, 128, 32, 4, 2, 2, 2},
    {64, 64, 32, 4, 2, 2, 4},
};
// clang-format on

}  // namespace flashmoe::cuda::moe::sm80
