// The backward pass of the experts. A gradient nobody needs is an empty tensor.
#include <tuple>

#include "execute.h"
#include "moe_call.h"

namespace flashmoe::ops {
namespace {

using SixTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

SixTensors moe_backward(const MoeBackwardArguments& b) {
  const MoeArguments& a = b.call;
  check_same_device(a, {{"grad_out", &b.grad_out}, {"pre", &b.pre}, {"routing", &b.routing}});
  const Device device = device_of(a.x);
  const MoeBackwardInputs more{.grad_out = place("grad_out", b.grad_out, device, needs_moe_copy),
                               .pre = spec_of("pre", b.pre),
                               .routing = spec_of("routing", b.routing),
                               .needs = b.needs};
  const MoeBackwardCall call = backward_call(a, more, device);
  const MoeProblem& problem = call.problem;
  // Refused before anything is copied or allocated.
  const auto plan = plan_or_fail<MoePlan>(problem);

  const MoeInputTensors inputs(a, call.inputs);
  const Tensor grad_out = bring_in(b.grad_out, call.grad_out);
  MoeTensors tensors = inputs.addresses();
  tensors.pre = const_cast<void*>(b.pre.const_data_ptr());  // only read here, as routing is
  tensors.routing = const_cast<void*>(b.routing.const_data_ptr());
  tensors.grad_out = grad_out.const_data_ptr();
  const DType dtype = problem.x.dtype;
  const Tensor dx = allocate_gradient(problem.grad_x, dtype, a.x, tensors.grad_x);
  const Tensor dgate_up = allocate_gradient(problem.grad_gate_up, dtype, a.x, tensors.grad_gate_up);
  const Tensor ddown = allocate_gradient(problem.grad_down, dtype, a.x, tensors.grad_down);
  const Tensor dup_bias = allocate_gradient(problem.grad_up_bias, dtype, a.x, tensors.grad_up_bias);
  const Tensor ddown_bias =
      allocate_gradient(problem.grad_down_bias, dtype, a.x, tensors.grad_down_bias);
  const Tensor dweights = allocate_gradient(
      problem.grad_weights, problem.weights ? problem.weights->dtype : DType::kFloat32, a.x,
      tensors.grad_weights);
  run_or_fail(*plan, tensors, a.x);
  return {hand_out(dx, call.grad_x),
          hand_out(dgate_up, call.grad_gate_up),
          hand_out(ddown, call.grad_down),
          hand_out(dup_bias, call.grad_up_bias),
          hand_out(ddown_bias, call.grad_down_bias),
          dweights};
}

}  // namespace
}  // namespace flashmoe::ops

STABLE_TORCH_LIBRARY_IMPL(flashmoe, CPU, m) {
  m.impl("moe_backward", flashmoe::ops::Boxed<flashmoe::ops::moe_backward>::call);
}

STABLE_TORCH_LIBRARY_IMPL(flashmoe, CUDA, m) {
  m.impl("moe_backward", flashmoe::ops::Boxed<flashmoe::ops::moe_backward>::call);
}
