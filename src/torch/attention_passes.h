// The passes of attention from an op's arguments to its results.
#pragma once

#include <tuple>

#include "arguments.h"

namespace flashmoe::ops {

// out and lse.
std::tuple<Tensor, Tensor> forward(const Arguments& arguments);

// Of query, key, value, bias and sinks. A gradient nobody needs is an empty tensor.
using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
Gradients backward(const BackwardArguments& arguments);

}  // namespace flashmoe::ops
