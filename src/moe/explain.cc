#include "core/explain.h"

#include "moe/problem.h"

namespace flashmoe {
namespace {

std::string options_text(const MoeProblem& p) {
  std::string line = activation_name(p.activation);
  if (p.up_bias) line += ", up bias";
  if (p.down_bias) line += ", down bias";
  if (!p.weights) line += ", no weights";
  if (p.pass == Pass::kForward)
    line += p.pre ? ", kept for backward" : ", nothing kept for backward";
  return line;
}

std::string work_text(const MoePlan& plan) {
  if (plan.problem.device.type == DeviceType::kCuda) return launches_text(plan.launches);
  return text("work       up to ", plan.work_items, " items", workers_text(plan.workers));
}

}  // namespace

std::string explain(const MoeProblem& problem) {
  const Result<MoePlan> result = plan(problem);
  if (!result.ok()) return "cannot run: " + result.status().message();
  const MoePlan& plan = result.value();
  return text(problem.pass == Pass::kForward ? "forward" : "backward", " mixture of experts in ",
              dtype_name(problem.x.dtype), ": ", plan.tokens, " tokens of width ", plan.width, ", ",
              plan.top_k, " of ", plan.experts, " experts of inner width ", plan.inner,
              "\n  options    ", options_text(problem), "\n  kernel     ", plan.kernel,
              "\n  tile       ", plan.block_m, " rows x ", plan.block_n, " columns\n  ",
              work_text(plan), "\n  workspace  ", mebibytes(plan.workspace_bytes),
              "\n  bitwise reproducible\n  ", candidates_text(plan.candidates));
}

}  // namespace flashmoe
