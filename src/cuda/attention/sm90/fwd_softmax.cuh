// Scores and online softmax of a consumer warpgroup of the sm90 forward pass: 64 rows x block_k
// keys.
#pragma once

#include "cuda/attention/score.cuh"
#include "cuda/attention/sm90/fwd_warpgroup.cuh"
#include "cuda/attention/softmax.cuh"
#include "cuda/ptx/ldmatrix.cuh"

namespace flashmoe::cuda::sm90 {

template <class C>
struct FwdSoftmax {
  using Rule = typename C::Rule;

  float rS[C::kBlockK / 2];  // S, then P, as wgmma lays out its accumulators
  RowState rows;
  float rBias[C::kLateBias ? C::kBlockK / 2 : 1];         // see prepare_bias()
  uint32_t rPacked[C::kPackedBias ? C::kBlockK / 4 : 1];  // see load_bias()
  float correction[2];  // what O is yet to be multiplied with, for each of the thread's two rows

  // A softcap, or the sign of a scale that is not positive: general kernels always have one of
  // them, so there is no third branch, as ScoreRule::transform() has it.
  __device__ __forceinline__ void transform(const Rule& rule) {
    if (rule.p.softcap_scale) {
#pragma unroll
      for (float& x : rS) x = rule.cap(x).value;
    } else {
#pragma unroll
      for (float& x : rS) x *= rule.sign();
    }
  }

  // take(i, two) for the bias of scores 2 i and 2 i + 1 of the thread's, from shared memory.
  template <class Take>
  static __device__ __forceinline__ void load_bias(const FwdWarpgroup<C>& wg, const Take& take) {
    using Tile = typename C::BiasTile;
    const uint32_t from =
        wg.bias_tile() +
        Tile::at(wg.index * kWarpgroupRows + warpgroup_warp() * 16 + lane() % 16, lane() / 16 * 8);
#pragma unroll
    for (int n = 0; n < C::kBlockK / 16; ++n) {
      uint32_t x[4];  // keys 0 to 7 and 8 to 15, of each rows 0 to 7 and 8 to 15
      ptx::ldmatrix_x4(x, (from ^ n % 4 * 32) + n / 4 * Tile::kBlockBytes);
#pragma unroll
      for (int i = 0; i < 4; ++i) take(4 * n + i, x[i]);
    }
  }
  // The bias to registers, two numbers in each, while the MMA is on its way: that takes half of the
  // registers of prepare_bias().
  __device__ __forceinline__ void load_bias(const FwdWarpgroup<C>& wg) {
    load_bias(wg, [&](int i, uint32_t two) { rPacked[i] = two; });
  }
  // take(i, bias) for the bias of each of the thread's scores of the tile.
  template <class Take>
  __device__ __forceinline__ void read_bias(const FwdWarpgroup<C>& wg, const Take& take) const {
    const auto both = [&](int i, uint32_t two) {
      take(2 * i, C::Type::unpack(static_cast<uint16_t>(two)));
      take(2 * i + 1, C::Type::unpack(static_cast<uint16_t>(two >> 16)));
    };
    if constexpr (C::kPackedBias) {
#pragma unroll
      for (int i = 0; i < C::kBlockK / 4; ++i) both(i, rPacked[i]);
    } else if constexpr (C::kBiasRows) {
      using Tile = typename C::BiasTile;
      const int row = wg.index * kWarpgroupRows + fragment_row();
      const uint32_t from = wg.bias_tile() + row * Tile::kPitch +
                            fragment_column() * Tile::kElementBytes +
                            Tile::shift(wg.reload(wg.task().bias_row), row, wg.p.bias_strides.row);
#pragma unroll
      for (int i = 0; i < C::kBlockK / 2; ++i) {
        take(i, Tile::read(from + i % 4 / 2 * 8 * Tile::kPitch +
                           (i / 4 * 8 + i % 2) * Tile::kElementBytes));
      }
    } else {
      load_bias(wg, both);
    }
  }
  // S begins with the bias: scores are scale * (q.k + bias / scale).
  __device__ __forceinline__ void start_from_bias(const FwdWarpgroup<C>& wg) {
    const float inverse = wg.p.bias_scale;
    read_bias(wg, [&](int i, float bias) { rS[i] = bias * inverse; });
  }
  __device__ __forceinline__ void add_bias(const FwdWarpgroup<C>& wg) {
    const float inverse = wg.p.bias_scale;
    read_bias(wg, [&](int i, float bias) { rS[i] = fmaf(bias, inverse, rS[i]); });
  }
  // What guess() adds to the scaled score: the bias in base 2, less the reference.
  __device__ __forceinline__ void prepare_bias(const FwdWarpgroup<C>& wg) {
    read_bias(
        wg, [&](int i, float bias) { rBias[i] = fmaf(bias, kLog2e, -rows.reference[i % 4 / 2]); });
  }

