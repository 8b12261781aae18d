// One tile of queries x keys of the backward pass, with P and dS through shared memory: the
// products that follow S and dP share out their tiles among the warps in another way (see BwdTile),
// S by queries and keys, dK and dV by keys and columns, dQ by queries and columns. For head dims
// above 64; smaller ones use bwd_transposed.cuh.
#pragma once

#include "cuda/attention/mma_sync/bwd_dq.cuh"
#include "cuda/attention/mma_sync/bwd_guard.cuh"
#include "cuda/attention/mma_sync/bwd_tile.cuh"

namespace flashmoe::cuda {

// LSE in base 2 and delta of the rows that a lane holds of S.
template <class C>
using LseDelta = float2[C::kScoreM][2];

template <class C>
__device__ __forceinline__ void load_lse_delta(LseDelta<C>& lse_delta, uint32_t sLseDelta) {
  const int thread = ptx::opaque_thread();
  const uint32_t from = sLseDelta + (score_row<C>(thread) + thread % 32 / 4) * 8;
#pragma unroll
  for (int m = 0; m < C::kScoreM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      lse_delta[m][half] = ptx::ld_shared_v2_f32(from + (16 * m + 8 * half) * 8);
    }
  }
}

// What a warp holds of S or dP, later of P or dS.
template <class C>
using Scores = float[C::kScoreM][C::kScoreN][4];

// Which of the pairs that a lane holds of S are kept; all of them without dropout. A bit for each,
// found before there are S and dP: beside them there are no registers for what is drawn.
template <class C>
class KeptScores {
 public:
  __device__ __forceinline__ KeptScores(const BwdTask& task, const QueryTile& tile,
                                        const AttentionBwdParams& p) {
    if constexpr (C::kDropout) {
      static_assert(C::kScoreM * C::kScoreN * 4 <= 32);
      const int thread = ptx::opaque_thread();
      DrawnPairs<C::kScoreN * 8, C::kScoreM> drawn;
      drawn.draw(tile.first + score_row<C>(thread),
                 task.key_tile * C::kBlockK + score_col<C>(thread), thread % 32,
                 dropout_of<C>(task, tile));
      uint32_t bits = 0;
#pragma unroll
      for (int i = 0; i < C::kScoreM * C::kScoreN * 4; ++i) {
        const int m = i / 4 / C::kScoreN, n = i / 4 % C::kScoreN;
        if (drawn.keeps(m, n, i % 4 / 2, i % 2, p)) bits |= 1u << i;
      }
      bits_ = ptx::opaque(bits);
    }
  }
  __device__ __forceinline__ bool operator()(int m, int n, int i) const {
    return !C::kDropout || bits_ >> ((m * C::kScoreN + n) * 4 + i) & 1;
  }

 private:
  uint32_t bits_;
};

// Calls f(score, dP, (LSE, delta), whether the pair is kept) for all that a lane holds.
template <class C, class F>
__device__ __forceinline__ void each_score(Scores<C>& s, Scores<C>& dp,
                                           const LseDelta<C>& lse_delta, const KeptScores<C>& kept,
                                           const F& f) {
#pragma unroll
  for (int m = 0; m < C::kScoreM; ++m) {
#pragma unroll
    for (int n = 0; n < C::kScoreN; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        f(s[m][n][i], dp[m][n][i], lse_delta[m][i / 2], kept(m, n, i));
      }
    }
  }
}

// Puts P and dS in place of S and dP.
template <class C, Loop kLoop>
__device__ __forceinline__ void differentiate_scores(Scores<C>& s, Scores<C>& dp,
                                                     const LseDelta<C>& lse_delta,
                                                     const KeptScores<C>& kept,
                                                     const AttentionBwdParams& p) {
  const ScoreRule rule(p);
  each_score<C>(s, dp, lse_delta, kept, [&](float&, float& dp, float2 term, bool kept) {
    dp = minus_delta<C::kDropout>(dp, term.y, kept, p);
  });
  if (kLoop == Loop::kGeneral && p.softcap_scale) {
    each_score<C>(s, dp, lse_delta, kept,
                  [&](float& s, float& dp, float2, bool) { rule.differentiate_cap(s, dp); });
  }
  each_score<C>(s, dp, lse_delta, kept, [&](float& s, float& dp, float2 term, bool kept) {
    rule.differentiate(s, dp, term.x);
    if (!kept) s = kDroppedProbability;
  });
}

