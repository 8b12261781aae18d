// Who will do it. Candidates are looked at best first; each one passed over leaves its reason in
// the plan.
#include "attention/problem.h"
#include "core/text.h"
#include "cpu/attention/backend.h"
#include "cpu/attention/kernels.h"
#include "cpu/targets.h"
#include "cuda/attention/planner.h"

namespace flashmoe {
namespace {

// CPU instruction sets better than the one in use, and that one.
void add_cpu_candidates(AttentionPlan& plan) {
  plan.family = "cpu";
  for (const cpu::TargetInfo& info : cpu::target_list()) {
    const bool chosen = info.name == std::string(cpu::target().name);
    std::string verdict = "chosen: the best this CPU can run";
    if (!chosen) {
      verdict = info.runnable ? "passed over: FLASHMOE_CPU_TARGET asks for another"
                              : text("passed over: this CPU lacks ", info.needs);
    }
    plan.candidates.push_back({text("cpu_", info.name), std::move(verdict)});
    if (chosen) return;
  }
}

}  // namespace

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
  if (problem.device.num_threads < 0) {
    return invalid("device.num_threads is ", problem.device.num_threads, "; it must be at least 0");
  }
  if (std::string problem = cpu::target_problem(); !problem.empty()) return invalid(problem);
  add_cpu_candidates(plan);
  cpu::cut(plan);
  return plan;
}

bool needs_copy(const TensorSpec& spec, const Device& device) {
  return device.type == DeviceType::kCuda && !cuda::in_place(spec);
}

}  // namespace flashmoe
