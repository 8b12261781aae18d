#include "cpu/moe/backend.h"

#include <algorithm>

#include "core/check.h"
#include "core/numbers.h"
#include "core/text.h"
#include "cpu/moe/kernels.h"
#include "cpu/targets.h"
#include "cpu/threads.h"

namespace flashmoe::cpu::moe {
namespace {

// Work items to aim for, however few experts have rows, so that a machine's threads have something
// to do. A number of its own, not the number of threads: how the inner width is cut decides bits.
constexpr int64_t kItems = 16;

const Kernels& kernels(const MoeProblem& problem) {
  return kernels_for(problem.x.dtype, *target().moe);
}

Matrix matrix(const TensorSpec& spec, const void* data) {
  const int rank = spec.rank;
  return {static_cast<char*>(const_cast<void*>(data)), spec.dtype,
          rank > 1 ? spec.stride[rank - 2] : 0, spec.stride[rank - 1]};
}

Matrix matrix(const std::optional<TensorSpec>& spec, const void* data) {
  return spec ? matrix(*spec, data) : Matrix{};
}

Stack stack(const TensorSpec& spec, const void* data) {
  return {matrix(spec, data), spec.stride[0]};
}

Stack stack(const std::optional<TensorSpec>& spec, const void* data) {
  return spec ? stack(*spec, data) : Stack{};
}

// (T k, G, n)
Stack pre_stack(const TensorSpec& spec, const void* data) {
  Matrix rows = matrix(spec, data);
  rows.row = spec.stride[0];
  return {rows, spec.stride[1]};
}

// What a backward pass has to find out on the way to what is asked for.
struct Needs {
  bool grad_pre = false, weighted = false, grad_weights = false;

  explicit Needs(const MoeProblem& p) {
    if (p.pass == Pass::kForward || !p.grad_out) return;
    grad_pre = p.grad_x || p.grad_gate_up || p.grad_up_bias;
    weighted = p.grad_down.has_value();
    grad_weights = p.grad_weights.has_value();
  }
  bool any() const { return grad_pre || weighted || grad_weights; }
};

// Everything a kernel is given but the workspace. While planning there are no tensors and pointers
// are null.
Params make_params(const MoePlan& plan, const MoeTensors& t) {
  const MoeProblem& problem = plan.problem;
  const Kernels& k = kernels(problem);
  Params p;
  p.s = sizes(problem);
  p.activation = problem.activation;
  p.x = matrix(problem.x, t.x);
  p.gate_up = stack(problem.gate_up, t.gate_up);
  p.down = stack(problem.down, t.down);
  p.up_bias = matrix(problem.up_bias, t.up_bias);
  p.down_bias = matrix(problem.down_bias, t.down_bias);
  p.ids = matrix(problem.ids, t.ids);
  p.weights = matrix(problem.weights, t.weights);
  if (problem.pre) p.pre = pre_stack(*problem.pre, t.pre);
  if (problem.pass == Pass::kForward) {
    p.out = matrix(problem.out, t.out);
  } else {
    p.grad_out = matrix(problem.grad_out, t.grad_out);
    p.grad_x = matrix(problem.grad_x, t.grad_x);
    p.grad_gate_up = stack(problem.grad_gate_up, t.grad_gate_up);
    p.grad_down = stack(problem.grad_down, t.grad_down);
    p.grad_up_bias = matrix(problem.grad_up_bias, t.grad_up_bias);
    p.grad_down_bias = matrix(problem.grad_down_bias, t.grad_down_bias);
    p.grad_weights = matrix(problem.grad_weights, t.grad_weights);
  }
  p.block_rows = plan.block_m;
  p.block_inner = plan.block_n;
  const int64_t fewest = std::max<int64_t>(1, ceil_div(p.s.rows, k.block_rows));
  p.parts = std::clamp<int64_t>(ceil_div(kItems, fewest), 1,
                                std::max<int64_t>(1, ceil_div(p.s.inner, p.block_inner)));
  return p;
}

// Where things are in the workspace.
struct Workspace {
  size_t scratch = 0;  // workers x scratch_bytes
  size_t routing = 0, blocks = 0, sums = 0, grad_pre = 0, weighted = 0, grad_weight_sums = 0;
  size_t bytes = 0;