// Puts P and dS in place of S and dP, pair by pair, for any call with a bias.
template <class C>
__device__ __forceinline__ void differentiate_pairs(Scores<C>& s, Scores<C>& dp,
                                                    const LseDelta<C>& lse_delta,
                                                    const KeptScores<C>& kept, uint32_t sBias,
                                                    const BwdTask& task, const QueryTile& tile,
                                                    const AttentionBwdParams& p) {
  const int thread = ptx::opaque_thread(), lane = thread % 32;
  const int query = score_row<C>(thread) + lane / 4, key = score_col<C>(thread) + lane % 4 * 2;
#pragma unroll
  for (int m = 0; m < C::kScoreM; ++m) {
#pragma unroll
    for (int n = 0; n < C::kScoreN; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        differentiate_pair<C>(s[m][n][i], dp[m][n][i], lse_delta[m][i / 2], kept(m, n, i),
                              query + 16 * m + i / 2 * 8, key + 8 * n + i % 2, sBias, task, tile,
                              p);
      }
    }
  }
}

// Stores dS as the gradient of the bias, which it is without a softcap.
template <class C>
__device__ __forceinline__ void store_bias_gradient(uint32_t sdS, const BwdTask& task,
                                                    const QueryTile& tile,
                                                    const AttentionBwdParams& p) {
  constexpr int kChunks = C::kBlockK / 8;
  const BiasRows grad = grad_bias_of(task, tile, p);
#pragma unroll 2
  for (int i = ptx::opaque_thread(); i < C::kBlockQ * kChunks; i += C::kThreads) {
    const int query = i / kChunks, key = task.key_tile * C::kBlockK + i % kChunks * 8;
    if (tile.first + query >= task.seq.len_q || key >= task.stored_keys) continue;
    store_eight(grad, tile.first + query, key, task.stored_keys - key,
                ptx::ld_shared_v4(sdS + C::PackedLayout::at(query, i % kChunks)));
  }
}

// Sets P and dS to 0 where the key is before the first that the row sees, or after the last.
template <class C, Side kSide>
__device__ __forceinline__ void mask_scores(Scores<C>& s, Scores<C>& dp, const Sequence& seq,
                                            int first_query, int first_key,
                                            const AttentionBwdParams& p) {
  const int thread = ptx::opaque_thread();
  for_each_masked<kSide, C::kScoreM, C::kScoreN>(
      first_query + score_row<C>(thread), first_key + score_col<C>(thread), seq, p,
      [&](int m, int n, int i) { s[m][n][i] = dp[m][n][i] = 0; });
}

