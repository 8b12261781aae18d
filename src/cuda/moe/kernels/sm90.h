// The sm90 family's tiles, listed once: the .cu files instantiate these tables, the catalogue plans
// with them, and the tests hold them against what was really compiled. Which of them a product gets
// is in cuda/moe/sm90.cc.
#pragma once

#include "cuda/moe/tiles.h"
#include "cuda/tma/gemm_tile.h"

namespace flashmoe::cuda::moe::sm90 {

// A line for each tile.
// clang-format off

// Products over rows of experts: up, down, dA and dX.
inline constexpr TmaGemmTile kRows[] = {
    // block_m, block_n, stages, ping_pong
    {128, 256, 4, 0},
    {128, 128, 4, 1},
};

// Products over tokens: the gradients of the weights. Their depth is not the same for all tiles,
// and their epilogue is short: no ping-pong.
inline constexpr TmaGemmTile kTokens[] = {
    // block_m, block_n, stages, ping_pong
    {128, 256, 4, 0},
    {128, 128, 4, 0},
};

// Few rows an expert, forward: bound by reading the weights.
inline constexpr FewTile kFew[] = {
    // block_m, block_n
    {16, 16},
    {8, 16},
};
// clang-format on

}  // namespace flashmoe::cuda::moe::sm90
