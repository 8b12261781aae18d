// The blocks of a ragged batch, listed on the device: only there are the lengths known.
//
//   tokens   |    sequence 0    |  1  |         2         | rest |
//   blocks   |  0  |  1  |  2   |  0  |  0  |  1  |  2  |3| 0    |
//   slots       0     1     2      3     4     5     6   7   8     empty ...
//
// A sequence has the tokens from where those before it reach to, up to its own end. Whatever
// cu_seqlens holds, no token has two sequences then, and there are at most tokens / block + batch
// + 1 blocks, which the host knows. Where cu_seqlens says something else, the sequence is invalid.
//
// The grid is (CTAs, lists). Each CTA goes over all sequences up to its share of the slots, so that
// nobody waits for anybody: first where each begins (a running maximum of ends), then its first
// slot (a running sum).
#pragma once

#include "cuda/attention/params.h"
#include "cuda/attention/sequence.cuh"
#include "cuda/attention/tiles.h"

namespace flashmoe::cuda {

inline constexpr int kSequencesPerThread = 2;  // at a time

// Two running numbers, 0 at first.
struct Int64x2 {
  int64_t x, y;
};

// Returns `mine` of all threads before this one, joined; `all` becomes that of all threads. `warps`
// has room for 32, and is free again after the next barrier.
template <class Join>
__device__ __forceinline__ Int64x2 join_before(Int64x2 mine, Int64x2* warps, Int64x2& all,
                                               const Join& join) {
  static_assert(kRaggedThreads == 32 * 32);  // a lane for each warp
  constexpr uint32_t kEveryone = 0xffffffffu;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto scan = [&](Int64x2& two) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int64_t x = __shfl_up_sync(kEveryone, two.x, step);
      const int64_t y = __shfl_up_sync(kEveryone, two.y, step);
      if (lane >= step) two = {join(two.x, x), join(two.y, y)};
    }
  };
  const auto from = [&](const Int64x2& two, int other) {
    return Int64x2{__shfl_sync(kEveryone, two.x, other), __shfl_sync(kEveryone, two.y, other)};
  };
  scan(mine);
  if (lane == 31) warps[warp] = mine;
  __syncthreads();  // every warp's is there
  Int64x2 sums = warps[lane];
  scan(sums);
  all = from(sums, 31);
  const Int64x2 warps_before = from(sums, max(warp - 1, 0)), left = from(mine, max(lane - 1, 0));
  Int64x2 before = {0, 0};
  if (warp > 0) before = warps_before;
  if (lane > 0) before = {join(before.x, left.x), join(before.y, left.y)};
  return before;
}

// Where sequence `i` ends, among the tokens there are. What comes after the last one is as good as
// a sequence.
__device__ __forceinline__ int64_t ragged_end(const RaggedSide& side, int64_t i,
                                              const RaggedParams& p) {
  if (i >= p.batch) return side.tokens;
  const int64_t end = read_length(side.cu_seqlens, (i + 1) * side.stride, p.lengths_are_int64);
  return min(max(end, int64_t{0}), side.tokens);
}

// What the sequences before a sequence add up to.
struct RaggedBefore {
  int64_t reach_q, reach_k;  // where they end
  int64_t pair;              // queries x keys of all
  int64_t slot;              // the first free one
};

// A sequence, with all its blocks.
struct RaggedSequence {
  int64_t len_q, len_k;
  int32_t blocks;
  RaggedKind kind;
};

__device__ __forceinline__ RaggedSequence find_ragged(const RaggedBefore& before, int64_t i,
                                                      const RaggedList& list,
                                                      const RaggedParams& p) {
  bool valid = true;
  const auto length = [&](const RaggedSide& side, int64_t begin) {
    const int64_t end = max(ragged_end(side, i, p), begin);
    if (i < p.batch) {
      valid = valid && end - begin <= side.longest &&
              read_length(side.cu_seqlens, i * side.stride, p.lengths_are_int64) == begin &&
              read_length(side.cu_seqlens, (i + 1) * side.stride, p.lengths_are_int64) == end;
    }
    return end - begin;
  };
  RaggedSequence s;
  s.len_q = length(p.query, before.reach_q);
  s.len_k = length(p.key, before.reach_k);
  const int64_t rows = list.of_keys ? s.len_k : s.len_q;
  // As many as a list has slots at most. Dividing 64 bits takes a hundred instructions.
  s.blocks = rows < kNoLimit ? (static_cast<int>(rows) + list.block - 1) / list.block
                             : static_cast<int>((rows + list.block - 1) / list.block);
  if (i == p.batch) s.blocks = max(s.blocks, 1);  // for what is left of the bias
  s.kind = i >= p.batch ? RaggedKind::kRest : valid ? RaggedKind::kBlock : RaggedKind::kInvalid;
  return s;
}

__device__ __forceinline__ RaggedBefore after(const RaggedBefore& before, const RaggedSequence& s) {
  return {before.reach_q + s.len_q, before.reach_k + s.len_k, before.pair + s.len_q * s.len_k,
          before.slot + s.blocks};
}

