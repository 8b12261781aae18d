// From a chosen kernel to the list of launches around it: what the families share.
#pragma once

#include <array>
#include <functional>

#include "cuda/attention/families.h"

namespace flashmoe::cuda {

using Grid = std::array<uint32_t, 3>;
inline Grid grid_of(int64_t x, int64_t y = 1, int64_t z = 1) {
  return {static_cast<uint32_t>(x), static_cast<uint32_t>(y), static_cast<uint32_t>(z)};
}

// Launches that happen once a call, and those that repeat for every slice.
AttentionLaunch once(const Kernel& kernel, const Grid& grid, Given given);
AttentionLaunch per_slice(const Kernel& kernel, const Grid& grid, Given given = Given::kCall);

// The lists of blocks of a ragged batch. bias_sum: the kernel that sums a shared bias's gradient,
// or null.
void add_ragged_lists(AttentionPlan& plan, const Kernel* bias_sum);

// Over how many CTAs the steps of a tile of a shared bias's gradient are split: the fewest that
// leave little of the chip idle.
int64_t choose_bias_splits(const AttentionPlan& plan, const Gpu& gpu, const Kernel& bias_sum);

// The launches that come first: the lists of blocks of a ragged batch, and copies of a bias.
// bias_sum: the kernel that sums a shared bias's gradient, or null.
void add_first_launches(AttentionPlan& plan, const Kernel* bias_sum = nullptr);

// The copy of a packed bias, or of its gradient back, in every slice.
void add_bias_transpose(AttentionPlan& plan, Given given);

// The sum of a shared bias's gradient, which comes last.
void add_bias_sum(AttentionPlan& plan, const Kernel& bias_sum);

// The gradient of the sinks, if it is wanted.
void add_sink_sum(AttentionPlan& plan);

// The kernel of the plan that sums a shared bias's gradient; null where no such gradient is wanted.
const Kernel* find_bias_sum(const AttentionPlan& plan);

// Whether a backward pass has a kernel after the main one that makes dQ. With short sequences and
// in fp32 it also makes the gradient of a bias that is not shared.
bool has_dq_kernel(const AttentionPlan& plan);

// In how many slices a call goes: plan.slices. As few as make the workspace small beside the
// tensors, with work left for the whole chip. `parts` are sequences; ragged, heads.
// workspace_bytes() is asked with plan.slices set.
void choose_slices(AttentionPlan& plan, const Gpu& gpu, int64_t parts, int64_t blocks_of_part,
                   const std::function<size_t()>& workspace_bytes);

// No slice of a dense batch is larger than a grid's third dimension.
void limit_slices(AttentionPlan& plan);

// Slices of a backward pass; workspace_bytes and dq_order_varies follow from them.
void lay_out_backward(AttentionPlan& plan, const Gpu& gpu, const Kernel* bias_sum);

// CTAs of the kernels that go by blocks of queries in a backward pass: preprocess and dQ.
Grid query_grid(const AttentionPlan& plan);
// Heads that a CTA of the preprocess kernel takes; those of a ragged batch lie side by side.
uint32_t preprocess_heads(const AttentionPlan& plan, uint32_t most);

}  // namespace flashmoe::cuda
