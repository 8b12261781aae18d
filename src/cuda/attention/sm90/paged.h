// What the kernel for chunks of queries over pages is given. Read by nvcc and by the host compiler.
#pragma once

#include "cuda/attention/paged.h"
#include "cuda/attention/sm90/params.h"
#include "cuda/attention/sm90/tiles.h"

namespace flashmoe::cuda {

// Tensor maps of K and V are (blocks, page, heads, D), and a box has box_keys rows of a page and 64
// columns. With whole rows they are (heads of all blocks, page / 8, D / 64, 8, 64), and a box has
// all columns.
// `blocks` is not null, which says that tokens of all sequences lie one after the other; nobody
// reads it.
struct Sm90PagedParams : Sm90FwdParams {
  PagedParams pages;
  // Divides the page and a tile's keys, and is a multiple of 8. 0: there are no boxes, because
  // pages are too small, the cache is fp8 or broadcast, and rows are copied by threads; maps of K
  // and V are not used then.
  int32_t box_keys;
  // With whole rows: from head h of a block to that of the next, counted in heads.
  int32_t key_block_heads, value_block_heads;
};

// Shared memory beside that of the forward kernel: the work before each thread's sequences.
constexpr int paged_work_bytes(int threads) { return (threads + kPagedWorkWords) * 4; }
// Pages have boxes if these have so many rows at least: as many as a swizzle goes over.
inline constexpr int kLeastBoxKeys = 8;

// Tiles of K or V of an fp8 cache that are on their way, before they become 16 bits.
inline constexpr int kRawTiles = 2;

struct Sm90ChunkTile : Sm90FwdTile {
  int cache_bytes = 2;  // of a number of the cache
  static constexpr bool kCountsTasks = false;
  // Tiles of an fp8 cache as they come.
  constexpr int raw_bytes() const { return cache_bytes == 1 ? kRawTiles * block_k * head_dim : 0; }
  constexpr int shared_bytes() const {
    return Sm90FwdTile::shared_bytes() + paged_work_bytes(threads()) + raw_bytes();
  }
};

}  // namespace flashmoe::cuda
