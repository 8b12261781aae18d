// Pairs sorted by expert, stable: a counting sort, with no count ever seen by the host. Pairs are
// cut into chunks, each a CTA's:
//
//   moe_count   how many pairs of each expert a chunk has
//   moe_scan    one CTA: where each expert begins, and each chunk within it; the tiles of experts
//   moe_place   row -> pair and pair -> row, by one warp a chunk
//   moe_sort    all of it by one CTA, for few pairs and experts: a launch instead of three
//
// When pairs are placed, a warp takes 32 neighbouring ones at a time. Lanes with the same expert
// find each other by match.any, and their order is that of the lanes, so that rows of an expert are
// in the order of their pairs and bits repeat. T k = 262,144 pairs of 128 experts are 512 chunks of
// 16 rounds, whose ids are all on their way before the first is needed.
#pragma once

#include "cuda/moe/experts.cuh"
#include "cuda/moe/lists.cuh"
#include "cuda/ptx/grid.cuh"
#include "cuda/ptx/special_registers.cuh"

namespace flashmoe::cuda::moe {

// The experts of pairs first, first + stride, ... up to `last`; -1 beyond, and where there is none.
template <int kCount>
__device__ __forceinline__ void load_experts(int (&experts)[kCount], const SortParams& p,
                                             int64_t first, int stride, int64_t last,
                                             const Divider& token_of) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int64_t pair = first + i * stride;
    experts[i] = pair < last ? expert_of(p.ids, static_cast<int>(pair), token_of) : -1;
  }
}

// Grid: chunks.
__device__ __forceinline__ void moe_count(const SortParams& p) {
  extern __shared__ __align__(16) char shared[];
  constexpr int kAtOnce = 4;
  int* const counters = reinterpret_cast<int*>(shared);
  for (int e = threadIdx.x; e < p.ids.experts; e += kCountThreads) counters[e] = 0;
  __syncthreads();
  const Divider token_of(p.top_k);
  const int64_t first = int64_t{blockIdx.x} * p.chunk;
  const int64_t last = min(first + p.chunk, int64_t{p.pairs});
  for (int64_t pair = first + threadIdx.x; pair < last; pair += kAtOnce * kCountThreads) {
    int experts[kAtOnce];
    load_experts(experts, p, pair, kCountThreads, last, token_of);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (experts[i] >= 0) atomicAdd(&counters[experts[i]], 1);  // a sum of integers has no order
    }
  }
  __syncthreads();
  const int chunk = blockIdx.x;
  for (int e = threadIdx.x; e < p.ids.experts; e += kCountThreads) {
    int* const row = p.counts + int64_t{e} * p.chunk_pitch;
    row[chunk] = counters[e];
    if (chunk + 1 < p.chunks) continue;
    for (int i = p.chunks; i < p.chunk_pitch; ++i) row[i] = 0;
  }
}

// Gives the pairs first .. last - 1 their rows, by one warp. experts[i] is that of pair first +
// 32 i + lane; `counters` (E, shared memory) are the next row of each expert.
template <int kAtOnce>
__device__ __forceinline__ void place_pairs(const SortParams& p, int* counters, int64_t first,
                                            int64_t last, int (&experts)[kAtOnce],
                                            const Divider& token_of) {
  const int lane = threadIdx.x % 32;
  for (int64_t batch = first; batch < last; batch += 32 * kAtOnce) {
    if (batch > first) load_experts(experts, p, batch + lane, 32, last, token_of);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int64_t round = batch + 32 * i;
      if (round >= last) break;
      const int expert = experts[i];
      const uint32_t same = __match_any_sync(kWholeWarp, expert);
      const int rank = __popc(same & ((1u << lane) - 1));
      const int row = expert >= 0 ? counters[expert] + rank : -1;
      __syncwarp();
      if (expert >= 0 && rank == 0) counters[expert] = row + __popc(same);
      __syncwarp();
      if (round + lane >= last) continue;
      const int pair = static_cast<int>(round) + lane;
      if (expert >= 0) p.routing.pairs[row] = pair;
      p.routing.row_of[pair] = row;
    }
  }
}

