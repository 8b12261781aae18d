// Activations and their derivatives, in fp32.
#pragma once

#include <type_traits>

#include "cuda/moe/params.h"
#include "cuda/ptx/arithmetic.cuh"
#include "cuda/ptx/math.cuh"

namespace flashmoe::cuda::moe {

struct Curve {
  float value, slope;
};

// A NaN stays one; what is infinite follows PyTorch.
__device__ __forceinline__ Curve activation_curve(Kind kind, float x) {
  if (kind == Kind::kSilu) {
    constexpr float kLog2e = 1.4426950408889634f;
    const float s = ptx::rcp_approx_ftz(1.f + ptx::ex2_approx_ftz(-kLog2e * x));
    return {x * s, s * (1.f + x * (1.f - s))};
  }
  if (kind == Kind::kGelu) {  // x times the normal distribution up to x
    constexpr float kHalfRoot = 0.70710678118654752f, kDensity = 0.39894228040143268f;
    const float below = 0.5f * (1.f + erff(kHalfRoot * x));
    return {x * below, below + x * kDensity * __expf(-0.5f * x * x)};
  }
  return {x < 0.f ? 0.f : x, x > 0.f ? 1.f : 0.f};
}

// Calls body with the kind as a constant: one branch for many numbers.
template <class Body>
__device__ __forceinline__ void with_kind(Kind kind, const Body& body) {
  if (kind == Kind::kSilu) {
    body(std::integral_constant<Kind, Kind::kSilu>());
  } else if (kind == Kind::kGelu) {
    body(std::integral_constant<Kind, Kind::kGelu>());
  } else {
    body(std::integral_constant<Kind, Kind::kRelu>());
  }
}

}  // namespace flashmoe::cuda::moe
