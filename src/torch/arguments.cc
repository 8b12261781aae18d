#include "arguments.h"

#include <string>

namespace flashmoe::ops {

// Braces are filled from left to right, and so in the order of the schema.

Arguments Arguments::read(ArgumentReader& in) {
  return {.query = in.next<Tensor>(),
          .key = in.next<Tensor>(),
          .value = in.next<Tensor>(),
          .bias = in.next<OptionalTensor>(),
          .sinks = in.next<OptionalTensor>(),
          .key_lengths = in.next<OptionalTensor>(),
          .cu_seqlens_q = in.next<OptionalTensor>(),
          .cu_seqlens_k = in.next<OptionalTensor>(),
          .max_seqlen_q = in.next<int64_t>(),
          .max_seqlen_k = in.next<int64_t>(),
          .options = {.causal = in.next<bool>(),
                      .window_left = in.next<int64_t>(),
                      .window_right = in.next<int64_t>(),
                      .scale = in.next<std::optional<double>>(),
                      .softcap = in.next<double>(),
                      .deterministic = in.next<bool>()}};
}

BackwardArguments BackwardArguments::read(ArgumentReader& in) {
  return {.grad_out = in.next<OptionalTensor>(),
          .grad_lse = in.next<OptionalTensor>(),
          .out = in.next<Tensor>(),
          .lse = in.next<Tensor>(),
          .forward = Arguments::read(in),
          .needs_query = in.next<bool>(),
          .needs_key = in.next<bool>(),
          .needs_value = in.next<bool>(),
          .needs_bias = in.next<bool>(),
          .needs_sinks = in.next<bool>()};
}

ExplainArguments ExplainArguments::read(ArgumentReader& in) {
  return {
      .call = Arguments::read(in), .backward = in.next<bool>(), .device = in.next<std::string>()};
}

void check_same_device(const Arguments& a, std::initializer_list<NamedTensor> more) {
  const NamedTensor query = {"query", &a.query};
  check_same_device(query, {{"key", &a.key},
                            {"value", &a.value},
                            {"bias", pointer_to(a.bias)},
                            {"sinks", pointer_to(a.sinks)},
                            {"key_lengths", pointer_to(a.key_lengths)},
                            {"cu_seqlens_q", pointer_to(a.cu_seqlens_q)},
                            {"cu_seqlens_k", pointer_to(a.cu_seqlens_k)}});
  check_same_device(query, more);
}

AttentionTensors addresses(const Arguments& a, const Tensor& query, const Tensor& key,
                           const Tensor& value) {
  AttentionTensors tensors;
  tensors.query = query.const_data_ptr();
  tensors.key = key.const_data_ptr();
  tensors.value = value.const_data_ptr();
  tensors.bias = data_of(a.bias);
  tensors.sinks = data_of(a.sinks);
  tensors.key_lengths = data_of(a.key_lengths);
  tensors.cu_seqlens_q = data_of(a.cu_seqlens_q);
  tensors.cu_seqlens_k = data_of(a.cu_seqlens_k);
  return tensors;
}

}  // namespace flashmoe::ops
