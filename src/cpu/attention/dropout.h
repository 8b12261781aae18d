// Dropout of a tile of scores: which pairs are kept is drawn once for a tile, and applied where a
// pass needs it. attention/dropout.h says which pairs these are.
#pragma once

#include "attention/dropout.h"
#include "cpu/attention/tile.h"

namespace flashmoe::cpu {
namespace {

// Blocks of Philox for rows that follow each other: element l of each word is row l's.
constexpr int kDrawn = 8;
struct DrawnBlocks {
  uint32_t word[4][kDrawn];
};

inline void draw(uint32_t first_row, uint32_t key, uint32_t head, uint32_t batch, uint64_t seed,
                 DrawnBlocks& blocks) {
  auto& [c0, c1, c2, c3] = blocks.word;
  for (int l = 0; l < kDrawn; ++l) {
    c0[l] = first_row + static_cast<uint32_t>(l);
    c1[l] = key;
    c2[l] = head;
    c3[l] = batch;
  }
  auto key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < dropout::kRounds; ++round) {
    for (int l = 0; l < kDrawn; ++l) {
      const uint64_t product0 = uint64_t{dropout::kMultiplier0} * c0[l];
      const uint64_t product1 = uint64_t{dropout::kMultiplier1} * c2[l];
      c0[l] = static_cast<uint32_t>(product1 >> 32) ^ c1[l] ^ key0;
      c1[l] = static_cast<uint32_t>(product1);
      c2[l] = static_cast<uint32_t>(product0 >> 32) ^ c3[l] ^ key1;
      c3[l] = static_cast<uint32_t>(product0);
    }
    key0 += dropout::kWeyl0;
    key1 += dropout::kWeyl1;
  }
}

// keep (keys x ld): all ones where a pair of the tile is kept, 0 where it is dropped.
template <class A>
void draw_tile(const Params& p, int64_t batch, int64_t head, int64_t row, int64_t rows, int64_t key,
               int64_t keys, Int<A>* keep, int64_t ld) {
  for (int64_t r = row / 16 * 16; r < row + rows; r += 16) {
    for (int64_t c = key / 32 * 32; c < key + keys; c += 32) {
      for (int64_t j = 0; j < 8; ++j) {
        const int64_t first = c + j - key, last = first + 24;
        if (last < 0 || first >= keys) continue;
        DrawnBlocks blocks;
        draw(static_cast<uint32_t>(r / 2), static_cast<uint32_t>(c / 4 + j),
             static_cast<uint32_t>(head), static_cast<uint32_t>(batch), p.seed, blocks);
        for (int64_t n = 0; n < 8; ++n) {  // both halves of four words
          const int64_t at_key = c + n / 2 * 8 + j - key, at_row = r + n % 2 * 8 - row;
          if (at_key < 0 || at_key >= keys) continue;
          Int<A>* to = keep + at_key * ld + at_row;
          for (int64_t l = larger(-at_row, 0); l < smaller(rows - at_row, kDrawn); ++l) {
            const uint32_t bits = blocks.word[n / 2][l] >> (n % 2 * 16) & 0xFFFF;
            to[l] = bits >= p.geometry.dropped ? -1 : 0;
          }
        }
      }
    }
  }
}

// Numbers of a tile times `scale` where the pair is kept, `instead` where it is dropped.
template <class A>
void drop(const Int<A>* keep, int64_t keys, int64_t queries, int64_t ld, A scale, A instead,
          A* tile) {
  for (int64_t j = 0; j < keys; ++j) {
    for (int64_t i = 0; i < queries; i += kLanes<A>) {
      const auto kept = load<Vec<Int<A>>>(keep + j * ld + i);
      A* at = tile + j * ld + i;
      store(at, kept ? load<Vec<A>>(at) * scale : splat(instead));
    }
  }
}

// A probability that is dropped is marked as a masked one is: a NaN in its value stays there.
template <class A>
constexpr A kDroppedProbability = A(-0.0);

}  // namespace
}  // namespace flashmoe::cpu
