#include "attention/lengths.h"
#include "attention/problem.h"
#include "core/check.h"
#include "core/text.h"
#include "cpu/attention/backend.h"
#include "cuda/attention/planner.h"

namespace flashmoe {
namespace {

Status check_call(const AttentionPlan& plan, const AttentionTensors& t, const void* workspace) {
  const AttentionProblem& p = plan.problem;
  if (p.query.rank == 0) return invalid("plan is empty; plan() makes one from a problem");
  const bool backward = !by_queries(p.pass);
  const bool moves = has_tangents(p.pass);
  const TensorSpec* cu_seqlens_q = p.ragged  ? &p.ragged->cu_seqlens_q
                                   : p.paged ? if_any(p.paged->cu_seqlens_q)
                                             : nullptr;
  return check_pointers(
      {
          {"query", &p.query, t.query},
          {p.paged ? "k_cache" : "key", &p.key, t.key},
          {p.paged ? "v_cache" : "value", &p.value, t.value},
          {"bias", if_any(p.bias), t.bias},
          {"key_lengths", if_any(p.key_lengths), t.key_lengths},
          {"cu_seqlens_q", cu_seqlens_q, t.cu_seqlens_q},
          {"cu_seqlens_k", p.ragged ? &p.ragged->cu_seqlens_k : nullptr, t.cu_seqlens_k},
          {"sinks", if_any(p.sinks), t.sinks},
          {"block_table", p.paged ? &p.paged->block_table : nullptr, t.block_table},
          {"seq_lens", p.paged ? &p.paged->seq_lens : nullptr, t.seq_lens},
          {"k_scale", p.paged ? if_any(p.paged->k_scale) : nullptr, t.k_scale},
          {"v_scale", p.paged ? if_any(p.paged->v_scale) : nullptr, t.v_scale},
          {"seed", if_any(p.seed), t.seed},
          {"out", &p.out, t.out},
          {"lse", if_any(p.lse), t.lse},
          {"grad_out", backward ? if_any(p.grad_out) : nullptr, t.grad_out},
          {"grad_lse", backward ? if_any(p.grad_lse) : nullptr, t.grad_lse},
          {"grad_query", backward ? if_any(p.grad_query) : nullptr, t.grad_query},
          {"grad_key", backward ? if_any(p.grad_key) : nullptr, t.grad_key},
          {"grad_value", backward ? if_any(p.grad_value) : nullptr, t.grad_value},
          {"grad_bias", backward ? if_any(p.grad_bias) : nullptr, t.grad_bias},
          {"grad_sinks", backward ? if_any(p.grad_sinks) : nullptr, t.grad_sinks},
          {"tangent_query", moves ? if_any(p.tangent_query) : nullptr, t.tangent_query},
          {"tangent_key", moves ? if_any(p.tangent_key) : nullptr, t.tangent_key},
          {"tangent_value", moves ? if_any(p.tangent_value) : nullptr, t.tangent_value},
          {"tangent_bias", moves ? if_any(p.tangent_bias) : nullptr, t.tangent_bias},
          {"tangent_sinks", moves ? if_any(p.tangent_sinks) : nullptr, t.tangent_sinks},
          {"tangent_out", moves ? if_any(p.tangent_out) : nullptr, t.tangent_out},
          {"tangent_lse", moves ? if_any(p.tangent_lse) : nullptr, t.tangent_lse},
      },
      plan.workspace_bytes, workspace);
}

}  // namespace

Status run(const AttentionPlan& plan, const AttentionTensors& tensors, void* workspace,
           const Launch& launch) {
  if (Status status = check_call(plan, tensors, workspace); !status.ok()) return status;
  if (plan.problem.device.type == DeviceType::kCuda) {
    return cuda::run(plan, tensors, workspace, launch);
  }
  if (Status status = check_lengths(plan.problem, tensors); !status.ok()) return status;
  cpu::run(plan, tensors, workspace, launch);
  return {};
}

}  // namespace flashmoe
