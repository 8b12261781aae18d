// The router, both passes. Its kernels read and write tensors as they lie.
#include <tuple>

#include "execute.h"
#include "layout.h"
#include "moe_arguments.h"

namespace flashmoe::ops {
namespace {

// (T, k) for logits (T, E); the planner says what is wrong with other logits.
TensorSpec choices_spec(const TensorSpec& logits, int64_t k, DType dtype) {
  return contiguous(dtype, {logits.rank > 0 ? logits.shape[0] : 0, k});
}

DType weights_dtype(const TensorSpec& logits) {
  return logits.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

std::tuple<Tensor, Tensor> route_forward(const RouteArguments& a) {
  check_same_device({"logits", &a.logits}, {{"bias", pointer_to(a.bias)}});
  RouteProblem problem;
  problem.device = device_of(a.logits);
  problem.scoring = a.scoring;
  problem.normalize = a.normalize;
  problem.logits = spec_of("logits", a.logits);
  problem.bias = spec_of("bias", a.bias);
  problem.ids = choices_spec(problem.logits, a.k, DType::kInt32);
  problem.weights = choices_spec(problem.logits, a.k, weights_dtype(problem.logits));
  const auto plan = plan_or_fail<RoutePlan>(problem);

  const Tensor ids = allocate(problem.ids, a.logits), weights = allocate(problem.weights, a.logits);
  RouteTensors tensors;
  tensors.logits = a.logits.const_data_ptr();
  tensors.bias = data_of(a.bias);
  tensors.ids = ids.mutable_data_ptr();
  tensors.weights = weights.mutable_data_ptr();
  run_or_fail(*plan, tensors, a.logits);
  return {weights, ids};
}

std::tuple<Tensor> route_backward(const RouteBackwardArguments& a) {
  check_same_device({"logits", &a.logits}, {{"grad_weights", &a.grad_weights}, {"ids", &a.ids}});
  RouteProblem problem;
  problem.pass = Pass::kBackward;
  problem.device = device_of(a.logits);
  problem.scoring = a.scoring;
  problem.normalize = a.normalize;
  problem.logits = spec_of("logits", a.logits);
  problem.ids = spec_of("ids", a.ids);
  problem.grad_weights = spec_of("grad_weights", a.grad_weights);
  problem.weights = packed(*problem.grad_weights);
  problem.grad_logits = packed_like(problem.logits);
  const auto plan = plan_or_fail<RoutePlan>(problem);

  RouteTensors tensors;
  tensors.logits = a.logits.const_data_ptr();
  tensors.ids = const_cast<void*>(a.ids.const_data_ptr());  // only read here
  tensors.grad_weights = a.grad_weights.const_data_ptr();
  const Tensor grad_logits =
      allocate_gradient(problem.grad_logits, problem.logits.dtype, a.logits, tensors.grad_logits);
  run_or_fail(*plan, tensors, a.logits);
  return grad_logits;
}

}  // namespace
}  // namespace flashmoe::ops

// `route` is route_forward under the name that has autograd (registered in Python).
STABLE_TORCH_LIBRARY_IMPL(flashmoe, CPU, m) {
  m.impl("route_forward", flashmoe::ops::Boxed<flashmoe::ops::route_forward>::call);
  m.impl("route", flashmoe::ops::Boxed<flashmoe::ops::route_forward>::call);
  m.impl("route_backward", flashmoe::ops::Boxed<flashmoe::ops::route_backward>::call);
}

STABLE_TORCH_LIBRARY_IMPL(flashmoe, CUDA, m) {
  m.impl("route_forward", flashmoe::ops::Boxed<flashmoe::ops::route_forward>::call);
  m.impl("route", flashmoe::ops::Boxed<flashmoe::ops::route_forward>::call);
  m.impl("route_backward", flashmoe::ops::Boxed<flashmoe::ops::route_backward>::call);
}
