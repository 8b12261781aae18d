// From arguments to a problem. Decides where every tensor of a call will lie, and moves none: the
// ops plan the problem first and then bring the tensors there, explain() only plans it.
#pragma once

#include "arguments.h"
#include "placement.h"

namespace flashmoe::ops {

// How results lie. `out` has the query's layout, so that (B, S, H, D) storage in gives the same
// storage out; another head dim has no layout to follow. lse is packed.
TensorSpec out_spec(const TensorSpec& query, const TensorSpec& value);
std::optional<TensorSpec> lse_spec(TensorSpec query);

struct ForwardCall {
  Placement query, key, value, out;
  AttentionProblem problem;  // with the tensors as the kernels see them
};

ForwardCall forward_call(const Arguments& a, const Device& device);

// What the backward pass has besides the arguments of the forward pass.
struct BackwardInputs {
  Placement out;
  TensorSpec lse;
  std::optional<Placement> grad_out;
  std::optional<TensorSpec> grad_lse;
  bool needs_query, needs_key, needs_value, needs_bias, needs_sinks;
};

struct BackwardCall {
  Placement query, key, value, out;
  std::optional<Placement> grad_out;
  // Absent where the gradient is not wanted. That of the bias is written as it lies: kernels take
  // any strides there.
  std::optional<Placement> grad_query, grad_key, grad_value;
  std::optional<TensorSpec> grad_bias;
  AttentionProblem problem;
};

BackwardCall backward_call(const Arguments& a, const BackwardInputs& inputs, const Device& device);

// Where tangents of the inputs lie; that of the bias is read as it lies.
struct TangentPlacements {
  std::optional<Placement> query, key, value;
};

// Adds tangents to a problem.
TangentPlacements place_tangents(const Tangents& tangents, const Device& device,
                                 AttentionProblem& problem);

// The tensors that kernels read, and their addresses in `tensors`.
Tangents bring_in(const Tangents& tangents, const TangentPlacements& placements,
                  AttentionTensors& tensors);

}  // namespace flashmoe::ops
