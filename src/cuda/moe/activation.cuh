// Activations and their derivatives, in fp32.
#pragma once

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

// Of several numbers, with one branch for all of them.
template <int kCount>
__device__ __forceinline__ void activation_curves(Kind kind, const float (&x)[kCount],
                                                  Curve (&curves)[kCount]) {
  const auto fill = [&](Kind known) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) curves[i] = activation_curve(known, x[i]);
  };
  if (kind == Kind::kSilu) {
    fill(Kind::kSilu);
  } else if (kind == Kind::kGelu) {
    fill(Kind::kGelu);
  } else {
    fill(Kind::kRelu);
  }
}

}  // namespace flashmoe::cuda::moe
