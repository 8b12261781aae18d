#include "cpu/attention/backend.h"

#include <cmath>

#include "attention/lengths.h"
#include "core/numbers.h"
#include "core/text.h"
#include "cpu/attention/kernels.h"
#include "cpu/attention/operands.h"
#include "cpu/attention/pages.h"
#include "cpu/targets.h"
#include "cpu/threads.h"

namespace flashmoe::cpu {
namespace {

// Work items to aim for, so that a machine's threads stay busy to the end. A number of its own, not
// the number of threads: how a head is cut decides the bits of dK and dV.
constexpr int64_t kForwardItems = 64;
constexpr int64_t kBackwardItems = 32;
constexpr int64_t kBackwardChunks = 8;  // at most: each has a dK and dV of its own in the workspace
constexpr int64_t kBackwardBlocks = 4;  // per chunk at least: each costs a pass over its dK and dV

const Kernels& kernels(const AttentionProblem& problem) {
  return kernels_for(problem.query.dtype, *target().attention);
}

// A packed bias is (rows, H).
Operand bias_operand(const std::optional<TensorSpec>& spec, const void* data, const Geometry& g) {
  return operand(spec, data, g, !g.ragged);
}

Operand integers(const TensorSpec& spec, const void* data, const Geometry& g) {
  Operand op;
  op.data = const_cast<void*>(data);
  op.dtype = spec.dtype;
  if (g.ragged) {
    op.row = spec.stride[0];
    return op;
  }
  for (int i = 0; i < spec.rank; ++i) {
    op.lead[g.num_lead - spec.rank + i] = spec.shape[i] == 1 ? 0 : spec.stride[i];
  }
  return op;
}

// How the bias's gradient comes about: see Params.
void set_bias_grad(const AttentionProblem& problem, Params& p) {
  if (by_queries(problem.pass) || !problem.grad_bias) return;
  const Geometry& g = p.geometry;
  const TensorSpec& bias = *problem.bias;
  if (g.ragged) {
    p.bias_own[0] = bias.shape[1] == g.heads_q;
    p.bias_grad = p.bias_own[0] ? Params::BiasGrad::kDirect : Params::BiasGrad::kShared;
    return;
  }
  bool shared = false;
  const auto own = [&](int from_end, int64_t size) {
    const bool yes = from_end <= bias.rank && bias.size(-from_end) == size;
    shared |= !yes;
    return yes;
  };
  p.bias_cols = own(1, g.len_k);
  p.bias_rows = own(2, g.len_q);
  p.bias_own[g.num_lead] = own(3, g.heads_q);
  for (int i = 0; i < g.num_lead; ++i) p.bias_own[i] = own(3 + g.num_lead - i, g.lead[i]);
  p.bias_grad = shared ? Params::BiasGrad::kShared : Params::BiasGrad::kDirect;
}

// Everything a kernel is given but the workspace. While planning there are no tensors and pointers
// are null.
Params make_params(const AttentionPlan& plan, const AttentionTensors& t) {
  const AttentionProblem& problem = plan.problem;
  Params p;
  p.geometry = geometry(problem);
  const Geometry& g = p.geometry;
  p.query = operand(problem.query, t.query, g, true);
  p.key = operand(problem.key, t.key, g, true);
  p.value = operand(problem.value, t.value, g, true);
  p.has_bias = problem.bias.has_value();
  p.bias = bias_operand(problem.bias, t.bias, g);
  p.sinks = per_head(problem.sinks, t.sinks);
  p.out = operand(problem.out, t.out, g, true);
  p.lse = operand(problem.lse, t.lse, g, false);
  if (problem.key_lengths) p.key_lengths = integers(*problem.key_lengths, t.key_lengths, g);
  if (g.ragged) {
    p.cu_seqlens_q = integers(problem.ragged->cu_seqlens_q, t.cu_seqlens_q, g);
    p.cu_seqlens_k = integers(problem.ragged->cu_seqlens_k, t.cu_seqlens_k, g);
  }
  if (t.seed) p.seed = static_cast<uint64_t>(*static_cast<const int64_t*>(t.seed));
  if (!by_queries(problem.pass)) {
    p.grad_out = operand(problem.grad_out, t.grad_out, g, true);
    p.grad_lse = operand(problem.grad_lse, t.grad_lse, g, false);
    p.grad_query = operand(problem.grad_query, t.grad_query, g, true);
    p.grad_key = operand(problem.grad_key, t.grad_key, g, true);
    p.grad_value = operand(problem.grad_value, t.grad_value, g, true);
    p.grad_bias = bias_operand(problem.grad_bias, t.grad_bias, g);
    p.grad_sinks = per_head(problem.grad_sinks, t.grad_sinks);
  }
  if (problem.pass == Pass::kTangent || problem.pass == Pass::kSecond) {
    p.tangent_query = operand(problem.tangent_query, t.tangent_query, g, true);
    p.tangent_key = operand(problem.tangent_key, t.tangent_key, g, true);
    p.tangent_value = operand(problem.tangent_value, t.tangent_value, g, true);
    p.has_tangent_bias = problem.tangent_bias.has_value();
    p.tangent_bias = bias_operand(problem.tangent_bias, t.tangent_bias, g);
    p.tangent_sinks = per_head(problem.tangent_sinks, t.tangent_sinks);
    p.tangent_out = operand(problem.tangent_out, t.tangent_out, g, true);
    p.tangent_lse = operand(problem.tangent_lse, t.tangent_lse, g, false);
  }
  set_bias_grad(problem, p);
  p.block_q = plan.block_q;
  p.block_k = plan.block_k;
  p.chunks = plan.chunks;
  p.items = plan.work_items;
  return p;
}

// Where things are in the workspace.
struct Workspace {
  size_t scratch = 0;  // workers x scratch_bytes
  size_t bias_offset = 0, partial = 0, sink_partial = 0, bytes = 0;

