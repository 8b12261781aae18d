// One block of queries x keys of the backward pass, P and dS through shared memory: the products
// that follow S and dP cut their tiles otherwise (see BwdTile). The warps share out S by queries
// and keys, dK and dV by keys and columns, dQ by queries and columns.
#pragma once

#include "cuda/any/attention_bwd_tile.cuh"
#include "cuda/tile/softmax.cuh"
#include "cuda/tile/sums.cuh"

namespace flashmoe::cuda {

// lse and delta of the rows that a lane holds of S.
template <class C>
using RowTerms = float2[C::kScoreM][2];

template <class C>
__device__ __forceinline__ void load_row_terms(RowTerms<C>& terms, uint32_t sTerms) {
  const int thread = ptx::opaque_thread();
  const uint32_t from = sTerms + (score_row<C>(thread) + thread % 32 / 4) * 8;
#pragma unroll
  for (int m = 0; m < C::kScoreM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      terms[m][half] = ptx::ld_shared_v2_f32(from + (16 * m + 8 * half) * 8);
    }
  }
}

template <class C>
using Scores = float[C::kScoreM][C::kScoreN][4];

// P and dS in place of S and dP.
template <class C, bool kGeneral>
__device__ __forceinline__ void differentiate_scores(Scores<C>& s, Scores<C>& dp,
                                                     const RowTerms<C>& terms,
                                                     const AttentionBwdParams& p) {
#pragma unroll
  for (int m = 0; m < C::kScoreM; ++m) {
#pragma unroll
    for (int n = 0; n < C::kScoreN; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 term = terms[m][i / 2];
        float score = s[m][n][i], slope = 1;
        if (kGeneral && p.softcap_scale) {
          const Tanh capped = tanh_and_derivative(score * p.softcap_scale);
          score = capped.value;
          slope = capped.derivative;
        }
        s[m][n][i] = ptx::ex2_approx_ftz(score * p.scale_log2 - term.x);
        dp[m][n][i] = s[m][n][i] * (dp[m][n][i] - term.y);
        if (kGeneral && p.softcap_scale) dp[m][n][i] *= slope;
      }
    }
  }
}

// 0 where a row may not see a key. True if something there was not finite: S and dP show it when it
// is in Q, K, dO or V.
template <class C>
__device__ __forceinline__ bool any_not_finite(const Scores<C>& s, const Scores<C>& dp) {
  float zero = 0;
#pragma unroll
  for (int m = 0; m < C::kScoreM; ++m) {
#pragma unroll
    for (int i = 0; i < C::kScoreN * 4; ++i) {
      zero += s[m][i / 4][i % 4] * 0.f;
      zero += dp[m][i / 4][i % 4] * 0.f;
    }
  }
  return !(zero == 0);
}
template <class C>
__device__ __forceinline__ void mask_scores(Scores<C>& s, Scores<C>& dp, const Sequence& seq,
                                            int first_query, int first_key,
                                            const AttentionBwdParams& p) {
  const int thread = ptx::opaque_thread(), lane = thread % 32;
#pragma unroll
  for (int m = 0; m < C::kScoreM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_query + score_row<C>(thread) + 16 * m + lane / 4 + 8 * half;
      const int offset = first_key + score_col<C>(thread) + lane % 4 * 2;
      const int begin = seq.begin(row, p) - offset, end = seq.end(row, p) - offset;
#pragma unroll
      for (int n = 0; n < C::kScoreN; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          if (8 * n + c >= begin && 8 * n + c < end) continue;
          s[m][n][2 * half + c] = 0;
          dp[m][n][2 * half + c] = 0;
        }
      }
    }
  }
}

// A tile of P or dS, rounded, to shared memory.
template <class C>
__device__ __forceinline__ void store_pairs(uint32_t lane, const Scores<C>& x) {
  using Layout = typename C::PairLayout;
#pragma unroll
  for (int n = 0; n < C::kScoreN; ++n) {
#pragma unroll
    for (int m = 0; m < C::kScoreM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        ptx::st_shared_u32(Layout::along(lane, n) + (16 * m + 8 * half) * Layout::kRowBytes,
                           C::Type::pack(x[m][n][2 * half], x[m][n][2 * half + 1]));
      }
    }
  }
}

