// What a call means: checks a MoeProblem or RouteProblem and turns it into numbers.
#pragma once

#include <cstdint>

#include "flashmoe/moe.h"

namespace flashmoe {

// Weights and their gradients are fp32, or fp64 where the tensors are.
constexpr DType weight_dtype(DType dtype) {
  return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

// Everything about a checked problem that is a number.
struct MoeSizes {
  int64_t tokens = 0, top_k = 0, experts = 0;
  int64_t width = 0, inner = 0;  // d, n
  int64_t gates = 1;             // G: rows of gate_up for each column of down
  int64_t rows = 0;              // T k
};

// Ok exactly when the problem is legal, whatever the device.
Status check(const MoeProblem& problem);
Status check(const RouteProblem& problem);

// Only for a problem that passed check().
MoeSizes sizes(const MoeProblem& problem);

}  // namespace flashmoe
