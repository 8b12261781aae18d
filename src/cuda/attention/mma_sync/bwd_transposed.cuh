// One tile of queries x keys of the backward pass, transposed: each warp has keys of its own and
// computes S and dP as keys x queries, so that P and dS are in registers as dV and dK need them,
// and only dS goes through shared memory, for dQ. For small head dims: a warp holds whole rows of
// dK and dV. At D = 64 a fifth faster than bwd_step.cuh (H200, 2026-11-15).
#pragma once

#include "cuda/attention/mma_sync/bwd_dq.cuh"
#include "cuda/attention/mma_sync/bwd_guard.cuh"
#include "cuda/attention/mma_sync/bwd_tile.cuh"

namespace flashmoe::cuda {

// What a warp holds of S or dP, later of P or dS: its keys x kQueriesAtOnce queries.
template <class C>
using TransposedScores = float[C::kKeyM][C::kQueriesAtOnce / 8][4];

// P or dS in registers as the left operand of a product: fragments of 16 keys x 16 queries.
template <class C>
struct PackedOperand {
  const TransposedScores<C>& x;
  __device__ __forceinline__ void load(uint32_t (&a)[4], int m, int step) const {
    pack_operand<typename C::Type>(a, x[m][2 * step], x[m][2 * step + 1]);
  }
};

// Writes P or dS to the packed tile, to the columns of the queries from `first` on.
template <class C>
__device__ __forceinline__ void store_packed_transposed(uint32_t lane, int first,
                                                        const TransposedScores<C>& x) {
  using Layout = typename C::TransposedLayout;
#pragma unroll
  for (int n = 0; n < C::kQueriesAtOnce / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 2 * C::kKeyM; ++i) {
      ptx::st_shared_u32(Layout::along(lane, first / 8 + n) + 8 * i * Layout::kRowBytes,
                         C::Type::pack(x[i / 2][n][i % 2 * 2], x[i / 2][n][i % 2 * 2 + 1]));
    }
  }
}

// Which of the pairs that a lane holds of kQueriesAtOnce queries are kept, from `first` of the tile
// on; all of them without dropout.
template <class C>
struct KeptTransposed {
  DrawnPairs<C::kKeyM == 1 ? 16 : 32, 1, true> drawn;
  const AttentionBwdParams& p;

  __device__ __forceinline__ KeptTransposed(const BwdTask& task, const QueryTile& tile, int first,
                                            const AttentionBwdParams& p)
      : p(p) {
    if constexpr (C::kDropout) {
      static_assert(C::kQueriesAtOnce == 16 && C::kKeyM <= 2);
      const int thread = ptx::opaque_thread();
      drawn.draw(tile.first + first, task.key_tile * C::kBlockK + score_col<C>(thread), thread % 32,
                 dropout_of<C>(task, tile));
    }
  }
  __device__ __forceinline__ bool operator()(int m, int n, int i) const {
    return !C::kDropout || drawn.keeps(0, 2 * m + i / 2, n, i % 2, p);
  }
};

// Puts P and dS in place of S and dP, two queries of a lane at a time.
template <class C, Loop kLoop>
__device__ __forceinline__ void differentiate_transposed(TransposedScores<C>& s,
                                                         TransposedScores<C>& dp,
                                                         uint32_t sLseDelta,
                                                         const KeptTransposed<C>& kept,
                                                         const AttentionBwdParams& p) {
  const ScoreRule rule(p);
  const uint32_t from = sLseDelta + ptx::opaque_thread() % 4 * 16;
#pragma unroll
  for (int n = 0; n < C::kQueriesAtOnce / 8; ++n) {
    const float4 two = ptx::ld_shared_v4_f32(from + n * 64);
#pragma unroll
    for (int m = 0; m < C::kKeyM; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        dp[m][n][i] =
            minus_delta<C::kDropout>(dp[m][n][i], i % 2 ? two.w : two.y, kept(m, n, i), p);
      }
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
        if (!kept(m, n, i)) s[m][n][i] = kDroppedProbability;
      }
    }
  }
}

// Sets P and dS to 0 where the key is before the first that the row sees, or after the last.
template <class C, Side kSide>
__device__ __forceinline__ void mask_transposed(TransposedScores<C>& s, TransposedScores<C>& dp,
                                                const BwdTask& task, int first_query,
                                                const AttentionBwdParams& p) {
  const int first_key = task.key_tile * C::kBlockK + score_col<C>(ptx::opaque_thread());
  for_each_masked_transposed<kSide, C::kKeyM, C::kQueriesAtOnce / 8>(
      first_query, first_key, task.seq, p,
      [&](int m, int n, int i) { s[m][n][i] = dp[m][n][i] = 0; });
}