// counts[e] = how many pairs expert e has, and where each chunk begins among them.
__device__ __forceinline__ void add_up_chunks(const SortParams& p, int* counts) {
  // A lane has four neighbouring chunks of every 128.
  constexpr int kMost = kMaxChunks / 128;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, experts = p.ids.experts;
#pragma unroll 2
  for (int e = warp; e < experts; e += kScanThreads / 32) {
    const int64_t row = int64_t{e} * p.chunk_pitch + 4 * lane;
    int4 mine[kMost];
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      mine[i] = {0, 0, 0, 0};
      if (128 * i + 4 * lane < p.chunk_pitch) {
        mine[i] = *reinterpret_cast<const int4*>(p.counts + row + 128 * i);
      }
    }
    int before = 0;
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      if (128 * i >= p.chunk_pitch) break;
      const auto [a, b, c, d] = mine[i];
      int sum = a + b + c + d;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(kWholeWarp, sum, step);
        if (lane >= step) sum += other;
      }
      const int base = before + sum - (a + b + c + d);
      if (128 * i + 4 * lane < p.chunk_pitch) {
        *reinterpret_cast<int4*>(p.bases + row + 128 * i) = {base, base + a, base + a + b,
                                                             base + a + b + c};
      }
      before += __shfl_sync(kWholeWarp, sum, 31);
    }
    if (lane == 0) counts[e] = before;
  }
}

// Grid: one CTA.
__device__ __forceinline__ void moe_scan(const SortParams& p) {
  extern __shared__ __align__(16) char shared[];
  const ListMemory memory{reinterpret_cast<int*>(shared), reinterpret_cast<int*>(shared) + 32};
  const int experts = p.ids.experts;
  add_up_chunks(p, memory.prefix);
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
  const Divider token_of(p.top_k);
  const int64_t first = int64_t{blockIdx.x} * p.chunk;
  const int64_t last = min(first + p.chunk, int64_t{p.pairs});
  int experts[16];
  load_experts(experts, p, first + threadIdx.x, 32, last, token_of);
  for (int e = threadIdx.x; e < p.ids.experts; e += 32) {
    counters[e] = p.routing.offsets[e] + p.bases[int64_t{e} * p.chunk_pitch + blockIdx.x];
  }
  __syncwarp();
  place_pairs(p, counters, first, last, experts, token_of);
}

// Grid: one CTA. A chunk for each warp; the counters of all are in shared memory. A kernel that
// waits for this one itself may begin at once.
__device__ __forceinline__ void moe_sort(const SortParams& p) {
  if constexpr (ptx::kHopper) ptx::griddepcontrol_launch_dependents();
  extern __shared__ __align__(16) char shared[];
  constexpr int kWarps = kScanThreads / 32;
  const ListMemory memory{reinterpret_cast<int*>(shared), reinterpret_cast<int*>(shared) + 32};
  const int warp = threadIdx.x / 32, experts = p.ids.experts;
  int* const counters = memory.prefix + experts + 1;  // (warps, E)
  int* const mine = counters + warp * experts;
  const Divider token_of(p.top_k);
  const int64_t first = int64_t{warp} * p.chunk;
  const int64_t last = min(first + p.chunk, int64_t{p.pairs});
  int chosen[kSortPairs / kScanThreads];  // all of the chunk's
  load_experts(chosen, p, first + threadIdx.x % 32, 32, last, token_of);
  for (int i = threadIdx.x; i < kWarps * experts; i += kScanThreads) counters[i] = 0;
  __syncthreads();
#pragma unroll
  for (const int expert : chosen) {
    if (expert >= 0) atomicAdd(&mine[expert], 1);  // a sum of integers has no order
  }
  __syncthreads();
  for (int e = threadIdx.x; e < experts; e += kScanThreads) {
    int sum = 0;
    for (int w = 0; w < kWarps; ++w) {
      const int here = counters[w * experts + e];
      counters[w * experts + e] = sum;
      sum += here;
    }
    memory.prefix[e] = sum;
  }
  __syncthreads();  // prefix[e] is how many pairs expert e has
  sum_over_experts(memory, experts, [&](int e) { return memory.prefix[e]; });
  int32_t* const offsets = p.routing.offsets;
  for (int e = threadIdx.x; e <= experts; e += kScanThreads) offsets[e] = memory.prefix[e];
  for (int i = threadIdx.x; i < kWarps * experts; i += kScanThreads) {
    counters[i] += memory.prefix[i % experts];
  }
  __syncthreads();  // counters are the next row of each expert, for each warp; offsets are there
  place_pairs(p, mine, first, last, chosen, token_of);
  make_lists(p.lists, memory, offsets, experts);
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
