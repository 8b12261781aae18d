// The tensor maps of the sm90 family's kernels.
#pragma once

#include <span>

#include "cuda/attention/call.h"
#include "cuda/attention/sm90/params.h"

namespace flashmoe::cuda::sm90 {

// The tensor as (batch, heads, length, D), as a tensor map wants it: its leading dimensions as one.
// False where no map describes it, because they lie otherwise or something is broadcast. Ragged, it
// is (tokens, heads, D).
bool four_dimensions(const TensorSpec& spec, bool ragged, TensorSpec& four);
Status encode(TensorMap& map, const TensorSpec& tensor, const void* data, std::span<const int> box);

// Columns of a box: those of a block of a tma::Tile as wide as the kernel's head dim.
int box_columns(const Kernel& kernel);

// The map of a tensor, copied `rows` rows and `columns` columns of one head at a time.
Status encode_keys(TensorMap& map, const TensorSpec& spec, const void* data, int64_t rows,
                   int columns, bool ragged);

// The same as (batch, heads, length, 2^pack, D): see Sm90FwdParams.
Status encode_queries(TensorMap& map, const TensorSpec& spec, const void* data, int64_t rows,
                      int columns, int pack, bool ragged);

// The map of a bias: see Sm90FwdParams. Boxes have `rows` rows.
Status encode_bias(TensorMap& map, const Call& call, const AttentionParams& p, int64_t rows);

// From head h of a block of a cache (blocks, page, heads, D) to that of the next, counted in heads.
// 0 where that is no whole number, or D no multiple of 64: then no map of whole rows describes it.
int64_t block_heads(const TensorSpec& cache);
// That map: (heads of all blocks, page / 8, D / 64, 8, 64), copied `rows` rows of a page and
// `columns` columns of a head at a time. See tma/operand.cuh.
Status encode_whole_rows(TensorMap& map, const TensorSpec& cache, const void* data, int rows,
                         int columns);

// Whether no dimension of a cache is broadcast: a tensor map describes it.
bool steps_forward(const TensorSpec& cache);

// The map of the gradient of a bias that is not shared, as (batch, heads, len_q, len_k), so that
// rows past a head's last one are not stored. Returns whether there is one: for that the batch is
// one dimension, and rows are whole chunks of 16 bytes from each other.
bool encode_grad_bias(TensorMap& map, const AttentionPlan& plan, const AttentionBwdParams& p);

// The map of a tensor of a packed batch, copied `rows` tokens and 64 columns at a time; with
// `side_by_side`, columns are those of all heads.
Status encode_packed(TensorMap& map, const TensorSpec& spec, const void* data, int rows,
                     bool side_by_side, bool ragged);

}  // namespace flashmoe::cuda::sm90