// Writes the packed tile of P or dS: in 16 bits, to shared memory.
template <class C>
__device__ __forceinline__ void store_packed(uint32_t lane, const Scores<C>& x) {
  using Layout = typename C::PackedLayout;
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
__device__ __forceinline__ void add_key_gradient(float (&acc)[C::kKeyM][C::kKeyN][4],
                                                 uint32_t left_lane, uint32_t right_lane) {
  const AcrossA<typename C::PackedLayout, C::kKeyRows> left{left_lane};
  const AcrossB<typename C::Layout, C::kKeyCols> right{right_lane};
  multiply<typename C::Type, C::kBlockQ / 16, kUnroll<C, kLoop, C::kBlockQ / 16>>(acc, left, right);
}

// One tile of queries, whose Q and dO are in shared memory. Returns false, with nothing added,
// where the tile needs the general loop because something is not finite. `after_bias` is called
// when the bias is done with.
template <class C, Loop kLoop, class Order, class AfterBias>
__device__ __forceinline__ bool bwd_step(BwdState<C>& t, uint32_t smem, int stage, BwdTask& task,
                                         const QueryTile& tile, const AttentionBwdParams& p,
                                         const Order& order, const AfterBias& after_bias) {
  using Layout = typename C::Layout;
  constexpr bool kMasked = kLoop != Loop::kPlain;
  constexpr bool kGeneral = kLoop == Loop::kGeneral;
  const Sequence& seq = task.seq;
  const int first_key = task.key_tile * C::kBlockK;
  const uint32_t sK = smem + C::kSmemK, sV = smem + C::kSmemV;
  const uint32_t sP = smem + C::kSmemP, sdS = smem + C::kSmemdS;
  const uint32_t sQ = smem + C::kSmemQ + stage * C::kQueryBytes;
  const uint32_t sdO = smem + C::kSmemdO + stage * C::kQueryBytes;
  const uint32_t sLseDelta = smem + C::kSmemLseDelta + stage * C::kLseDeltaBytes;
  const BwdLanes<C> lanes;
  const uint32_t sBias = bias_address<C>(smem, stage);
  if (may_need_guard<C, kLoop>() && rows_nonfinite<C>(sLseDelta)) return false;
  // A bias that comes late, or that may hide something not finite, is applied pair by pair.
  const bool by_pair =
      C::kBias && kGeneral && (late_bias(p) || task.nonfinite_keys || rows_nonfinite<C>(sLseDelta));
  bool needs_guard = false;
  {
    const KeptScores<C> kept(task, tile, p);
    LseDelta<C> lse_delta;
    load_lse_delta<C>(lse_delta, sLseDelta);
    Scores<C> s, dp;
    if (has_bias<C>(p) && !by_pair) {
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
    if (kGeneral && (by_pair || !C::kBias)) needs_guard = any_nonfinite(s, dp);
    if (by_pair) {
      if constexpr (C::kBias) differentiate_pairs<C>(s, dp, lse_delta, kept, sBias, task, tile, p);
    } else {
      differentiate_scores<C, kLoop>(s, dp, lse_delta, kept, p);
      if (kMasked && tile.first < task.full_begin) {
        mask_scores<C, Side::kAfter>(s, dp, seq, tile.first, first_key, p);
      }
      if (kMasked && tile.first >= task.full_end) {
        mask_scores<C, Side::kBefore>(s, dp, seq, tile.first, first_key, p);
      }
    }
    store_packed<C>(sP + lanes.packed(), s);
    store_packed<C>(sdS + lanes.packed(), dp);
  }
  order.wait(task, tile, p);
  if (kGeneral) {
    needs_guard = __syncthreads_or(needs_guard);  // P and dS are written
  } else {
    __syncthreads();  // P and dS are written
  }
  after_bias();
  order.release_previous(task, tile, p);
  if constexpr (C::kBias && !C::kShort) {
    if (p.grad_bias && !by_pair) store_bias_gradient<C>(sdS, task, tile, p);
  }

  // Short sequences leave dQ to its own kernel.
  if (!needs_guard) {
    add_key_gradient<C, kLoop>(t.rdV, sP + lanes.key_left(), sdO + lanes.key_right());
    add_key_gradient<C, kLoop>(t.rdK, sdS + lanes.key_left(), sQ + lanes.key_right());
    if constexpr (C::kShort) return true;
    add_dq<C>(task, tile, p, [&](DqPart<C>& acc, int part) {
      dq_product<C, kLoop>(acc, part, sdS + lanes.query_left(), sK + lanes.query_right());
    });
  } else if constexpr (kGeneral) {
    const GuardedProducts<C> products{seq, tile.first, first_key, p, packed_bias_of(task, tile, p)};
    products.template add_key_gradient<C::kDropout>(t.rdV, sP, sdO, 0, C::kBlockQ);
    products.template add_key_gradient<false>(t.rdK, sdS, sQ, 0, C::kBlockQ);
    if constexpr (C::kShort) return true;
    add_dq<C>(task, tile, p,
              [&](DqPart<C>& acc, int part) { products.dq_product(acc, part, sdS, sK); });
  }
  return true;
}

}  // namespace flashmoe::cuda
