// Dropout in fragments of scores: which of the pairs that a lane holds are kept.
// attention/dropout.h says which pairs these are; a block of Philox has eight that one lane holds,
// whether fragments are queries x keys (m16n8: a lane has rows r and r + 8 of four n8 fragments of
// keys) or keys x queries.
//
//   O  = (P of the pairs that are kept) V, times kept_scale
//   dV = the same of P^T dO
//   dS = P (kept_scale dP - delta), where dropped P (-delta)
#pragma once

#include "attention/dropout.h"
#include "cuda/attention/params.h"
#include "cuda/ptx/special_registers.cuh"

namespace flashmoe::cuda {

// The seed, where there is dropout.
__device__ __forceinline__ uint64_t read_seed(const AttentionParams& p) {
  return p.seed ? *p.seed : 0;
}

// What the pairs of one head have in common: the seed, and the half of Philox's first round that
// knows neither row nor key.
struct DropoutOfHead {
  uint32_t key0, key1;
  uint32_t high, low;  // of the product that the head is a factor of
  uint32_t batch;

  __device__ __forceinline__ DropoutOfHead(uint64_t seed, uint32_t batch, uint32_t head)
      : key0(static_cast<uint32_t>(seed)),
        key1(static_cast<uint32_t>(seed >> 32)),
        high(__umulhi(dropout::kMultiplier1, head)),
        low(dropout::kMultiplier1 * head),
        batch(batch) {}

  // dropout::philox() of the counters {row, key, head, batch}, where the first two words of each
  // block hold row and key. All blocks round by round: they share the keys of a round, which would
  // take registers to keep.
  template <int kBlocks>
  __device__ __forceinline__ void philox(uint32_t (&blocks)[kBlocks][4]) const {
    uint32_t round0 = key0, round1 = key1;
#pragma unroll
    for (uint32_t(&c)[4] : blocks) {
      const uint64_t product = uint64_t{dropout::kMultiplier0} * c[0];
      c[0] = high ^ c[1] ^ round0;
      c[1] = low;
      c[2] = static_cast<uint32_t>(product >> 32) ^ batch ^ round1;
      c[3] = static_cast<uint32_t>(product);
    }
#pragma unroll
    for (int round = 1; round < dropout::kRounds; ++round) {
      round0 += dropout::kWeyl0;
      round1 += dropout::kWeyl1;
#pragma unroll
      for (uint32_t(&c)[4] : blocks) {
        const uint64_t product0 = uint64_t{dropout::kMultiplier0} * c[0];
        const uint64_t product1 = uint64_t{dropout::kMultiplier1} * c[2];
        c[0] = static_cast<uint32_t>(product1 >> 32) ^ c[1] ^ round0;
        c[1] = static_cast<uint32_t>(product1);
        c[2] = static_cast<uint32_t>(product0 >> 32) ^ c[3] ^ round1;
        c[3] = static_cast<uint32_t>(product0);
      }
    }
  }
};

// What decides about the pairs that a lane holds of kTiles x 16 queries x kKeys keys: 32, or a part
// of 32 in the first words. Of queries x keys lane / 4 is the row and lane % 4 has two keys;
// kTransposed, it is the other way round.
template <int kKeys, int kTiles = 1, bool kTransposed = false>
struct DrawnPairs {
  static_assert(kKeys == 32 || kKeys == 16 || kKeys == 8);
  uint32_t word[kTiles * 2][4];

  // (row, key) is where the fragments begin: multiples of 16 and of kKeys.
  __device__ __forceinline__ void draw(int row, int key, int lane, const DropoutOfHead& head) {
#pragma unroll
    for (int i = 0; i < kTiles * 2; ++i) {
      const int one = lane / 4, two = lane % 4 * 2 + i % 2;
      word[i][0] = row / 2 + i / 2 * 8 + (kTransposed ? two : one);
      word[i][1] = key / 32 * 8 + (kTransposed ? one : two);
    }
    head.philox(word);
#pragma unroll
    for (uint32_t(&w)[4] : word) {
      if (kKeys < 32 && key & 16) w[0] = w[2], w[1] = w[3];
      if (kKeys < 16 && key & 8) w[0] = w[1];
    }
  }

  // Whether the pair is kept of eight keys `eight`, of tile `tile` the row `half` * 8 on, and of
  // the two keys (or rows) of the lane the one that `e` says.
  __device__ __forceinline__ bool keeps(int tile, int eight, int half, int e,
                                        const AttentionParams& p) const {
    const uint32_t bits = word[tile * 2 + e][eight];
    return (half ? bits : bits << 16) > p.drop_limit;
  }
};

// Whether one pair is kept. Slow: what needs many draws whole blocks.
__device__ __forceinline__ bool keeps_pair(int row, int key, const DropoutOfHead& head,
                                           const AttentionParams& p) {
  uint32_t word[1][4] = {{uint32_t(row / 16 * 8 + row % 8), uint32_t(key / 32 * 8 + key % 8)}};
  head.philox(word);
  const int which = key / 8 % 4;
  const uint32_t low = which % 2 ? word[0][1] : word[0][0];
  const uint32_t high = which % 2 ? word[0][3] : word[0][2];
  const uint32_t bits = which / 2 ? high : low;
  return (row & 8 ? bits : bits << 16) > p.drop_limit;
}

// dP - delta of a pair, with what dropout leaves of dP.
template <bool kDropout>
__device__ __forceinline__ float minus_delta(float dp, float delta, bool kept,
                                             const AttentionParams& p) {
  if constexpr (!kDropout) return dp - delta;
  return kept ? fmaf(dp, p.kept_scale, -delta) : -delta;
}

// P of a dropped pair. Not the 0 of one that is masked or small, so that who goes pair by pair
// (guard.cuh) can tell that nothing of it is to be multiplied.
constexpr float kDroppedProbability = -0.f;

}  // namespace flashmoe::cuda
