// One block of queries x keys of the backward pass, each warp with keys of its own: S and dP are
// computed as keys x queries, so that P and dS are in registers as dV and dK need them, and only dS
// goes through shared memory, for dQ. For small head dims: a warp holds its keys' whole rows of dK
// and dV. At D = 64 on an H200 a fifth faster than attention_bwd_block.cuh.
#pragma once

#include "cuda/attention/mma_sync/bwd_dq.cuh"
#include "cuda/attention/mma_sync/bwd_guard.cuh"
#include "cuda/attention/mma_sync/bwd_tile.cuh"

namespace flashmoe::cuda {

// S and dP with own keys: keys x queries, kOwnQueries of the block's at a time.
template <class C>
using OwnScores = float[C::kKeyM][C::kOwnQueries / 8][4];

// P or dS as the left operand of a product: a fragment of 16 keys x 16 queries.
template <class C>
struct OwnPairs {
  const OwnScores<C>& x;
  __device__ __forceinline__ void load(uint32_t (&a)[4], int m, int step) const {
    const auto &left = x[m][2 * step], &right = x[m][2 * step + 1];
    a[0] = C::Type::pack(left[0], left[1]);
    a[1] = C::Type::pack(left[2], left[3]);
    a[2] = C::Type::pack(right[0], right[1]);
    a[3] = C::Type::pack(right[2], right[3]);
  }
};

// To the block's columns from `first` on.
template <class C>
__device__ __forceinline__ void store_own_pairs(uint32_t lane, int first, const OwnScores<C>& x) {
  using Layout = typename C::OwnLayout;
#pragma unroll
  for (int n = 0; n < C::kOwnQueries / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 2 * C::kKeyM; ++i) {
      ptx::st_shared_u32(Layout::along(lane, first / 8 + n) + 8 * i * Layout::kRowBytes,
                         C::Type::pack(x[i / 2][n][i % 2 * 2], x[i / 2][n][i % 2 * 2 + 1]));
    }
  }
}

// P and dS in place of S and dP, of two columns of queries at a time.
template <class C, Loop kLoop>
__device__ __forceinline__ void differentiate_own(OwnScores<C>& s, OwnScores<C>& dp,
                                                  uint32_t sTerms, const AttentionBwdParams& p) {
  const ScoreRule rule(p);
  const uint32_t from = sTerms + ptx::opaque_thread() % 4 * 16;
#pragma unroll
  for (int n = 0; n < C::kOwnQueries / 8; ++n) {
    const float4 two = ptx::ld_shared_v4_f32(from + n * 64);
#pragma unroll
    for (int m = 0; m < C::kKeyM; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) dp[m][n][i] -= i % 2 ? two.w : two.y;
    }
    if (kLoop == Loop::kGeneral && p.softcap_scale) {
#pragma unroll
      for (int i = 0; i < C::kKeyM * 4; ++i) {
        rule.differentiate_cap(s[i / 4][n][i % 4], dp[i / 4][n][i % 4]);
      }
    }
#pragma unroll
    for (int m = 0; m < C::kKeyM; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        rule.differentiate(s[m][n][i], dp[m][n][i], i % 2 ? two.z : two.x);
      }
    }
  }
}

// 0 where a key is before the first that the row sees, or after the last.
template <class C, Side kSide>
__device__ __forceinline__ void mask_own(OwnScores<C>& s, OwnScores<C>& dp, const BwdTask& task,
                                         int first_query, const AttentionBwdParams& p) {
  const int first_key = task.key_block * C::kBlockK + score_col<C>(ptx::opaque_thread());
  for_each_masked_transposed<kSide, C::kKeyM, C::kOwnQueries / 8>(
      first_query, first_key, task.seq, p,
      [&](int m, int n, int i) { s[m][n][i] = dp[m][n][i] = 0; });
}

// Whether the keys of this warp are past the end.
template <class C>
__device__ __forceinline__ bool own_idle(const BwdTask& task) {
  return task.key_block * C::kBlockK + score_col<C>(ptx::opaque_thread()) >= task.seq.len_k;
}

