// The forward pass of the experts as two ops: one without gradients, and one that has them.
#include <tuple>

#include "execute.h"
#include "moe_call.h"

namespace flashmoe::ops {
namespace {

// Memory for what only the backward pass needs; without elements where that is not wanted.
Tensor allocate_kept(const std::optional<TensorSpec>& spec, DType dtype, const Tensor& like) {
  return allocate(spec.value_or(contiguous(dtype, {0})), like);
}

std::tuple<Tensor, Tensor, Tensor> moe_forward(const MoeForwardArguments& f) {
  const MoeArguments& a = f.call;
  check_same_device(a);
  const MoeForwardCall call = forward_call(a, f.keep, device_of(a.x));
  const MoeProblem& problem = call.problem;
  // Refused before anything is copied or allocated.
  const auto plan = plan_or_fail<MoePlan>(problem);

  const MoeInputTensors inputs(a, call.inputs);
  const Tensor out = allocate(problem.out, a.x);
  const Tensor pre = allocate_kept(problem.pre, problem.x.dtype, a.x),
               routing = allocate_kept(problem.routing, DType::kInt32, a.x);
  MoeTensors tensors = inputs.addresses();
  tensors.out = out.mutable_data_ptr();
  if (f.keep) {
    tensors.pre = pre.mutable_data_ptr();
    tensors.routing = routing.mutable_data_ptr();
  }
  run_or_fail(*plan, tensors, a.x);
  return {hand_out(out, call.out), pre, routing};
}

}  // namespace
}  // namespace flashmoe::ops

// `moe` is the same under the name that has autograd (registered in Python): what traced graphs
// hold.
STABLE_TORCH_LIBRARY_IMPL(flashmoe, CPU, m) {
  m.impl("moe_forward", flashmoe::ops::Boxed<flashmoe::ops::moe_forward>::call);
  m.impl("moe", flashmoe::ops::Boxed<flashmoe::ops::moe_forward>::call);
}

STABLE_TORCH_LIBRARY_IMPL(flashmoe, CUDA, m) {
  m.impl("moe_forward", flashmoe::ops::Boxed<flashmoe::ops::moe_forward>::call);
  m.impl("moe", flashmoe::ops::Boxed<flashmoe::ops::moe_forward>::call);
}
