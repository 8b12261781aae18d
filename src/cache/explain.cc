#include "core/explain.h"

#include "cache/problem.h"

namespace flashmoe {
namespace {

std::string options_text(const AppendProblem& p) {
  std::string line = text("pages of ", p.key_cache.size(1));
  if (p.key_cache.dtype != p.key.dtype) line += text(" in ", dtype_name(p.key_cache.dtype));
  if (p.k_scale || p.v_scale) line += ", scaled";
  return line;
}

std::string work_text(const AppendPlan& plan) {
  if (plan.problem.device.type == DeviceType::kCuda) return launches_text(plan.launches);
  return text("work       ", plan.work_items, " items", workers_text(plan.workers));
}

}  // namespace

std::string explain(const AppendProblem& problem) {
  const Result<AppendPlan> result = plan(problem);
  if (!result.ok()) return "cannot run: " + result.status().message();
  const AppendPlan& plan = result.value();
  const int64_t dim = problem.key.size(-1), dim_v = problem.value.size(-1);
  return text("append to a cache in ", dtype_name(problem.key.dtype), ": ", plan.tokens,
              " tokens, heads ", plan.heads, ", head dim ", dim,
              dim_v != dim ? text("/", dim_v) : "", "\n  options    ", options_text(problem),
              "\n  kernel     ", plan.kernel, "\n  ", work_text(plan), "\n  workspace  ",
              mebibytes(0), "\n  bitwise reproducible\n  ", candidates_text(plan.candidates));
}

}  // namespace flashmoe
