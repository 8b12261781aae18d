// One block of queries x keys of the backward pass, P and dS through shared memory: the products
// that follow S and dP cut their tiles otherwise (see BwdTile). The warps share out S by queries
// and keys, dK and dV by keys and columns, dQ by queries and columns.
#pragma once

#include "cuda/attention/mma_sync/bwd_dq.cuh"
#include "cuda/attention/mma_sync/bwd_guard.cuh"
#include "cuda/attention/mma_sync/bwd_tile.cuh"

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

// f(score, dP, lse and delta, index) for all that a lane holds.
template <class C, class F>
__device__ __forceinline__ void each_score(Scores<C>& s, Scores<C>& dp, const RowTerms<C>& terms,
                                           const F& f) {
#pragma unroll
  for (int m = 0; m < C::kScoreM; ++m) {
#pragma unroll
    for (int n = 0; n < C::kScoreN; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) f(s[m][n][i], dp[m][n][i], terms[m][i / 2]);
    }
  }
}

// P and dS in place of S and dP.
template <class C, Loop kLoop>
__device__ __forceinline__ void differentiate_scores(Scores<C>& s, Scores<C>& dp,
                                                     const RowTerms<C>& terms,
                                                     const AttentionBwdParams& p) {
  const ScoreRule rule(p);
  each_score<C>(s, dp, terms, [](float&, float& dp, float2 term) { dp -= term.y; });
  if (kLoop == Loop::kGeneral && p.softcap_scale) {
    each_score<C>(s, dp, terms,
                  [&](float& s, float& dp, float2) { rule.differentiate_cap(s, dp); });
  }
  each_score<C>(s, dp, terms,
                [&](float& s, float& dp, float2 term) { rule.differentiate(s, dp, term.x); });
}

// The same for any call with a bias.
template <class C>
__device__ __forceinline__ void differentiate_any(Scores<C>& s, Scores<C>& dp,
                                                  const RowTerms<C>& terms, uint32_t sBias,
                                                  const BwdTask& task, const QueryBlock& block,
                                                  const AttentionBwdParams& p) {
  const int thread = ptx::opaque_thread(), lane = thread % 32;
  const int query = score_row<C>(thread) + lane / 4, key = score_col<C>(thread) + lane % 4 * 2;
#pragma unroll
  for (int m = 0; m < C::kScoreM; ++m) {
#pragma unroll
    for (int n = 0; n < C::kScoreN; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        differentiate_any<C>(s[m][n][i], dp[m][n][i], terms[m][i / 2], query + 16 * m + i / 2 * 8,
                             key + 8 * n + i % 2, sBias, task, block, p);
      }
    }
  }
}

// dS is the gradient of the bias, too, where there is no softcap.
template <class C>
__device__ __forceinline__ void store_bias_gradient(uint32_t sdS, const BwdTask& task,
                                                    const QueryBlock& block,
                                                    const AttentionBwdParams& p) {
  constexpr int kChunks = C::kBlockK / 8;
  const BiasRows grad = grad_bias_of(task, block, p);
#pragma unroll 2
  for (int i = ptx::opaque_thread(); i < C::kBlockQ * kChunks; i += C::kThreads) {
    const int query = i / kChunks, key = task.key_block * C::kBlockK + i % kChunks * 8;
    if (block.first + query >= task.seq.len_q || key >= task.stored_keys) continue;
    store_eight(grad, block.first + query, key, task.stored_keys - key,
                ptx::ld_shared_v4(sdS + C::PairLayout::at(query, i % kChunks)));
  }
}

