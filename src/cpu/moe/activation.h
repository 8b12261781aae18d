// Activations and their slopes, a vector at a time.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cpu/simd.h"
#include "flashmoe/moe.h"

namespace flashmoe::cpu::moe {
namespace {

// The largest exponent of which exp2 has a result.
template <class A>
constexpr A kMaxExponent = sizeof(A) == 8 ? 1022 : 126;

// f(x), and f'(x) where it is asked for.
template <class A>
struct Silu {
  static Vec<A> value(Vec<A> x) { return x / (A(1) + exp2(bounded(x))); }
  static Vec<A> value(Vec<A> x, Vec<A>* slope) {
    const Vec<A> s = A(1) / (A(1) + exp2(bounded(x)));
    *slope = s * (x * (A(1) - s) + A(1));
    return x * s;
  }

 private:
  // -x in base 2, where exp2 has a result; beyond it nothing is left of silu.
  static Vec<A> bounded(Vec<A> x) {
    const Vec<A> t = x * A(-kLog2e);
    return t > kMaxExponent<A> ? splat(kMaxExponent<A>) : t;  // this way round a NaN is kept
  }
};

// The normal distribution up to x. In float: a minimax polynomial for the base 2 logarithm of the
// smaller tail, 5e-8 off at most, and falling without end.
inline Vec<float> normal_cdf(Vec<float> x) {
  const Vec<float> t = x < 0.f ? -x : x;
  Vec<float> p = splat(-2.35751259e-6f);
  p = p * t + 3.38986501e-5f;
  p = p * t - 1.61421616e-4f;
  p = p * t - 1.93257816e-4f;
  p = p * t + 7.1317805e-3f;
  p = p * t - 5.25392666e-2f;
  p = p * t - 0.459195673f;
  p = p * t - 1.15110636f;
  p = p * t - 1.f;
  const Vec<float> tail = exp2(p);
  return x < 0.f ? tail : 1.f - tail;
}
inline Vec<double> normal_cdf(Vec<double> x) {
  for (int i = 0; i < kLanes<double>; ++i) x[i] = __builtin_erfc(x[i] * -0.7071067811865476) / 2;
  return x;
}

template <class A>
struct Gelu {
  static Vec<A> value(Vec<A> x) { return x * normal_cdf(x); }
  static Vec<A> value(Vec<A> x, Vec<A>* slope) {
    const Vec<A> cdf = normal_cdf(x);
    const Vec<A> pdf = exp2(x * x * A(-kLog2e / 2)) * A(0.3989422804014327);
    *slope = cdf + x * pdf;
    return x * cdf;
  }
};

template <class A>
struct Relu {
  static Vec<A> value(Vec<A> x) { return x < A(0) ? splat(A(0)) : x; }  // a NaN is kept
  static Vec<A> value(Vec<A> x, Vec<A>* slope) {
    *slope = x > A(0) ? splat(A(1)) : splat(A(0));
    return value(x);
  }
};

// Calls body(Silu<A>()) or its like.
template <class A, class Body>
inline void with_activation(Activation activation, const Body& body) {
  switch (activation) {
    case Activation::kSwiglu:
    case Activation::kSilu:
      return body(Silu<A>());
    case Activation::kGeglu:
    case Activation::kGelu:
      return body(Gelu<A>());
    case Activation::kReglu:
    case Activation::kRelu:
      return body(Relu<A>());
  }
}

// Calls step(i, count) for i over n elements in steps of `count` vectors, first four and then one:
// a vector's chain of operations is long, and four of them hide each other's latency. step() reads
// all before it writes any.
template <class A, class Step>
inline void by_fours(int64_t n, const Step& step) {
  constexpr int64_t kFour = 4 * kLanes<A>;
  int64_t i = 0;
  for (; i + kFour <= n; i += kFour) step(i, std::integral_constant<int, 4>());
  for (; i < n; i += kLanes<A>) step(i, std::integral_constant<int, 1>());
}

}  // namespace
}  // namespace flashmoe::cpu::moe
