// The pairs of queries and keys that a warp holds in accumulator fragments (m16n8: a lane holds
// columns 2c, 2c + 1 of rows r and r + 8, with r = lane / 4 and c = lane % 4), and what becomes of
// their products, as score.cuh has it.
//
// Fragments are queries x keys, or transposed. Masks go over whole fragments; what few calls need
// (softcap, a scale that is not positive, something not finite behind a mask) goes pair by pair. A
// bias is in the accumulators before the product begins, in units of it, so that its numbers are on
// their way while the product is made.
#pragma once

#include "cuda/attention/bias.cuh"
#include "cuda/attention/params.h"
#include "cuda/attention/score.cuh"
#include "cuda/attention/sequence.cuh"

namespace flashmoe::cuda {

// Which pairs a lane holds: element i of fragment (m, n).
template <bool kTransposed>
class Pairs {
 public:
  // The warp's first fragment begins at (row, key). Where the lane begins is computed anew for each
  // tile: kept over a main loop it would cost registers.
  __device__ __forceinline__ Pairs(int row, int key) {
    const int lane = ptx::opaque_thread() % 32;
    row_ = row + (kTransposed ? lane % 4 * 2 : lane / 4);
    key_ = key + (kTransposed ? lane / 4 : lane % 4 * 2);
  }
  __device__ __forceinline__ int row(int m, int n, int i) const {
    return row_ + (kTransposed ? 8 * n + i % 2 : 16 * m + i / 2 * 8);
  }
  __device__ __forceinline__ int key(int m, int n, int i) const {
    return key_ + (kTransposed ? 16 * m + i / 2 * 8 : 8 * n + i % 2);
  }

 private:
  int row_, key_;  // of the first element
};

// Calls f(m, n, i) for each element of a warp's fragments.
template <int kM, int kN, class F>
__device__ __forceinline__ void for_each_element(const F& f) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) f(m, n, i);
    }
  }
}

// Whether a bias cannot be in the accumulators before the product begins.
__device__ __forceinline__ bool adds_bias_late(const AttentionParams& p) {
  return p.softcap_scale || !(p.bias_scale > 0);
}

// The bias of a pair; 0 where there is no such pair.
__device__ __forceinline__ float pair_bias(const BiasRows& bias, int row, int key,
                                           const Sequence& seq) {
  const bool exists = row < seq.len_q && key < seq.len_k;
  return exists ? __ldg(reinterpret_cast<const float*>(bias.at(row, key))) : 0.f;
}

// Calls f(m, n, i, bias) for each element, in an order that walks through the bias by additions:
// multiplying 64-bit strides for each element would take three instructions more.
template <int kM, int kN, bool kTransposed, class F>
__device__ __forceinline__ void for_each_bias(const Pairs<kTransposed>& at, const BiasRows& bias,
                                              const Sequence& seq, const F& f) {
  const int64_t down = 8 * (kTransposed ? bias.column : bias.row);  // rows r and r + 8
  const int64_t right = kTransposed ? bias.row : bias.column;       // columns 2c and 2c + 1
  const int rows = kTransposed ? seq.len_k - at.key(0, 0, 0) : seq.len_q - at.row(0, 0, 0);
  const int cols = kTransposed ? seq.len_q - at.row(0, 0, 0) : seq.len_k - at.key(0, 0, 0);
  const float* line = reinterpret_cast<const float*>(bias.at(at.row(0, 0, 0), at.key(0, 0, 0)));
#pragma unroll
  for (int i = 0; i < 2 * kM; ++i, line += down) {
    const float* from = line;
#pragma unroll
    for (int n = 0; n < kN; ++n, from += 8 * right) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const bool exists = 8 * i < rows && 8 * n + c < cols;
        f(i / 2, n, i % 2 * 2 + c, exists ? __ldg(from + (c ? right : 0)) : 0.f);
      }
    }
  }
}

// Starts the accumulators of S.
template <bool kBias, int kM, int kN, bool kTransposed>
__device__ __forceinline__ void start_scores(float (&s)[kM][kN][4], const Pairs<kTransposed>& at,
                                             const BiasRows& bias, const Sequence& seq,
                                             const AttentionParams& p) {
  if (!kBias || adds_bias_late(p)) {
    set_zero(s);
    return;
  }
  for_each_bias<kM, kN>(at, bias, seq,
                        [&](int m, int n, int i, float b) { s[m][n][i] = b * p.bias_scale; });
}

// Whether the score of a pair is hidden, by the mask alone.
__device__ __forceinline__ bool mask_hides(int row, int key, const Sequence& seq,
                                           const AttentionParams& p) {
  return key < seq.begin(row, p) || key >= seq.end(row, p);
}

// What a backward pass makes of S and dP.
//   kPlain     every pair is seen
//   kMasked    the mask hides some
//   kGeneral   anything that a call can ask for
// In place of S comes P, in place of dP comes dS. `lse_delta` gives those of (m, n, i), and
// `gradient` is told (row, key, dS), which is the bias's gradient; after that dS is multiplied by
// the slope of the softcap.
template <bool kBias, bool kTransposed, int kM, int kN, class LseDelta, class Gradient>
__device__ __forceinline__ void differentiate(Loop loop, float (&s)[kM][kN][4],
                                              float (&dp)[kM][kN][4], const Pairs<kTransposed>& at,
                                              const LseDelta& lse_delta, const BiasRows& bias,
                                              const Sequence& seq, const AttentionBwdParams& p,
                                              const Gradient& gradient) {
  if (loop != Loop::kGeneral) {
    for_each_element<kM, kN>([&](int m, int n, int i) {
      const float2 row_terms = lse_delta(m, n, i);
      const bool hidden =
          loop == Loop::kMasked && mask_hides(at.row(m, n, i), at.key(m, n, i), seq, p);
      const float probability = ptx::ex2_approx_ftz(s[m][n][i] * p.scale_log2 - row_terms.x);
      s[m][n][i] = hidden ? 0 : probability;
      dp[m][n][i] = hidden ? 0 : probability * (dp[m][n][i] - row_terms.y);
      gradient(m, n, i, dp[m][n][i]);
    });
    return;
  }
  const bool late = adds_bias_late(p);
  for_each_element<kM, kN>([&](int m, int n, int i) {
    const int row = at.row(m, n, i), key = at.key(m, n, i);
    const float2 row_terms = lse_delta(m, n, i);
    const float b = kBias ? pair_bias(bias, row, key, seq) : 0.f;
    const PairScore pair = ScoreRule(p).pair(s[m][n][i], late ? b : 0.f, row, key, seq);
    const bool seen = pair.seen && b != -INFINITY;
    // A row that sees a key has an infinite LSE only where its scores are infinite.
    s[m][n][i] = !seen ? 0 : row_terms.x == INFINITY ? NAN : pair.probability(row_terms.x);
    dp[m][n][i] = seen ? s[m][n][i] * (dp[m][n][i] - row_terms.y) : 0;
    gradient(m, n, i, dp[m][n][i]);
    if (seen) dp[m][n][i] *= pair.slope;
  });
}

}  // namespace flashmoe::cuda
