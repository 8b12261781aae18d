#include "cuda/attention/lay_out.h"

#include <algorithm>

#include "core/numbers.h"
#include "cuda/attention/bias_plan.h"
#include "cuda/attention/params.h"
#include "cuda/attention/planner.h"
#include "cuda/attention/tile_choice.h"
#include "cuda/attention/tiles.h"
#include "cuda/attention/workspace.h"

namespace flashmoe::cuda {
namespace {

const Kernel& small_kernel(const AttentionPlan& plan, Role role) {
  return *find_kernel(role, plan.family, plan.problem.query.dtype);
}

// Of all tensors of a call that are as large as its inputs.
double tensor_bytes(const AttentionProblem& p) {
  double bytes = 0;
  const auto add = [&](const TensorSpec& spec) {
    double count = dtype_bytes(spec.dtype);
    for (int i = 0; i < spec.rank; ++i) count *= static_cast<double>(spec.shape[i]);
    bytes += count;
  };
  for (const TensorSpec* spec : {&p.query, &p.key, &p.value, &p.out}) add(*spec);
  for (const std::optional<TensorSpec>* spec :
       {&p.grad_out, &p.grad_query, &p.grad_key, &p.grad_value, &p.bias, &p.grad_bias}) {
    if (*spec) add(**spec);
  }
  return bytes;
}

void add_bias_align(AttentionPlan& plan) {
  const TensorSpec& bias = *plan.problem.bias;
  int64_t batches = 1;
  for (int i = 0; i < bias.rank - 3; ++i) batches *= bias.shape[i];
  const int64_t heads = bias.rank > 2 ? bias.size(-3) : 1;
  plan.launches.push_back(once(small_kernel(plan, Role::kBiasAlign),
                               grid_of(ceil_div(plan.len_q, kAlignedRows), heads, batches),
                               Given::kBiasAlign));
}

}  // namespace

// Of queries forward; else of keys (none in a tangent pass), of queries, and of keys for the sum of
// a bias's gradient.
void add_ragged_lists(AttentionPlan& plan, const Kernel* bias_sum) {
  // Each CTA goes over all sequences; more CTAs than a few have too little to write.
  constexpr int64_t kSlotsOfOne = 256, kMost = 64;
  const AttentionProblem& p = plan.problem;
  const auto slots = [&](const TensorSpec& spec, int64_t block) {
    return ragged_slots(spec.shape[0], block, plan.batch);
  };
  int64_t lists = 1, longest = slots(p.query, plan.block_q);
  if (p.pass != Pass::kForward) {
    lists = 2;
    longest = std::max(longest, slots(p.key, plan.block_k));
    if (bias_sum) {
      lists = 3;
      longest = std::max(longest, slots(p.key, bias_sum->block_k));
    }
  }
  const int64_t ctas = std::clamp<int64_t>(longest / kSlotsOfOne, 1, kMost);
  plan.launches.push_back(
      once(small_kernel(plan, Role::kRaggedBlocks), grid_of(ctas, lists), Given::kRagged));
}

AttentionLaunch once(const Kernel& kernel, const Grid& grid, Given given) {
  AttentionLaunch step;
  step.kernel = kernel.id.name;
  step.role = role_name(kernel.role);
  step.grid = grid;
  step.threads = static_cast<uint32_t>(kernel.threads);
  step.shared_bytes = static_cast<uint32_t>(kernel.shared_bytes);
  step.cluster = static_cast<uint32_t>(kernel.cluster);
  step.handle = &kernel;
  step.given = given;
  return step;
}

AttentionLaunch per_slice(const Kernel& kernel, const Grid& grid, Given given) {
  AttentionLaunch step = once(kernel, grid, given);
  step.per_slice = true;
  return step;
}

void add_first_launches(AttentionPlan& plan, const Kernel* bias_sum) {
  if (plan.problem.ragged) add_ragged_lists(plan, bias_sum);
  if (transposes_bias(plan)) add_bias_transpose(plan, Given::kBiasToHeads);
  if (aligns_bias(plan)) add_bias_align(plan);
}

void add_bias_transpose(AttentionPlan& plan, Given given) {
  const int64_t heads = plan.heads_q / plan.slices;
  plan.launches.push_back(per_slice(small_kernel(plan, Role::kBiasTranspose),
                                    grid_of(ceil_div(plan.problem.bias->shape[0], kBiasTilePairs),
                                            ceil_div(heads, kBiasTileHeads)),
                                    given));
}

// One CTA for each tile of the gradient sums what shares it. Where that leaves most of the chip
// idle, several CTAs do (plan.bias_splits), and a last launch adds up theirs.
void add_bias_sum(AttentionPlan& plan, const Kernel& bias_sum) {
  if (plan.problem.ragged) {
    const int64_t slots = ragged_slots(plan.problem.key.shape[0], bias_sum.block_k, plan.batch);
    plan.launches.push_back(once(bias_sum, grid_of(slots), Given::kBiasSum));
    return;
  }
  const BiasSumGrid grid = bias_sum_grid(plan, bias_sum.block_q, bias_sum.block_k);
  for (int64_t first = 0; first < grid.batches; first += kMaxGridYZ) {
    const int64_t batches = std::min(grid.batches - first, kMaxGridYZ);
    const auto add = [&](int64_t ctas, Given given) {
      AttentionLaunch step = once(bias_sum, grid_of(ctas, grid.heads, batches), given);
      step.first_batch = first;
      plan.launches.push_back(step);
    };
    add(grid.tiles * plan.bias_splits, Given::kBiasSum);
    if (plan.bias_splits > 1) add(grid.tiles, Given::kBiasSumLast);
  }
}

void add_sink_sum(AttentionPlan& plan) {
  if (!plan.problem.grad_sinks) return;
  const Kernel& kernel = small_kernel(plan, Role::kSinkSum);
  const int64_t parts = sink_parts(plan);
  plan.launches.push_back(once(kernel, grid_of(parts, plan.heads_q), Given::kSinkSum));
  if (parts == 1) return;
  plan.launches.push_back(once(kernel, grid_of(1, plan.heads_q), Given::kSinkSumLast));
}

const Kernel* find_bias_sum(const AttentionPlan& plan) {
  if (!plan.problem.grad_bias || !shares_bias(plan)) return nullptr;
  return find_kernel(Role::kBiasSum, main_kernel(plan));
}

bool has_dq_kernel(const AttentionPlan& plan) {
  const Kernel& kernel = main_kernel(plan);
  if (kernel.converts_dq || stores_dq(plan)) return false;
  const bool own_bias = plan.problem.grad_bias && !shares_bias(plan);
  return plan.problem.grad_query || (own_bias && (kernel.for_short || kernel.makes_dq));
}

void choose_slices(AttentionPlan& plan, const Gpu& gpu, int64_t parts, int64_t blocks_of_part,
                   const std::function<size_t()>& workspace_bytes) {
  constexpr double kSmall = 0.099;
  constexpr int64_t kBlocksOfAnSm = 2, kMost = 16;
  const bool ragged = plan.problem.ragged.has_value();
  const double small = kSmall * tensor_bytes(plan.problem);
  for (int64_t slices = 1; slices <= std::min(parts, kMost); ++slices) {
    // Equal parts of the heads; of the batch, as many as there really are.
    const bool whole =
        ragged ? parts % slices == 0 : ceil_div(parts, ceil_div(parts, slices)) == slices;
    if (!whole) continue;
    if (parts / slices * blocks_of_part < kBlocksOfAnSm * gpu.multiprocessors) break;
    plan.slices = slices;
    if (static_cast<double>(workspace_bytes()) <= small) return;
  }
  plan.slices = 1;  // no number of slices makes the workspace small
}

void limit_slices(AttentionPlan& plan) {
  if (plan.problem.ragged) return;
  plan.slices = std::max(plan.slices, ceil_div(plan.batch, kMaxGridYZ));
}

int64_t choose_bias_splits(const AttentionPlan& plan, const Gpu& gpu, const Kernel& bias_sum) {
  constexpr int64_t kFewSteps = 4;
  if (plan.problem.ragged) return 1;
  const BiasSumGrid grid = bias_sum_grid(plan, bias_sum.block_q, bias_sum.block_k);
  const int64_t work = grid.tiles * grid.heads * grid.batches;
  const int64_t slots = gpu.multiprocessors * resident_ctas(bias_sum, gpu.chip);
  int64_t chosen = 1;
  for (int64_t splits = 1; work > 0 && splits * kFewSteps <= grid.steps; ++splits) {
    chosen = splits;
    if (splits * work >= 0.9 * ceil_div(splits * work, slots) * slots) break;
  }
  return chosen;
}

void lay_out_backward(AttentionPlan& plan, const Gpu& gpu, const Kernel* bias_sum) {
  const AttentionProblem& p = plan.problem;
  if (bias_sum) plan.bias_splits = choose_bias_splits(plan, gpu, *bias_sum);
  // The accumulator of dQ is fp32, and all at once it would be a quarter of all tensors. (Long
  // dense sequences have few and long tasks, and would lose a tenth of their time to the ends of
  // slices.)
  const bool accumulates = accumulates_dq(plan) && (p.bias || p.ragged);
  if (accumulates || transposes_bias(plan)) {
    const auto bytes = [&] { return backward_workspace(plan, bias_sum).bytes; };
    if (p.ragged) {
      const int64_t slots = ragged_slots(p.key.shape[0], plan.block_k, plan.batch);
      choose_slices(plan, gpu, plan.heads_k, slots, bytes);
    } else {
      const int64_t blocks = ceil_div(plan.len_k, plan.block_k) * plan.heads_k;
      choose_slices(plan, gpu, plan.batch, blocks, bytes);
    }
  }
  limit_slices(plan);
  plan.dq_order_varies = accumulates_dq(plan) && !p.options.deterministic;
  plan.workspace_bytes = backward_workspace(plan, bias_sum).bytes;
}

Grid query_grid(const AttentionPlan& plan) {
  const AttentionProblem& p = plan.problem;
  if (p.ragged) {
    const int64_t slots = ragged_slots(p.query.shape[0], plan.block_q, plan.batch);
    return grid_of(slots * (plan.heads_q / plan.slices));
  }
  return grid_of(ceil_div(plan.len_q, plan.block_q), plan.heads_q, slice_batch(plan));
}

uint32_t preprocess_heads(const AttentionPlan& plan, uint32_t most) {
  if (!plan.problem.ragged) return 1;
  const int64_t heads = plan.heads_q / plan.slices;
  uint32_t taken = 1;
  while (taken < most && heads % (2 * taken) == 0) taken *= 2;
  return taken;
}

}  // namespace flashmoe::cuda