  Workspace(const AttentionPlan& plan, const Params& p) {
    const Kernels& k = kernels(plan.problem);
    bias_offset = scratch + plan.workers * plan.scratch_bytes;
    partial =
        bias_offset +
        (p.geometry.ragged && plan.problem.bias ? aligned(p.geometry.batch * sizeof(int64_t)) : 0);
    const bool gives_gradients = !by_queries(plan.problem.pass);
    sink_partial = partial + (gives_gradients ? aligned(k.partial_bytes(p)) : 0);
    const bool sinks = gives_gradients && plan.problem.grad_sinks;
    bytes = sink_partial + (sinks ? aligned(p.items * p.geometry.group * sizeof(double)) : 0);
    if (bytes) bytes += kWorkspaceAlign;  // room to align whatever memory we are given
  }
};

int64_t sequence_length(const TensorSpec& cu_seqlens, const void* data, int64_t sequence) {
  return read_int(cu_seqlens, data, sequence + 1) - read_int(cu_seqlens, data, sequence);
}

void fill_unused_tokens(const AttentionProblem& problem, const Params& p) {
  const Geometry& g = p.geometry;
  const Ragged& r = *problem.ragged;
  const int64_t rows = read_int(r.cu_seqlens_q, p.cu_seqlens_q.data, g.batch),
                all_rows = problem.query.shape[0];
  const int64_t keys = read_int(r.cu_seqlens_k, p.cu_seqlens_k.data, g.batch),
                all_keys = problem.key.shape[0];
  if (problem.pass == Pass::kForward) {
    fill_rest(p.out, g.heads_q, g.head_dim_v, rows, all_rows, 0);
    fill_rest(p.lse, g.heads_q, 1, rows, all_rows, -HUGE_VAL);
  } else if (problem.pass == Pass::kTangent) {
    fill_rest(p.tangent_out, g.heads_q, g.head_dim_v, rows, all_rows, 0);
    fill_rest(p.tangent_lse, g.heads_q, 1, rows, all_rows, 0);
  } else {
    fill_rest(p.grad_query, g.heads_q, g.head_dim, rows, all_rows, 0);
    fill_rest(p.grad_key, g.heads_k, g.head_dim, keys, all_keys, 0);
    fill_rest(p.grad_value, g.heads_k, g.head_dim_v, keys, all_keys, 0);
  }
}

const char* kernel_name(Pass pass) {
  switch (pass) {
    case Pass::kForward:
      return "_attention_fwd";
    case Pass::kBackward:
      return "_attention_bwd";
    case Pass::kTangent:
      return "_attention_tangent";
    case Pass::kSecond:
      return "_attention_second";
  }
  return "";
}

size_t scratch_bytes(Pass pass, const Kernels& k, const Params& p) {
  switch (pass) {
    case Pass::kForward:
      return k.forward_scratch(p);
    case Pass::kBackward:
      return k.backward.scratch(p);
    case Pass::kTangent:
      return k.tangent_scratch(p);
    case Pass::kSecond:
      return k.second.scratch(p);
  }
  return 0;
}

int64_t shared_bias_items(const Params& p) {
  const Geometry& g = p.geometry;
  int64_t items = g.ragged ? g.batch : 1;
  for (int i = 0; i <= g.num_lead; ++i) {
    if (p.bias_own[i]) items *= i == g.num_lead ? g.heads_q : g.lead[i];
  }
  if (p.bias_rows) items *= ceil_div(g.len_q, p.block_q);
  if (p.bias_cols) items *= ceil_div(g.len_k, p.block_k);
  return items;
}

}  // namespace

void cut(AttentionPlan& plan) {
  if (plan.problem.paged) return cut_pages(plan);
  const bool forward = by_queries(plan.problem.pass);
  plan.kernel = text("cpu_", target().name, kernel_name(plan.problem.pass));
  const Kernels& k = kernels(plan.problem);
  plan.block_q = even_block(plan.len_q, k.block, 16);
  plan.block_k = even_block(plan.len_k, k.block, k.key_step);
  const int64_t heads = plan.batch * (forward ? plan.heads_q : plan.heads_k);
  const int64_t blocks =
      ceil_div(plan.len_q, plan.block_q) * (forward ? 1 : plan.heads_q / plan.heads_k);
  const int64_t wanted = heads ? ceil_div(forward ? kForwardItems : kBackwardItems, heads) : 1;
  plan.chunks = std::max<int64_t>(
      1, std::min(wanted, forward ? blocks : std::min(blocks / kBackwardBlocks, kBackwardChunks)));
  // An empty batch of any size is no work; without queries there are still dK = 0 and dV = 0 to
  // write.
  const bool nothing = plan.len_q == 0 && (forward || plan.len_k == 0);
  plan.work_items = nothing ? 0 : heads * plan.chunks;

  const Params p = make_params(plan, {});
  int64_t most_items = plan.work_items;
  if (p.bias_grad == Params::BiasGrad::kShared)
    most_items = std::max(most_items, shared_bias_items(p));
  plan.workers = workers_for(plan.problem.device, most_items);
  plan.scratch_bytes = aligned(scratch_bytes(plan.problem.pass, k, p));
  plan.workspace_bytes = Workspace(plan, p).bytes;
}

void run(const AttentionPlan& plan, const AttentionTensors& tensors, void* memory,
         const Launch& launch) {
  if (plan.problem.paged) return run_pages(plan, tensors, memory, launch);
  Params p = make_params(plan, tensors);
  const Geometry& g = p.geometry;
  const Kernels& k = kernels(plan.problem);
  const Workspace workspace(plan, p);
  char* base = reinterpret_cast<char*>(aligned(reinterpret_cast<size_t>(memory)));
  const auto phase = [&](int64_t items, void (*kernel)(const Params&, int64_t, void*)) {
    run_items(items, plan.workers, launch, [&](int64_t item, int worker) {
      kernel(p, item, base + workspace.scratch + worker * plan.scratch_bytes);
    });
  };

  if (g.ragged) {
    fill_unused_tokens(plan.problem, p);
    if (p.bias) {
      auto* offset = reinterpret_cast<int64_t*>(base + workspace.bias_offset);
      int64_t next = 0;
      for (int64_t b = 0; b < g.batch; ++b) {
        offset[b] = next;
        next += sequence_length(plan.problem.ragged->cu_seqlens_q, tensors.cu_seqlens_q, b) *
                sequence_length(plan.problem.ragged->cu_seqlens_k, tensors.cu_seqlens_k, b);
      }
      p.bias_offset = offset;
    }
  }
  const Pass pass = plan.problem.pass;
  if (by_queries(pass)) {
    phase(plan.work_items, pass == Pass::kForward ? k.forward : k.tangent);
    return;
  }
  const GradientKernels& of = pass == Pass::kBackward ? k.backward : k.second;
  p.partial = base + workspace.partial;
  p.sink_partial = reinterpret_cast<double*>(base + workspace.sink_partial);
  phase(plan.work_items, of.gradients);
  if (p.chunks > 1) phase(g.batch * g.heads_k * ceil_div(g.len_k, p.block_k), k.reduce);
  if (p.bias_grad == Params::BiasGrad::kShared) phase(shared_bias_items(p), of.bias);
  if (p.grad_sinks) phase(g.heads_q, k.sink_grad);
}

}  // namespace flashmoe::cpu
