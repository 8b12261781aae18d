// The arguments of the attention ops.
#pragma once

#include <initializer_list>
#include <string>

#include "boxed.h"
#include "convert.h"
#include "flashmoe/attention.h"

namespace flashmoe::ops {

// What every attention op has: FLASHMOE_ARGUMENTS of schema.cc.
struct Arguments {
  Tensor query, key, value;
  OptionalTensor bias{}, sinks{}, key_lengths{}, cu_seqlens_q{}, cu_seqlens_k{};
  int64_t max_seqlen_q, max_seqlen_k;
  AttentionOptions options;
  OptionalTensor seed{};  // of dropout

  static Arguments read(ArgumentReader& in);
};

struct BackwardArguments {
  OptionalTensor grad_out{}, grad_lse{};
  Tensor out, lse;
  Arguments forward;
  bool needs_query, needs_key, needs_value, needs_bias, needs_sinks;

  static BackwardArguments read(ArgumentReader& in);
};

// How the inputs of a call move: FLASHMOE_TANGENTS of schema.cc. Absent: not at all.
struct Tangents {
  OptionalTensor query, key, value, bias, sinks;

  static Tangents read(ArgumentReader& in);
};

struct TangentArguments {
  Tangents tangents;
  Tensor out, lse;
  Arguments forward;

  static TangentArguments read(ArgumentReader& in);
};

struct SecondArguments {
  Tangents tangents;
  Tensor tangent_out, tangent_lse;
  BackwardArguments backward;

  static SecondArguments read(ArgumentReader& in);
};

struct ExplainArguments {
  Arguments call;
  Pass pass;
  std::string device;  // "": the tensors' own

  static ExplainArguments read(ArgumentReader& in);
};

// Fails unless all of them, and the tensors that an op has besides, are where query is.
void check_same_device(const Arguments& a, std::initializer_list<NamedTensor> more = {});

// The same for tangents.
void check_same_device(const Arguments& a, const Tangents& tangents);

// Addresses of the inputs, with query, key and value where the kernels read them.
AttentionTensors addresses(const Arguments& a, const Tensor& query, const Tensor& key,
                           const Tensor& value);

}  // namespace flashmoe::ops
