// Which keys each query of a packed batch sees. Packed kernels (fwd_packed.cuh) read nothing else
// of its lengths. For a backward pass also the other way round, which queries see each key.
//
// Of a ragged batch that is found on the device: only there are the lengths known. Each CTA has a
// share of the sequences. It first finds where all those before it reach to, and with a bias how
// many pairs they have, so that nobody waits for anybody. What is a sequence, and which are valid,
// is as in ragged.cuh: what comes after the last one is as good as a sequence, and here it reaches
// to the end of the last tile.
#pragma once

#include "cuda/attention/ragged.cuh"
#include "cuda/attention/sm90/params.h"
#include "cuda/attention/sm90/tiles.h"
#include "cuda/ptx/grid.cuh"

namespace flashmoe::cuda::sm90 {

// Whose bounds are found: those of the queries, which see keys, or of the keys, which queries see.
struct BoundsOf {
  bool keys;
  RowBounds* bounds;         // (rows)
  int rows;                  // of that side, in whole tiles
  PairRow* pairs = nullptr;  // (rows), with a bias
  // Its gradient, for pairs of no valid sequence; null: not wanted.
  uint16_t* grad_bias = nullptr;
  int64_t grad_bias_pair = 0, grad_bias_head = 0;  // strides
  int heads = 0;
  uint16_t nan = 0;
};

// A sequence in shared memory: its rows, and the tokens of the other side.
struct alignas(16) PackedSequence {
  int token, other_token;
  int len, other_len;
  uint32_t pair, pair_end;                         // its pairs in the bias
  static constexpr int kInvalid = -1, kRest = -2;  // in place of other_len

  // Of one of its rows. Pairs of a query follow each other.
  __device__ __forceinline__ PairRow pairs_of(int row, bool keys) const {
    const uint32_t first = pair, r = row;
    if (keys)
      return {first + r - static_cast<uint32_t>(other_token) * len, static_cast<uint32_t>(len)};
    return {first + r * other_len - static_cast<uint32_t>(other_token), 1};
  }
};

// The mask is the same from both sides: a row that sees `left` tokens before it and `right` after
// it is seen by `right` before and `left` after.
__device__ __forceinline__ RowBounds row_bounds(const PackedSequence& s, int row, bool keys,
                                                const AttentionParams& p) {
  const uint32_t first = static_cast<uint32_t>(s.other_token);
  if (s.other_len == PackedSequence::kInvalid) return {first | RowBounds::kInvalid, s.other_token};
  if (s.other_len == PackedSequence::kRest) return {first + 1, s.other_token};
  const int position = row + s.other_len - s.len;
  const int begin = max(position - (keys ? p.right : p.left), 0);
  const int end = min(position + (keys ? p.left : p.right) + 1, s.other_len);
  return {first + begin, s.other_token + max(end, begin)};
}

// Where the sequences before `count` end, on each side. The same for all threads.
__device__ __forceinline__ Int64x2 reach_of(int64_t count, Int64x2* warps, const RaggedParams& p) {
  Int64x2 reach = {0, 0}, all;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < count; i += kRaggedThreads) {
    reach = {max(reach.x, ragged_end(p.query, i, p)), max(reach.y, ragged_end(p.key, i, p))};
  }
  join_before(reach, warps, all, [](int64_t a, int64_t b) { return max(a, b); });
  return all;
}

// The sequence `i`, which begins at `reach`, and how many pairs it has.
__device__ __forceinline__ PackedSequence find_packed(int64_t& pairs, const Int64x2& reach,
                                                      int64_t i, const BoundsOf& of,
                                                      const RaggedParams& p) {
  const RaggedSequence s = find_ragged({reach.x, reach.y, 0, 0}, i, {.block = 128}, p);
  const int token_q = static_cast<int>(reach.x), token_k = static_cast<int>(reach.y);
  const int len_q = static_cast<int>(s.len_q), len_k = static_cast<int>(s.len_k);
  PackedSequence packed;
  packed.token = of.keys ? token_k : token_q;
  packed.other_token = of.keys ? token_q : token_k;
  packed.len = of.keys ? len_k : len_q;
  packed.other_len = of.keys ? len_q : len_k;
  if (s.kind == RaggedKind::kRest) {
    packed.len = of.rows - packed.token;
    packed.other_len = PackedSequence::kRest;
  }
  if (s.kind == RaggedKind::kInvalid) packed.other_len = PackedSequence::kInvalid;
  packed.pair = packed.pair_end = 0;
  pairs = s.kind == RaggedKind::kRest ? 0 : s.len_q * s.len_k;
  return packed;
}

// Says which pairs are a sequence's: one that has more than the bias is invalid, and what no
// sequence has is the rest's.
__device__ __forceinline__ void place_pairs(PackedSequence& s, int64_t before, int64_t count,
                                            const RaggedParams& p) {
  const bool rest = s.other_len == PackedSequence::kRest;
  if (rest) count = p.pairs - before;
  const bool inside = before >= 0 && count >= 0 && count <= p.pairs - before;
  if (!inside && !rest) s.other_len = PackedSequence::kInvalid;
  const int64_t first = min(max(before, int64_t{0}), p.pairs);
  s.pair = static_cast<uint32_t>(first);
  s.pair_end = static_cast<uint32_t>(inside ? first + count : p.pairs);
}
// Sets the gradient of pairs that belong to no valid sequence, by one of `step` threads.
__device__ __forceinline__ void fill_pairs(const PackedSequence& s, int first, int step,
                                           const BoundsOf& of) {
  if (!of.grad_bias || s.other_len >= 0) return;
  const uint16_t value = s.other_len == PackedSequence::kInvalid ? of.nan : 0;
  for (int head = 0; head < of.heads; ++head) {
    for (uint32_t i = s.pair + first; i < s.pair_end; i += step) {
      of.grad_bias[head * of.grad_bias_head + i * of.grad_bias_pair] = value;
    }
  }
}