// 0 where a key is before the first that the row sees, or after the last.
template <class C, Side kSide>
__device__ __forceinline__ void mask_scores(Scores<C>& s, Scores<C>& dp, const Sequence& seq,
                                            int first_query, int first_key,
                                            const AttentionBwdParams& p) {
  const int thread = ptx::opaque_thread();
  for_each_masked<kSide, C::kScoreM, C::kScoreN>(
      first_query + score_row<C>(thread), first_key + score_col<C>(thread), seq, p,
      [&](int m, int n, int i) { s[m][n][i] = dp[m][n][i] = 0; });
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
template <class C, Loop kLoop>
__device__ __forceinline__ void accumulate_key(float (&acc)[C::kKeyM][C::kKeyN][4],
                                               uint32_t left_lane, uint32_t right_lane) {
  const AcrossA<typename C::PairLayout, C::kKeyRows> left{left_lane};
  const AcrossB<typename C::Layout, C::kKeyCols> right{right_lane};
  multiply<typename C::Type, C::kBlockQ / 16, kUnroll<C, kLoop, C::kBlockQ / 16>>(acc, left, right);
}

// One block of queries, Q and dO already in shared memory. False where a mask alone will not do,
// because there is something that is not finite: nothing was added then. `between` is called when
// the bias is done with.
template <class C, Loop kLoop, class Turn, class Between>
__device__ __forceinline__ bool bwd_block(BwdState<C>& t, uint32_t smem, int stage, BwdTask& task,
                                          const QueryBlock& block, const AttentionBwdParams& p,
                                          const Turn& turn, const Between& between) {
  using Layout = typename C::Layout;
  constexpr bool kMasked = kLoop != Loop::kPlain;
  constexpr bool kGeneral = kLoop == Loop::kGeneral;
  const Sequence& seq = task.seq;
  const int first_key = task.key_block * C::kBlockK;
  const uint32_t sK = smem + C::kSmemK, sV = smem + C::kSmemV;
  const uint32_t sP = smem + C::kSmemP, sdS = smem + C::kSmemGradS;
  const uint32_t sQ = smem + C::kSmemQ + stage * C::kQueryBytes;
  const uint32_t sdO = smem + C::kSmemGradOut + stage * C::kQueryBytes;
  const uint32_t sTerms = smem + C::kSmemTerms + stage * C::kTermBytes;
  const BwdLanes<C> lanes;
  const uint32_t sBias = bias_place<C>(smem, stage);
  if (may_contain<C, kLoop>() && terms_not_finite<C>(sTerms)) return false;
  // With a bias, pair by pair: one that comes late, or that hides something not finite.
  const bool each =
      C::kBias && kGeneral && (late_bias(p) || task.contain || terms_not_finite<C>(sTerms));
  bool contain = false;
  {
    RowTerms<C> terms;
    load_row_terms<C>(terms, sTerms);
    Scores<C> s, dp;
    if (C::kBias && !each) {
      C::Bias::start(s, sBias, score_row<C>(lanes.thread), score_col<C>(lanes.thread),
                     p.bias_scale);
    } else {
      set_zero(s);
    }
    set_zero(dp);
    multiply<typename C::Type, C::kDim / 16, kUnroll<C, kLoop, C::kDim / 16>>(
        s, AlongA<Layout>{sQ + lanes.score_left()}, AlongB<Layout>{sK + lanes.score_right()});
    multiply<typename C::Type, C::kDim / 16, kUnroll<C, kLoop, C::kDim / 16>>(
        dp, AlongA<Layout>{sdO + lanes.score_left()}, AlongB<Layout>{sV + lanes.score_right()});
    if (kGeneral && (each || !C::kBias)) contain = any_nonfinite(s, dp);
    if (each) {
      if constexpr (C::kBias) differentiate_any<C>(s, dp, terms, sBias, task, block, p);
    } else {
      differentiate_scores<C, kLoop>(s, dp, terms, p);
      if (kMasked && block.first < task.full_begin) {
        mask_scores<C, Side::kAfter>(s, dp, seq, block.first, first_key, p);
      }
      if (kMasked && block.first >= task.full_end) {
        mask_scores<C, Side::kBefore>(s, dp, seq, block.first, first_key, p);
      }
    }
    store_pairs<C>(sP + lanes.pairs(), s);
    store_pairs<C>(sdS + lanes.pairs(), dp);
  }
  turn.wait(task, block, p);
  // P and dS are written.
  if (kGeneral) {
    contain = __syncthreads_or(contain);
  } else {
    __syncthreads();
  }
  between();
  turn.pass_on(task, block, p);
  if constexpr (C::kBias && !C::kShort) {
    if (p.grad_bias && !each) store_bias_gradient<C>(sdS, task, block, p);
  }

  // dQ of short sequences has a kernel of its own.
  if (!contain) {
    accumulate_key<C, kLoop>(t.gV, sP + lanes.key_left(), sdO + lanes.key_right());
    accumulate_key<C, kLoop>(t.gK, sdS + lanes.key_left(), sQ + lanes.key_right());
    if constexpr (C::kShort) return true;
    add_query_gradient<C>(task, block, p, [&](QueryPart<C>& acc, int part) {
      query_gradient<C, kLoop>(acc, part, sdS + lanes.query_left(), sK + lanes.query_right());
    });
  } else if constexpr (kGeneral) {
    const ContainedProducts<C> products{seq, block.first, first_key, p,
                                        packed_bias_of(task, block, p)};
    products.accumulate_key(t.gV, sP, sdO, 0, C::kBlockQ);
    products.accumulate_key(t.gK, sdS, sQ, 0, C::kBlockQ);
    if constexpr (C::kShort) return true;
    add_query_gradient<C>(task, block, p, [&](QueryPart<C>& acc, int part) {
      products.query_gradient(acc, part, sdS, sK);
    });
  }
  return true;
}

}  // namespace flashmoe::cuda
