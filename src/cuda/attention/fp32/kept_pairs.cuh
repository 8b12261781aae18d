// Dropout of the pairs that a warp holds (pairs.cuh): which of them are kept, a bit for each, in
// one register.
//
//   O = P' V      dV = P'^T dO      dS = P (dP' - delta)
//
// where P' and dP' are kept_scale times P and dP, and 0 of a pair that is dropped.
#pragma once

#include "cuda/attention/dropout.cuh"
#include "cuda/attention/fp32/pairs.cuh"

namespace flashmoe::cuda {

template <int kM, int kN, bool kTransposed>
class KeptPairs {
  static_assert(kM * kN * 4 <= 32 && !(kTransposed && kM > 1));

 public:
  // The warp's first fragment begins at (row, key): multiples of 16, and of 8 where there is only
  // one fragment in that direction.
  __device__ __forceinline__ KeptPairs(int row, int key, uint64_t seed, int batch, int head,
                                       const AttentionParams& p) {
    if (!p.seed) return;
    // What two blocks of Philox are for: 16 queries and up to 32 keys.
    constexpr int kMost = kTransposed ? 2 : 4, kFragments = kN < kMost ? kN : kMost;
    constexpr int kParts = kM * kN / kFragments;
    constexpr int kKeys = kTransposed ? 16 : 8 * kFragments;
    const DropoutOfHead dropout(seed, batch, head);
    const int lane = ptx::opaque_thread() % 32;
#pragma unroll 1
    for (int part = 0; part < kParts; ++part) {
      constexpr int kAcross = kN / kFragments;  // parts side by side
      DrawnPairs<kKeys, 1, kTransposed> drawn;
      if constexpr (kTransposed) {
        drawn.draw(row / 16 * 16 + 16 * part, key, lane, dropout);
      } else {
        drawn.draw(row + part / kAcross * 16, key + part % kAcross * 32, lane, dropout);
      }
      uint32_t bits = 0;
#pragma unroll
      for (int i = 0; i < 4 * kFragments; ++i) {
        const int n = i / 4, half = i % 4 / 2;
        const bool kept = kTransposed ? drawn.keeps(0, half, kN == 1 ? row / 8 % 2 : n, i % 2, p)
                                      : drawn.keeps(0, n, half, i % 2, p);
        if (kept) bits |= 1u << i;
      }
      bits_ |= bits << part * 4 * kFragments;
    }
  }

  __device__ __forceinline__ bool operator()(int m, int n, int i) const {
    return bits_ >> ((m * kN + n) * 4 + i) & 1;
  }

  // What dropout leaves of P, or of dP.
  __device__ __forceinline__ void apply(float (&x)[kM][kN][4], const AttentionParams& p) const {
    if (!p.seed) return;
    for_each_element<kM, kN>([&](int m, int n, int i) {
      x[m][n][i] = (*this)(m, n, i) ? x[m][n][i] * p.kept_scale : 0;
    });
  }

 private:
  uint32_t bits_ = 0;
};

// Whether one pair is kept; slow.
__device__ __forceinline__ bool keeps_pair(int row, int key, uint64_t seed, int batch, int head,
                                           const AttentionParams& p) {
  return !p.seed || keeps_pair(row, key, DropoutOfHead(seed, batch, head), p);
}

}  // namespace flashmoe::cuda
