// The CUDA backend as the planner sees it: which kernel a checked problem gets, and how it is
// launched.
#pragma once

#include <string_view>

#include "flashmoe/attention.h"

namespace flashmoe::cuda {

// The second and third dimension of a grid are 16-bit.
inline constexpr int64_t kMaxGridYZ = 65535;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Fills in kernel, tile and grid, or says why no kernel of this build can do it and what would
// work. Asks no device: all it knows of the chip is problem.device.
Status choose(AttentionPlan& plan);

// Runs a plan made by choose() on launch.stream.
Status run(const AttentionPlan& plan, const AttentionTensors& tensors, void* workspace,
           const Launch& launch);

// Whether kernels can address the tensor where it lies: its last dimension unit-stride, its rows
// 16-byte aligned.
bool in_place(const TensorSpec& spec);

// Of a sequence: its queries or its keys, whichever are more; ragged, on average.
int64_t mean_length(const AttentionPlan& plan);

// Whether this build has kernels of the family.
bool has_family(std::string_view family);

// Whether the plan's bias is broadcast, so that its gradient is a sum.
bool shares_bias(const AttentionPlan& plan);

// Whether a backward pass ends with the kernel that makes dQ. Of short sequences it also makes the
// gradient of a bias that is not shared.
bool has_dq_kernel(const AttentionPlan& plan);

// Whether the bias is first copied to rows of whole chunks, and how large the copy is.
bool copies_bias(const AttentionPlan& plan);
inline int64_t bias_pitch(const AttentionPlan& plan) { return (plan.len_k + 7) / 8 * 8; }
int64_t bias_copy_bytes(const AttentionPlan& plan);

// Whether the bias of a ragged batch is copied, a round's heads at a time, to pairs side by side;
// its gradient then takes the copy's place and is copied back.
bool copies_pairs(const AttentionPlan& plan);
inline int64_t pairs_pitch(const AttentionPlan& plan) {  // with room for one more
  return plan.problem.bias->shape[0] / 8 * 8 + 8;
}
int64_t pairs_copy_bytes(const AttentionPlan& plan);

// The sum of that gradient, as it is launched: one block for each of `tiles` and split.
struct BiasSumGrid {
  int64_t tiles = 0;               // of one matrix of the gradient
  int64_t heads = 1, batches = 1;  // matrices
  int64_t steps = 0;               // that share a tile
};
BiasSumGrid bias_sum_grid(const AttentionPlan& plan, int64_t block_q, int64_t block_k);

// How many blocks the sequences of a ragged batch may have: see any/attention_ragged.cuh.
inline int64_t ragged_slots(int64_t tokens, int64_t block, int64_t batch) {
  return tokens / block + batch + 1;
}

// Sequences of a dense batch in one round of a backward pass.
inline int64_t round_batch(const AttentionPlan& plan) {
  return (plan.batch + plan.rounds - 1) / plan.rounds;
}

// What lies where in the workspace of a backward pass, in bytes: see AttentionBwdParams.
struct BackwardWorkspace {
  int64_t dq_accum_rows = 0;  // of one head in a round
  int64_t rows = 0;           // of one head, all sequences, in whole blocks
  int64_t key_slots = 0, query_slots = 0, sum_slots = 0;  // ragged: of its lists
  size_t key_blocks = 0, query_blocks = 0, sum_blocks = 0;
  size_t lse_delta = 0, dq_accum = 0, dq_semaphore = 0, tile_counter = 0, done = 0;
  size_t bias_sums = 0;  // in the place of dq_accum, which are done with by then
  size_t bias_rows = 0, bias_pairs = 0;
  size_t bytes = 0;  // of all
};
BackwardWorkspace backward_workspace(const AttentionPlan& plan);

// Columns of the sums of dQ.
struct Kernel;
int64_t dq_accum_dim(const Kernel& kernel);

}  // namespace flashmoe::cuda