// Whether all keys of this warp are past the end of the sequence.
template <class C>
__device__ __forceinline__ bool keys_past_end(const BwdTask& task) {
  return task.key_tile * C::kBlockK + score_col<C>(ptx::opaque_thread()) >= task.seq.len_k;
}

// Puts P and dS in place of S and dP, pair by pair, for any call with a bias.
template <class C>
__device__ __forceinline__ void differentiate_pairs_transposed(
    TransposedScores<C>& s, TransposedScores<C>& dp, int first, const KeptTransposed<C>& kept,
    uint32_t sLseDelta, uint32_t sBias, const BwdTask& task, const QueryTile& tile,
    const AttentionBwdParams& p) {
  const int thread = ptx::opaque_thread(), lane = thread % 32;
  const int key = score_col<C>(thread) + lane / 4, query = first + lane % 4 * 2;
#pragma unroll
  for (int n = 0; n < C::kQueriesAtOnce / 8; ++n) {
    const float4 two = ptx::ld_shared_v4_f32(sLseDelta + (query + 8 * n) * 8);
#pragma unroll
    for (int i = 0; i < C::kKeyM * 4; ++i) {
      const float2 lse_delta = i % 2 ? float2{two.z, two.w} : float2{two.x, two.y};
      differentiate_pair<C>(s[i / 4][n][i % 4], dp[i / 4][n][i % 4], lse_delta,
                            kept(i / 4, n, i % 4), query + 8 * n + i % 2, key + i / 2 * 8, sBias,
                            task, tile, p);
    }
  }
}

// Stores dS as the gradient of the bias, which it is without a softcap. dS lies as keys x queries:
// each matrix of eight rows takes the keys that make a lane's four registers eight neighbouring
// keys.
template <class C>
__device__ __forceinline__ void store_bias_gradient_transposed(uint32_t sdS, const BwdTask& task,
                                                               const QueryTile& tile,
                                                               const AttentionBwdParams& p) {
  constexpr int kGroups = C::kBlockQ / 8, kWarps = C::kThreads / 32;
  const int thread = ptx::opaque_thread(), lane = thread % 32;
  const BiasRows grad = grad_bias_of(task, tile, p);
#pragma unroll 1
  for (int i = thread / 32; i < kGroups * (C::kBlockK / 32); i += kWarps) {
    const int group = i % kGroups, keys = i / kGroups * 32;
    const int from = keys + lane % 8 / 2 * 8 + lane / 8 * 2 + lane % 2;
    uint32_t x[4];
    ptx::ldmatrix_x4_trans(x, sdS + C::TransposedLayout::at(from, group));
    const int row = tile.first + group * 8 + lane / 4;
    const int key = task.key_tile * C::kBlockK + keys + lane % 4 * 8;
    if (row < task.seq.len_q && key < task.stored_keys) {
      store_eight(grad, row, key, task.stored_keys - key, {x[0], x[1], x[2], x[3]});
    }
  }
}

// Clears dS of the warp's keys: those past the end are never computed.
template <class C>
__device__ __forceinline__ void clear_packed(uint32_t sdS) {
  using Layout = typename C::TransposedLayout;
  const int thread = ptx::opaque_thread(), lane = thread % 32;
  const uint32_t from = sdS + score_col<C>(thread) * Layout::kRowBytes;
#pragma unroll 1
  for (int i = lane * 16; i < C::kKeyM * 16 * Layout::kRowBytes; i += 32 * 16) {
    ptx::st_shared_v4(from + i, {0, 0, 0, 0});
  }
}