// By CTA `cta` of `ctas`, with kRowBoundsSharedBytes of shared memory.
__device__ __forceinline__ void find_row_bounds(const BoundsOf& of, int cta, int ctas,
                                                const RaggedParams& ragged,
                                                const AttentionParams& p) {
  extern __shared__ __align__(16) char shared_sequences[];
  PackedSequence* const sequences = reinterpret_cast<PackedSequence*>(shared_sequences);
  Int64x2* const warps = reinterpret_cast<Int64x2*>(sequences + kRaggedThreads);
  static_assert(kRaggedThreads * sizeof(PackedSequence) + 2 * 32 * sizeof(Int64x2) ==
                kRowBoundsSharedBytes);
  const int count = p.batch + 1, share = (p.batch + ctas) / ctas;
  const int begin = min(int64_t{cta} * share, int64_t{count}), end = min(begin + share, count);
  if (begin >= end) return;

  constexpr int kWarps = kRaggedThreads / 32, kOfOneWarp = 1024;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto write = [&](const PackedSequence& s, int first, int step) {
#pragma unroll 1
    for (int row = first; row < s.len; row += step) {
      of.bounds[s.token + row] = row_bounds(s, row, of.keys, p);
      if (of.pairs && s.other_len >= 0) of.pairs[s.token + row] = s.pairs_of(row, of.keys);
    }
    fill_pairs(s, first, step, of);
  };
  // With a bias all sequences before are counted, not only looked at.
  const int start = of.pairs ? 0 : begin;
  Int64x2 before = reach_of(start, warps, ragged);
  int64_t pairs_before = 0;
#pragma unroll 1
  for (int round = start; round < end; round += kRaggedThreads) {
    const int i = round + static_cast<int>(threadIdx.x);
    Int64x2 reach = {0, 0}, all;
    if (i < end) reach = {ragged_end(ragged.query, i, ragged), ragged_end(ragged.key, i, ragged)};
    const auto larger = [](int64_t a, int64_t b) { return max(a, b); };
    reach = join_before(reach, warps + 32, all, larger);
    reach = {max(reach.x, before.x), max(reach.y, before.y)};
    before = {max(before.x, all.x), max(before.y, all.y)};
    PackedSequence s{};
    int64_t pairs = 0;
    if (i < end) s = find_packed(pairs, reach, i, of, ragged);
    if (of.pairs) {
      const auto sum = [](int64_t a, int64_t b) { return a + b; };
      const Int64x2 earlier = join_before({pairs, 0}, warps, all, sum);
      place_pairs(s, pairs_before + earlier.x, pairs, ragged);
      pairs_before += all.x;
    }
    if (i < end) sequences[threadIdx.x] = s;
    const bool is_long = i >= begin && i < end && s.len > kOfOneWarp;
    const bool any_long = __syncthreads_or(is_long);  // the sequences are there
    const int found = min(end - round, kRaggedThreads);
    const int first = max(begin - round, 0);  // of the share
    // A warp for each, but all of them together for one that is long.
#pragma unroll 1
    for (int j = first + warp; j < found; j += kWarps) {
      const PackedSequence s = sequences[j];
      if (s.len <= kOfOneWarp) write(s, lane, 32);
    }
#pragma unroll 1
    for (int j = first; any_long && j < found; ++j) {
      if (sequences[j].len > kOfOneWarp) write(sequences[j], threadIdx.x, kRaggedThreads);
    }
    __syncthreads();  // they have been read
  }
}

// The bounds of a dense batch. Rows after the last token of a sequence see nothing, and begin after
// the end of its keys, so that numbers do not fall.
__device__ __forceinline__ void find_dense_bounds(const BoundsOf& of, int cta, int ctas, int pitch,
                                                  int other_pitch, const AttentionParams& p) {
  const int len = of.keys ? p.len_k : p.len_q, other_len = of.keys ? p.len_q : p.len_k;
#pragma unroll 1
  for (int i = cta * kRaggedThreads + threadIdx.x; i < of.rows; i += ctas * kRaggedThreads) {
    const int batch = min(i / pitch, p.batch), row = i - batch * pitch, first = batch * other_pitch;
    if (batch < p.batch && row < len) {
      of.bounds[i] = row_bounds({batch * pitch, first, len, other_len}, row, of.keys, p);
    } else {
      const int end = batch < p.batch ? first + other_len : first;
      of.bounds[i] = {static_cast<uint32_t>(end) + 1, end};
    }
  }
}

// Those of one side, by CTA `cta` of `ctas`.
template <class Params>
__device__ __forceinline__ void find_bounds(const BoundsOf& of, int cta, int ctas,
                                            const Params& p) {
  if (p.pitch_q) {
    find_dense_bounds(of, cta, ctas, of.keys ? p.pitch_k : p.pitch_q,
                      of.keys ? p.pitch_q : p.pitch_k, p);
  } else {
    find_row_bounds(of, cta, ctas, p.ragged, p);
  }
}

__device__ __forceinline__ void attention_row_bounds(const Sm90PackedParams& p) {
  ptx::griddepcontrol_launch_dependents();
  if (blockIdx.x + threadIdx.x == 0) *p.ragged.tile_counter = 0;
  find_bounds({.keys = false, .bounds = p.bounds, .rows = p.rows, .pairs = p.pairs}, blockIdx.x,
              gridDim.x, p);
}

}  // namespace flashmoe::cuda::sm90
