// What kernels of the sm90 family are given besides cuda/params.h.
#pragma once

#include "cuda/attention/params.h"
#include "cuda/tma/tensor_map.h"

namespace flashmoe::cuda {

// The grid is as many CTAs as the chip holds at once; each goes through some of `num_tasks`.
//
// Where heads that share their keys have few queries, 2^pack of them share a tile: its rows are
// (query, head), and `heads`, `group` and query_blocks count such packs.
struct Sm90FwdParams : AttentionFwdParams {
  TensorMap query_map, out_map;  // (batch, heads, length, 2^pack, D)
  TensorMap key_map, value_map;  // (batch, heads, length, D); ragged: tokens are the length
  int32_t pack;
  int32_t query_blocks, num_tasks;
  int32_t heads_per_wave;  // (batch, head) whose blocks follow each other
  int32_t* tile_counter;   // ragged: how many tasks have been given out
};

// A backward pass. The grid is as many CTAs as the chip holds at once; `tile_counter` gives out the
// `num_tasks` blocks of keys, deterministic or not, and its second number the rows of dQ to round.
struct Sm90BwdParams : AttentionBwdParams {
  // (batch, heads, length, D); ragged: tokens are the length. Where there is no grad_out, its map
  // is that of the queries: what is read lies beyond their end. Maps of gradients that are not
  // wanted are never looked at.
  TensorMap query_map, key_map, value_map, grad_out_map, grad_key_map, grad_value_map;
  int32_t key_blocks, num_tasks;
  int32_t heads_per_wave;  // (batch, key head) whose blocks follow each other
  int32_t
      log2_adjacent_heads;  // 2^this heads of queries, whose rows the kernel before takes together
  int32_t preprocess_rows;  // that each of its CTAs has, in whole blocks
  int32_t converted_tiles;  // blocks of queries, of all heads; 0 where the kernel after rounds
  int32_t* done;            // (sequences, key heads) of a round: see blocks_done()
  int64_t tokens_q;         // ragged: of all sequences, and what comes after them
};

}  // namespace flashmoe::cuda