// bwd_step() transposed. In the general loop each warp guards its own dK and dV.
template <class C, Loop kLoop, class Order, class AfterBias>
__device__ __forceinline__ bool bwd_step_transposed(BwdState<C>& t, uint32_t smem, int stage,
                                                    BwdTask& task, const QueryTile& tile,
                                                    const AttentionBwdParams& p, const Order& order,
                                                    const AfterBias& after_bias) {
  using Layout = typename C::Layout;
  using Type = typename C::Type;
  constexpr bool kMasked = kLoop != Loop::kPlain, kGeneral = kLoop == Loop::kGeneral;
  const uint32_t sK = smem + C::kSmemK, sV = smem + C::kSmemV, sdS = smem + C::kSmemdS;
  const uint32_t sQ = smem + C::kSmemQ + stage * C::kQueryBytes;
  const uint32_t sdO = smem + C::kSmemdO + stage * C::kQueryBytes;
  const uint32_t sLseDelta = smem + C::kSmemLseDelta + stage * C::kLseDeltaBytes;
  const uint32_t sBias = bias_address<C>(smem, stage);
  const GuardedProducts<C> guarded_products{task.seq, tile.first, task.key_tile * C::kBlockK, p,
                                            packed_bias_of(task, tile, p)};
  if (may_need_guard<C, kLoop>() && rows_nonfinite<C>(sLseDelta)) return false;
  bool needs_guard = false;
  // A bias that comes late, or that may hide something not finite, is applied pair by pair.
  const bool by_pair =
      C::kBias && kGeneral && (late_bias(p) || task.nonfinite_keys || rows_nonfinite<C>(sLseDelta));
  // Queries past the end, and a warp's keys past the end, would cost as much as the others. (The
  // plain loop at D = 64 has no register to count with.)
  int queries = C::kBlockQ;
  if (kMasked || C::kDim < 64) queries = min(queries, task.seq.len_q - tile.first);
  if (kMasked && !by_pair && keys_past_end<C>(task)) queries = 0;
#pragma unroll 1
  for (int first = 0; first < queries; first += C::kQueriesAtOnce) {
    const uint32_t rows = first * Layout::kRowBytes;
    const BwdLanes<C> lanes;
    TransposedScores<C> s, dp;
    if (has_bias<C>(p) && !by_pair) {
      C::Bias::start_transposed(s, sBias, first, score_col<C>(lanes.thread), p.bias_scale);
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
    const bool guards_keys =
        kGeneral && (by_pair || !C::kBias) && __any_sync(0xffffffffu, any_nonfinite(s, dp));
    const KeptTransposed<C> kept(task, tile, first, p);
    if (by_pair) {
      if constexpr (C::kBias) {
        differentiate_pairs_transposed<C>(s, dp, first, kept, sLseDelta, sBias, task, tile, p);
      }
    } else {
      differentiate_transposed<C, kLoop>(s, dp, sLseDelta + first * 8, kept, p);
      if (kMasked && tile.first < task.full_begin) {
        mask_transposed<C, Side::kAfter>(s, dp, task, tile.first + first, p);
      }
      if (kMasked && tile.first >= task.full_end) {
        mask_transposed<C, Side::kBefore>(s, dp, task, tile.first + first, p);
      }
    }
    if (kGeneral && guards_keys) {
      needs_guard = true;
      store_packed_transposed<C>(sdS + lanes.packed(), first, s);
      __syncwarp();  // P is written where dS will be
      guarded_products.template add_key_gradient<C::kDropout>(t.rdV, sdS, sdO, first,
                                                              first + C::kQueriesAtOnce);
      __syncwarp();  // P is read
      store_packed_transposed<C>(sdS + lanes.packed(), first, dp);
      __syncwarp();  // dS is written
      guarded_products.template add_key_gradient<false>(t.rdK, sdS, sQ, first,
                                                        first + C::kQueriesAtOnce);
    } else {
      if (!C::kShort) store_packed_transposed<C>(sdS + lanes.packed(), first, dp);
      multiply<Type, C::kQueriesAtOnce / 16>(t.rdV, PackedOperand<C>{s},
                                             AcrossB<Layout>{sdO + rows + lanes.key_right()});
      multiply<Type, C::kQueriesAtOnce / 16>(t.rdK, PackedOperand<C>{dp},
                                             AcrossB<Layout>{sQ + rows + lanes.key_right()});
    }
  }
  if constexpr (C::kShort) return true;  // dQ has a kernel of its own
  order.wait(task, tile, p);
  if (kGeneral) {
    needs_guard = __syncthreads_or(needs_guard);  // dS is written
  } else {
    __syncthreads();  // dS is written
  }
  after_bias();
  order.release_previous(task, tile, p);
  if constexpr (C::kBias) {
    if (p.grad_bias && !by_pair) store_bias_gradient_transposed<C>(sdS, task, tile, p);
  }
  const BwdLanes<C> lanes;
  add_dq<C>(task, tile, p, [&](DqPart<C>& acc, int part) {
    if (kGeneral && needs_guard) {
      guarded_products.dq_product(acc, part, sdS, sK);
    } else {
      dq_product<C, kLoop>(acc, part, sdS + lanes.query_left(), sK + lanes.query_right());
    }
  });
  return true;
}

}  // namespace flashmoe::cuda
