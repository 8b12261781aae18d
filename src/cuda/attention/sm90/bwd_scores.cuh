// The score step of the sm90 backward pass: S and dP of 64 keys by MMA, and P and dS from them.
#pragma once

#include "cuda/attention/score.cuh"
#include "cuda/attention/sm90/bwd_warpgroup.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/wgmma.cuh"

namespace flashmoe::cuda::sm90 {

// P or dS of 64 keys in 16 bits, as wgmma reads operands from registers.
template <class C>
using PackedTile = uint32_t[C::kBlockQ / 16][4];

template <class C>
__device__ __forceinline__ void pack(PackedTile<C>& packed, const float (&x)[C::kBlockQ / 2]) {
#pragma unroll
  for (int i = 0; i < C::kBlockQ / 4; ++i) {
    packed[i / 4][i % 4] = C::Type::pack(x[2 * i], x[2 * i + 1]);
  }
}

// Where a lane begins in a C::ScoreTile whose rows are queries, to read or write 8 x 8 matrices of
// the warp's accumulators transposed: 16 queries and the warp's 16 of the 64 keys from `first` on.
template <class C>
__device__ __forceinline__ uint32_t fragment_of_tile(int first) {
  const int query = lane() / 16 * 8 + lane() % 8;
  return C::ScoreTile::at(query, first + warpgroup_warp() * 16 + lane() / 8 % 2 * 8);
}

// dS (or P) to shared memory, a row for each query; the warpgroup's keys from column `first` on.
template <class C>
__device__ __forceinline__ void store_ds(const BwdWarpgroup<C>& wg, const PackedTile<C>& packed,
                                         int first) {
  const uint32_t at = fragment_of_tile<C>(first), to = wg.ds_tile(wg.stage) + at;
#pragma unroll
  for (int i = 0; i < C::kBlockQ / 16; ++i) ptx::stmatrix_x4_trans(to + i * 16 * 128, packed[i]);
}

// dV += P^T dO, or dK += dS^T Q, with P^T or dS^T in registers and `rows` the address of dO or Q.
template <class C>
__device__ __forceinline__ void issue_gradient(float (&sums)[C::kDim / 2],
                                               const PackedTile<C>& packed, uint32_t rows) {
  rows = BwdWarpgroup<C>::recompute(rows);
#pragma unroll
  for (int step = 0; step < C::kBlockQ / 16; ++step) {
    ptx::Wgmma<C::kBf16, C::kDim>::rs_tb(sums, packed[step],
                                         C::Rows::across(C::Rows::descriptor(rows), step));
  }
  ptx::wgmma_commit_group();
}

template <class C>
struct BwdScores {
  using Smem = typename C::Smem;

  float rS[C::kBlockQ / 2], rdP[C::kBlockQ / 2];  // then P and dS; a row for each key
  PackedTile<C> slopes;                           // the derivative of a softcap
  // K of the last steps of S, as wgmma reads it from registers.
  static constexpr int kSteps = C::kDim / 16, kKeySteps = C::kKeySteps;
  uint32_t rK[kKeySteps > 0 ? kKeySteps : 1][4];

  // Whether dP is issued after P is found: beside a softcap there are no registers for both, nor
  // where many consumers share them.
  static constexpr bool kLateDp = C::kTile.general_score || C::kSmallDim;

