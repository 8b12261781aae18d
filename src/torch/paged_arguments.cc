#include "paged_arguments.h"

#include "error.h"

namespace flashmoe::ops {

// Braces are filled from left to right, and so in the order of the schema.

PagedArguments PagedArguments::read(ArgumentReader& in) {
  return {.query = in.next<Tensor>(),
          .k_cache = in.next<Tensor>(),
          .v_cache = in.next<Tensor>(),
          .block_table = in.next<Tensor>(),
          .seq_lens = in.next<Tensor>(),
          .cu_seqlens_q = in.next<OptionalTensor>(),
          .sinks = in.next<OptionalTensor>(),
          .k_scale = in.next<OptionalTensor>(),
          .v_scale = in.next<OptionalTensor>(),
          .max_seqlen_q = in.next<std::optional<int64_t>>(),
          .max_seqlen_k = in.next<std::optional<int64_t>>(),
          .options = {.causal = in.next<bool>(),
                      .window_left = in.next<int64_t>(),
                      .window_right = in.next<int64_t>(),
                      .scale = in.next<std::optional<double>>(),
                      .softcap = in.next<double>()}};
}

PagedForwardArguments PagedForwardArguments::read(ArgumentReader& in) {
  return {.call = PagedArguments::read(in), .return_lse = in.next<bool>()};
}

PagedOutArguments PagedOutArguments::read(ArgumentReader& in) {
  return {
      .call = PagedArguments::read(in), .out = in.next<Tensor>(), .lse = in.next<OptionalTensor>()};
}

ExplainPagedArguments ExplainPagedArguments::read(ArgumentReader& in) {
  return {.forward = PagedForwardArguments::read(in), .device = in.next<std::string>()};
}

AppendArguments AppendArguments::read(ArgumentReader& in) {
  return {.key = in.next<Tensor>(),
          .value = in.next<Tensor>(),
          .k_cache = in.next<Tensor>(),
          .v_cache = in.next<Tensor>(),
          .slot_mapping = in.next<Tensor>(),
          .k_scale = in.next<OptionalTensor>(),
          .v_scale = in.next<OptionalTensor>()};
}

ExplainAppendArguments ExplainAppendArguments::read(ArgumentReader& in) {
  return {.append = AppendArguments::read(in), .device = in.next<std::string>()};
}

void check_same_device(const PagedArguments& a, std::initializer_list<NamedTensor> more) {
  const NamedTensor query = {"query", &a.query};
  check_same_device(query, {{"k_cache", &a.k_cache},
                            {"v_cache", &a.v_cache},
                            {"block_table", &a.block_table},
                            {"seq_lens", &a.seq_lens},
                            {"cu_seqlens_q", pointer_to(a.cu_seqlens_q)},
                            {"sinks", pointer_to(a.sinks)},
                            {"k_scale", pointer_to(a.k_scale)},
                            {"v_scale", pointer_to(a.v_scale)}});
  check_same_device(query, more);
}

void check_same_device(const AppendArguments& a) {
  check_same_device({"key", &a.key}, {{"value", &a.value},
                                      {"k_cache", &a.k_cache},
                                      {"v_cache", &a.v_cache},
                                      {"slot_mapping", &a.slot_mapping},
                                      {"k_scale", pointer_to(a.k_scale)},
                                      {"v_scale", pointer_to(a.v_scale)}});
}

AppendProblem append_problem(const AppendArguments& a, const Device& device) {
  AppendProblem problem;
  problem.device = device;
  problem.key = spec_of("key", a.key);
  problem.value = spec_of("value", a.value);
  problem.key_cache = cache_spec("k_cache", a.k_cache);
  problem.value_cache = cache_spec("v_cache", a.v_cache);
  problem.slots = spec_of("slot_mapping", a.slot_mapping);
  problem.k_scale = scale_spec("k_scale", a.k_scale);
  problem.v_scale = scale_spec("v_scale", a.v_scale);
  return problem;
}

TensorSpec cache_spec(const char* name, const Tensor& cache) {
  if (cache.scalar_type() == torch::headeronly::ScalarType::Byte) {
    fail(std::string(name) + " is torch.uint8; where its bytes are fp8 numbers (e4m3), pass " +
         name + ".view(torch.float8_e4m3fn)");
  }
  return spec_of(name, cache);
}

std::optional<TensorSpec> scale_spec(const char* name, const OptionalTensor& scale) {
  std::optional<TensorSpec> spec = spec_of(name, scale);
  if (spec && spec->rank == 1 && spec->shape[0] == 1) spec = contiguous(spec->dtype, {});
  return spec;
}

}  // namespace flashmoe::ops
