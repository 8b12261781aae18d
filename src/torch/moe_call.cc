#include "moe_call.h"

#include "layout.h"

namespace flashmoe::ops {
namespace {

MoeInputs inputs_of(const MoeArguments& a, const Device& device) {
  return {.x = place("x", a.x, device, needs_moe_copy),
          .gate_up = place("gate_up", a.gate_up, device, needs_moe_copy),
          .down = place("down", a.down, device, needs_moe_copy),
          .up_bias = place("up_bias", a.up_bias, device, needs_moe_copy),
          .down_bias = place("down_bias", a.down_bias, device, needs_moe_copy)};
}

// Everything that both passes have.
MoeProblem problem_of(const MoeArguments& a, const MoeInputs& inputs, const Device& device) {
  MoeProblem p;
  p.device = device;
  p.activation = a.activation;
  p.x = inputs.x.inside;
  p.gate_up = inputs.gate_up.inside;
  p.down = inputs.down.inside;
  p.up_bias = inside(inputs.up_bias);
  p.down_bias = inside(inputs.down_bias);
  p.ids = spec_of("ids", a.ids);
  p.weights = spec_of("weights", a.weights);
  return p;
}

// A size of a tensor that is not checked yet: the planner says what is wrong with it.
int64_t size_of(const TensorSpec& spec, int dim) { return dim < spec.rank ? spec.shape[dim] : 0; }

// Unsigned, as in layout.cc: a product past 2^63 must only wrap around until it is refused.
int64_t pairs_of(const TensorSpec& ids) {
  return static_cast<int64_t>(static_cast<uint64_t>(size_of(ids, 0)) *
                              static_cast<uint64_t>(size_of(ids, 1)));
}

// (T k, G, n) with rows that kernels can address, so that it never needs a copy. The fake kernel in
// _library.py promises the same strides.
TensorSpec pre_spec(const MoeProblem& p) {
  TensorSpec pre;
  pre.dtype = p.x.dtype;
  pre.rank = 3;
  pre.shape = {pairs_of(p.ids), has_gate(p.activation) ? 2 : 1, size_of(p.down, 2)};
  return p.device.type == DeviceType::kCuda ? padded(pre) : packed(pre);
}

TensorSpec routing_spec(const MoeProblem& p) {
  const int64_t pairs = pairs_of(p.ids);
  return contiguous(DType::kInt32, {routing_elems(pairs, 1, size_of(p.gate_up, 0))});
}

}  // namespace

MoeForwardCall forward_call(const MoeArguments& a, bool keep, const Device& device) {
  MoeForwardCall call;
  call.inputs = inputs_of(a, device);
  call.out = place(packed(call.inputs.x.outside), device, needs_moe_copy);
  call.problem = problem_of(a, call.inputs, device);
  call.problem.out = call.out.inside;
  if (keep) {
    call.problem.pre = pre_spec(call.problem);
    call.problem.routing = routing_spec(call.problem);
  }
  return call;
}

MoeBackwardCall backward_call(const MoeArguments& a, const MoeBackwardInputs& in,
                              const Device& device) {
  MoeBackwardCall call;
  call.inputs = inputs_of(a, device);
  call.grad_out = in.grad_out;
  const auto gradient = [&](bool wanted, const Placement* of) -> std::optional<Placement> {
    if (!wanted || !of) return std::nullopt;
    return place(packed_like(of->outside), device, needs_moe_copy);
  };
  call.grad_x = gradient(in.needs.x, &call.inputs.x);
  call.grad_gate_up = gradient(in.needs.gate_up, &call.inputs.gate_up);
  call.grad_down = gradient(in.needs.down, &call.inputs.down);
  call.grad_up_bias = gradient(in.needs.up_bias, pointer_to(call.inputs.up_bias));
  call.grad_down_bias = gradient(in.needs.down_bias, pointer_to(call.inputs.down_bias));

  MoeProblem& p = call.problem = problem_of(a, call.inputs, device);
  p.pass = Pass::kBackward;
  p.out = place(packed(call.inputs.x.outside), device, needs_moe_copy).inside;
  p.pre = in.pre;
  p.routing = in.routing;
  p.grad_out = call.grad_out.inside;
  p.grad_x = inside(call.grad_x);
  p.grad_gate_up = inside(call.grad_gate_up);
  p.grad_down = inside(call.grad_down);
  p.grad_up_bias = inside(call.grad_up_bias);
  p.grad_down_bias = inside(call.grad_down_bias);
  if (in.needs.weights && p.weights) p.grad_weights = packed_like(*p.weights);
  return call;
}

MoeInputTensors::MoeInputTensors(const MoeArguments& a, const MoeInputs& inputs)
    : x_(bring_in(a.x, inputs.x)),
      gate_up_(bring_in(a.gate_up, inputs.gate_up)),
      down_(bring_in(a.down, inputs.down)),
      ids_(a.ids),
      up_bias_(bring_in(a.up_bias, inputs.up_bias)),
      down_bias_(bring_in(a.down_bias, inputs.down_bias)),
      weights_(a.weights) {}

MoeTensors MoeInputTensors::addresses() const {
  MoeTensors tensors;
  tensors.x = x_.const_data_ptr();
  tensors.gate_up = gate_up_.const_data_ptr();
  tensors.down = down_.const_data_ptr();
  tensors.up_bias = data_of(up_bias_);
  tensors.down_bias = data_of(down_bias_);
  tensors.ids = ids_.const_data_ptr();
  tensors.weights = data_of(weights_);
  return tensors;
}

}  // namespace flashmoe::ops
