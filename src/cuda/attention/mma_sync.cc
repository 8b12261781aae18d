#include "cuda/attention/mma_sync.h"

#include <algorithm>

#include "core/numbers.h"
#include "core/text.h"
#include "cuda/attention/bias_plan.h"
#include "cuda/attention/call.h"
#include "cuda/attention/lay_out.h"
#include "cuda/attention/tile_choice.h"
#include "cuda/attention/workspace.h"

namespace flashmoe::cuda::mma_sync {
namespace {

constexpr uint32_t kMostPreprocessHeads = 8;

// Over how many CTAs the keys of one tile of queries are split: as many as fill the chip once,
// where one each would fill less than half of it. A split should have a few tiles of keys, or
// combining costs more than it saves. fp32 has nothing that combines.
int64_t choose_splits(const AttentionPlan& plan, const Kernel& kernel, const Gpu& gpu) {
  constexpr int64_t kFewBlocks = 4;
  if (plan.problem.query.dtype == DType::kFloat32) return 1;
  const int64_t blocks = std::max<int64_t>(ceil_div(forward_rows(plan), kernel.block_q), 1);
  const int64_t work = blocks * forward_heads(plan) * plan.batch;
  const int64_t slots = gpu.multiprocessors * resident_ctas(kernel, gpu.chip);
  if (work == 0 || work > slots / 2) return 1;
  const int64_t key_blocks = ceil_div(plan.len_k, kernel.block_k);
  return std::max<int64_t>(std::min(slots / work, key_blocks / kFewBlocks), 1);
}

void lay_out_forward(AttentionPlan& plan, const Kernel& kernel, const Gpu& gpu) {
  const AttentionProblem& p = plan.problem;
  if (p.ragged) {
    const int64_t slots = ragged_slots(p.query.shape[0], kernel.block_q, plan.batch);
    if (transposes_bias(plan)) {
      choose_slices(plan, gpu, plan.heads_q, slots, [&] { return forward_workspace(plan).bytes; });
    }
    add_first_launches(plan);
    plan.launches.push_back(per_slice(kernel, grid_of(slots * (plan.heads_q / plan.slices))));
    plan.work_items = slots * plan.heads_q;
  } else {
    const int64_t rows = forward_rows(plan), heads = forward_heads(plan);
    const int64_t blocks = std::max<int64_t>(ceil_div(rows, kernel.block_q), 1);
    plan.splits = choose_splits(plan, kernel, gpu);
    limit_slices(plan);
    add_first_launches(plan);
    const int64_t batch = slice_batch(plan);
    plan.launches.push_back(per_slice(kernel, grid_of(blocks * plan.splits, heads, batch)));
    if (plan.splits > 1) {
      const Kernel* combine = find_kernel(Role::kCombine, plan.family, p.query.dtype);
      plan.launches.push_back(per_slice(*combine, grid_of(rows, heads, batch)));
    }
    plan.work_items = blocks * plan.splits * heads * plan.batch;
  }
  plan.workspace_bytes = forward_workspace(plan).bytes;
}

void lay_out_backward(AttentionPlan& plan, const Kernel& kernel, const Gpu& gpu) {
  const AttentionProblem& p = plan.problem;
  const Kernel* bias_sum = find_bias_sum(plan);
  cuda::lay_out_backward(plan, gpu, bias_sum);
  add_first_launches(plan, bias_sum);
  Grid rows = query_grid(plan);
  rows[0] /= preprocess_heads(plan, kMostPreprocessHeads);
  const Kernel* preprocess = find_kernel(Role::kPreprocess, plan.family, p.query.dtype);
  plan.launches.push_back(per_slice(*preprocess, rows));
  if (p.ragged) {
    const int64_t slots = ragged_slots(p.key.shape[0], kernel.block_k, plan.batch);
    const int64_t heads = plan.heads_k / plan.slices;
    plan.launches.push_back(per_slice(kernel, grid_of(slots * heads * kernel.key_parts)));
    plan.work_items = slots * plan.heads_k;
  } else {
    const int64_t blocks = ceil_div(plan.len_k, kernel.block_k);
    plan.launches.push_back(
        per_slice(kernel, grid_of(blocks * kernel.key_parts, plan.heads_k, slice_batch(plan))));
    plan.work_items = blocks * plan.heads_k * plan.batch;
  }
  if (has_dq_kernel(plan)) {
    const Role role = kernel.role == Role::kBackwardDropout ? Role::kBackwardDropoutDq
                      : p.bias                              ? Role::kBackwardBiasDq
                                                            : Role::kBackwardDq;
    const Kernel* dq = find_kernel(role, kernel);
    plan.launches.push_back(per_slice(*dq, query_grid(plan)));
  }
  if (p.grad_bias && !bias_sum && transposes_bias(plan)) {
    add_bias_transpose(plan, Given::kBiasFromHeads);
  }
  if (bias_sum) add_bias_sum(plan, *bias_sum);
  add_sink_sum(plan);
}

}  // namespace

std::string lacks(const AttentionPlan&) { return {}; }

std::string slower(const AttentionPlan&, const Gpu&) { return {}; }

std::string cannot_serve(const AttentionPlan&, const Kernel&) { return {}; }

std::string too_large(const AttentionPlan& plan, const Kernel& kernel, const Gpu& gpu) {
  if (plan.problem.pass == Pass::kBackward) return {};
  const int64_t rows = forward_rows(plan);
  if (rows <= 64) {
    return text(rows, rows == 1 ? " row" : " rows", plan.problem.ragged ? " a sequence" : "",
                " would leave half of the tile empty");
  }
  const int64_t blocks = ceil_div(rows, kernel.block_q) * forward_heads(plan) * plan.batch;
  if (blocks < gpu.multiprocessors) {
    return text(blocks, " blocks would leave some of ", gpu.multiprocessors, " SMs idle");
  }
  // The next tile has half the rows and, with a bias, 0.82 of the speed; three of its CTAs are on
  // an SM.
  const auto full = [&](int64_t blocks, int64_t of_sm) {
    const int64_t slots = gpu.multiprocessors * of_sm;
    return static_cast<double>(blocks) / static_cast<double>(ceil_div(blocks, slots) * slots);
  };
  if (plan.problem.bias &&
      0.82 * full(2 * blocks, 3) > full(blocks, resident_ctas(kernel, gpu.chip))) {
    return text(blocks, " blocks would leave much of the last round of SMs idle");
  }
  return {};
}

void lay_out(AttentionPlan& plan, const Kernel& kernel, const Gpu& gpu) {
  if (plan.problem.pass == Pass::kForward) {
    lay_out_forward(plan, kernel, gpu);
  } else {
    lay_out_backward(plan, kernel, gpu);
  }
}

Status run(const Call& call) {
  const bool longest_first = true;
  if (call.plan.problem.pass == Pass::kForward) {
    AttentionFwdParams p{};
    fill_forward(p, call);
    return run_launches(call, p, fill_side_params(call, p, longest_first));
  }
  AttentionBwdParams p{};
  fill_backward(p, call, preprocess_heads(call.plan, kMostPreprocessHeads));
  return run_launches(call, p, fill_side_params(call, p, longest_first));
}

}  // namespace flashmoe::cuda::mma_sync
