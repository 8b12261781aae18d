// Forward mode: how the results move with the inputs.
#include <tuple>

#include "call.h"
#include "execute.h"

namespace flashmoe::ops {
namespace {

std::tuple<Tensor, Tensor> tangent(const TangentArguments& b) {
  Arguments a = b.forward;
  a.bias = start_aligned(a.bias);
  check_same_device(a, {{"out", &b.out}, {"lse", &b.lse}});
  check_same_device(a, b.tangents);
  const Device device = device_of(a.query);
  ForwardCall call = forward_call(a, device);
  AttentionProblem& problem = call.problem;
  const Placement out = place("out", b.out, device, needs_copy);
  problem.pass = Pass::kTangent;
  problem.tangent_out = call.out.inside;  // laid out as the forward pass does
  problem.tangent_lse = problem.lse;
  problem.out = out.inside;
  problem.lse = spec_of("lse", b.lse);
  const TangentPlacements placements = place_tangents(b.tangents, device, problem);
  // Refused before anything is copied or allocated.
  const auto plan = plan_or_fail<AttentionPlan>(problem);

  const Tensor query = bring_in(a.query, call.query), key = bring_in(a.key, call.key),
               value = bring_in(a.value, call.value), read_out = bring_in(b.out, out);
  AttentionTensors tensors = addresses(a, query, key, value);
  tensors.out = const_cast<void*>(read_out.const_data_ptr());  // only read here, as lse is
  tensors.lse = const_cast<void*>(b.lse.const_data_ptr());
  const Tangents tangents = bring_in(b.tangents, placements, tensors);
  const Tensor tangent_out = allocate(*problem.tangent_out, a.query),
               tangent_lse = allocate(*problem.tangent_lse, a.query);
  tensors.tangent_out = tangent_out.mutable_data_ptr();
  tensors.tangent_lse = tangent_lse.mutable_data_ptr();
  run_or_fail(*plan, tensors, a.query);
  return {hand_out(tangent_out, call.out), tangent_lse};
}

}  // namespace
}  // namespace flashmoe::ops

STABLE_TORCH_LIBRARY_IMPL(flashmoe, CPU, m) {
  m.impl("attention_tangent", flashmoe::ops::Boxed<flashmoe::ops::tangent>::call);
}

STABLE_TORCH_LIBRARY_IMPL(flashmoe, CUDA, m) {
  m.impl("attention_tangent", flashmoe::ops::Boxed<flashmoe::ops::tangent>::call);
}
