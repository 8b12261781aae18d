#include "arguments.h"

#include <string>
#include <utility>

namespace flashmoe::ops {
namespace {

Pass pass_named(const std::string& name) {
  constexpr std::pair<const char*, Pass> kPasses[] = {{"forward", Pass::kForward},
                                                      {"backward", Pass::kBackward},
                                                      {"tangent", Pass::kTangent},
                                                      {"second", Pass::kSecond}};
  for (const auto& [known, pass] : kPasses) {
    if (name == known) return pass;
  }
  fail("explain() knows the passes forward, backward, tangent and second, not \"" + name + "\"");
}

}  // namespace

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
                      .deterministic = in.next<bool>(),
                      .allow_tf32 = in.next<bool>(),
                      .dropout_p = in.next<double>()},
          .seed = in.next<OptionalTensor>()};
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

Tangents Tangents::read(ArgumentReader& in) {
  return {.query = in.next<OptionalTensor>(),
          .key = in.next<OptionalTensor>(),
          .value = in.next<OptionalTensor>(),
          .bias = in.next<OptionalTensor>(),
          .sinks = in.next<OptionalTensor>()};
}

TangentArguments TangentArguments::read(ArgumentReader& in) {
  return {.tangents = Tangents::read(in),
          .out = in.next<Tensor>(),
          .lse = in.next<Tensor>(),
          .forward = Arguments::read(in)};
}

SecondArguments SecondArguments::read(ArgumentReader& in) {
  return {.tangents = Tangents::read(in),
          .tangent_out = in.next<Tensor>(),
          .tangent_lse = in.next<Tensor>(),
          .backward = BackwardArguments::read(in)};
}

ExplainArguments ExplainArguments::read(ArgumentReader& in) {
  return {.call = Arguments::read(in),
          .pass = pass_named(in.next<std::string>()),
          .device = in.next<std::string>()};
}

void check_same_device(const Arguments& a, std::initializer_list<NamedTensor> more) {
  const NamedTensor query = {"query", &a.query};
  check_same_device(query, {{"key", &a.key},
                            {"value", &a.value},
                            {"bias", pointer_to(a.bias)},
                            {"sinks", pointer_to(a.sinks)},
                            {"key_lengths", pointer_to(a.key_lengths)},
                            {"cu_seqlens_q", pointer_to(a.cu_seqlens_q)},
                            {"cu_seqlens_k", pointer_to(a.cu_seqlens_k)},
                            {"seed", pointer_to(a.seed)}});
  check_same_device(query, more);
}

void check_same_device(const Arguments& a, const Tangents& tangents) {
  check_same_device({"query", &a.query}, {{"tangent_query", pointer_to(tangents.query)},
                                          {"tangent_key", pointer_to(tangents.key)},
                                          {"tangent_value", pointer_to(tangents.value)},
                                          {"tangent_bias", pointer_to(tangents.bias)},
                                          {"tangent_sinks", pointer_to(tangents.sinks)}});
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
  tensors.seed = data_of(a.seed);
  return tensors;
}

}  // namespace flashmoe::ops
