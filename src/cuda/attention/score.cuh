// The score of a query and a key: what becomes of their product q.k, in both passes and in every
// family. All of it is decided here, as the CPU's ScoreRule does (cpu/attention/fwd.h).
//
//   S  = scale softcap(q.k) + bias, and -inf where the row does not see the key, all in base 2
//   P  = 2^(S - LSE)
//   dS = P (dP - delta), which is the gradient of the bias; times the slope of the softcap it is
//        that of scale q.k
//
// Kernels hold products in accumulator fragments (m16n8: a lane holds columns 2c, 2c + 1 of rows r
// and r + 8, with r = lane / 4 and c = lane % 4). What most calls need goes over whole fragments,
// with one branch for all elements: a branch for each costs a masked tile a fifth of its time. What
// few calls need (a bias that comes late, a NaN behind a mask) goes pair by pair through pair().
#pragma once

#include <type_traits>

#include "cuda/attention/params.h"
#include "cuda/attention/sequence.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/special_registers.cuh"

namespace flashmoe::cuda {

constexpr float kLn2 = 0.6931471805599453f;
constexpr float kLog2e = 1.4426950408889634f;

// tanh and its derivative, each with a relative error of a few 1e-7: the first also where it is all
// but x (a large softcap multiplies its error), the second also where it is all but 0.
struct Tanh {
  float value, derivative;
};
__device__ __forceinline__ Tanh tanh_and_derivative(float x) {
  const float e = ptx::ex2_approx_ftz(-2 * kLog2e * fabsf(x));  // e^(-2|x|)
  const float inverse = __fdividef(1.f, 1 + e);
  // Below 0.3 the series: its next term is 1382/155925 x^11.
  const float y = x * x;
  const float series =
      x + x * y * (-1.f / 3 + y * (2.f / 15 + y * (-17.f / 315 + y * (62.f / 2835))));
  const float value = fabsf(x) < 0.3f ? series : copysignf((1 - e) * inverse, x);
  return {value, 4 * e * inverse * inverse};
}

// The score of one pair with all that a call can ask for.
struct PairScore {
  float score;  // in base 2, with its bias
  float slope;  // of the softcap; 1 without one
  bool seen;    // whether the row sees the key: neither the mask nor the bias hides it

  // P. A hidden score may be NaN, but its probability is 0.
  __device__ __forceinline__ float probability(float lse) const {
    return seen ? ptx::ex2_approx_ftz(score - lse) : 0;
  }
};

// By reference: numbers are read where they are used, from constant memory, and take no register
// before.
template <class Params>
struct ScoreRule {
  const Params& p;
  bool has_bias = false;  // whether scores are whole already, in base 2, because a bias came late

  __device__ __forceinline__ explicit ScoreRule(const Params& params) : p(params) {}

  // Times which a product, or what the softcap made of it, is a score.
  __device__ __forceinline__ float scale_log2() const { return has_bias ? 1.f : p.scale_log2; }
  // The forward pass looks for the largest product, so the sign of the scale is apart there.
  __device__ __forceinline__ float sign() const {
    if constexpr (std::is_base_of_v<AttentionFwdParams, Params>) {
      return p.sign;
    } else {
      return 1;
    }
  }

  // What comes between product and scale: softcap or sign. `each` applies a function of one number
  // to all products that a lane holds.
  __device__ __forceinline__ bool transforms() const { return sign() != 1 || p.softcap_scale; }
  template <class Each>
  __device__ __forceinline__ void transform(const Each& each) const {
    if (p.softcap_scale) {
      each([&](float product) { return cap(product).value; });
    } else if (sign() != 1) {
      each([&](float product) { return product * sign(); });
    }
  }
  __device__ __forceinline__ Tanh cap(float product) const {
    return tanh_and_derivative(product * p.softcap_scale);
  }

  // The whole score of a product without a bias.
  __device__ __forceinline__ float score(float product) const {
    return (p.softcap_scale ? cap(product).value : product * sign()) * p.scale_log2;
  }
  // The score of a product that transform() is done with, with a bias that comes late.
  __device__ __forceinline__ float score(float transformed, float bias) const {
    return transformed * p.scale_log2 + bias * kLog2e;
  }
  // The score of (row, key), as a bias and the mask leave it.
  __device__ __forceinline__ PairScore pair(float product, float bias, int row, int key,
                                            const Sequence& seq) const {
    PairScore result;
    result.slope = 1;
    if (p.softcap_scale) {
      const Tanh capped = cap(product);
      product = capped.value;
      result.slope = capped.derivative;
    }
    result.score = score(product, bias);
    result.seen = row < seq.len_q && key >= seq.begin(row, p) && key < seq.end(row, p) &&
                  bias != -INFINITY && result.score != -INFINITY;
    return result;
  }

  // P of a product that transform() is done with. `lse` is that of the row in base 2, or any other
  // reference.
  __device__ __forceinline__ float probability(float transformed, float lse) const {
    return ptx::ex2_approx_ftz(transformed * scale_log2() - lse);
  }

  // The softcap of a product, and dP - delta times its slope: what plain scores have without it.
  __device__ __forceinline__ void differentiate_cap(float& product, float& dp) const {
    const Tanh capped = cap(product);
    product = capped.value;
    dp *= capped.derivative;
  }
  // P in place of S, and dS in place of dP - delta.
  __device__ __forceinline__ void differentiate(float& s, float& dp, float lse) const {
    s = probability(s, lse);
    dp *= s;
  }
};

// Whether the bias cannot be in the accumulators before the product begins: it is fp32, or comes
// after a softcap, or the scale is not one to divide by.
__device__ __forceinline__ bool late_bias(const AttentionParams& p) {
  return p.bias && (p.bias_is_fp32 || p.softcap_scale || p.bias_scale <= 0);
}

// Calls hide(m, n, i) for each element i of fragment (m, n) whose key is before the first that its
// row sees, or after the last. Fragments are queries x keys and begin at (row, key).
template <Side kSide, int kM, int kN, class Hide>
__device__ __forceinline__ void for_each_masked(int row, int key, const Sequence& seq,
                                                const AttentionParams& p, const Hide& hide) {
  const int lane = ptx::opaque_thread() % 32;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row + 16 * m + lane / 4 + 8 * half;
      const int limit = seq.limit<kSide>(r, p) - key - lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          if (masked<kSide>(8 * n + c, limit)) hide(m, n, 2 * half + c);
        }
      }
    }
  }
}

// for_each_masked() of fragments that are keys x queries.
template <Side kSide, int kM, int kN, class Hide>
__device__ __forceinline__ void for_each_masked_transposed(int row, int key, const Sequence& seq,
                                                           const AttentionParams& p,
                                                           const Hide& hide) {
  const int lane = ptx::opaque_thread() % 32;
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int r = row + 8 * n + lane % 4 * 2 + c;
      const int limit = seq.limit<kSide>(r, p) - key - lane / 4;
#pragma unroll
      for (int i = 0; i < 2 * kM; ++i) {
        if (masked<kSide>(8 * i, limit)) hide(i / 2, n, i % 2 * 2 + c);
      }
    }
  }
}

}  // namespace flashmoe::cuda
