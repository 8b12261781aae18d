// The forward pass as two ops: one without gradients, and one that has them.
#include "attention_passes.h"
#include "call.h"
#include "execute.h"

namespace flashmoe::ops {

std::tuple<Tensor, Tensor> forward(const Arguments& given) {
  check_same_device(given);
  Arguments a = given;
  a.bias = start_aligned(a.bias);
  const ForwardCall call = forward_call(a, device_of(a.query));
  // Refused before anything is copied or allocated.
  const auto plan = plan_or_fail<AttentionPlan>(call.problem);

  const Tensor query = bring_in(a.query, call.query), key = bring_in(a.key, call.key),
               value = bring_in(a.value, call.value);
  const Tensor out = allocate(call.problem.out, a.query),
               lse = allocate(*call.problem.lse, a.query);
  AttentionTensors tensors = addresses(a, query, key, value);
  tensors.out = out.mutable_data_ptr();
  tensors.lse = lse.mutable_data_ptr();
  run_or_fail(*plan, tensors, a.query);
  return {hand_out(out, call.out), lse};
}

}  // namespace flashmoe::ops

// `attention` is the same under the name that has autograd (registered in Python): what traced
// graphs hold.
STABLE_TORCH_LIBRARY_IMPL(flashmoe, CPU, m) {
  m.impl("attention_forward", flashmoe::ops::Boxed<flashmoe::ops::forward>::call);
  m.impl("attention", flashmoe::ops::Boxed<flashmoe::ops::forward>::call);
}

STABLE_TORCH_LIBRARY_IMPL(flashmoe, CUDA, m) {
  m.impl("attention_forward", flashmoe::ops::Boxed<flashmoe::ops::forward>::call);
  m.impl("attention", flashmoe::ops::Boxed<flashmoe::ops::forward>::call);
}
