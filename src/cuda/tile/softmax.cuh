// Online softmax over rows of accumulator fragments (m16n8: a lane holds columns 2c, 2c + 1 of rows
// r and r + 8, with r = lane / 4 and c = lane % 4), in base 2.
#pragma once

#include "cuda/ptx/math.cuh"

namespace flashmoe::cuda {

constexpr float kLn2 = 0.6931471805599453f;

// Over the four lanes that share a row.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// The two rows a lane holds of one m16 fragment. `sum` is the lane's own share until the end.
struct RowState {
  float maximum[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0, 0};
};

// The maximum of each row brought up to date. `reference` is what is taken off the scaled scores
// from now on, `correction` what the output and the sum so far must be multiplied by; the sum is.
template <int kTiles>
__device__ __forceinline__ void update_maximum(const float (&s)[kTiles][4], RowState& state,
                                               float scale_log2, float (&reference)[2],
                                               float (&correction)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float maximum = state.maximum[half];
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
      maximum = fmaxf(maximum, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
    maximum = quad_max(maximum);
    // A row that has seen no key yet keeps -inf, which must not meet another -inf.
    reference[half] = maximum == -INFINITY ? 0.f : maximum * scale_log2;
    correction[half] = ptx::ex2_approx_ftz(state.maximum[half] * scale_log2 - reference[half]);
    state.maximum[half] = maximum;
    state.sum[half] *= correction[half];
  }
}

// The probabilities of two n8 fragments, in place, added to `sum`. Sums are kept per block of keys
// and added up then: one chain over thousands of keys would lose the last digits of lse. A NaN
// score did not raise the maximum, but is a NaN probability and so reaches the sum.
__device__ __forceinline__ void probabilities(float (&left)[4], float (&right)[4], float (&sum)[2],
                                              float scale_log2, const float (&reference)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int c = 2 * half; c < 2 * half + 2; ++c) {
      left[c] = ptx::ex2_approx_ftz(left[c] * scale_log2 - reference[half]);
      right[c] = ptx::ex2_approx_ftz(right[c] * scale_log2 - reference[half]);
    }
    sum[half] += (left[2 * half] + left[2 * half + 1]) + (right[2 * half] + right[2 * half + 1]);
  }
}

}  // namespace flashmoe::cuda
