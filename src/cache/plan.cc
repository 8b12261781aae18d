// Who will write to a cache.
#include "cache/problem.h"
#include "cpu/cache/backend.h"
#include "cpu/targets.h"
#include "cuda/cache/planner.h"

namespace flashmoe {

Result<AppendPlan> plan(const AppendProblem& problem) {
  if (Status status = check(problem); !status.ok()) return status;
  AppendPlan plan;
  plan.problem = problem;
  plan.tokens = problem.key.size(0);
  plan.heads = problem.key_cache.size(2);
  plan.page = problem.key_cache.size(1);
  if (problem.device.type == DeviceType::kCuda) {
    if (Status status = cuda::cache::plan_call(plan); !status.ok()) return status;
    return plan;
  }
  if (Status status = cpu::check_device(problem.device); !status.ok()) return status;
  plan.family = "cpu";
  plan.candidates = cpu::candidates();
  cpu::cache::cut(plan);
  return plan;
}

}  // namespace flashmoe
