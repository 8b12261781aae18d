// The arguments of the ops of a mixture of experts and of its router.
#pragma once

#include <initializer_list>
#include <string>

#include "boxed.h"
#include "convert.h"
#include "flashmoe/moe.h"

namespace flashmoe::ops {

// What every op of the experts has: FLASHMOE_MOE_ARGUMENTS of schema.cc.
struct MoeArguments {
  Tensor x, gate_up, down;
  OptionalTensor up_bias, down_bias;
  Tensor ids;
  OptionalTensor weights;
  Activation activation;

  static MoeArguments read(ArgumentReader& in);
};

struct MoeForwardArguments {
  MoeArguments call;
  bool keep;  // what the backward pass needs

  static MoeForwardArguments read(ArgumentReader& in);
};

// Which gradients are wanted.
struct MoeNeeds {
  bool x, gate_up, down, up_bias, down_bias, weights;
};

struct MoeBackwardArguments {
  Tensor grad_out, pre, routing;
  MoeArguments call;
  MoeNeeds needs;

  static MoeBackwardArguments read(ArgumentReader& in);
};

struct ExplainMoeArguments {
  MoeForwardArguments forward;
  bool backward;
  std::string device;  // "": the tensors' own

  static ExplainMoeArguments read(ArgumentReader& in);
};

struct RouteArguments {
  Tensor logits;
  OptionalTensor bias;
  int64_t k;
  Scoring scoring;
  bool normalize;

  static RouteArguments read(ArgumentReader& in);
};

struct RouteBackwardArguments {
  Tensor grad_weights, logits, ids;
  Scoring scoring;
  bool normalize;

  static RouteBackwardArguments read(ArgumentReader& in);
};

// Fails unless all of them, and the tensors that an op has besides, are where x is.
void check_same_device(const MoeArguments& a, std::initializer_list<NamedTensor> more = {});

}  // namespace flashmoe::ops