// P and dS of any call with a bias.
template <class C>
__device__ __forceinline__ void differentiate_own_any(OwnScores<C>& s, OwnScores<C>& dp, int first,
                                                      uint32_t sTerms, uint32_t sBias,
                                                      const BwdTask& task, const QueryBlock& block,
                                                      const AttentionBwdParams& p) {
  const int thread = ptx::opaque_thread(), lane = thread % 32;
  const int key = score_col<C>(thread) + lane / 4, query = first + lane % 4 * 2;
#pragma unroll
  for (int n = 0; n < C::kOwnQueries / 8; ++n) {
    const float4 two = ptx::ld_shared_v4_f32(sTerms + (query + 8 * n) * 8);
#pragma unroll
    for (int i = 0; i < C::kKeyM * 4; ++i) {
      const float2 term = i % 2 ? float2{two.z, two.w} : float2{two.x, two.y};
      differentiate_any<C>(s[i / 4][n][i % 4], dp[i / 4][n][i % 4], term, query + 8 * n + i % 2,
                           key + i / 2 * 8, sBias, task, block, p);
    }
  }
}

// dS is the gradient of the bias, too, where there is no softcap. It lies as keys x queries: each
// matrix of eight rows takes the keys that make a lane's four registers eight neighbouring keys.
template <class C>
__device__ __forceinline__ void store_own_bias_gradient(uint32_t sdS, const BwdTask& task,
                                                        const QueryBlock& block,
                                                        const AttentionBwdParams& p) {
  constexpr int kGroups = C::kBlockQ / 8, kWarps = C::kThreads / 32;
  const int thread = ptx::opaque_thread(), lane = thread % 32;
  const BiasRows grad = grad_bias_of(task, block, p);
#pragma unroll 1
  for (int i = thread / 32; i < kGroups * (C::kBlockK / 32); i += kWarps) {
    const int group = i % kGroups, keys = i / kGroups * 32;
    const int from = keys + lane % 8 / 2 * 8 + lane / 8 * 2 + lane % 2;
    uint32_t x[4];
    ptx::ldmatrix_x4_trans(x, sdS + C::OwnLayout::at(from, group));
    const int row = block.first + group * 8 + lane / 4;
    const int key = task.key_block * C::kBlockK + keys + lane % 4 * 8;
    if (row < task.seq.len_q && key < task.stored_keys) {
      store_eight(grad, row, key, task.stored_keys - key, {x[0], x[1], x[2], x[3]});
    }
  }
}

// dS of keys past the end, which nobody computes.
template <class C>
__device__ __forceinline__ void clear_own_pairs(uint32_t sdS) {
  using Layout = typename C::OwnLayout;
  const int thread = ptx::opaque_thread(), lane = thread % 32;
  const uint32_t from = sdS + score_col<C>(thread) * Layout::kRowBytes;
#pragma unroll 1
  for (int i = lane * 16; i < C::kKeyM * 16 * Layout::kRowBytes; i += 32 * 16) {
    ptx::st_shared_v4(from + i, {0, 0, 0, 0});
  }
}

