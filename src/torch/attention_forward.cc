// The forward pass as two ops: one without gradients, and one that has them.
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "call.h"
#include "execute.h"

namespace flashmoe::ops {
namespace {

std::tuple<Tensor, Tensor> forward(const Arguments& a) {
  check_same_device(a);
  const ForwardCall call = forward_call(a, device_of(a.query));
  const auto plan = plan_or_fail(call.problem);  // refused before anything is copied or allocated

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

std::tuple<Tensor, Tensor> attention_forward(
    const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& bias,
    const OptionalTensor& key_lengths, const OptionalTensor& cu_seqlens_q,
    const OptionalTensor& cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k, bool causal,
    int64_t window_left, int64_t window_right, std::optional<double> scale, double softcap) {
  return forward({query, key, value, bias, key_lengths, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
                  max_seqlen_k, causal, window_left, window_right, scale, softcap});
}

// The same under the name that has autograd (registered in Python): what traced graphs hold. Only
// its backward pass asks whether to be deterministic.
std::tuple<Tensor, Tensor> attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                     const OptionalTensor& bias, const OptionalTensor& key_lengths,
                                     const OptionalTensor& cu_seqlens_q,
                                     const OptionalTensor& cu_seqlens_k, int64_t max_seqlen_q,
                                     int64_t max_seqlen_k, bool causal, int64_t window_left,
                                     int64_t window_right, std::optional<double> scale,
                                     double softcap, bool /*deterministic*/) {
  return forward({query, key, value, bias, key_lengths, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
                  max_seqlen_k, causal, window_left, window_right, scale, softcap});
}

}  // namespace
}  // namespace flashmoe::ops

STABLE_TORCH_LIBRARY_IMPL(flashmoe, CPU, m) {
  m.impl("attention_forward", TORCH_BOX(&flashmoe::ops::attention_forward));
  m.impl("attention", TORCH_BOX(&flashmoe::ops::attention));
}

STABLE_TORCH_LIBRARY_IMPL(flashmoe, CUDA, m) {
  m.impl("attention_forward", TORCH_BOX(&flashmoe::ops::attention_forward));
  m.impl("attention", TORCH_BOX(&flashmoe::ops::attention));
}
