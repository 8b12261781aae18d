// The passes that give gradients: the backward pass, and the one of second derivatives. A gradient
// nobody needs is an empty tensor.
#include "attention_passes.h"
#include "call.h"
#include "execute.h"

namespace flashmoe::ops {
namespace {

// With `more`, what the second pass has besides.
Gradients gradients(const BackwardArguments& b, const SecondArguments* more) {
  Arguments a = b.forward;
  a.bias = start_aligned(a.bias);
  check_same_device(a, {{"out", &b.out},
                        {"lse", &b.lse},
                        {"grad_out", pointer_to(b.grad_out)},
                        {"grad_lse", pointer_to(b.grad_lse)}});
  const Device device = device_of(a.query);
  const BackwardInputs inputs{.out = place("out", b.out, device, needs_copy),
                              .lse = spec_of("lse", b.lse),
                              .grad_out = place("grad_out", b.grad_out, device, needs_copy),
                              .grad_lse = spec_of("grad_lse", b.grad_lse),
                              .needs_query = b.needs_query,
                              .needs_key = b.needs_key,
                              .needs_value = b.needs_value,
                              .needs_bias = b.needs_bias,
                              .needs_sinks = b.needs_sinks};
  BackwardCall call = backward_call(a, inputs, device);
  AttentionProblem& problem = call.problem;
  TangentPlacements tangent_placements;
  Placement tangent_out;
  if (more) {
    check_same_device(a, more->tangents);
    check_same_device(a,
                      {{"tangent_out", &more->tangent_out}, {"tangent_lse", &more->tangent_lse}});
    problem.pass = Pass::kSecond;
    tangent_placements = place_tangents(more->tangents, device, problem);
    tangent_out = place("tangent_out", more->tangent_out, device, needs_copy);
    problem.tangent_out = tangent_out.inside;
    problem.tangent_lse = spec_of("tangent_lse", more->tangent_lse);
  }
  // Refused before anything is copied or allocated.
  const auto plan = plan_or_fail<AttentionPlan>(problem);

  const Tensor query = bring_in(a.query, call.query), key = bring_in(a.key, call.key),
               value = bring_in(a.value, call.value), out = bring_in(b.out, call.out);
  const OptionalTensor grad_out = bring_in(b.grad_out, call.grad_out);
  AttentionTensors tensors = addresses(a, query, key, value);
  tensors.out = const_cast<void*>(out.const_data_ptr());  // only read here, as lse is
  tensors.lse = const_cast<void*>(b.lse.const_data_ptr());
  tensors.grad_out = data_of(grad_out);
  tensors.grad_lse = data_of(b.grad_lse);
  Tangents tangents;
  OptionalTensor moved_out;
  if (more) {
    tangents = bring_in(more->tangents, tangent_placements, tensors);
    moved_out = bring_in(more->tangent_out, tangent_out);
    tensors.tangent_out = const_cast<void*>(data_of(moved_out));
    tensors.tangent_lse = const_cast<void*>(more->tangent_lse.const_data_ptr());
  }
  const DType dtype = problem.query.dtype;
  const Tensor dq = allocate_gradient(problem.grad_query, dtype, a.query, tensors.grad_query);
  const Tensor dk = allocate_gradient(problem.grad_key, dtype, a.query, tensors.grad_key);
  const Tensor dv = allocate_gradient(problem.grad_value, dtype, a.query, tensors.grad_value);
  const Tensor db = allocate_gradient(problem.grad_bias, problem.bias.value_or(problem.query).dtype,
                                      a.query, tensors.grad_bias);
  const Tensor ds = allocate_gradient(
      problem.grad_sinks, problem.sinks.value_or(problem.query).dtype, a.query, tensors.grad_sinks);
  run_or_fail(*plan, tensors, a.query);
  return {hand_out(dq, call.grad_query), hand_out(dk, call.grad_key), hand_out(dv, call.grad_value),
          db, ds};
}

Gradients second(const SecondArguments& b) { return gradients(b.backward, &b); }

}  // namespace

Gradients backward(const BackwardArguments& b) { return gradients(b, nullptr); }

}  // namespace flashmoe::ops

// `attention_gradients` is the same under the name that has autograd (registered in Python).
STABLE_TORCH_LIBRARY_IMPL(flashmoe, CPU, m) {
  m.impl("attention_backward", flashmoe::ops::Boxed<flashmoe::ops::backward>::call);
  m.impl("attention_gradients", flashmoe::ops::Boxed<flashmoe::ops::backward>::call);
  m.impl("attention_second", flashmoe::ops::Boxed<flashmoe::ops::second>::call);
}

STABLE_TORCH_LIBRARY_IMPL(flashmoe, CUDA, m) {
  m.impl("attention_backward", flashmoe::ops::Boxed<flashmoe::ops::backward>::call);
  m.impl("attention_gradients", flashmoe::ops::Boxed<flashmoe::ops::backward>::call);
  m.impl("attention_second", flashmoe::ops::Boxed<flashmoe::ops::second>::call);
}
