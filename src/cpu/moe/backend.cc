#include "cpu/moe/backend.h"

#include "core/text.h"

namespace flashmoe::cpu::moe {

void cut(MoePlan& plan) {
  plan.kernel = plan.problem.pass == Pass::kForward ? "cpu_moe_fwd" : "cpu_moe_bwd";
}

void cut(RoutePlan& plan) {
  plan.kernel = plan.problem.pass == Pass::kForward ? "cpu_route_fwd" : "cpu_route_bwd";
}

Status run(const MoePlan& plan, const MoeTensors& tensors, void*, const Launch&) {
  return run_reference(plan.problem, tensors);
}

Status run(const RoutePlan& plan, const RouteTensors& tensors, void*, const Launch&) {
  return run_reference(plan.problem, tensors);
}

}  // namespace flashmoe::cpu::moe
