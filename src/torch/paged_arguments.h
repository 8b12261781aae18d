// The arguments of the ops over a paged cache: attention, and writing to it.
#pragma once

#include <initializer_list>
#include <optional>
#include <string>

#include "boxed.h"
#include "convert.h"
#include "flashmoe/attention.h"
#include "flashmoe/cache.h"

namespace flashmoe::ops {

// What every op of attention over pages has: FLASHMOE_PAGED_ARGUMENTS of schema.cc.
struct PagedArguments {
  Tensor query, k_cache, v_cache, block_table, seq_lens;
  OptionalTensor cu_seqlens_q, sinks, k_scale, v_scale;
  std::optional<int64_t> max_seqlen_q, max_seqlen_k;
  AttentionOptions options;

  static PagedArguments read(ArgumentReader& in);
};

struct PagedForwardArguments {
  PagedArguments call;
  bool return_lse;

  static PagedForwardArguments read(ArgumentReader& in);
};

struct PagedOutArguments {
  PagedArguments call;
  Tensor out;
  OptionalTensor lse;

  static PagedOutArguments read(ArgumentReader& in);
};

struct ExplainPagedArguments {
  PagedForwardArguments forward;
  std::string device;  // "": the tensors' own

  static ExplainPagedArguments read(ArgumentReader& in);
};

// FLASHMOE_APPEND_ARGUMENTS of schema.cc.
struct AppendArguments {
  Tensor key, value, k_cache, v_cache, slot_mapping;
  OptionalTensor k_scale, v_scale;

  static AppendArguments read(ArgumentReader& in);
};

struct ExplainAppendArguments {
  AppendArguments append;
  std::string device;  // "": the tensors' own

  static ExplainAppendArguments read(ArgumentReader& in);
};

// Fails unless all of them, and the tensors that an op has besides, are where query is.
void check_same_device(const PagedArguments& a, std::initializer_list<NamedTensor> more = {});
void check_same_device(const AppendArguments& a);

// What is asked of a device.
AppendProblem append_problem(const AppendArguments& a, const Device& device);

// A cache as it lies: one is never copied. Fails for bytes, which are how some keep fp8 numbers.
TensorSpec cache_spec(const char* name, const Tensor& cache);

// A scale of a cache; one number in a dimension of its own is one number.
std::optional<TensorSpec> scale_spec(const char* name, const OptionalTensor& scale);

}  // namespace flashmoe::ops
