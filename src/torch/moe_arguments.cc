#include "moe_arguments.h"

#include <iterator>
#include <string>

namespace flashmoe::ops {
namespace {

// In the order of the enums.
constexpr const char* kActivations[] = {"swiglu", "geglu", "reglu", "silu", "gelu", "relu"};
constexpr const char* kScorings[] = {"softmax", "sigmoid"};

// The value of an enum that has this name.
template <class Enum, size_t count>
Enum named(const char* argument, const std::string& name, const char* const (&names)[count]) {
  std::string known;
  for (size_t i = 0; i < count; ++i) {
    if (name == names[i]) return static_cast<Enum>(i);
    known += (i == 0 ? "'" : i + 1 == count ? " or '" : ", '") + std::string(names[i]) + "'";
  }
  fail(std::string(argument) + " is '" + name + "'; it must be " + known);
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
      .activation = named<Activation>("activation", in.next<std::string>(), kActivations),
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
          .scoring = named<Scoring>("scoring", in.next<std::string>(), kScorings),
          .normalize = in.next<bool>()};
}

RouteBackwardArguments RouteBackwardArguments::read(ArgumentReader& in) {
  return {.grad_weights = in.next<Tensor>(),
          .logits = in.next<Tensor>(),
          .ids = in.next<Tensor>(),
          .scoring = named<Scoring>("scoring", in.next<std::string>(), kScorings),
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
