// Where the tokens of a packed batch are, and what a warp of the packed kernels knows of its 16
// rows: how they lie in shared memory, and which tokens of the other side they see.
#pragma once

#include "cuda/attention/sequence.cuh"
#include "cuda/attention/sm90/params.h"
#include "cuda/attention/sm90/tiles.h"
#include "cuda/attention/sm90/warpgroup.cuh"
#include "cuda/ptx/tma.cuh"

namespace flashmoe::cuda::sm90 {

inline constexpr int kPackedRows = 16;  // of a warp

// A token as its batch and its row there; of a ragged batch, whose pitch is 0, as a row of all.
struct TokenPlace {
  int row, batch;
  __device__ __forceinline__ TokenPlace(int token, int pitch)
      : row(pitch ? token % pitch : token), batch(pitch ? token / pitch : 0) {}
};
// Whether there is such a token: of sequences of `length`, or ragged of so many tokens.
__device__ __forceinline__ bool is_token(const TokenPlace& at, int length,
                                         const AttentionParams& p) {
  return at.row < length && at.batch < p.batch;
}
// Where a token's row of a head begins in a tensor, in elements.
__device__ __forceinline__ int64_t token_offset(const Strides& strides, const TokenPlace& at,
                                                int head, const AttentionParams& p) {
  const int64_t batch = at.batch ? batch_offset(p, strides.batch, at.batch) : 0;
  return batch + at.row * strides.row + head * strides.head;
}
// The same in a tensor that has a map, whose leading dimensions are as good as one. (A division is
// 20 instructions: with those of batch_offset() in all places the forward kernel with heads of 16
// had 4,280.)
__device__ __forceinline__ int64_t mapped_offset(const Strides& strides, const TokenPlace& at,
                                                 int head, const AttentionParams& p) {
  return at.batch * strides.batch[p.batch_dims - 1] + at.row * strides.row + head * strides.head;
}

// Which pairs a lane's numbers of a 16 x 16 fragment of S are of: those of one of its rows, from
// column lane % 4 * 2 on, `step` apart.
struct PairsOfRow {
  uint32_t first, step;
  __device__ __forceinline__ PairsOfRow(const PairRow& row, int token)
      : first(row.first + (token + lane() % 4 * 2) * row.step), step(row.step) {}
  // Number i of two in fragment n.
  __device__ __forceinline__ uint32_t at(int n, int i) const { return first + (8 * n + i) * step; }
};

// A packed bias, or its gradient, from the first head of a box on.
struct BoxOfBias {
  uint16_t* data;
  int pair;  // strides
  int64_t head;
  int heads;   // that there are
  bool whole;  // whether those of the box are one aligned word

  __device__ __forceinline__ uint16_t* at(uint32_t number) const {
    return data + int64_t{static_cast<int>(number)} * pair;
  }
};
// The bias from a head on, of so many.
template <class Params>
__device__ __forceinline__ BoxOfBias bias_of(int head, int heads, const Params& p) {
  uint16_t* const data = static_cast<uint16_t*>(const_cast<void*>(p.bias));
  return {data + head * p.bias_strides.head, static_cast<int>(p.bias_column), p.bias_strides.head,
          heads - head, p.bias_of_box != 0};
}
// What a pair has of it, for the heads of a box.
template <int kHeads>
struct HeadsOfPair {
  uint32_t words[(kHeads + 1) / 2] = {};

  __device__ __forceinline__ uint16_t get(int h) const { return words[h / 2] >> (h % 2 * 16); }
  // Only where nothing was set before.
  __device__ __forceinline__ void set(int h, uint32_t x) { words[h / 2] |= x << (h % 2 * 16); }

  // -inf for all of them.
  template <class Type>
  __device__ __forceinline__ void hide() {
#pragma unroll
    for (uint32_t& two : words) two = (0x8000u | Type::kExponent) * 0x10001u;
  }

  __device__ __forceinline__ void load(const BoxOfBias& bias, uint32_t pair) {
    const uint16_t* from = bias.at(pair);
    if (kHeads > 1 && bias.whole) {
      if constexpr (kHeads == 4) {
        const uint2 four = *reinterpret_cast<const uint2*>(from);
        words[0] = four.x, words[1] = four.y;
      } else {
        words[0] = *reinterpret_cast<const uint32_t*>(from);
      }
      return;
    }
    *this = {};
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (h < bias.heads) set(h, from[h * bias.head]);
    }
  }
  __device__ __forceinline__ void store(const BoxOfBias& gradient, uint32_t pair) const {
    uint16_t* to = gradient.at(pair);
    if (kHeads > 1 && gradient.whole) {
      if constexpr (kHeads == 4) {
        *reinterpret_cast<uint2*>(to) = {words[0], words[1]};
      } else {
        *reinterpret_cast<uint32_t*>(to) = words[0];
      }
      return;
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (h < gradient.heads) to[h * gradient.head] = get(h);
    }
  }
};

// The coordinates of a box of tokens from `token` on and of the heads from `head` on: see
// Sm90PackedParams.
template <class C>
struct TokenBox {
  int x[4];
  __device__ __forceinline__ TokenBox(int head, int token, int pitch) {
    const TokenPlace at(token, pitch);
    const bool several = C::kHeads > 1;
    x[0] = several ? head * C::kDim : 0;
    x[1] = at.row;
    x[2] = several ? 0 : head;
    x[3] = at.batch;
  }
  __device__ __forceinline__ void load(uint32_t to, const TensorMap& map, uint32_t barrier) const {
    ptx::tma_load(to, &map, barrier, x[0], x[1], x[2], x[3]);
  }
  __device__ __forceinline__ void store(uint32_t from, const TensorMap& map) const {
    ptx::tma_store(from, &map, x[0], x[1], x[2], x[3]);
  }
};
// A stage begins here so that a box has tokens of one sequence.
__device__ __forceinline__ int stage_begin(int token, int pitch) {
  return pitch ? token / kPackedChunk * kPackedChunk : token;
}

// Where this lane's row of an ldmatrix begins in 16 rows of a tile. Columns 16 s to 16 s + 15 are
// at that address ^ 32 s. Matrices are in the order of the left operand of mma.sync, and of the
// right one where the depth is rows (ldmatrix with .trans): first all rows of 8 columns.
__device__ __forceinline__ uint32_t packed_lane_offset() {
  return lane() % 16 * 128 + (lane() / 16 ^ lane() % 8) * 16;
}
// The same for the right operand where the depth is columns: first all columns of 8 rows, so that
// the two registers that mma.sync reads are neighbours and need not be moved.
__device__ __forceinline__ uint32_t packed_right_offset() {
  return (lane() % 8 + lane() / 16 * 8) * 128 + (lane() / 8 % 2 ^ lane() % 8) * 16;
}

// Bit n: whether a row sees token n of the kCount from `first` on, counted from the first column of
// a fragment that the lane holds.
template <int kCount>
__device__ __forceinline__ uint32_t seen_tokens(const RowBounds& bounds, int first) {
  const auto from = [](int n) { return __funnelshift_lc(0, ~0u, max(n, 0)); };
  const uint32_t seen = from(bounds.begin() - first) & ~from(bounds.end - first);
  return (seen & ~from(kCount)) >> (lane() % 4 * 2);
}

}  // namespace flashmoe::cuda::sm90
