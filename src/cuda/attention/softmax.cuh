// Online softmax over rows of accumulator fragments (m16n8: a lane holds columns 2c, 2c + 1 of rows
// r and r + 8, with r = lane / 4 and c = lane % 4), in base 2.
#pragma once

#include "cuda/attention/score.cuh"

namespace flashmoe::cuda {

// The maximum and the sum over the four lanes that share a row of a fragment.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// The maximum and the sum over the warp.
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

// Output and sums are brought to a new reference only when the maximum has outgrown the old one by
// this much (an idea of FlashAttention-4): probabilities then reach 2^8, far from where fp16 ends,
// and the final division makes the result the same. Rescaling at every new maximum costs a
// multiplication for each output accumulator and tile of keys.
constexpr float kSlack = 8;

// The two rows a lane holds of one m16 fragment. Probabilities are 2^(score - reference); `sum` is
// the lane's own share until the end.
struct RowState {
  float reference[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0, 0};

  // A row that has seen no key yet keeps -inf, which must not meet another -inf.
  __device__ __forceinline__ float finite_reference(int half) const {
    return reference[half] == -INFINITY ? 0.f : reference[half];
  }
};

// What the sink of a head adds to the softmax of a row, as a score; -inf where there is none.
template <class T>
__device__ __forceinline__ float sink_of(const AttentionParams& p, int head, int row = 0) {
  if (!p.sinks) return -INFINITY;
  const int64_t at = head * p.sink_head + row * p.sink_row;
  if (p.sinks_are_fp32) return static_cast<const float*>(p.sinks)[at];
  return T::unpack(static_cast<const typename T::Storage*>(p.sinks)[at]);
}

// The end of a row: O is multiplied by share / sum.
struct RowEnd {
  float share, sum;
  float lse;  // natural
};
// From the sum of 2^(score - reference), and a sink: one key more, whose value is 0. Without a sink
// the numbers are as if there were none of this.
__device__ __forceinline__ RowEnd end_row(float sum, float reference, float sink) {
  if (sum == 0) return {0.f, 1.f, sink};  // no key allowed; a NaN is not 0
  const float sink_log2 = sink * kLog2e, top = fmaxf(reference, sink_log2);
  const float share = ptx::ex2_approx_ftz(reference - top);
  const float all = sum * share + ptx::ex2_approx_ftz(sink_log2 - top);
  return {share, all, (top + __log2f(all)) * kLn2};
}

// The largest score of each of the two rows, over the quad.
template <int kTiles>
__device__ __forceinline__ void row_maxima(float (&top)[2], const float (&s)[kTiles][4],
                                           float scale_log2) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float largest = -INFINITY;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      largest = fmaxf(largest, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
    }
    top[half] = quad_max(largest) * scale_log2;
  }
}

// The probabilities of two n8 fragments, in place, added to `sum`. Sums are kept per tile of keys
// and added up then: one chain over thousands of keys would lose the last digits of the LSE. A NaN
// score does not raise the maximum, but is a NaN probability and so reaches the sum.
template <class Rule>
__device__ __forceinline__ void probabilities(float (&left)[4], float (&right)[4], float (&sum)[2],
                                              const Rule& rule, const float (&reference)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int c = 2 * half; c < 2 * half + 2; ++c) {
      left[c] = rule.probability(left[c], reference[half]);
      right[c] = rule.probability(right[c], reference[half]);
    }
    sum[half] += (left[2 * half] + left[2 * half + 1]) + (right[2 * half] + right[2 * half + 1]);
  }
}

}  // namespace flashmoe::cuda