  Workspace(const MoePlan& plan, const Params& p) {
    const MoeProblem& problem = plan.problem;
    const Kernels& k = kernels(problem);
    const Needs needs(problem);
    const bool forward = problem.pass == Pass::kForward;
    const auto take = [&](bool wanted, int64_t count, size_t size) {
      const size_t at = bytes;
      if (wanted) bytes += aligned(count * size);
      return at;
    };
    scratch = take(true, plan.workers, plan.scratch_bytes);
    routing = take(true, routing_elems(p.s.tokens, p.s.top_k, p.s.experts), sizeof(int32_t));
    blocks = take(true, most_blocks(p), sizeof(Block));
    sums = take(has_sums(p) && (forward || (problem.grad_x && problem.grad_out)),
                p.parts * p.s.rows * p.s.width, k.accumulator_bytes);
    grad_pre = take(needs.grad_pre, p.s.rows * p.s.gates * p.s.inner, k.element_bytes);
    weighted = take(needs.weighted, p.s.rows * p.s.inner, k.element_bytes);
    grad_weight_sums = take(needs.grad_weights, p.parts * p.s.rows, k.accumulator_bytes);
    bytes += kWorkspaceAlign;  // room to align whatever memory we are given
  }

  static bool has_sums(const Params& p) { return p.s.top_k > 1 || p.parts > 1; }

