// What would run, and why. Only shapes matter, so meta tensors do.
#include <string>
#include <tuple>

#include "call.h"
#include "error.h"

namespace flashmoe::ops {
namespace {

std::string explain_forward(const Arguments& a, const Device& device) {
  const ForwardCall call = forward_call(a, device);
  raise_if_error(plan(call.problem).status());
  return explain(call.problem) +
         copies_text({{"query", &call.query}, {"key", &call.key}, {"value", &call.value}},
                     {{"out", &call.out}});
}

// All gradients, of a loss of `out` alone; out and its gradient as the forward pass lays out.
std::string explain_backward(const Arguments& a, const Device& device) {
  const ForwardCall forward = forward_call(a, device);
  raise_if_error(plan(forward.problem).status());
  const Placement out = place(forward.out.outside, device, needs_copy);
  const BackwardCall call = backward_call(a,
                                          {.out = out,
                                           .lse = *forward.problem.lse,
                                           .grad_out = out,
                                           .grad_lse = std::nullopt,
                                           .needs_query = true,
                                           .needs_key = true,
                                           .needs_value = true,
                                           .needs_bias = true,
                                           .needs_sinks = true},
                                          device);
  raise_if_error(plan(call.problem).status());
  return explain(call.problem) + copies_text({{"query", &call.query},
                                              {"key", &call.key},
                                              {"value", &call.value},
                                              {"out", &call.out},
                                              {"grad_out", pointer_to(call.grad_out)}},
                                             {{"grad_query", pointer_to(call.grad_query)},
                                              {"grad_key", pointer_to(call.grad_key)},
                                              {"grad_value", pointer_to(call.grad_value)}});
}

std::tuple<std::string> explain_attention(const ExplainArguments& a) {
  const Device device = device_named(a.device, a.call.query);
  return a.backward ? explain_backward(a.call, device) : explain_forward(a.call, device);
}

}  // namespace
}  // namespace flashmoe::ops

STABLE_TORCH_LIBRARY_IMPL(flashmoe, CompositeExplicitAutograd, m) {
  m.impl("explain", flashmoe::ops::Boxed<flashmoe::ops::explain_attention>::call);
}
