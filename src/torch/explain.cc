// What would run, and why. Only shapes matter, so meta tensors do.
#include <string>
#include <tuple>

#include "call.h"
#include "error.h"

namespace flashmoe::ops {
namespace {

// A bias that has no gradient.
bool is_mask(const AttentionProblem& p) { return p.bias && p.bias->dtype == DType::kBool; }

std::string explain_forward(const Arguments& a, const Device& device) {
  const ForwardCall call = forward_call(a, device);
  raise_if_error(plan(call.problem).status());
  return explain(call.problem) +
         copies_text({{"query", &call.query}, {"key", &call.key}, {"value", &call.value}},
                     {{"out", &call.out}});
}

// All inputs move; tangents and results lie as the forward pass lays out.
void add_tangents(const ForwardCall& forward, AttentionProblem& problem) {
  problem.tangent_query = forward.query.inside;
  problem.tangent_key = forward.key.inside;
  problem.tangent_value = forward.value.inside;
  if (!is_mask(forward.problem)) problem.tangent_bias = problem.bias;
  problem.tangent_sinks = problem.sinks;
  problem.tangent_out = forward.out.inside;
  problem.tangent_lse = forward.problem.lse;
}

std::string explain_tangent(const Arguments& a, const Device& device) {
  ForwardCall call = forward_call(a, device);
  raise_if_error(plan(call.problem).status());
  call.problem.pass = Pass::kTangent;
  add_tangents(call, call.problem);
  raise_if_error(plan(call.problem).status());
  return explain(call.problem) +
         copies_text({{"query", &call.query}, {"key", &call.key}, {"value", &call.value}},
                     {{"tangent_out", &call.out}});
}

// All gradients, of a loss of `out` alone; out and its gradient as the forward pass lays out.
std::string explain_gradients(const Arguments& a, Pass pass, const Device& device) {
  const ForwardCall forward = forward_call(a, device);
  raise_if_error(plan(forward.problem).status());
  const Placement out = place(forward.out.outside, device, needs_copy);
  BackwardCall call = backward_call(a,
                                    {.out = out,
                                     .lse = *forward.problem.lse,
                                     .grad_out = out,
                                     .grad_lse = std::nullopt,
                                     .needs_query = true,
                                     .needs_key = true,
                                     .needs_value = true,
                                     .needs_bias = !is_mask(forward.problem),
                                     .needs_sinks = true},
                                    device);
  call.problem.pass = pass;
  if (pass == Pass::kSecond) add_tangents(forward, call.problem);
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
  if (a.pass == Pass::kForward) return explain_forward(a.call, device);
  if (a.pass == Pass::kTangent) return explain_tangent(a.call, device);
  return explain_gradients(a.call, a.pass, device);
}

}  // namespace
}  // namespace flashmoe::ops

STABLE_TORCH_LIBRARY_IMPL(flashmoe, CompositeExplicitAutograd, m) {
  m.impl("explain", flashmoe::ops::Boxed<flashmoe::ops::explain_attention>::call);
}
