// Which keys each query of a packed batch sees. Packed kernels (fwd_packed.cuh) read nothing else
// of its lengths. For a backward pass also the other way round, which queries see each key.
//
// Of a ragged batch that is found on the device: only there are the lengths known. Each CTA has a
// share of the sequences. It first finds where all those before it reach to, so that nobody waits
// for anybody. What is a sequence, and which are valid, is as in ragged.cuh: what comes after the
// last one is as good as a sequence, and here it reaches to the end of the last tile.
#pragma once

#include "cuda/attention/ragged.cuh"
#include "cuda/attention/sm90/params.h"
#include "cuda/attention/sm90/tiles.h"
#include "cuda/ptx/grid.cuh"

namespace flashmoe::cuda::sm90 {

// Whose bounds are found: those of the queries, which see keys, or of the keys, which queries see.
struct BoundsOf {
  bool keys;
  RowBounds* bounds;  // (rows)
  int rows;           // of that side, in whole tiles
};

// A sequence in shared memory: its rows, and the tokens of the other side.
struct alignas(16) PackedSequence {
  int token, other_token;
  int len, other_len;
  static constexpr int kInvalid = -1, kRest = -2;  // in place of other_len
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

// The sequence `i`, which begins at `reach`.
__device__ __forceinline__ PackedSequence find_packed(const Int64x2& reach, int64_t i,
                                                      const BoundsOf& of, const RaggedParams& p) {
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
  return packed;
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
  const int64_t count = int64_t{p.batch} + 1, share = (count + ctas - 1) / ctas;
  const int64_t begin = cta * share, end = min(begin + share, count);
  if (begin >= end) return;

  constexpr int kWarps = kRaggedThreads / 32, kOfOneWarp = 1024;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto write = [&](const PackedSequence& s, int first, int step) {
#pragma unroll 1
    for (int row = first; row < s.len; row += step) {
      of.bounds[s.token + row] = row_bounds(s, row, of.keys, p);
    }
  };
  Int64x2 before = reach_of(begin, warps, ragged);
#pragma unroll 1
  for (int64_t round = begin; round < end; round += kRaggedThreads) {
    const int64_t i = round + threadIdx.x;
    Int64x2 reach = {0, 0}, all;
    if (i < end) reach = {ragged_end(ragged.query, i, ragged), ragged_end(ragged.key, i, ragged)};
    const auto larger = [](int64_t a, int64_t b) { return max(a, b); };
    reach = join_before(reach, warps + 32, all, larger);
    reach = {max(reach.x, before.x), max(reach.y, before.y)};
    bool is_long = false;
    if (i < end) {
      const PackedSequence s = find_packed(reach, i, of, ragged);
      sequences[threadIdx.x] = s;
      is_long = s.len > kOfOneWarp;
    }
    before = {max(before.x, all.x), max(before.y, all.y)};
    const bool any_long = __syncthreads_or(is_long);  // the sequences are there
    const int found = static_cast<int>(min(end - round, int64_t{kRaggedThreads}));
    // A warp for each, but all of them together for one that is long.
#pragma unroll 1
    for (int j = warp; j < found; j += kWarps) {
      const PackedSequence s = sequences[j];
      if (s.len <= kOfOneWarp) write(s, lane, 32);
    }
#pragma unroll 1
    for (int j = 0; any_long && j < found; ++j) {
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
  find_bounds({.keys = false, .bounds = p.bounds, .rows = p.rows}, blockIdx.x, gridDim.x, p);
}

}  // namespace flashmoe::cuda::sm90
