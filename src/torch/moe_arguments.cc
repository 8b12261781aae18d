#include "moe_arguments.h"

#include <string>

namespace flashmoe::ops {
namespace {

// The value of an enum, from its first to the last, that has this name.
template <class Enum>
Enum named(const char* argument, const std::string& name, Enum last, const char* (*name_of)(Enum)) {
  std::string known;
  for (int i = 0; i <= static_cast<int>(last); ++i) {
    const auto value = static_cast<Enum>(i);
    if (name == name_of(value)) return value;
    known += (i == 0 ? "'" : value == last ? " or '" : ", '") + std::string(name_of(value)) + "'";
  }
  fail(std::string(argument) + " is '" + name + "'; it must be " + known);
}

Activation next_activation(ArgumentReader& in) {
  return named("activation", in.next<std::string>(), Activation::kRelu, activation_name);
}

Scoring next_scoring(ArgumentReader& in) {
  return named("scoring", in.next<std::string>(), Scoring::kSigmoid, scoring_name);
}

}  // namespace

// Braces are filled from left to right, and so in the order of the schema.

MoeArguments MoeArguments::read(ArgumentReader& in) {
  return {
      .x = in.next<Tensor>(),
      .gate_up = in.next<Tensor>(),
      .down = in.next<Tensor>(),
      .up_bias = in.next<OptionalTensor>(),
      .down_bias = in.next<OptionalTensor>(),
      .ids = in.next<Tensor>(),
      .weights = in.next<OptionalTensor>(),
      .activation = next_activation(in),
  };
}

MoeForwardArguments MoeForwardArguments::read(ArgumentReader& in) {
  return {.call = MoeArguments::read(in), .keep = in.next<bool>()};
}

MoeBackwardArguments MoeBackwardArguments::read(ArgumentReader& in) {
  return {.grad_out = in.next<Tensor>(),
          .pre = in.next<Tensor>(),
          .routing = in.next<Tensor>(),
          .call = MoeArguments::read(in),
          .needs = {.x = in.next<bool>(),
                    .gate_up = in.next<bool>(),
                    .down = in.next<bool>(),
                    .up_bias = in.next<bool>(),
                    .down_bias = in.next<bool>(),
                    .weights = in.next<bool>()}};
}

ExplainMoeArguments ExplainMoeArguments::read(ArgumentReader& in) {
  return {.forward = MoeForwardArguments::read(in),
          .backward = in.next<bool>(),
          .device = in.next<std::string>()};
}

RouteArguments RouteArguments::read(ArgumentReader& in) {
  return {.logits = in.next<Tensor>(),
          .bias = in.next<OptionalTensor>(),
          .k = in.next<int64_t>(),
          .scoring = next_scoring(in),
          .normalize = in.next<bool>()};
}

RouteBackwardArguments RouteBackwardArguments::read(ArgumentReader& in) {
  return {.grad_weights = in.next<Tensor>(),
          .logits = in.next<Tensor>(),
          .ids = in.next<Tensor>(),
          .scoring = next_scoring(in),
          .normalize = in.next<bool>()};
}

void check_same_device(const MoeArguments& a, std::initializer_list<NamedTensor> more) {
  const NamedTensor x = {"x", &a.x};
  check_same_device(x, {{"gate_up", &a.gate_up},
                        {"down", &a.down},
                        {"up_bias", pointer_to(a.up_bias)},
                        {"down_bias", pointer_to(a.down_bias)},
                        {"ids", &a.ids},
                        {"weights", pointer_to(a.weights)}});
  check_same_device(x, more);
}

}  // namespace flashmoe::ops
