// Who will do it. Candidates are looked at best first; each one passed over leaves its reason in
// the plan.
#include "cpu/moe/backend.h"
#include "cpu/targets.h"
#include "cuda/moe/planner.h"
#include "moe/problem.h"

namespace flashmoe {
namespace {

// The device's half of a plan, after what the problem alone says.
template <class Plan>
Result<Plan> planned(Plan plan) {
  const Device& device = plan.problem.device;
  if (device.type == DeviceType::kCuda) {
    if (Status status = cuda::moe::plan_call(plan); !status.ok()) return status;
    return plan;
  }
  if (Status status = cpu::check_device(device); !status.ok()) return status;
  plan.family = "cpu";
  plan.candidates = cpu::candidates();
  cpu::moe::cut(plan);
  return plan;
}

}  // namespace

Result<MoePlan> plan(const MoeProblem& problem) {
  if (Status status = check(problem); !status.ok()) return status;
  const MoeSizes s = sizes(problem);
  MoePlan plan;
  plan.problem = problem;
  plan.tokens = s.tokens;
  plan.top_k = s.top_k;
  plan.experts = s.experts;
  plan.width = s.width;
  plan.inner = s.inner;
  plan.rows = s.rows;
  return planned(std::move(plan));
}

Result<RoutePlan> plan(const RouteProblem& problem) {
  if (Status status = check(problem); !status.ok()) return status;
  RoutePlan plan;
  plan.problem = problem;
  plan.tokens = problem.logits.shape[0];
  plan.experts = problem.logits.shape[1];
  plan.top_k = problem.ids.shape[1];
  return planned(std::move(plan));
}

bool needs_moe_copy(const TensorSpec& spec, const Device& device) {
  return device.type == DeviceType::kCuda && !cuda::moe::in_place(spec);
}

}  // namespace flashmoe
