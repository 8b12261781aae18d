// The backward pass. A gradient nobody needs is an empty tensor.
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "call.h"
#include "execute.h"

namespace flashmoe::ops {
namespace {

// Memory for a gradient, and its address; without elements and null where it is not wanted.
Tensor allocate_gradient(const std::optional<TensorSpec>& spec, const TensorSpec& of,
                         const Tensor& like, void*& address) {
  if (!spec) return allocate(contiguous(of.dtype, {0}), like);
  const Tensor gradient = allocate(*spec, like);
  address = gradient.mutable_data_ptr();
  return gradient;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const OptionalTensor& grad_out, const OptionalTensor& grad_lse, const Tensor& query,
    const Tensor& key, const Tensor& value, const OptionalTensor& bias,
    const OptionalTensor& key_lengths, const OptionalTensor& cu_seqlens_q,
    const OptionalTensor& cu_seqlens_k, const Tensor& out, const Tensor& lse, int64_t max_seqlen_q,
    int64_t max_seqlen_k, bool causal, int64_t window_left, int64_t window_right,
    std::optional<double> scale, double softcap, bool deterministic, bool needs_query,
    bool needs_key, bool needs_value, bool needs_bias) {
  const Arguments a{query,        key,          value,        bias,         key_lengths,
                    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal,
                    window_left,  window_right, scale,        softcap};
  check_same_device(a, {{"out", &out},
                        {"lse", &lse},
                        {"grad_out", pointer_to(grad_out)},
                        {"grad_lse", pointer_to(grad_lse)}});
  const Device device = device_of(query);
  const BackwardInputs inputs{.out = place("out", out, device),
                              .lse = spec_of("lse", lse),
                              .grad_out = place("grad_out", grad_out, device),
                              .grad_lse = spec_of("grad_lse", grad_lse),
                              .deterministic = deterministic,
                              .needs_query = needs_query,
                              .needs_key = needs_key,
                              .needs_value = needs_value,
                              .needs_bias = needs_bias};
  const BackwardCall call = backward_call(a, inputs, device);
  const AttentionProblem& problem = call.problem;
  const auto plan = plan_or_fail(problem);  // refused before anything is copied or allocated

  const Tensor q = bring_in(query, call.query), k = bring_in(key, call.key),
               v = bring_in(value, call.value), o = bring_in(out, call.out);
  const OptionalTensor go = bring_in(grad_out, call.grad_out);
  AttentionTensors tensors = addresses(a, q, k, v);
  tensors.out = const_cast<void*>(o.const_data_ptr());  // only read here, as lse is
  tensors.lse = const_cast<void*>(lse.const_data_ptr());
  tensors.grad_out = data_of(go);
  tensors.grad_lse = data_of(grad_lse);
  const Tensor dq = allocate_gradient(problem.grad_query, problem.query, query, tensors.grad_query);
  const Tensor dk = allocate_gradient(problem.grad_key, problem.key, query, tensors.grad_key);
  const Tensor dv = allocate_gradient(problem.grad_value, problem.value, query, tensors.grad_value);
  const Tensor db = allocate_gradient(problem.grad_bias, problem.bias.value_or(problem.query),
                                      query, tensors.grad_bias);
  run_or_fail(*plan, tensors, query);
  return {hand_out(dq, call.grad_query), hand_out(dk, call.grad_key), hand_out(dv, call.grad_value),
          db};
}

}  // namespace
}  // namespace flashmoe::ops

STABLE_TORCH_LIBRARY_IMPL(flashmoe, CPU, m) {
  m.impl("attention_backward", TORCH_BOX(&flashmoe::ops::attention_backward));
}

STABLE_TORCH_LIBRARY_IMPL(flashmoe, CUDA, m) {
  m.impl("attention_backward", TORCH_BOX(&flashmoe::ops::attention_backward));
}