// dV += P^T dO, or dK += dS^T Q
template <class C, bool kGeneral>
__device__ __forceinline__ void accumulate_key(float (&acc)[C::kKeyM][C::kKeyN][4],
                                               uint32_t left_lane, uint32_t right_lane) {
  const AcrossA<typename C::PairLayout, C::kKeyRows> left{left_lane};
  const AcrossB<typename C::Layout, C::kKeyCols> right{right_lane};
  multiply<typename C::Type, C::kBlockQ / 16, kUnroll<C, kGeneral, C::kBlockQ / 16>>(acc, left,
                                                                                     right);
}

// One block of queries, Q and dO already in shared memory. The general version is for blocks that
// need a mask and for softcap; the plain one has no branch from its first product to its last.
// `wait` and `publish` are called before and after P and dS are written.
template <class C, bool kGeneral, class Wait, class Publish>
__device__ __forceinline__ void bwd_block(BwdState<C>& t, const BwdLanes<C>& lanes, uint32_t smem,
                                          int stage, const BwdTask& task, const QueryBlock& block,
                                          const AttentionBwdParams& p, const Wait& wait,
                                          const Publish& publish) {
  using Layout = typename C::Layout;
  const Sequence& seq = task.seq;
  const int first_key = task.key_block * C::kBlockK;
  const uint32_t sK = smem + C::kSmemK, sV = smem + C::kSmemV;
  const uint32_t sP = smem + C::kSmemP, sdS = smem + C::kSmemGradS;
  const uint32_t sQ = smem + C::kSmemQ + stage * C::kQueryBytes;
  const uint32_t sdO = smem + C::kSmemGradOut + stage * C::kQueryBytes;
  const uint32_t sTerms = smem + C::kSmemTerms + stage * C::kTermBytes;
  bool contain = false;
  {
    RowTerms<C> terms;
    load_row_terms<C>(terms, sTerms);
    Scores<C> s, dp;
    set_zero(s);
    set_zero(dp);
    multiply<typename C::Type, C::kDim / 16, kUnroll<C, kGeneral, C::kDim / 16>>(
        s, AlongA<Layout>{sQ + lanes.score_left()}, AlongB<Layout>{sK + lanes.score_right()});
    multiply<typename C::Type, C::kDim / 16, kUnroll<C, kGeneral, C::kDim / 16>>(
        dp, AlongA<Layout>{sdO + lanes.score_left()}, AlongB<Layout>{sV + lanes.score_right()});
    if (kGeneral) contain = any_not_finite<C>(s, dp);
    differentiate_scores<C, kGeneral>(s, dp, terms, p);
    if (kGeneral) mask_scores<C>(s, dp, seq, block.first, first_key, p);
    store_pairs<C>(sP + lanes.pairs(), s);
    store_pairs<C>(sdS + lanes.pairs(), dp);
  }
  wait();
  // P and dS are written.
  if (kGeneral) {
    contain = __syncthreads_or(contain);
  } else {
    __syncthreads();
  }
  publish();

  float gQ[C::kQueryM][C::kQueryN][4];
  if (!kGeneral || !contain) {
    accumulate_key<C, kGeneral>(t.gV, sP + lanes.key_left(), sdO + lanes.key_right());
    accumulate_key<C, kGeneral>(t.gK, sdS + lanes.key_left(), sQ + lanes.key_right());
    query_gradient<C, kGeneral>(gQ, sdS + lanes.query_left(), sK + lanes.query_right());
  } else {
    const ContainedProducts<C> products{seq, block.first, first_key, p};
    products.accumulate_key(t.gV, sP, sdO);
    products.accumulate_key(t.gK, sdS, sQ);
    products.query_gradient(gQ, sdS, sK);
  }
  if (p.grad_query) add_sums(query_sums<C>(task, block, p), gQ);
}

}  // namespace flashmoe::cuda
