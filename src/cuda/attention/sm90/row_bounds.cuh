// Which keys each query of a ragged batch sees, found on the device: only there are the lengths
// known. Packed kernels (fwd_packed.cuh) read nothing else of them.
//
// Each CTA has a share of the sequences. It first finds where all those before it reach to, so that
// nobody waits for anybody. What is a sequence, and which are valid, is as in ragged.cuh: what
// comes after the last one is as good as a sequence, and here it reaches to the end of the last
// tile.
#pragma once

#include "cuda/attention/ragged.cuh"
#include "cuda/attention/sm90/params.h"
#include "cuda/attention/sm90/tiles.h"
#include "cuda/ptx/grid.cuh"

namespace flashmoe::cuda::sm90 {

// A sequence in shared memory.
struct alignas(16) PackedSequence {
  int token_q, token_k;
  int len_q, len_k;
  static constexpr int kInvalid = -1, kRest = -2;  // in place of len_k
};

__device__ __forceinline__ RowBounds row_bounds(const PackedSequence& s, int row,
                                                const AttentionParams& p) {
  const uint32_t first = static_cast<uint32_t>(s.token_k);
  if (s.len_k == PackedSequence::kInvalid) return {first | RowBounds::kInvalid, s.token_k};
  if (s.len_k == PackedSequence::kRest) return {first, s.token_k};
  Sequence seq;
  seq.len_q = s.len_q;
  seq.len_k = s.len_k;
  seq.shift = s.len_k - s.len_q;
  const int begin = seq.begin(row, p);
  return {first + begin, s.token_k + max(seq.end(row, p), begin)};
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
                                                      const Sm90PackedParams& p) {
  const RaggedSequence s = find_ragged({reach.x, reach.y, 0, 0}, i, {.block = 128}, p.ragged);
  PackedSequence packed;
  packed.token_q = static_cast<int>(reach.x);
  packed.token_k = static_cast<int>(reach.y);
  packed.len_q = static_cast<int>(s.kind == RaggedKind::kRest ? p.rows - reach.x : s.len_q);
  packed.len_k = s.kind == RaggedKind::kBlock     ? static_cast<int>(s.len_k)
                 : s.kind == RaggedKind::kInvalid ? PackedSequence::kInvalid
                                                  : PackedSequence::kRest;
  return packed;
}

__device__ __forceinline__ void attention_row_bounds(const Sm90PackedParams& p) {
  ptx::griddepcontrol_launch_dependents();
  extern __shared__ __align__(16) char shared_sequences[];
  PackedSequence* const sequences = reinterpret_cast<PackedSequence*>(shared_sequences);
  Int64x2* const warps = reinterpret_cast<Int64x2*>(sequences + kRaggedThreads);
  static_assert(kRaggedThreads * sizeof(PackedSequence) + 2 * 32 * sizeof(Int64x2) ==
                kRowBoundsSharedBytes);
  if (blockIdx.x + threadIdx.x == 0) *p.ragged.tile_counter = 0;
  const int64_t count = int64_t{p.batch} + 1, share = (count + gridDim.x - 1) / gridDim.x;
  const int64_t begin = blockIdx.x * share, end = min(begin + share, count);
  if (begin >= end) return;

  constexpr int kWarps = kRaggedThreads / 32, kOfOneWarp = 1024;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto write = [&](const PackedSequence& s, int first, int step) {
#pragma unroll 1
    for (int row = first; row < s.len_q; row += step) {
      p.bounds[s.token_q + row] = row_bounds(s, row, p);
    }
  };
  Int64x2 before = reach_of(begin, warps, p.ragged);
#pragma unroll 1
  for (int64_t round = begin; round < end; round += kRaggedThreads) {
    const int64_t i = round + threadIdx.x;
    Int64x2 reach = {0, 0}, all;
    if (i < end)
      reach = {ragged_end(p.ragged.query, i, p.ragged), ragged_end(p.ragged.key, i, p.ragged)};
    const auto larger = [](int64_t a, int64_t b) { return max(a, b); };
    reach = join_before(reach, warps + 32, all, larger);
    reach = {max(reach.x, before.x), max(reach.y, before.y)};
    bool is_long = false;
    if (i < end) {
      const PackedSequence s = find_packed(reach, i, p);
      sequences[threadIdx.x] = s;
      is_long = s.len_q > kOfOneWarp;
    }
    before = {max(before.x, all.x), max(before.y, all.y)};
    const bool any_long = __syncthreads_or(is_long);  // the sequences are there
    const int found = static_cast<int>(min(end - round, int64_t{kRaggedThreads}));
    // A warp for each, but all of them together for one that is long.
#pragma unroll 1
    for (int j = warp; j < found; j += kWarps) {
      const PackedSequence s = sequences[j];
      if (s.len_q <= kOfOneWarp) write(s, lane, 32);
    }
#pragma unroll 1
    for (int j = 0; any_long && j < found; ++j) {
      if (sequences[j].len_q > kOfOneWarp) write(sequences[j], threadIdx.x, kRaggedThreads);
    }
    __syncthreads();  // they have been read
  }
}

}  // namespace flashmoe::cuda::sm90
