// Which pairs of a query and a key dropout drops: a function of the seed and of where the pair is,
// so that both passes, every tile, family and backend drop the same ones.
//
// Philox 4x32-7 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11: the fewest
// rounds that pass all of BigCrush; ten would cost GPUs half as much again), keyed by the seed. One
// block of 128 bits is for eight pairs, 16 bits each: rows r and r + 8 of a group of 16, and keys
// c, c + 8, c + 16 and c + 24 of a group of 32. Those are pairs that one thread holds of the scores
// that an MMA leaves, with a row per query or per key, so that it can use the whole block.
//
//   counter  {row / 16 * 8 + row % 8, key / 32 * 8 + key % 8, query head, batch}
//   word     key / 8 % 4, its lower half for row / 8 % 2 = 0
//
// A pair is dropped where its 16 bits are below dropped_of(p).
#pragma once

#include <cstdint>

namespace flashmoe::dropout {

inline constexpr uint32_t kOutOf = 1 << 16;

// How many of kOutOf are dropped. A p other than 0 and 1 is never rounded to one of them.
inline uint32_t dropped_of(double p) {
  if (p <= 0) return 0;
  if (p >= 1) return kOutOf;
  const auto rounded = static_cast<uint32_t>(p * kOutOf + 0.5);
  return rounded == 0 ? 1 : rounded == kOutOf ? kOutOf - 1 : rounded;
}

// What a pair that is kept is multiplied by, so that the mean stays.
inline double kept_scale(uint32_t dropped) {
  return dropped == kOutOf ? 0 : static_cast<double>(kOutOf) / (kOutOf - dropped);
}

inline constexpr uint32_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
inline constexpr uint32_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;  // the key grows by these
inline constexpr int kRounds = 7;

struct Block {
  uint32_t word[4];
};

inline Block philox(Block counter, uint64_t seed) {
  auto& c = counter.word;
  auto key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t product0 = uint64_t{kMultiplier0} * c[0],
                   product1 = uint64_t{kMultiplier1} * c[2];
    counter = {static_cast<uint32_t>(product1 >> 32) ^ c[1] ^ key0, static_cast<uint32_t>(product1),
               static_cast<uint32_t>(product0 >> 32) ^ c[3] ^ key1,
               static_cast<uint32_t>(product0)};
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
  return counter;
}

// One pair, for the oracle.
inline bool keeps(uint64_t seed, uint32_t dropped, int64_t batch, int64_t head, int64_t row,
                  int64_t key) {
  const Block block = philox(
      {static_cast<uint32_t>(row / 16 * 8 + row % 8), static_cast<uint32_t>(key / 32 * 8 + key % 8),
       static_cast<uint32_t>(head), static_cast<uint32_t>(batch)},
      seed);
  return (block.word[key / 8 % 4] >> (row / 8 % 2 * 16) & 0xFFFF) >= dropped;
}

}  // namespace flashmoe::dropout
