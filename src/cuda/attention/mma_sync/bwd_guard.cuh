// The guarded path of the backward pass (guard.cuh tells why): what shows that a tile needs it, and
// its products.
#pragma once

#include "cuda/attention/guard.cuh"
#include "cuda/attention/mma_sync/bwd_dq.cuh"
#include "cuda/attention/mma_sync/bwd_tile.cuh"

namespace flashmoe::cuda {

// Whether Q or dO of a tile of queries has something that is not finite: LSE and delta show it
// (bwd_preprocess.cuh sees to that). Every warp finds the same. Such tiles are left to the general
// loop.
template <class C>
__device__ __forceinline__ bool rows_nonfinite(uint32_t sLseDelta) {
  static_assert(C::kBlockQ <= 64);
  const int lane = ptx::opaque_thread() % 32;
  float4 two = {0, 0, 0, 0};
  if (lane < C::kBlockQ / 2) two = ptx::ld_shared_v4_f32(sLseDelta + lane * 16);
  const auto nonfinite = [](float lse, float delta) {
    return isnan(lse) || !(fabsf(delta) < INFINITY);
  };
  return __any_sync(0xffffffffu, nonfinite(two.x, two.y) || nonfinite(two.z, two.w));
}

// Whether a loop leaves tiles to the general one: where a pair may be hidden, by a mask or by a
// bias.
template <class C, Loop kLoop>
__device__ __forceinline__ constexpr bool may_need_guard() {
  return kLoop == Loop::kMasked || (C::kBias && kLoop == Loop::kPlain);
}

// Whether K or V has something that is not finite, which a CTA asks once.
template <class C>
__device__ __forceinline__ bool keys_nonfinite(uint32_t smem) {
  float zero = 0;
#pragma unroll 1
  for (uint32_t i = ptx::opaque_thread() * 16; i < 2 * C::kKeyBytes; i += C::kThreads * 16) {
    const uint4 eight = ptx::ld_shared_v4(smem + C::kSmemK + i);
    for (uint32_t two : {eight.x, eight.y, eight.z, eight.w}) {
      zero += C::Type::unpack(two & 0xffff) * 0.f + C::Type::unpack(two >> 16) * 0.f;
    }
  }
  return !(zero == 0);
}

// The products that follow S and dP, pair by pair, with hidden pairs left out.
template <class C>
struct GuardedProducts {
  const Sequence& seq;
  int first_query, first_key;
  const AttentionBwdParams& p;
  BiasRows bias;

  // One number of a tile of P or dS.
  __device__ __forceinline__ GuardedFactor factor(uint32_t tile, int query, int key) const {
    return {sees<typename C::Type, C::kBias>(first_query + query, first_key + key, seq, bias, p),
            pair(tile, query, key)};
  }
  static __device__ __forceinline__ float pair(uint32_t tile, int query, int key) {
    if constexpr (C::kTransposed) return number<typename C::TransposedLayout>(tile, key, query);
    return number<typename C::PackedLayout>(tile, query, key);
  }
  template <class Layout>
  static __device__ __forceinline__ float number(uint32_t tile, int row, int col) {
    return C::Type::unpack(ptx::ld_shared_u16(tile + Layout::at_element(row, col)));
  }

  // dV += P^T dO, or dK += dS^T Q, over the queries [begin, end) of the tile. `packed` is the tile
  // of P or dS, `rows` that of dO or Q. Dropped pairs of P are left out as hidden ones are.
  template <bool kWeights>
  __device__ __forceinline__ void add_key_gradient(float (&acc)[C::kKeyM][C::kKeyN][4],
                                                   uint32_t packed, uint32_t rows, int begin,
                                                   int end) const {
    const int thread = ptx::opaque_thread(), warp = thread / 32, lane = thread % 32;
    const int row = warp / C::kKeyCols, col = warp % C::kKeyCols;
#pragma unroll 1
    for (int query = begin; query < end; ++query) {
      add_one(
          acc,
          [&](int m, int half) {
            const int key = key_row<C>(row, m) + lane / 4 + 8 * half;
            GuardedFactor found = factor(packed, query, key);
            if (kWeights && __float_as_uint(found.value) == 0x80000000) found.seen = false;
            return found;
          },
          [&](int n, int c) {
            const int column = 16 * (n / 2 * C::kKeyCols + col) + n % 2 * 8 + lane % 4 * 2 + c;
            return number<typename C::Layout>(rows, query, column);
          });
    }
  }
  // One part of dQ = dS K.
  __device__ __forceinline__ void dq_product(DqPart<C>& acc, int part, uint32_t sdS,
                                             uint32_t sK) const {
    const int thread = ptx::opaque_thread(), warp = thread / 32, lane = thread % 32;
    const int row = warp / C::kQueryCols, col = warp % C::kQueryCols;
#pragma unroll 1
    for (int key = 0; key < C::kBlockK; ++key) {
      add_one(
          acc,
          [&](int m, int half) {
            const int query = query_row<C>(row, m) + lane / 4 + 8 * half;
            return factor(sdS, query, key);
          },
          [&](int n, int c) {
            const int pair = (part * C::kPartN + n) / 2;
            const int column = 16 * (pair * C::kQueryCols + col) + n % 2 * 8 + lane % 4 * 2 + c;
            return number<typename C::Layout>(sK, key, column);
          });
    }
  }

  // Adds one step of the depth: a column of the left operand times a row of the right.
  template <int kM, int kN, class Left, class Right>
  static __device__ __forceinline__ void add_one(float (&acc)[kM][kN][4], const Left& left,
                                                 const Right& right) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const GuardedFactor factor = left(m, half);
        if (!factor.seen) continue;
#pragma unroll
        for (int n = 0; n < kN; ++n) {
          acc[m][n][2 * half] += factor.value * right(n, 0);
          acc[m][n][2 * half + 1] += factor.value * right(n, 1);
        }
      }
    }
  }
};

}  // namespace flashmoe::cuda
