// Parameters of the sm90 kernels beside cuda/attention/params.h.
#pragma once

#include "cuda/attention/params.h"
#include "cuda/tma/tensor_map.h"

namespace flashmoe::cuda {

// A forward pass. The grid has as many CTAs as the chip holds at once; each goes through some of
// `num_tasks`.
//
// Where heads that share their keys have few queries, 2^pack of them share a tile: its rows are
// (query, head), and `heads`, `group` and query_blocks count such packs.
struct Sm90FwdParams : AttentionFwdParams {
  TensorMap query_map, out_map;  // (batch, heads, length, 2^pack, D)
  TensorMap key_map, value_map;  // (batch, heads, length, D); ragged: tokens are the length
  // Kernels with a bias by TMA: (rows, len_k), the rows of all heads and batches one after the
  // other. Those of one (batch, head) begin at row offset / bias_strides.row.
  TensorMap bias_map;
  int32_t pack;
  int32_t query_blocks, num_tasks;
  int32_t heads_per_wave;  // (batch, head) whose tiles of queries follow each other
  int32_t late_blocks;     // the shortest tiles of each head, which follow all waves
  int32_t* tile_counter;   // how many tasks have been given out but the first of each CTA, or null
  // Kernels in which a bias stays: so many batches that follow each other share it.
  int32_t bias_batches;
};

// The keys that a query of a packed batch sees, as positions in K: those of its own sequence, and
// of these what the mask leaves. Neither number falls from one query to the next, so the keys of a
// tile of queries are those from its first query's first to its last query's last. A token of no
// sequence begins after its end. The other way round, for a backward pass: the queries that see a
// key.
struct alignas(8) RowBounds {
  uint32_t first;  // and kInvalid
  int32_t end;
  static constexpr uint32_t kInvalid = uint32_t{1} << 31;  // lengths are wrong: results are NaN

#if defined(__CUDACC__)
  __device__ __forceinline__ int begin() const { return static_cast<int>(first & ~kInvalid); }
  __device__ __forceinline__ bool valid() const { return !(first & kInvalid); }
  // Of a token of no sequence.
  __device__ __forceinline__ bool is_rest() const { return begin() > end; }
#endif
};

// Where the pairs of a row are in the bias of a ragged batch, of one head: that with token y of the
// other side is number first + y * step. There are fewer than 2^31; sums on the way may go around.
struct alignas(8) PairRow {
  uint32_t first, step;
};

// A forward pass over tiles of tokens, whatever sequences these are of: see fwd_packed.cuh. The
// grid has as many CTAs as the chip holds at once; ragged.tile_counter gives out `num_tasks`.
//
// A dense batch is packed as well: its sequences follow each other `pitch` tokens apart, their
// length in whole chunks. There are no tokens after the last of a sequence: TMA reads zeros there
// and writes nothing.
struct Sm90PackedParams : AttentionFwdParams {
  // (batch, heads, length, D); ragged (1, heads, tokens, D). Where several heads share a box of 64
  // columns, in which they lie side by side, they are one, heads x D wide.
  TensorMap query_map, key_map, value_map, out_map;
  RaggedParams ragged;       // for the kernel that finds the bounds
  RowBounds* bounds;         // (rows)
  PairRow* pairs;            // (rows), with a bias
  int32_t bias_of_box;       // whether a pair's bias of the heads of a box is one aligned word
  int32_t pitch_q, pitch_k;  // dense: from one sequence to the next; ragged: 0
  int32_t rows;              // queries, in whole tiles
  int32_t boxes;             // of heads: the heads of a box share a task
  int32_t num_tasks;
};

// A backward pass over tiles of tokens: see bwd_packed.cuh. Tasks are tiles of keys and tiles of
// queries, of the heads of one box; tile_counter gives them out.
struct Sm90PackedBwdParams : AttentionBwdParams {
  // As those of Sm90PackedParams. Without grad_out its map is that of the queries, and loads begin
  // beyond their end. Maps of gradients that are not wanted are never read.
  TensorMap query_map, key_map, value_map, grad_out_map;
  TensorMap grad_query_map, grad_key_map, grad_value_map;
  RaggedParams ragged;                    // for the kernel before
  RowBounds *query_bounds, *key_bounds;   // (rows of that side)
  PairRow *query_pairs, *key_pairs;       // the same, with a bias
  int32_t bias_of_box, grad_bias_of_box;  // as in Sm90PackedParams
  int32_t pitch_q, pitch_k;               // as in Sm90PackedParams
  // One side of the problem: queries or keys.
  struct Side {
    int32_t rows;   // tokens, in whole tiles
    int32_t tiles;  // of them
    int32_t boxes;  // of heads: the heads of a box share a task; 0 where no gradient is wanted
  };
  Side query_side, key_side;
  int32_t stored_heads;  // of lse_delta: all heads of all boxes
  int32_t bounds_ctas;   // of the kernel before, for each side
  int32_t num_tasks;
};

// A backward pass. The grid has as many CTAs as the chip holds at once; tile_counter[0] gives out
// the `num_tasks` tasks, deterministic or not, and tile_counter[1] the rows of dQ to
// convert.
struct Sm90BwdParams : AttentionBwdParams {
  // (batch, heads, length, D); ragged: tokens are the length. Where there is no grad_out, its map
  // is that of the queries, and loads begin beyond their end. Maps of gradients that are not wanted
  // are never read.
  TensorMap query_map, key_map, value_map, grad_out_map, grad_key_map, grad_value_map;
  TensorMap bias_map;  // kernels with a bias by TMA: see Sm90FwdParams
  // The gradient of a bias that is not shared, where TMA can store it: see stores_grad_bias.
  TensorMap grad_bias_map;
  int32_t bias_by_rows;      // whether the bias is not for TMA: there is no bias_map then
  int32_t stores_grad_bias;  // whether it can: rows of whole chunks of 16 bytes
  int32_t key_blocks, key_tiles, num_tasks;  // key_tiles: key blocks of all heads
  int32_t heads_per_wave;  // (batch, key head) whose tiles of keys follow each other
  // Before them come `paired_heads`, in waves of `pairs` pairs: see find_paired_tile().
  int32_t paired_heads, pairs, blocks_of_pass;
  int32_t log2_adjacent_heads;  // 2^this heads, whose rows the preprocess kernel reads together
  int32_t preprocess_rows;      // rows of each of its CTAs: whole tiles, or a part of one
  // Tiles of queries, of all heads, whose dQ the kernel writes itself; 0: the convert kernel does.
  int32_t converted_tiles;
  int32_t stores_dq;     // whether one tile of keys has all: its dQ is complete
  int32_t zeroes_dq;     // whether all tiles of keys add: see zero_next_wave()
  int32_t zeroed_ahead;  // how many heads on is the one whose sums a head's tasks zero
  int32_t* done;         // (sequences, key heads) of a slice: see parts_done()
  int64_t tokens_q;      // ragged: of all sequences, and of the rows after them
  // The last `split_tiles` of the tiles of keys, as tasks count them, come in `splits` tasks each,
  // with `split_rows` queries of each head, whole tiles of them. They leave parts of dK, and behind
  // all of these of dV, in fp32, which a last kernel adds up: see bwd_key_sum.cuh.
  int32_t splits, split_tiles, split_rows;
  float* grad_parts;  // (2, splits, split_tiles, 128, dim), as dq_accum has its rows
};

}  // namespace flashmoe::cuda
