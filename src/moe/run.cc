#include "core/check.h"
#include "cpu/moe/backend.h"
#include "cuda/moe/planner.h"
#include "moe/problem.h"

namespace flashmoe {
namespace {

Status check_call(const MoePlan& plan, const MoeTensors& t, const void* workspace) {
  const MoeProblem& p = plan.problem;
  const bool backward = p.pass == Pass::kBackward;
  const auto gradient = [&](const std::optional<TensorSpec>& spec) {
    return backward ? if_any(spec) : nullptr;
  };
  return check_pointers(
      {
          {"x", &p.x, t.x},
          {"gate_up", &p.gate_up, t.gate_up},
          {"down", &p.down, t.down},
          {"up_bias", if_any(p.up_bias), t.up_bias},
          {"down_bias", if_any(p.down_bias), t.down_bias},
          {"ids", &p.ids, t.ids},
          {"weights", if_any(p.weights), t.weights},
          {"out", backward ? nullptr : &p.out, t.out},
          {"pre", if_any(p.pre), t.pre},
          {"routing", if_any(p.routing), t.routing},
          {"grad_out", gradient(p.grad_out), t.grad_out},
          {"grad_x", gradient(p.grad_x), t.grad_x},
          {"grad_gate_up", gradient(p.grad_gate_up), t.grad_gate_up},
          {"grad_down", gradient(p.grad_down), t.grad_down},
          {"grad_up_bias", gradient(p.grad_up_bias), t.grad_up_bias},
          {"grad_down_bias", gradient(p.grad_down_bias), t.grad_down_bias},
          {"grad_weights", gradient(p.grad_weights), t.grad_weights},
      },
      plan.workspace_bytes, workspace);
}

Status check_call(const RoutePlan& plan, const RouteTensors& t, const void* workspace) {
  const RouteProblem& p = plan.problem;
  const bool backward = p.pass == Pass::kBackward;
  return check_pointers(
      {
          {"logits", &p.logits, t.logits},
          {"bias", if_any(p.bias), t.bias},
          {"ids", &p.ids, t.ids},
          {"weights", backward ? nullptr : &p.weights, t.weights},
          {"grad_weights", backward ? if_any(p.grad_weights) : nullptr, t.grad_weights},
          {"grad_logits", backward ? if_any(p.grad_logits) : nullptr, t.grad_logits},
      },
      plan.workspace_bytes, workspace);
}

template <class Plan, class Tensors>
Status checked_run(const Plan& plan, const Tensors& tensors, void* workspace,
                   const Launch& launch) {
  if (Status status = check_call(plan, tensors, workspace); !status.ok()) return status;
  if (plan.problem.device.type == DeviceType::kCuda) {
    return cuda::moe::run(plan, tensors, workspace, launch);
  }
  return cpu::moe::run(plan, tensors, workspace, launch);
}

}  // namespace

Status run(const MoePlan& plan, const MoeTensors& tensors, void* workspace, const Launch& launch) {
  return checked_run(plan, tensors, workspace, launch);
}

Status run(const RoutePlan& plan, const RouteTensors& tensors, void* workspace,
           const Launch& launch) {
  return checked_run(plan, tensors, workspace, launch);
}

}  // namespace flashmoe
