// What would run of the experts, and why. Only shapes matter, so meta tensors do.
#include <string>
#include <tuple>

#include "error.h"
#include "moe_call.h"

namespace flashmoe::ops {
namespace {

std::string explain_forward(const MoeForwardCall& call) {
  const MoeInputs& in = call.inputs;
  return explain(call.problem) + copies_text({{"x", &in.x},
                                              {"gate_up", &in.gate_up},
                                              {"down", &in.down},
                                              {"up_bias", pointer_to(in.up_bias)},
                                              {"down_bias", pointer_to(in.down_bias)}},
                                             {{"out", &call.out}});
}

// All gradients; that of out as the forward pass lays it out.
std::string explain_backward(const MoeArguments& a, const Device& device) {
  const MoeForwardCall forward = forward_call(a, true, device);
  raise_if_error(plan(forward.problem).status());
  const MoeBackwardCall call =
      backward_call(a,
                    {.grad_out = place(forward.out.outside, device, needs_moe_copy),
                     .pre = *forward.problem.pre,
                     .routing = *forward.problem.routing,
                     .needs = {true, true, true, true, true, true}},
                    device);
  raise_if_error(plan(call.problem).status());
  const MoeInputs& in = call.inputs;
  return explain(call.problem) + copies_text({{"x", &in.x},
                                              {"gate_up", &in.gate_up},
                                              {"down", &in.down},
                                              {"up_bias", pointer_to(in.up_bias)},
                                              {"down_bias", pointer_to(in.down_bias)},
                                              {"grad_out", &call.grad_out}},
                                             {{"grad_x", pointer_to(call.grad_x)},
                                              {"grad_gate_up", pointer_to(call.grad_gate_up)},
                                              {"grad_down", pointer_to(call.grad_down)},
                                              {"grad_up_bias", pointer_to(call.grad_up_bias)},
                                              {"grad_down_bias", pointer_to(call.grad_down_bias)}});
}

std::tuple<std::string> explain_moe(const ExplainMoeArguments& a) {
  const Device device = device_named(a.device, a.forward.call.x);
  if (a.backward) return explain_backward(a.forward.call, device);
  const MoeForwardCall call = forward_call(a.forward.call, a.forward.keep, device);
  raise_if_error(plan(call.problem).status());
  return explain_forward(call);
}

}  // namespace
}  // namespace flashmoe::ops

STABLE_TORCH_LIBRARY_IMPL(flashmoe, CompositeExplicitAutograd, m) {
  m.impl("explain_moe", flashmoe::ops::Boxed<flashmoe::ops::explain_moe>::call);
}
