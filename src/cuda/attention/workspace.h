// What lies where in the workspace of a call, and which part of the call a slice is. Sizes follow
// from the plan alone, so planning and running reckon with the same functions.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/attention/catalogue.h"
#include "flashmoe/attention.h"

namespace flashmoe::cuda {

inline const Kernel& kernel_of(const LaunchStep& step) {
  return *static_cast<const Kernel*>(step.handle);
}
// The kernel that does most of the work.
inline const Kernel& main_kernel(const AttentionPlan& plan) {
  return *static_cast<const Kernel*>(plan.handle);
}

// How many blocks the sequences of a ragged batch may have: see ragged.cuh.
inline int64_t ragged_slots(int64_t tokens, int64_t block, int64_t batch) {
  return tokens / block + batch + 1;
}
// The largest grid of a ragged batch, whose heads are not a dimension of their own.
int64_t ragged_grid(const AttentionPlan& plan);

// The queries of a forward pass as the mma.sync kernels count them: where each head has one query,
// the heads of a group are the rows of a tile.
bool one_query(const AttentionPlan& plan);
int64_t forward_rows(const AttentionPlan& plan);
int64_t forward_heads(const AttentionPlan& plan);

// One slice of a call: dense, a part of the batch; ragged, a part of the heads, since only the
// device knows which tokens a sequence has. Heads are queries' forward, keys' backward.
struct Slice {
  int64_t first_head = 0, heads = 0;
  int64_t first_batch = 0, batch = 0;
};
Slice slice_of(const AttentionPlan& plan, int64_t index);
// Sequences of a dense batch in one full slice.
int64_t slice_batch(const AttentionPlan& plan);

// Rows of a head in all sequences, and in how many parts they are summed for the gradient of its
// sink: as many CTAs as fill any chip, each with a few hundred rows. No number of a chip is asked
// for, so the bits of the sum are the same on all.
int64_t sink_rows(const AttentionPlan& plan);
int64_t sink_parts(const AttentionPlan& plan);

// Packed kernels, whose tokens are those of all sequences, queries or keys. Of a dense batch each
// sequence has whole chunks of them: the tokens from one to the next; ragged, 0.
int64_t packed_pitch(const AttentionPlan& plan, bool keys);
int64_t packed_tokens(const AttentionPlan& plan, bool keys);

// Offsets are in bytes; a buffer that a call has no use for has no bytes.
struct ForwardWorkspace {
  size_t aligned_bias = 0;     // (batch, heads, len_q, pitch), as the bias has them
  size_t blocks = 0;           // ragged: RaggedBlock (slots)
  size_t row_bounds = 0;       // packed: RowBounds (queries in whole tiles)
  size_t row_pairs = 0;        // packed, with a bias: PairRow (the same)
  size_t transposed_bias = 0;  // ragged: (heads of a slice, pairs)
  size_t tile_counter = 0;     // int32
  size_t partial_out = 0;      // splits: float (splits, batch, heads, rows, dim)
  size_t partial_lse = 0;      // float (splits, batch, heads, rows)
  size_t bytes = 0;
};
ForwardWorkspace forward_workspace(const AttentionPlan& plan);
// Whether the CTAs of a forward pass take their tasks from a counter.
bool counts_tasks(const AttentionPlan& plan);

struct BackwardWorkspace {
  int64_t rows = 0;           // of one head, all sequences, in whole blocks of queries
  int64_t dq_accum_rows = 0;  // of one head in a slice
  int64_t key_slots = 0, query_slots = 0, sum_slots = 0;  // ragged: of its lists of blocks
  size_t lse_delta = 0;                                   // float (heads, rows, 2)
  size_t dq_accum = 0;                      // float (heads of a slice, dq_accum_rows, dq_accum_dim)
  size_t bias_sums = 0;                     // in the place of dq_accum, whose use has ended by then
  size_t grad_parts = 0;                    // splits: float (2, splits, split_tiles, block_k, dim)
  size_t dq_semaphore = 0;                  // int32 (heads of a slice, blocks of queries)
  size_t tile_counter = 0;                  // int32 (2)
  size_t done = 0;                          // int32 (batch + 1, heads_k)
  size_t query_bounds = 0, key_bounds = 0;  // packed: RowBounds (tokens in whole tiles)
  size_t query_pairs = 0, key_pairs = 0;    // packed, with a bias: PairRow (the same)
  size_t key_blocks = 0, query_blocks = 0, sum_blocks = 0;  // ragged: RaggedBlock (slots)
  size_t aligned_bias = 0, transposed_bias = 0;
  size_t sink_sums = 0;    // float (heads_q, sink_parts)
  size_t row_numbers = 0;  // second derivatives: float (heads_q, rows, 4)
  size_t bytes = 0;
};
// bias_sum: the kernel that sums a shared bias's gradient, or null.
BackwardWorkspace backward_workspace(const AttentionPlan& plan, const Kernel* bias_sum);

// Whether the backward kernel stores dQ, because one tile has all keys: see Sm90BwdParams.
inline bool stores_dq(const AttentionPlan& plan) {
  const Kernel& kernel = main_kernel(plan);
  return kernel.stores_dq && plan.problem.grad_query && !plan.problem.ragged &&
         plan.len_k <= kernel.block_k;
}

// Whether dQ is summed up in fp32 by the CTAs of several key tiles: see AttentionBwdParams.
inline bool accumulates_dq(const AttentionPlan& plan) {
  return plan.problem.grad_query && !main_kernel(plan).for_short && !main_kernel(plan).makes_dq &&
         !stores_dq(plan);
}

}  // namespace flashmoe::cuda
