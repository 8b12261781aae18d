// One block of queries x keys of the backward pass, each warp with keys of its own: S and dP are
// computed as keys x queries, so that P and dS are in registers as dV and dK need them, and only dS
// goes through shared memory, for dQ. For small head dims: a warp holds its keys' whole rows of dK
// and dV. At D = 64 on an H200 a fifth faster than attention_bwd_block.cuh.
#pragma once

#include "cuda/any/attention_bwd_tile.cuh"
#include "cuda/tile/softmax.cuh"
#include "cuda/tile/sums.cuh"

namespace flashmoe::cuda {

// S and dP with own keys: keys x queries.
template <class C>
using OwnScores = float[C::kKeyM][C::kBlockQ / 8][4];

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

template <class C>
__device__ __forceinline__ void store_own_pairs(uint32_t lane, const OwnScores<C>& x) {
  using Layout = typename C::OwnLayout;
#pragma unroll
  for (int n = 0; n < C::kBlockQ / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 2 * C::kKeyM; ++i) {
      ptx::st_shared_u32(Layout::along(lane, n) + 8 * i * Layout::kRowBytes,
                         C::Type::pack(x[i / 2][n][i % 2 * 2], x[i / 2][n][i % 2 * 2 + 1]));
    }
  }
}

// P and dS in place of S and dP, of two columns of queries at a time.
template <class C, bool kGeneral>
__device__ __forceinline__ void differentiate_own(OwnScores<C>& s, OwnScores<C>& dp,
                                                  uint32_t sTerms, const BwdTask& task,
                                                  const QueryBlock& block,
                                                  const AttentionBwdParams& p) {
  const int thread = ptx::opaque_thread(), lane = thread % 32;
#pragma unroll
  for (int n = 0; n < C::kBlockQ / 8; ++n) {
    const float4 two = ptx::ld_shared_v4_f32(sTerms + n * 64 + lane % 4 * 16);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float lse = c ? two.z : two.x, delta = c ? two.w : two.y;
      const int query = block.first + 8 * n + lane % 4 * 2 + c;
      const int offset = task.key_block * C::kBlockK + score_col<C>(thread) + lane / 4;
      const int begin = kGeneral ? task.seq.begin(query, p) - offset : 0;
      const int end = kGeneral ? task.seq.end(query, p) - offset : 0;
#pragma unroll
      for (int m = 0; m < C::kKeyM; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float &score = s[m][n][2 * half + c], &slope = dp[m][n][2 * half + c];
          Tanh capped{score, 1};
          if (kGeneral && p.softcap_scale) capped = tanh_and_derivative(score * p.softcap_scale);
          score = ptx::ex2_approx_ftz(capped.value * p.scale_log2 - lse);
          slope = score * (slope - delta);
          if (!kGeneral) continue;
          if (p.softcap_scale) slope *= capped.derivative;
          const int key = 16 * m + 8 * half;
          if (key < begin || key >= end) score = slope = 0;
        }
      }
    }
  }
}

// bwd_block with own keys.
template <class C, bool kGeneral, class Wait, class Publish>
__device__ __forceinline__ void bwd_block_own(BwdState<C>& t, const BwdLanes<C>& lanes,
                                              uint32_t smem, int stage, const BwdTask& task,
                                              const QueryBlock& block, const AttentionBwdParams& p,
                                              const Wait& wait, const Publish& publish) {
  using Layout = typename C::Layout;
  using Type = typename C::Type;
  const uint32_t sK = smem + C::kSmemK, sV = smem + C::kSmemV, sdS = smem + C::kSmemGradS;
  const uint32_t sQ = smem + C::kSmemQ + stage * C::kQueryBytes;
  const uint32_t sdO = smem + C::kSmemGradOut + stage * C::kQueryBytes;
  const uint32_t sTerms = smem + C::kSmemTerms + stage * C::kTermBytes;
  OwnScores<C> s, dp;
  set_zero(s);
  set_zero(dp);
  multiply<Type, C::kDim / 16, kUnroll<C, kGeneral, C::kDim / 16>>(
      s, AlongA<Layout>{sK + lanes.score_left()}, AlongB<Layout>{sQ + lanes.score_right()});
  multiply<Type, C::kDim / 16, kUnroll<C, kGeneral, C::kDim / 16>>(
      dp, AlongA<Layout>{sV + lanes.score_left()}, AlongB<Layout>{sdO + lanes.score_right()});
  bool contain = false;
  if (kGeneral) {
    float zero = 0;
#pragma unroll
    for (int i = 0; i < C::kKeyM * C::kBlockQ / 2; ++i) {
      const int m = i / (C::kBlockQ / 2), n = i % (C::kBlockQ / 2) / 4;
      zero += s[m][n][i % 4] * 0.f + dp[m][n][i % 4] * 0.f;
    }
    contain = __syncthreads_or(!(zero == 0));
  }
  differentiate_own<C, kGeneral>(s, dp, sTerms, task, block, p);
  if (kGeneral && contain) {
    store_own_pairs<C>(smem + C::kSmemP + lanes.pairs(), s);
  } else {
    multiply<Type, C::kBlockQ / 16>(t.gV, OwnPairs<C>{s}, AcrossB<Layout>{sdO + lanes.key_right()});
  }
  store_own_pairs<C>(sdS + lanes.pairs(), dp);
  wait();
  __syncthreads();  // dS is written
  publish();

  float gQ[C::kQueryM][C::kQueryN][4];
  if (kGeneral && contain) {
    const ContainedProducts<C> products{task.seq, block.first, task.key_block * C::kBlockK, p};
    products.accumulate_key(t.gV, smem + C::kSmemP, sdO);
    products.accumulate_key(t.gK, sdS, sQ);
    products.query_gradient(gQ, sdS, sK);
  } else {
    multiply<Type, C::kBlockQ / 16>(t.gK, OwnPairs<C>{dp}, AcrossB<Layout>{sQ + lanes.key_right()});
    query_gradient<C, kGeneral>(gQ, sdS + lanes.query_left(), sK + lanes.query_right());
  }
  if (p.grad_query) add_sums(query_sums<C>(task, block, p), gQ);
}

}  // namespace flashmoe::cuda