  // Every expert with rows may have a block that is not full.
  static int64_t most_blocks(const Params& p) {
    return p.s.rows / std::max<int64_t>(1, p.block_rows) + std::min(p.s.experts, p.s.rows);
  }
};

int64_t read_id(const Matrix& ids, int64_t token, int64_t choice) {
  const int64_t at = token * ids.row + choice * ids.col;
  return ids.dtype == DType::kInt32 ? reinterpret_cast<const int32_t*>(ids.data)[at]
                                    : reinterpret_cast<const int64_t*>(ids.data)[at];
}

// The routing: a stable counting sort of the pairs by their expert.
void sort_pairs(const Params& p, int32_t* offsets, int32_t* pairs) {
  const MoeSizes& s = p.s;
  const auto for_each_pair = [&](const auto& visit) {
    for (int64_t t = 0; t < s.tokens; ++t) {
      for (int64_t j = 0; j < s.top_k; ++j) {
        const int64_t id = read_id(p.ids, t, j);
        if (id >= 0 && id < s.experts) visit(id, static_cast<int32_t>(t * s.top_k + j));
      }
    }
  };
  std::fill_n(offsets, s.experts + 1, 0);
  for_each_pair([&](int64_t id, int32_t) { ++offsets[id + 1]; });
  for (int64_t e = 0; e < s.experts; ++e) offsets[e + 1] += offsets[e];
  // Each expert's offset moves to its end, which is where the next one begins, and back.
  for_each_pair([&](int64_t id, int32_t pair) { pairs[offsets[id]++] = pair; });
  for (int64_t e = s.experts; e > 0; --e) offsets[e] = offsets[e - 1];
  offsets[0] = 0;
}

// Cuts each expert's rows into blocks of equal size; returns how many.
int64_t cut_rows(const Params& p, int64_t step, Block* blocks) {
  int64_t count = 0;
  for (int32_t e = 0; e < p.s.experts; ++e) {
    const int32_t begin = p.offsets[e], end = p.offsets[e + 1];
    const auto block = static_cast<int32_t>(even_block(end - begin, p.block_rows, step));
    for (int32_t row = begin; row < end; row += block) {
      blocks[count++] = {e, row, std::min(block, end - row)};
    }
  }
  return count;
}

// A backward pass is given the routing of its forward pass: that of the same ids.
Status check_routing(const Params& p, const int32_t* given) {
  const int32_t* pairs = given + p.s.experts + 1;
  if (std::equal(p.offsets, p.offsets + p.s.experts + 1, given) &&
      std::equal(p.pairs, p.pairs + p.offsets[p.s.experts], pairs)) {
    return {};
  }
  return invalid("routing is not that of ids; it must be the one that the forward pass wrote");
}

}  // namespace

void cut(MoePlan& plan) {
  const bool forward = plan.problem.pass == Pass::kForward;
  plan.kernel = text("cpu_", target().name, forward ? "_moe_fwd" : "_moe_bwd");
  const Kernels& k = kernels(plan.problem);
  plan.block_m = std::min(k.block_rows, even_block(plan.rows, k.block_rows, k.row_step));
  plan.block_n = even_block(plan.inner, k.block_inner, 16);
  const Params p = make_params(plan, {});
  plan.work_items = Workspace::most_blocks(p) * p.parts;
  int64_t most_items = std::max(plan.work_items, ceil_div(plan.tokens, kTokenBlock));
  if (!forward) {
    most_items = std::max(most_items, p.s.experts * grad_tiles(p.s.gates * p.s.inner, k.grad_rows) *
                                          grad_tiles(p.s.width, k.grad_cols));
  }
  plan.workers = workers_for(plan.problem.device, most_items);
  plan.scratch_bytes = aligned(forward ? k.forward_scratch(p) : k.backward_scratch(p));
  plan.workspace_bytes = Workspace(plan, p).bytes;
}

Status run(const MoePlan& plan, const MoeTensors& tensors, void* memory, const Launch& launch) {
  Params p = make_params(plan, tensors);
  const Kernels& k = kernels(plan.problem);
  const Workspace workspace(plan, p);
  char* base = reinterpret_cast<char*>(aligned(reinterpret_cast<size_t>(memory)));
  const auto phase = [&](int64_t items, void (*kernel)(const Params&, int64_t, void*)) {
    run_items(items, plan.workers, launch, [&](int64_t item, int worker) {
      kernel(p, item, base + workspace.scratch + worker * plan.scratch_bytes);
    });
  };
  const bool forward = plan.problem.pass == Pass::kForward;
  const bool keeps = forward && tensors.routing;
  auto* offsets = keeps ? static_cast<int32_t*>(tensors.routing)
                        : reinterpret_cast<int32_t*>(base + workspace.routing);
  sort_pairs(p, offsets, offsets + p.s.experts + 1);
  p.offsets = offsets;
  p.pairs = offsets + p.s.experts + 1;
  if (!forward) {
    const auto* given = static_cast<const int32_t*>(tensors.routing);
    if (Status status = check_routing(p, given); !status.ok()) return status;
    if (!p.grad_out) {  // all gradients are 0, as if no pair had an expert
      std::fill_n(offsets, p.s.experts + 1, 0);
      p.ids = {};
    }
  }
  auto* blocks = reinterpret_cast<Block*>(base + workspace.blocks);
  const int64_t items = cut_rows(p, k.row_step, blocks) * p.parts;
  p.blocks = blocks;
  if (Workspace::has_sums(p)) p.sums = base + workspace.sums;

  const int64_t token_items = ceil_div(p.s.tokens, kTokenBlock);
  if (forward) {
    phase(items, k.forward);
    phase(token_items, k.combine);
    return {};
  }
  const Needs needs(plan.problem);
  if (needs.grad_pre) p.grad_pre = base + workspace.grad_pre;
  if (needs.weighted) p.weighted = base + workspace.weighted;
  if (needs.grad_weights) p.grad_weight_sums = base + workspace.grad_weight_sums;
  if (needs.any()) phase(items, k.backward);
  if (p.grad_x || p.grad_weights) phase(token_items, k.combine);
  const int64_t up_tiles = grad_tiles(p.s.gates * p.s.inner, k.grad_rows);
  if (p.grad_gate_up || p.grad_up_bias) {
    phase(p.s.experts * up_tiles * grad_tiles(p.s.width, k.grad_cols), k.grad_gate_up);
  }
  if (p.grad_down || p.grad_down_bias) {
    phase(p.s.experts * grad_tiles(p.s.width, k.grad_rows) * grad_tiles(p.s.inner, k.grad_cols),
          k.grad_down);
  }
  return {};
}

namespace {

RouteParams make_params(const RoutePlan& plan, const RouteTensors& t) {
  const RouteProblem& problem = plan.problem;
  RouteParams p;
  p.tokens = plan.tokens;
  p.experts = plan.experts;
  p.top_k = plan.top_k;
  p.scoring = problem.scoring;
  p.normalize = problem.normalize;
  p.logits = matrix(problem.logits, t.logits);
  p.bias = matrix(problem.bias, t.bias);
  p.ids = matrix(problem.ids, t.ids);
  if (problem.pass == Pass::kForward) {
    p.weights = matrix(problem.weights, t.weights);
  } else {
    p.grad_weights = matrix(problem.grad_weights, t.grad_weights);
    p.grad_logits = matrix(problem.grad_logits, t.grad_logits);
  }
  return p;
}

}  // namespace

void cut(RoutePlan& plan) {
  const bool forward = plan.problem.pass == Pass::kForward;
  plan.kernel = text("cpu_", target().name, forward ? "_route_fwd" : "_route_bwd");
  const Kernels& k = kernels_for(plan.problem.logits.dtype, *target().moe);
  const bool nothing = !forward && !plan.problem.grad_logits;
  plan.work_items = nothing ? 0 : ceil_div(plan.tokens, kTokenBlock);
  plan.workers = workers_for(plan.problem.device, plan.work_items);
  const size_t scratch = aligned(k.route_scratch(make_params(plan, {})));
  plan.workspace_bytes = plan.workers * scratch + kWorkspaceAlign;
}

Status run(const RoutePlan& plan, const RouteTensors& tensors, void* memory, const Launch& launch) {
  const RouteParams p = make_params(plan, tensors);
  const Kernels& k = kernels_for(plan.problem.logits.dtype, *target().moe);
  const size_t scratch = aligned(k.route_scratch(p));
  char* base = reinterpret_cast<char*>(aligned(reinterpret_cast<size_t>(memory)));
  const auto kernel = plan.problem.pass == Pass::kForward ? k.route_forward : k.route_backward;
  run_items(plan.work_items, plan.workers, launch,
            [&](int64_t item, int worker) { kernel(p, item, base + worker * scratch); });
  return {};
}

}  // namespace flashmoe::cpu::moe
