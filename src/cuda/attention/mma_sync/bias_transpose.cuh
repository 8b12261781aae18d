// Copies the bias of a ragged batch from (pairs, heads) to (heads, pairs), or its gradient back:
// the caller's has its heads side by side, and a kernel that takes one head would use two bytes of
// every sector it reads. Bound by memory.
//
//   a tile of kBiasTilePairs pairs x kBiasTileHeads heads through shared memory, a row for each
//   head
#pragma once

#include "cuda/attention/params.h"
#include "cuda/attention/tiles.h"

namespace flashmoe::cuda {

// Moves four heads of one pair, of which `count` exist, to `four`, or back from there.
template <bool kBack>
__device__ __forceinline__ void move_four(uint16_t* packed, int64_t stride, int count,
                                          uint16_t (&four)[4]) {
  if (stride == 1 && count == 4 && reinterpret_cast<uintptr_t>(packed) % 8 == 0) {
    uint2& both = *reinterpret_cast<uint2*>(packed);
    if (kBack) both = {four[0] | uint32_t{four[1]} << 16, four[2] | uint32_t{four[3]} << 16};
    if (!kBack) {
      const uint2 x = both;
      four[0] = x.x, four[1] = x.x >> 16, four[2] = x.y, four[3] = x.y >> 16;
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < count) (kBack ? packed[i * stride] : four[i]) = kBack ? four[i] : packed[i * stride];
  }
}

using BiasHeadsTile = uint16_t[kBiasTileHeads][kBiasTilePitch];

// Moves a tile of pairs and heads through shared memory, so that neighbouring threads take what is
// neighbouring in memory on either side. The grid is (pairs, heads) in tiles.
template <bool kBack>
__device__ __forceinline__ void move_heads(BiasHeadsTile& tile, const BiasTransposeParams& p) {
  constexpr int kPairs = kBiasTilePairs, kHeads = kBiasTileHeads, kChunks = kPairs / 8 + 1;
  const int64_t first = int64_t{blockIdx.x} * kPairs;
  const int first_head = blockIdx.y * kHeads, heads = min(p.heads - first_head, kHeads);
  const int pairs = static_cast<int>(min(p.pairs - first, int64_t{kPairs}));
  const int quads = (heads + 3) / 4;
  auto* packed = static_cast<uint16_t*>(p.packed) + first * p.packed_pair +
                 int64_t{first_head} * p.packed_head;
  auto* by_head = static_cast<uint16_t*>(p.by_head) + first_head * p.by_head_stride + first;
  const auto move_packed = [&] {
#pragma unroll 4
    for (int i = threadIdx.x; i < pairs * quads; i += kRowThreads) {
      const int pair = i / quads, head = i % quads * 4;
      uint16_t four[4];
#pragma unroll
      for (int h = 0; h < 4 && kBack; ++h) four[h] = tile[head + h][pair];
      move_four<kBack>(packed + pair * p.packed_pair + head * p.packed_head, p.packed_head,
                       min(heads - head, 4), four);
#pragma unroll
      for (int h = 0; h < 4 && !kBack; ++h) tile[head + h][pair] = four[h];
    }
  };
  // Rows of the copy are whole chunks, and have room for one more number: its reader takes two at
  // once. What lies after the last pair does not matter.
  const bool last = first + kPairs >= p.pairs;
  const auto move_by_head = [&] {
#pragma unroll 4
    for (int i = threadIdx.x; i < heads * kChunks; i += kRowThreads) {
      const int head = i / kChunks, pair = i % kChunks * 8;
      if (pair > pairs || (pair == kPairs && !last)) continue;
      uint4& there = *reinterpret_cast<uint4*>(by_head + head * p.by_head_stride + pair);
      uint4& here = *reinterpret_cast<uint4*>(&tile[head][pair]);
      (kBack ? here : there) = kBack ? there : here;
    }
  };
  if constexpr (kBack) {
    move_by_head();
  } else {
    move_packed();
  }
  __syncthreads();  // the tile is there
  if constexpr (kBack) {
    move_packed();
  } else {
    move_by_head();
  }
}

// The kernel.
__device__ __forceinline__ void attention_bias_transpose(const BiasTransposeParams& p) {
  extern __shared__ __align__(16) char shared[];
  static_assert(sizeof(BiasHeadsTile) == kBiasTransposeSharedBytes);
  BiasHeadsTile& tile = *reinterpret_cast<BiasHeadsTile*>(shared);
  if (p.back) {
    move_heads<true>(tile, p);
  } else {
    move_heads<false>(tile, p);
  }
}

}  // namespace flashmoe::cuda