  // The bias of the tile that `tiles` says as S^T, which issue_scores() adds to: scores are scale *
  // (q.k + bias / scale).
  __device__ __forceinline__ void start_from_bias(const BwdWarpgroup<C>& wg,
                                                  const tma::Ring<C::kStages>& tiles) {
    const tma::Slot slot = wg.slot(C::kBiasBarrier + tiles.at());
    const uint32_t tile =
        wg.opaque_smem() + offsetof(Smem, sBias) + tiles.at() * sizeof(typename C::BiasStage);
    tiles.wait_full(slot);
    if constexpr (C::kBiasRows) {
      read_bias_rows(wg, tile);
    } else {
      read_bias_matrices(wg, tile);
    }
    warp_arrive(slot.empty);
  }
  __device__ __forceinline__ void read_bias_matrices(const BwdWarpgroup<C>& wg, uint32_t tile) {
    const uint32_t from = tile + fragment_of_tile<C>(wg.first_key());
    const float inverse = wg.p.bias_scale;
#pragma unroll
    for (int n = 0; n < C::kBlockQ / 16; ++n) {
      uint32_t x[4];  // keys 0 to 7 and 8 to 15, of each queries 0 to 7 and 8 to 15
      ptx::ldmatrix_x4_trans(x, from + n * 16 * 128);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        rS[8 * n + 2 * i] = C::Type::unpack(static_cast<uint16_t>(x[i])) * inverse;
        rS[8 * n + 2 * i + 1] = C::Type::unpack(static_cast<uint16_t>(x[i] >> 16)) * inverse;
      }
    }
  }
  // The same from rows that begin anywhere.
  __device__ __forceinline__ void read_bias_rows(const BwdWarpgroup<C>& wg, uint32_t tile) {
    using Tile = typename C::BiasTile;
    const uint32_t first = ptx::ld_shared_u32(tile + offsetof(typename C::BiasRowStage, shift));
    const float inverse = wg.p.bias_scale;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int query = fragment_column() + e;
      const uint32_t from = tile + query * Tile::kPitch +
                            (wg.first_key() + fragment_row()) * Tile::kElementBytes +
                            Tile::shift(first, query, wg.p.bias_strides.row);
#pragma unroll
      for (int i = 0; i < C::kBlockQ / 4; ++i) {
        const uint32_t at = i / 2 * 8 * Tile::kPitch + i % 2 * 8 * Tile::kElementBytes;
        rS[2 * i + e] = Tile::read(from + at) * inverse;
      }
    }
  }

  __device__ __forceinline__ void load_keys(const BwdWarpgroup<C>& wg) {
    const uint32_t keys = wg.opaque_smem() + offsetof(Smem, sK);
    const int row = wg.first_row() + warpgroup_warp() * 16 + lane() % 16;
#pragma unroll
    for (int i = 0; i < kKeySteps; ++i) {
      const int column = (kSteps - kKeySteps + i) * 16 + lane() / 16 * 8;
      ptx::ldmatrix_x4(rK[i], keys + C::Keys::at(row, column));
    }
  }

  // S^T = K Q^T, or dP^T = V dO^T; kAdd: added to what is there. The last kKept steps take the keys
  // from registers, `kept`.
  template <bool kAdd = false, int kKept = 0>
  static __device__ __forceinline__ void issue_mma(const BwdWarpgroup<C>& wg,
                                                   float (&sums)[C::kBlockQ / 2], uint32_t keys,
                                                   uint32_t rows,
                                                   const uint32_t (*kept)[4] = nullptr) {
    using Wgmma = ptx::Wgmma<C::kBf16, C::kBlockQ>;
    static_assert(kKept < kSteps);
    keys = C::Keys::descriptor(wg.recompute(keys + wg.first_row() * C::Keys::kRowBytes));
    rows = C::Rows::descriptor(wg.recompute(rows));
    if constexpr (!kAdd) {
      Wgmma::ss_first(sums, C::Keys::along(keys, 0), C::Rows::along(rows, 0));
    }
#pragma unroll
    for (int step = kAdd ? 0 : 1; step < kSteps; ++step) {
      if (step < kSteps - kKept) {
        Wgmma::ss(sums, C::Keys::along(keys, step), C::Rows::along(rows, step), true);
      } else {
        Wgmma::rs(sums, kept[step - (kSteps - kKept)], C::Rows::along(rows, step));
      }
    }
    ptx::wgmma_commit_group();
  }
  __device__ __forceinline__ void issue_scores(const BwdWarpgroup<C>& wg) {
    issue_mma<C::kBias, kKeySteps>(wg, rS, wg.smem + offsetof(Smem, sK), wg.stage_q(), rK);
  }
  __device__ __forceinline__ void issue_dp(const BwdWarpgroup<C>& wg) {
    if (!kLateDp) wg.ring.wait_full(wg.grad_out_slot());
    ptx::wgmma_fence();
    issue_mma(wg, rdP, wg.smem + offsetof(Smem, sV), wg.stage_grad_out());
  }

  // P in place of S, while dP is on its way.
  __device__ __forceinline__ void find_probabilities(BwdWarpgroup<C>& wg, const BwdTask& task) {
    if (kLateDp) wg.ring.wait_full(wg.grad_out_slot());
    const bool masked = wg.inspect_query_tile(task);
    ptx::wgmma_wait_group<kLateDp ? 0 : 1>(rS);
    exponentiate(wg);
    if (masked) mask(wg, rS, task.seq, task.first_key + wg.first_key());
  }
  // P = 2^(S - lse), and with a softcap the slopes that dS is yet to be multiplied with.
  __device__ __forceinline__ void exponentiate(const BwdWarpgroup<C>& wg) {
    const ScoreRule<Sm90BwdParams> rule(wg.p);
    if (C::kTile.general_score && wg.p.softcap_scale) {
#pragma unroll
      for (int i = 0; i < C::kBlockQ / 4; ++i) {
        const Tanh two[] = {rule.cap(rS[2 * i]), rule.cap(rS[2 * i + 1])};
        rS[2 * i] = two[0].value;
        rS[2 * i + 1] = two[1].value;
        slopes[i / 4][i % 4] = C::Type::pack(two[0].derivative, two[1].derivative);
      }
    }
    const uint32_t lse_delta = wg.stage_lse_delta();
#pragma unroll
    for (int i = 0; i < C::kBlockQ / 8; ++i) {
      const float2 lse = wg.two_queries(lse_delta + 64 * i);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        rS[4 * i + j] = rule.probability(rS[4 * i + j], j % 2 ? lse.y : lse.x);
      }
    }
  }
  // Writes 0 over P or dS where a query does not see the key. `first_key` is the warpgroup's.
  static __device__ __forceinline__ void mask(const BwdWarpgroup<C>& wg, float (&x)[C::kBlockQ / 2],
                                              const Sequence& seq, int first_key) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = first_key + fragment_row() + 8 * half;
      const int from = wg.first_query() + fragment_column();
      // Queries [begin, end] see the key.
      const int begin = key < seq.len_k ? max(key - seq.shift - wg.p.right, 0) - from : kNoLimit;
      const int end = min(key - seq.shift + wg.p.left, seq.len_q - 1) - from;
