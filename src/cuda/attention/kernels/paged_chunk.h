// The tiles of sm90's kernels for chunks of queries over pages: those of its forward kernel, with
// two consumers at D = 64 too. Three leave a producer 32 registers, and copying rows takes more.
#pragma once

#include "cuda/attention/sm90/paged.h"

namespace flashmoe::cuda::sm90 {

// clang-format off: a row is a line.
inline constexpr Sm90ChunkTile kPagedChunk[] = {
    // head_dim, block_q, block_k, stages, general_score, bias, ctas, bias_tiles, more_key_stages
    {{64, 128, 128, 4, false}},
    {{128, 128, 128, 2, false, kNoBias, 1, 0, 1}},
    {{256, 128, 64, 2, false}},
};
// Of an fp8 cache. Tiles as they come take the place of a third stage of K, and at D = 256 there is
// none for them.
inline constexpr Sm90ChunkTile kPagedChunkFp8[] = {
    // head_dim, block_q, block_k, stages, general_score; cache_bytes
    {{64, 128, 128, 4, false}, 1},
    {{128, 128, 128, 2, false}, 1},
};
// Where head dims are whole blocks of 64 columns, and heads evenly far apart from block to block of
// the cache: one box has all columns of a page's rows. With D = 64 it always has.
inline constexpr Sm90ChunkTile kPagedChunkRows[] = {
    // as kPagedChunk, whole_rows
    {{128, 128, 128, 2, false, kNoBias, 1, 0, 1, true}},
    {{256, 128, 64, 2, false, kNoBias, 1, 0, 0, true}},
};
// clang-format on

}  // namespace flashmoe::cuda::sm90
