// Who will do it. Candidates are looked at best first; each one passed over leaves its reason in
// the plan.
#include "attention/problem.h"
#include "cpu/attention/backend.h"
#include "cpu/targets.h"
#include "cuda/attention/planner.h"

namespace flashmoe {
Result<AttentionPlan> plan(const AttentionProblem& problem) {
  if (Status status = check(problem); !status.ok()) return status;
  const Geometry g = geometry(problem);
  AttentionPlan plan;
  plan.problem = problem;
  plan.problem.options.scale = g.scale;
  plan.batch = g.batch;
  plan.heads_q = g.heads_q;
  plan.heads_k = g.heads_k;
  plan.len_q = g.len_q;
  plan.len_k = g.len_k;
  plan.head_dim = g.head_dim;
  plan.head_dim_v = g.head_dim_v;

  if (problem.device.type == DeviceType::kCuda) {
    if (Status status = cuda::plan_call(plan); !status.ok()) return status;
    return plan;
  }
  if (Status status = cpu::check_device(problem.device); !status.ok()) return status;
  plan.family = "cpu";
  plan.candidates = cpu::candidates();
  cpu::cut(plan);
  return plan;
}

bool needs_copy(const TensorSpec& spec, const Device& device) {
  return device.type == DeviceType::kCuda && !cuda::in_place(spec);
}

}  // namespace flashmoe
