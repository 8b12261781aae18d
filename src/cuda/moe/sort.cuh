// Pairs sorted by expert, stable: a counting sort in three launches, with no count ever seen by the
// host. Pairs are cut into chunks, each a warp's:
//
//   moe_count   how many pairs of each expert a chunk has
//   moe_scan    one CTA: where each expert begins, and each chunk within it; the tiles of experts
//   moe_place   row -> pair and pair -> row
//
// A warp takes 32 neighbouring pairs at a time. Lanes with the same expert find each other by
// match.any, and their order is that of the lanes, so that rows of an expert are in the order of
// their pairs and bits repeat. T k = 262,144 pairs of 128 experts are 512 chunks of 16 rounds.
#pragma once

#include "cuda/moe/experts.cuh"
#include "cuda/moe/lists.cuh"

namespace flashmoe::cuda::moe {

// Calls visit(pair, expert, count) for each pair of this CTA's chunk, 32 at once: the expert's
// counter (E of them, in shared memory) before the pair, which adds 1 to it. An expert of -1 has
// no counter.
template <class Visit>
__device__ __forceinline__ void count_chunk(const SortParams& p, int* counters,
                                            const Visit& visit) {
  const int lane = threadIdx.x;
  const int64_t first = int64_t{blockIdx.x} * p.chunk;
  const int64_t last = min(first + p.chunk, int64_t{p.pairs});
  const auto expert_at = [&](int64_t pair) {
    return pair < last ? expert_of(p.ids, static_cast<int>(pair), p.top_k) : -1;
  };
  int next = expert_at(first + lane);
  for (int64_t round = first; round < last; round += 32) {
    const int expert = next;
    next = expert_at(round + 32 + lane);  // on its way while the others are counted
    const uint32_t same = __match_any_sync(kWholeWarp, expert);
    const int rank = __popc(same & ((1u << lane) - 1));
    const int start = expert >= 0 ? counters[expert] : 0;
    __syncwarp();
    if (expert >= 0 && rank == 0) counters[expert] = start + __popc(same);
    __syncwarp();
    if (round + lane < last) visit(static_cast<int>(round) + lane, expert, start + rank);
  }
}

// Grid: chunks, a warp each.
__device__ __forceinline__ void moe_count(const SortParams& p) {
  extern __shared__ __align__(16) char shared[];
  int* const counters = reinterpret_cast<int*>(shared);
  for (int e = threadIdx.x; e < p.ids.experts; e += 32) counters[e] = 0;
  __syncwarp();
  count_chunk(p, counters, [](int, int, int) {});
  for (int e = threadIdx.x; e < p.ids.experts; e += 32) {
    p.counts[int64_t{e} * p.chunks + blockIdx.x] = counters[e];
  }
}

// Grid: one CTA.
__device__ __forceinline__ void moe_scan(const SortParams& p) {
  extern __shared__ __align__(16) char shared[];
  const ListMemory memory{reinterpret_cast<int*>(shared), reinterpret_cast<int*>(shared) + 32};
  constexpr int kMost = kMaxChunks / 32;  // chunks of a lane
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, experts = p.ids.experts;
  const int share = (p.chunks + 31) / 32, first = lane * share;
  const int* __restrict__ const counts = p.counts;
#pragma unroll 2
  for (int e = warp; e < experts; e += kScanThreads / 32) {
    const int64_t row = int64_t{e} * p.chunks;
    int mine[kMost], sum = 0;
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      mine[i] = i < share && first + i < p.chunks ? counts[row + first + i] : 0;
      sum += mine[i];
    }
    int before = sum;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(kWholeWarp, before, step);
      if (lane >= step) before += other;
    }
    if (lane == 31) memory.prefix[e] = before;
    before -= sum;
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      if (i < share && first + i < p.chunks) p.bases[row + first + i] = before;
      before += mine[i];
    }
  }
  __syncthreads();  // prefix[e] is how many pairs expert e has
  sum_over_experts(memory, experts, [&](int e) { return memory.prefix[e]; });
  int32_t* const offsets = p.routing.offsets;
  for (int e = threadIdx.x; e <= experts; e += kScanThreads) offsets[e] = memory.prefix[e];
  __syncthreads();
  make_lists(p.lists, memory, offsets, experts);
}

// Grid: chunks, a warp each.
__device__ __forceinline__ void moe_place(const SortParams& p) {
  extern __shared__ __align__(16) char shared[];
  int* const counters = reinterpret_cast<int*>(shared);
  for (int e = threadIdx.x; e < p.ids.experts; e += 32) {
    counters[e] = p.routing.offsets[e] + p.bases[int64_t{e} * p.chunks + blockIdx.x];
  }
  __syncwarp();
  count_chunk(p, counters, [&](int pair, int expert, int row) {
    if (expert >= 0) p.routing.pairs[row] = pair;
    p.routing.row_of[pair] = expert >= 0 ? row : -1;
  });
}

// Before a backward pass. Grid: one CTA for the lists, and those that go over the pairs.
__device__ __forceinline__ void moe_bwd_prepare(const PrepareParams& p) {
  extern __shared__ __align__(16) char shared[];
  const int experts = p.ids.experts;
  if (blockIdx.x == 0) {
    const ListMemory memory{reinterpret_cast<int*>(shared), reinterpret_cast<int*>(shared) + 32};
    for (int i = threadIdx.x; i < p.zero_row_chunks; i += kScanThreads) {
      static_cast<uint4*>(p.zero_row)[i] = {0, 0, 0, 0};
    }
    make_lists(p.lists, memory, p.routing.offsets, experts);
    return;
  }
  const int64_t i = int64_t{blockIdx.x - 1} * kScanThreads + threadIdx.x;
  if (i >= p.pairs) return;
  // A row that has an expert, and a pair that has none: no entry is written twice.
  if (i < p.routing.offsets[experts]) {
    p.routing.row_of[p.routing.pairs[i]] = static_cast<int>(i);
  }
  if (expert_of(p.ids, static_cast<int>(i), p.top_k) < 0) p.routing.row_of[i] = -1;
}

}  // namespace flashmoe::cuda::moe
