// What surrounds a bias: whether it is copied first, and how the sum of its gradient is launched.
#pragma once

#include "cuda/attention/tiles.h"
#include "flashmoe/attention.h"

namespace flashmoe::cuda {

// Whether the plan's bias is broadcast, so that its gradient is a sum.
bool shares_bias(const AttentionPlan& plan);

// Matrices of len_q x len_k that a dense bias has.
int64_t bias_matrices(const AttentionPlan& plan);
// How many batches that follow each other share a bias.
int64_t bias_batches(const AttentionPlan& plan);

// Whether a dense bias has a number for every query and key of a head; and of 16 bits.
bool has_bias_of_pairs(const AttentionPlan& plan);
bool has_whole_bias(const AttentionPlan& plan);

// Whether the keys of its rows are neighbours in memory.
bool has_neighbouring_keys(const AttentionPlan& plan);

// How kernels that have several ways to read a bias of pairs would read this one. By TMA, one whose
// rows are no whole chunks is copied first.
BiasInput bias_input(const AttentionPlan& plan);

// Whether the bias is first copied to rows of whole 16-byte chunks, and how large the copy is.
bool aligns_bias(const AttentionPlan& plan);
inline int64_t aligned_bias_pitch(const AttentionPlan& plan) { return (plan.len_k + 7) / 8 * 8; }
int64_t aligned_bias_bytes(const AttentionPlan& plan);
// Whether a kernel that reads a bias by TMA would copy one that few share, and much of it: the copy
// is as large as the bias itself.
bool copies_much_bias(const AttentionPlan& plan);

// Whether the packed bias of a ragged batch is copied, a slice's heads at a time, from (pairs,
// heads) to (heads, pairs). Its gradient then takes the copy's place and is copied back.
bool transposes_bias(const AttentionPlan& plan);
inline int64_t transposed_bias_pitch(const AttentionPlan& plan) {  // with room for one pair more
  return plan.problem.bias->shape[0] / 8 * 8 + 8;
}
int64_t transposed_bias_bytes(const AttentionPlan& plan);

// The launch of the sum of a shared bias's gradient: a CTA for each of `tiles` and split.
struct BiasSumGrid {
  int64_t tiles = 0;               // of one matrix of the gradient
  int64_t heads = 1, batches = 1;  // matrices
  int64_t steps = 0;               // (queries x keys) tiles whose sum is one of `tiles`
};
BiasSumGrid bias_sum_grid(const AttentionPlan& plan, int64_t block_q, int64_t block_k);

}  // namespace flashmoe::cuda
