// What kernels of the sm90 family are given besides cuda/params.h.
#pragma once

#include "cuda/params.h"

namespace flashmoe::cuda {

// What the copy engine reads of a tensor: see tensor_map.h. By value, in constant memory.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

// The grid is as many CTAs as the chip holds at once; each goes through some of `works`.
//
// Where heads that share their keys have few queries, 2^pack of them share a tile: its rows are
// (query, head), and `heads`, `group` and query_blocks count such packs.
struct HopperFwdParams : AttentionFwdParams {
  TensorMap query_map, out_map;  // (batch, heads, length, 2^pack, D)
  TensorMap key_map, value_map;  // (batch, heads, length, D); ragged: tokens are the length
  int32_t pack;
  int32_t query_blocks, works;
  int32_t heads_together;  // (batch, head) whose blocks follow each other
  int32_t* tickets;        // ragged: how many works have been given out
};

}  // namespace flashmoe::cuda
