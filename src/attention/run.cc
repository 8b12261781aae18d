#include "attention/lengths.h"
#include "attention/problem.h"
#include "core/text.h"
#include "cpu/attention/backend.h"
#include "cuda/attention/planner.h"

namespace flashmoe {
namespace {

int64_t element_count(const TensorSpec& spec) {
  int64_t count = 1;
  for (int i = 0; i < spec.rank; ++i) count *= spec.shape[i];
  return count;
}

// Every tensor of the problem that has elements has memory, and so does the workspace.
Status check_pointers(const AttentionPlan& plan, const AttentionTensors& t, const void* workspace) {
  const AttentionProblem& p = plan.problem;
  struct Named {
    const char* name;
    const TensorSpec* spec;
    const void* data;
  };
  const auto maybe = [](const std::optional<TensorSpec>& spec) { return spec ? &*spec : nullptr; };
  const bool backward = p.pass == Pass::kBackward;
  const Named all[] = {
      {"query", &p.query, t.query},
      {"key", &p.key, t.key},
      {"value", &p.value, t.value},
      {"bias", maybe(p.bias), t.bias},
      {"key_lengths", maybe(p.key_lengths), t.key_lengths},
      {"cu_seqlens_q", p.ragged ? &p.ragged->cu_seqlens_q : nullptr, t.cu_seqlens_q},
      {"cu_seqlens_k", p.ragged ? &p.ragged->cu_seqlens_k : nullptr, t.cu_seqlens_k},
      {"out", &p.out, t.out},
      {"lse", maybe(p.lse), t.lse},
      {"grad_out", backward ? maybe(p.grad_out) : nullptr, t.grad_out},
      {"grad_lse", backward ? maybe(p.grad_lse) : nullptr, t.grad_lse},
      {"grad_query", backward ? maybe(p.grad_query) : nullptr, t.grad_query},
      {"grad_key", backward ? maybe(p.grad_key) : nullptr, t.grad_key},
      {"grad_value", backward ? maybe(p.grad_value) : nullptr, t.grad_value},
      {"grad_bias", backward ? maybe(p.grad_bias) : nullptr, t.grad_bias},
  };
  for (const Named& n : all) {
    if (n.spec && !n.data && element_count(*n.spec) > 0) {
      return invalid(n.name, " is null, but the problem has one of ", spec_text(*n.spec));
    }
  }
  if (plan.workspace_bytes > 0 && !workspace) {
    return invalid("workspace is null; the plan needs ", plan.workspace_bytes, " bytes");
  }
  return {};
}

}  // namespace

Status run(const AttentionPlan& plan, const AttentionTensors& tensors, void* workspace,
           const Launch& launch) {
  if (Status status = check_pointers(plan, tensors, workspace); !status.ok()) return status;
  if (plan.problem.device.type == DeviceType::kCuda) {
    return cuda::run(plan, tensors, workspace, launch);
  }
  if (Status status = check_lengths(plan.problem, tensors); !status.ok()) return status;
  cpu::run(plan, tensors, workspace, launch);
  return {};
}

}  // namespace flashmoe