#pragma unroll
      for (int i = 0; i < C::kBlockQ / 4; ++i) {
        const int query = i / 2 * 8 + i % 2;
        if (query < begin || query > end) x[i / 2 * 4 + 2 * half + i % 2] = 0;
      }
    }
  }

  // dS = P (dP - delta) in place of dP. P is taken as it was rounded to 16 bits: in fp32 it would
  // be 64 registers more at D = 64. But where the bias and so its gradient are fp32, tiles have 64
  // queries, and there is room for 32.
  __device__ __forceinline__ void differentiate(const BwdWarpgroup<C>& wg,
                                                const PackedTile<C>& rP) {
    const uint32_t lse_delta = wg.stage_lse_delta();
#pragma unroll
    for (int i = 0; i < C::kBlockQ / 8; ++i) {
      const float2 delta = wg.two_queries(lse_delta + 64 * i + 4);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t both = rP[i / 2][i % 2 * 2 + j / 2];
        const float rounded = C::Type::unpack(static_cast<uint16_t>(j % 2 ? both >> 16 : both));
        const float p = C::kFloatBias ? rS[4 * i + j] : rounded;
        rdP[4 * i + j] = (rdP[4 * i + j] - (j % 2 ? delta.y : delta.x)) * p;
        if (C::kTile.general_score && wg.p.softcap_scale) {
          const uint32_t two = slopes[i / 2][i % 2 * 2 + j / 2];
          rdP[4 * i + j] *= C::Type::unpack(static_cast<uint16_t>(j % 2 ? two >> 16 : two));
        }
      }
    }
  }

  // A tile of queries from its beginning: P is there then, and dP on its way.
  __device__ __forceinline__ void begin_tile(BwdWarpgroup<C>& wg, const BwdTask& task) {
    if constexpr (C::kBias) start_from_bias(wg, wg.ring);
    ptx::mbarrier_wait(wg.q_slot().full, wg.ring.parity());
    ptx::wgmma_fence();
    issue_scores(wg);
    if (!kLateDp) issue_dp(wg);
    find_probabilities(wg, task);
    if (kLateDp) issue_dp(wg);
  }
};

}  // namespace flashmoe::cuda::sm90