// The entry of block n of a sequence, in the order of the list.
__device__ __forceinline__ RaggedBlock ragged_block(const RaggedBefore& before, int64_t i,
                                                    const RaggedSequence& s, int64_t n,
                                                    const RaggedList& list, const RaggedParams& p) {
  RaggedBlock b{};
  b.token_q = before.reach_q;
  b.token_k = before.reach_k;
  b.pair = before.pair;
  b.len_q = static_cast<int32_t>(s.len_q);
  b.len_k = static_cast<int32_t>(s.len_k);
  b.sequence = static_cast<int32_t>(i);
  b.block = static_cast<int32_t>(list.descending ? s.blocks - 1 - n : n);
  b.kind = s.kind;
  // Lengths that are wrong may be large enough for the sum of the pairs to overflow.
  const int64_t pairs = s.kind == RaggedKind::kRest ? p.pairs - before.pair : s.len_q * s.len_k;
  const bool inside = before.pair >= 0 && pairs >= 0 && pairs <= p.pairs - before.pair;
  if (s.kind == RaggedKind::kBlock && inside) return b;
  if (s.kind == RaggedKind::kBlock) b.kind = RaggedKind::kInvalid;
  // Its own rows only, of which there may be more than 2^31, and its share of the pairs.
  const int64_t skipped = n * list.block;
  const int64_t rows = min((list.of_keys ? s.len_k : s.len_q) - skipped, int64_t{list.block});
  (list.of_keys ? b.token_k : b.token_q) += skipped;
  (list.of_keys ? b.len_k : b.len_q) = static_cast<int32_t>(rows);
  b.block = 0;
  if (list.of_keys) {
    const int64_t first = min(max(before.pair, int64_t{0}), p.pairs);
    const int64_t last = inside ? first + pairs : p.pairs;
    const int64_t share = (last - first + s.blocks - 1) / s.blocks;
    b.pair = min(first + n * share, last);
    b.token_q = min(share, last - b.pair);
  }
  return b;
}

__device__ __forceinline__ void attention_ragged_blocks(const RaggedParams& p) {
  extern __shared__ __align__(16) char shared[];
  Int64x2* const warps = reinterpret_cast<Int64x2*>(shared);
  static_assert(2 * 32 * sizeof(Int64x2) == kRaggedSharedBytes);
  const RaggedList list = p.lists[blockIdx.y];
  if (p.tile_counter && blockIdx.x + blockIdx.y + threadIdx.x == 0) *p.tile_counter = 0;
  const int64_t share = (list.slots + gridDim.x - 1) / gridDim.x;
  const int64_t begin = blockIdx.x * share, end = min(begin + share, int64_t{list.slots});

  RaggedBefore before = {0, 0, 0, 0};  // the first sequence of a round; the same for all threads
  constexpr int64_t kRound = kRaggedThreads * kSequencesPerThread;
#pragma unroll 1
  for (int64_t round = 0; round < p.batch && before.slot < end; round += kRound) {
    const int64_t first = round + threadIdx.x * kSequencesPerThread;
    Int64x2 reach = {0, 0};
#pragma unroll
    for (int i = 0; i < kSequencesPerThread; ++i) {
      if (first + i < p.batch) {
        reach = {max(reach.x, ragged_end(p.query, first + i, p)),
                 max(reach.y, ragged_end(p.key, first + i, p))};
      }
    }
    const auto larger = [](int64_t a, int64_t b) { return max(a, b); };
    Int64x2 reach_all, sums_all;
    reach = join_before(reach, warps, reach_all, larger);
    RaggedBefore mine = {max(before.reach_q, reach.x), max(before.reach_k, reach.y), 0, 0};
    RaggedBefore next = mine;
    RaggedSequence found[kSequencesPerThread] = {};  // past the last one there is nothing
#pragma unroll
    for (int i = 0; i < kSequencesPerThread; ++i) {
      if (first + i < p.batch) found[i] = find_ragged(next, first + i, list, p);
      next = after(next, found[i]);
    }
    const auto sum = [](int64_t a, int64_t b) { return a + b; };
    const Int64x2 sums = join_before({next.pair, next.slot}, warps + 32, sums_all, sum);
    mine.pair = before.pair + sums.x;
    mine.slot = before.slot + sums.y;
#pragma unroll
    for (int i = 0; i < kSequencesPerThread; ++i) {
      const RaggedSequence& s = found[i];
      const int64_t last = min(int64_t{s.blocks}, end - mine.slot);
#pragma unroll 1
      for (int64_t n = max(begin - mine.slot, int64_t{0}); n < last; ++n) {
        list.blocks[mine.slot + n] = ragged_block(mine, first + i, s, n, list, p);
      }
      mine = after(mine, s);
    }
    before = {max(before.reach_q, reach_all.x), max(before.reach_k, reach_all.y),
              before.pair + sums_all.x, before.slot + sums_all.y};
  }
  // What comes after the last sequence, and empty slots.
  const RaggedSequence rest = find_ragged(before, p.batch, list, p);
  for (int64_t slot = max(begin, before.slot) + threadIdx.x; slot < end; slot += kRaggedThreads) {
    const int64_t n = slot - before.slot;
    list.blocks[slot] =
        n < rest.blocks ? ragged_block(before, p.batch, rest, n, list, p) : RaggedBlock{};
  }
}

}  // namespace flashmoe::cuda
