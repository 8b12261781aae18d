// The tables of the fp32 kernels: fp32 by three TF32 products on sm80, by FMAs on sm75; tf32 by one
// product, where the caller allows it.
#pragma once

#include "cuda/attention/fp32/tiles.h"

// A line for each head dim.
// clang-format off

namespace flashmoe::cuda::sm80::fp32 {

// Shared memory for one CTA on every chip from Ampere on, and for as many as the row says on
// Hopper.
inline constexpr Fp32FwdTile kFwd[] = {
    // head_dim, block_q, block_k, warps, stages, ctas
    {32, 128, 32, 8, 2, 2},
    {64, 128, 32, 8, 2, 2},
    {128, 64, 32, 4, 2, 2},
    {256, 64, 16, 4, 1, 2},
};

inline constexpr Fp32BwdTile kBwd[] = {
    // head_dim, block_q, block_k, step, stages, ctas, bias_ctas
    {32, 64, 64, 32, 2, 4, 3},
    {64, 64, 64, 32, 2, 3, 2},
    {128, 64, 64, 16, 2, 2, 2},
    {256, 32, 32, 8, 2, 2, 2},
};

inline constexpr Fp32BiasSumTile kBiasSum[] = {
    // head_dim, block_q, block_k, ctas
    {32, 64, 64, 2},
    {64, 64, 64, 2},
    {128, 64, 32, 2},
    {256, 32, 16, 2},
};

}  // namespace flashmoe::cuda::sm80::fp32

namespace flashmoe::cuda::sm80::tf32 {

// One product needs fewer registers, and more reuse of what is read from shared memory: 32 rows for
// a warp where they fit.
inline constexpr Fp32FwdTile kFwd[] = {
    // head_dim, block_q, block_k, warps, stages, ctas
    {32, 128, 32, 4, 2, 3},
    {64, 128, 32, 4, 2, 2},
    {128, 64, 32, 4, 2, 2},
    {256, 64, 16, 4, 1, 2},
};

inline constexpr Fp32BwdTile kBwd[] = {
    // head_dim, block_q, block_k, step, stages, ctas, bias_ctas
    {32, 64, 64, 32, 2, 4, 4},
    {64, 64, 64, 32, 2, 3, 3},
    {128, 64, 64, 16, 2, 2, 2},
    {256, 32, 32, 8, 2, 2, 2},
};

inline constexpr Fp32BiasSumTile kBiasSum[] = {
    // head_dim, block_q, block_k, ctas
    {32, 64, 64, 3},
    {64, 64, 64, 3},
    {128, 64, 32, 2},
    {256, 32, 16, 2},
};

}  // namespace flashmoe::cuda::sm80::tf32

namespace flashmoe::cuda::sm75::fp32 {

// For 64 KB of shared memory; Turing copies nothing in the background. Steps are short: FMAs are
// unrolled over them, and compile for as long as all others together.
inline constexpr Fp32FwdTile kFwd[] = {
    // head_dim, block_q, block_k, warps, stages, ctas
    {32, 64, 32, 4, 1, 2},
    {64, 64, 32, 4, 1, 2},
    {128, 64, 16, 4, 1, 1},
    {256, 32, 8, 2, 1, 1},
};

inline constexpr Fp32BwdTile kBwd[] = {
    // head_dim, block_q, block_k, step, stages, ctas, bias_ctas
    {32, 64, 64, 16, 1, 2, 2},
    {64, 64, 64, 16, 1, 1, 1},
    {128, 32, 32, 8, 1, 1, 1},
    {256, 16, 16, 8, 1, 1, 1},
};

inline constexpr Fp32BiasSumTile kBiasSum[] = {
    // head_dim, block_q, block_k, ctas
    {32, 64, 32, 2},
    {64, 64, 32, 1},
    {128, 32, 16, 1},
    {256, 16, 8, 1},
};

}  // namespace flashmoe::cuda::sm75::fp32

// clang-format on