// bwd_block with own keys; in a block that needs anything a warp contains what is not finite by
// itself.
template <class C, Loop kLoop, class Turn, class Between>
__device__ __forceinline__ bool bwd_block_own(BwdState<C>& t, uint32_t smem, int stage,
                                              BwdTask& task, const QueryBlock& block,
                                              const AttentionBwdParams& p, const Turn& turn,
                                              const Between& between) {
  using Layout = typename C::Layout;
  using Type = typename C::Type;
  constexpr bool kMasked = kLoop != Loop::kPlain, kGeneral = kLoop == Loop::kGeneral;
  const uint32_t sK = smem + C::kSmemK, sV = smem + C::kSmemV, sdS = smem + C::kSmemGradS;
  const uint32_t sQ = smem + C::kSmemQ + stage * C::kQueryBytes;
  const uint32_t sdO = smem + C::kSmemGradOut + stage * C::kQueryBytes;
  const uint32_t sTerms = smem + C::kSmemTerms + stage * C::kTermBytes;
  const uint32_t sBias = bias_place<C>(smem, stage);
  const ContainedProducts<C> contained{task.seq, block.first, task.key_block * C::kBlockK, p,
                                       packed_bias_of(task, block, p)};
  if (may_contain<C, kLoop>() && terms_not_finite<C>(sTerms)) return false;
  bool contain = false;
  // With a bias, pair by pair: one that comes late, or that hides something not finite.
  const bool each =
      C::kBias && kGeneral && (late_bias(p) || task.contain || terms_not_finite<C>(sTerms));
  // Queries and, for this warp, keys past the end would cost as much as the others. (At D = 64 full
  // blocks have no register to count with.)
  int queries = C::kBlockQ;
  if (kMasked || C::kDim < 64) queries = min(queries, task.seq.len_q - block.first);
  if (kMasked && !each && own_idle<C>(task)) queries = 0;
#pragma unroll 1
  for (int first = 0; first < queries; first += C::kOwnQueries) {
    const uint32_t rows = first * Layout::kRowBytes;
    const BwdLanes<C> lanes;
    OwnScores<C> s, dp;
    if (C::kBias && !each) {
      C::Bias::start_across(s, sBias, first, score_col<C>(lanes.thread), p.bias_scale);
    } else {
      set_zero(s);
    }
    set_zero(dp);
    multiply<Type, C::kDim / 16, kUnroll<C, kLoop, C::kDim / 16>>(
        s, AlongA<Layout>{sK + lanes.score_left()},
        AlongB<Layout>{sQ + rows + lanes.score_right()});
    multiply<Type, C::kDim / 16, kUnroll<C, kLoop, C::kDim / 16>>(
        dp, AlongA<Layout>{sV + lanes.score_left()},
        AlongB<Layout>{sdO + rows + lanes.score_right()});
    // dK and dV are this warp's own affair.
    const bool mine =
        kGeneral && (each || !C::kBias) && __any_sync(0xffffffffu, any_nonfinite(s, dp));
    if (each) {
      if constexpr (C::kBias) {
        differentiate_own_any<C>(s, dp, first, sTerms, sBias, task, block, p);
      }
    } else {
      differentiate_own<C, kLoop>(s, dp, sTerms + first * 8, p);
      if (kMasked && block.first < task.full_begin) {
        mask_own<C, Side::kAfter>(s, dp, task, block.first + first, p);
      }
      if (kMasked && block.first >= task.full_end) {
        mask_own<C, Side::kBefore>(s, dp, task, block.first + first, p);
      }
    }
    if (kGeneral && mine) {
      contain = true;
      store_own_pairs<C>(sdS + lanes.pairs(), first, s);
      __syncwarp();  // P is written, in dS's place
      contained.accumulate_key(t.gV, sdS, sdO, first, first + C::kOwnQueries);
      __syncwarp();  // and read
      store_own_pairs<C>(sdS + lanes.pairs(), first, dp);
      __syncwarp();  // dS is written
      contained.accumulate_key(t.gK, sdS, sQ, first, first + C::kOwnQueries);
    } else {
      if (!C::kShort) store_own_pairs<C>(sdS + lanes.pairs(), first, dp);
      multiply<Type, C::kOwnQueries / 16>(t.gV, OwnPairs<C>{s},
                                          AcrossB<Layout>{sdO + rows + lanes.key_right()});
      multiply<Type, C::kOwnQueries / 16>(t.gK, OwnPairs<C>{dp},
                                          AcrossB<Layout>{sQ + rows + lanes.key_right()});
    }
  }
  if constexpr (C::kShort) return true;  // dQ has a kernel of its own
  turn.wait(task, block, p);
  // dS is written.
  if (kGeneral) {
    contain = __syncthreads_or(contain);
  } else {
    __syncthreads();
  }
  between();
  turn.pass_on(task, block, p);
  if constexpr (C::kBias) {
    if (p.grad_bias && !each) store_own_bias_gradient<C>(sdS, task, block, p);
  }
  const BwdLanes<C> lanes;
  add_query_gradient<C>(task, block, p, [&](QueryPart<C>& acc, int part) {
    if (kGeneral && contain) {
      contained.query_gradient(acc, part, sdS, sK);
    } else {
      query_gradient<C, kLoop>(acc, part, sdS + lanes.query_left(), sK + lanes.query_right());
    }
  });
  return true;
}

}  // namespace flashmoe::cuda