  // Writes -inf over the scores of keys that a row does not see, of the tile's first kKeys.
  template <int kKeys>
  __device__ __forceinline__ void mask(const FwdWarpgroup<C>& wg) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int q = wg.query(wg.fragment_row(half));
      const int first = wg.block * C::kBlockK + fragment_column();
      const auto hide = [&](const auto& hidden) {
#pragma unroll
        for (int i = 0; i < kKeys / 4; ++i) {
          if (hidden(i / 2 * 8 + i % 2)) rS[i / 2 * 4 + 2 * half + i % 2] = -INFINITY;
        }
      };
      const int end = wg.task().seq.end(q, wg.p) - first;
      hide([&](int key) { return key >= end; });
      if (wg.p.left == kNoLimit) continue;
      const int begin = wg.task().seq.begin(q, wg.p) - first;
      hide([&](int key) { return key < begin; });
    }
  }

  // P in place of S. Where a row's maximum has outgrown its reference by kSlack, the reference
  // moves and `correction` is not 1.
  template <bool kFirst, int kKeys = C::kBlockK>
  __device__ __forceinline__ void step(const Rule& rule) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = rS[2 * half];
#pragma unroll
      for (int i = 0; i < kKeys / 8; ++i) {
        top = fmaxf(top, fmaxf(rS[4 * i + 2 * half], rS[4 * i + 2 * half + 1]));
      }
      top = quad_max(top) * rule.scale_log2();
      const float before = rows.reference[half];
      if (kFirst || top > before + kSlack) rows.reference[half] = top;
      const float reference = rows.finite_reference(half);
      correction[half] = kFirst ? 1.f : ptx::ex2_approx_ftz(before - reference);
      float sum = 0;
#pragma unroll
      for (int i = 0; i < kKeys / 4; ++i) {
        float& x = rS[i / 2 * 4 + 2 * half + i % 2];
        x = rule.probability(x, reference);
        sum += x;
      }
      rows.sum[half] = kFirst ? sum : rows.sum[half] * correction[half] + sum;
    }
  }

  // step() that guesses: P against the old reference, with no look for a maximum, since few tiles
  // have a score much above those before. Returns whether the guess fails in the warp: a score was
  // too large, a row has no reference yet, or there is a NaN. Each shows in `sum`, to which the
  // tile's P are added.
  __device__ __forceinline__ bool guess(float (&sum)[2], const Rule& rule) {
    constexpr float kMost = 1 << 14;  // of a thread's sum; fp16 holds its terms
#pragma unroll
    for (int i = 0; i < C::kBlockK / 2; ++i) {
      const int half = i % 4 / 2;
      if constexpr (C::kPackedBias) {
        const uint32_t two = rPacked[i / 2];
        const float bias = C::Type::unpack(static_cast<uint16_t>(i % 2 ? two >> 16 : two));
        const float rest = fmaf(bias, kLog2e, -rows.reference[half]);
        rS[i] = ptx::ex2_approx_ftz(fmaf(rS[i], rule.scale_log2(), rest));
      } else if constexpr (C::kLateBias) {
        rS[i] = ptx::ex2_approx_ftz(fmaf(rS[i], rule.scale_log2(), rBias[i]));
      } else {
        rS[i] = rule.probability(rS[i], rows.reference[half]);
      }
      sum[half] += rS[i];
    }
    return __any_sync(0xffffffffu, !(sum[0] <= kMost && sum[1] <= kMost));
  }

  // S of the tile once more after a failed guess, by each warp for itself with mma.sync: the other
  // warps of the warpgroup need not take part.
  __device__ __forceinline__ void recompute_scores(const FwdWarpgroup<C>& wg) {
    using Smem = typename C::Smem;
    const int r = lane() % 16, column = lane() / 16 * 8;
    const uint32_t q = wg.queries(wg.tasks.count()) +
                       (wg.index * kWarpgroupRows + warpgroup_warp() * 16) * C::Rows::kRowBytes +
                       C::Rows::at(r, column);
    const uint32_t k = wg.smem + offsetof(Smem, sK) + wg.keys.at() * sizeof(typename C::Keys) +
                       C::Keys::at(r, column);
    if constexpr (C::kBias) {
      if constexpr (C::kPackedBias) load_bias(wg);  // its registers are used for P
      start_from_bias(wg);
    } else {
#pragma unroll
      for (float& x : rS) x = 0;
    }
#pragma unroll 1
    for (int step = 0; step < C::kDim / 16; ++step) {
      const uint32_t chunk = step % C::Rows::kSteps * 32;  // swizzled as the lane's first chunk is
      uint32_t a[4];
      ptx::ldmatrix_x4(a, (q ^ chunk) + step / C::Rows::kSteps * C::Rows::kBlockBytes);
#pragma unroll
      for (int n = 0; n < C::kBlockK / 16; ++n) {
        uint32_t b[4];  // keys 0 to 7 and 8 to 15, of each two halves of the depth
        ptx::ldmatrix_x4(b, (k ^ chunk) + step / C::Keys::kSteps * C::Keys::kBlockBytes +
                                n * 2 * C::Keys::kEightBytes);
        float(&left)[4] = reinterpret_cast<float(&)[4]>(rS[8 * n]);
        float(&right)[4] = reinterpret_cast<float(&)[4]>(rS[8 * n + 4]);
        C::Type::mma(left, a, b[0], b[2], left);
        C::Type::mma(right, a, b[1], b[3], right);
      }
    }
  }
};

}  // namespace flashmoe::cuda::sm90
