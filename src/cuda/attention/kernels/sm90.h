// The sm90 family's kernels, listed once: see sm80.h.
#pragma once

#include "cuda/attention/sm90/tiles.h"

namespace flashmoe::cuda::sm90 {

// A line for each head dim.
// clang-format off

// As many rows as registers allow, three warpgroups up to D = 96, two above; 128 where they leave
// less of a tile empty. At D = 32, where MMAs are short, two CTAs on an SM fill each other's gaps.
inline constexpr Sm90FwdTile kFwd[] = {
    // head_dim, block_q, block_k, stages, general_score
    {32, 128, 64, 4, false, kNoBias, 2},
    joined({64, 192, 128, 4, false}), joined({64, 128, 128, 4, false}),
    {96, 192, 96, 2, false}, joined({96, 128, 128, 2, false}),
    joined({128, 128, 128, 2, false}),
    {192, 128, 96, 2, false},
    {256, 128, 64, 2, false},
};

// With a softcap, or a scale that is not positive: what that takes of registers leaves two
// warpgroups at D = 64 as well.
inline constexpr Sm90FwdTile kFwdGeneral[] = {
    // head_dim, block_q, block_k, stages, general_score
    joined({64, 128, 128, 2, true}),
    joined({96, 128, 128, 2, true}),
    joined({128, 128, 128, 2, true}),
    {192, 128, 96, 2, true},
    {256, 128, 64, 2, true},
};

// With a bias.
inline constexpr Sm90FwdTile kFwdBias[] = {
    // head_dim, block_q, block_k, stages, general_score, bias, ctas, bias_tiles
    {32, 256, 64, 4, false, kBiasByTma, 1, 8}, {32, 128, 64, 4, false, kBiasByTma, 2},
    {64, 192, 128, 2, false, kBiasByTma}, {64, 128, 128, 2, false, kBiasByTma},
    {96, 128, 64, 2, false, kBiasByTma},
    {128, 128, 64, 2, false, kBiasByTma},
};
// In rows that begin anywhere.
inline constexpr Sm90FwdTile kFwdBiasRows[] = {
    // head_dim, block_q, block_k, stages, general_score, bias, ctas
    {32, 128, 64, 2, false, kBiasByRows, 2},
    {64, 128, 128, 2, false, kBiasByRows},
    {96, 128, 64, 2, false, kBiasByRows},
    {128, 128, 64, 2, false, kBiasByRows},
};
// In fp32: two tiles of 128 keys would not fit.
inline constexpr Sm90FwdTile kFwdBiasFloat[] = {
    // head_dim, block_q, block_k, stages, general_score, bias
    {32, 128, 64, 2, false, kFloatsByRows},
    {64, 128, 64, 2, false, kFloatsByRows},
};

// A mask.
inline constexpr Sm90FwdTile kFwdMask[] = {
    // head_dim, block_q, block_k, stages, general_score, bias, ctas
    {32, 128, 64, 2, false, kBytesByRows, 2},
    {64, 128, 128, 2, false, kBytesByRows},
    {96, 128, 64, 2, false, kBytesByRows},
    {128, 128, 64, 2, false, kBytesByRows},
};

// Ragged batches of many short sequences: tiles of tokens, of several sequences. A box of 64 columns
// holds one head, or four of 16, or two of 32.
inline constexpr Sm90PackedTile kFwdPacked[] = {
    // head_dim, block_q, block_k, stages, ctas
    {16, 128, 32, 8, 2},
    {32, 128, 32, 8, 2},
    {64, 128, 32, 8, 2},
};

inline constexpr Sm90PackedTile kFwdPackedBias[] = {
    // head_dim, block_q, block_k, stages, ctas, general_score, bias
    {16, 128, 32, 8, 2, false, kBiasByPairs},
    {32, 128, 32, 8, 2, false, kBiasByPairs},
    {64, 128, 32, 8, 2, false, kBiasByPairs},
};

// Their backward pass.
inline constexpr Sm90PackedBwdTile kBwdPacked[] = {
    // head_dim, block_q, block_k, stages, ctas
    {16, 192, 32, 8, 1},
    {32, 192, 32, 8, 1},
    {64, 192, 32, 8, 1},
};
inline constexpr Sm90PackedBwdTile kBwdPackedBias[] = {
    // head_dim, block_q, block_k, stages, ctas, general_score, bias
    {16, 192, 32, 8, 1, false, kBiasByPairs},
    {32, 192, 32, 8, 1, false, kBiasByPairs},
    {64, 192, 32, 8, 1, false, kBiasByPairs},
};

// Few queries and keys, a head in a cluster of one CTA or two.
inline constexpr Sm90WholeBwdTile kBwdWhole[] = {
    // head_dim, block_q, block_k
    {32, 128, 256},
    {64, 128, 256},
};

// As many queries as registers allow beside dK and dV of 64 keys, and above D = 64 fewer where 80
// leave more of their tiles empty; above D = 128 a warpgroup has one of the two, and two CTAs share
// the block.
inline constexpr Sm90BwdTile kBwd[] = {
    // head_dim, block_q, block_k, general_score
    {32, 128, 128, false},
    {64, 128, 128, false},
    {96, 80, 128, false},  {96, 64, 128, false},
    {128, 80, 128, false}, {128, 64, 128, false},
    {192, 64, 128, false},
    {256, 64, 128, false},
};

// With a softcap. There are no registers for its derivative at D = 64 and 128: the next larger head
// dims compute those.
inline constexpr Sm90BwdTile kBwdGeneral[] = {
    // head_dim, block_q, block_k, general_score
    {96, 64, 128, true},
    {192, 64, 128, true},
    {256, 64, 128, true},
};

// With a bias.
inline constexpr Sm90BwdTile kBwdBias[] = {
    // head_dim, block_q, block_k, general_score, bias
    {32, 64, 256, false, kBiasByTma}, {32, 64, 192, false, kBiasByTma},
    {64, 64, 128, false, kBiasByTma},
    {96, 64, 128, false, kBiasByTma},
    {128, 64, 128, false, kBiasByTma},
};
inline constexpr Sm90BwdTile kBwdBiasRows[] = {
    // head_dim, block_q, block_k, general_score, bias
    {32, 64, 128, false, kBiasByRows},
    {64, 64, 128, false, kBiasByRows},
    {96, 64, 128, false, kBiasByRows},
    {128, 64, 128, false, kBiasByRows},
};
// In fp32, up to the head dim that two tiles of it fit beside.
inline constexpr Sm90BwdTile kBwdBiasFloat[] = {
    // head_dim, block_q, block_k, general_score, bias
    {32, 64, 128, false, kFloatsByRows},
    {64, 64, 128, false, kFloatsByRows},
};

inline constexpr Sm90BwdTile kBwdMask[] = {
    // head_dim, block_q, block_k, general_score, bias
    {32, 64, 128, false, kBytesByRows},
    {64, 64, 128, false, kBytesByRows},
    {96, 64, 128, false, kBytesByRows},
    {128, 64, 128, false, kBytesByRows},
};

// The sum of a shared bias's gradient: as many slots as shared memory holds.
inline constexpr Sm90BiasSumTile kBiasSum[] = {
    // head_dim, block_q, block_k, slots
    {32, 128, 128, 12},
    {64, 128, 128, 6},
    {96, 128, 128, 3},
    {128, 128, 128, 3},
};

// clang-format on

}  // namespace flashmoe::cuda::sm90
