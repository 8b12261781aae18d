// NaN and infinity behind a mask. A number that is not finite must reach the results that see it
// and no others, but a product of matrices multiplies what a row does not see by a probability of
// 0, and 0 times NaN is NaN.
//
// So kernels have a guarded path beside the others. Who finds something that is not finite
// (needs_guard) computes the tile once more, or from the start, pair by pair or with zeros in place
// of it, and leaves out the pairs that are hidden. Slow, and rarely needed. What a kernel looks at:
//   forward, dQ of short sequences, sums of a bias's gradient   their results
//   backward                                                    LSE and delta of the rows, K and V
#pragma once

#include "cuda/attention/bias.cuh"
#include "cuda/attention/sequence.cuh"

namespace flashmoe::cuda {

// Whether a row sees a key: neither the mask nor -inf in the bias hides it.
template <class T, bool kBias>
__device__ __forceinline__ bool sees(int row, int key, const Sequence& seq, const BiasRows& bias,
                                     const AttentionParams& p) {
  return key >= seq.begin(row, p) && key < seq.end(row, p) &&
         (!kBias || (row < seq.len_q && !hidden<T>(bias, row, key)));
}

// A number of P or dS, and whether its row sees its key.
struct GuardedFactor {
  bool seen;
  float value;
};

// Whether all results are finite.
template <int kM, int kN>
__device__ __forceinline__ bool all_finite(const float (&acc)[kM][kN][4]) {
  bool finite = true;
#pragma unroll
  for (int i = 0; i < kM * kN * 4; ++i) finite &= isfinite(acc[i / 4 / kN][i / 4 % kN][i % 4]);
  return finite;
}

// Whether there is something in Q, K, dO or V that is not finite: S and dP show it.
template <int kM, int kN>
__device__ __forceinline__ bool any_nonfinite(const float (&s)[kM][kN][4],
                                              const float (&dp)[kM][kN][4]) {
  float zero = 0;
#pragma unroll
  for (int i = 0; i < kM * kN * 4; ++i) {
    // In one sum: two take registers that bwd_bias at D = 64 does not have.
    zero += s[i / 4 / kN][i / 4 % kN][i % 4] * 0.f + dp[i / 4 / kN][i / 4 % kN][i % 4] * 0.f;
  }
  return !(zero == 0);
}

}  // namespace flashmoe::cuda
