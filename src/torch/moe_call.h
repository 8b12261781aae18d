// From the arguments of the experts' ops to a problem. Decides where every tensor of a call will
// lie, and moves none: the ops plan the problem first, explain_moe() only plans it.
#pragma once

#include "moe_arguments.h"
#include "placement.h"

namespace flashmoe::ops {

// The inputs of both passes that kernels may want copied. Ids and weights are read with whatever
// strides they have.
struct MoeInputs {
  Placement x, gate_up, down;
  std::optional<Placement> up_bias, down_bias;
};

struct MoeForwardCall {
  MoeInputs inputs;
  Placement out;
  MoeProblem problem;  // with the tensors as the kernels see them
};

MoeForwardCall forward_call(const MoeArguments& a, bool keep, const Device& device);

// What the backward pass has besides the arguments of the forward pass.
struct MoeBackwardInputs {
  Placement grad_out;
  TensorSpec pre, routing;  // as the forward pass laid them out
  MoeNeeds needs;
};

struct MoeBackwardCall {
  MoeInputs inputs;
  Placement grad_out;
  // Absent where the gradient is not wanted.
  std::optional<Placement> grad_x, grad_gate_up, grad_down, grad_up_bias, grad_down_bias;
  MoeProblem problem;
};

MoeBackwardCall backward_call(const MoeArguments& a, const MoeBackwardInputs& inputs,
                              const Device& device);

// The inputs where the kernels read them: alive as long as this is.
class MoeInputTensors {
 public:
  MoeInputTensors(const MoeArguments& a, const MoeInputs& inputs);
  MoeTensors addresses() const;

 private:
  Tensor x_, gate_up_, down_, ids_;
  OptionalTensor up_bias_, down_bias_, weights_;
};

}  // namespace flashmoe::ops
