// The tiles of all experts, listed on the device: only there are the counts known.
//
//   experts   |     0      |1|        2         |     3 (none)     4  |
//   tiles     |  0  |  1   |2|  3  |  4  |  5   |                  6  |   empty slots ...
//
// One CTA makes the lists: prefix sums over the experts, then every slot looks up its expert in
// them. CTAs of the products find their work in one load.
#pragma once

#include "cuda/moe/params.h"
#include "cuda/moe/tiles.h"
#include "cuda/tile/scan.cuh"

namespace flashmoe::cuda::moe {

// Shared memory of the CTA that makes lists.
struct ListMemory {
  int* warps;   // (32)
  int* prefix;  // (E + 1)
};

// prefix[e] = the sum of count(e') over e' < e, for e up to E. count may read prefix[e] itself.
template <class Count>
__device__ __forceinline__ void sum_over_experts(const ListMemory& memory, int experts,
                                                 const Count& count) {
  const int share = (experts + kScanThreads - 1) / kScanThreads;
  const int first = min(static_cast<int>(threadIdx.x) * share, experts);
  const int last = min(first + share, experts);
  int mine = 0, all = 0;
  for (int e = first; e < last; ++e) mine += count(e);
  int before = sum_before<kScanThreads>(mine, memory.warps, all);
  for (int e = first; e < last; ++e) {
    const int here = count(e);
    memory.prefix[e] = before;
    before += here;
  }
  if (threadIdx.x == 0) memory.prefix[experts] = all;
  __syncthreads();
}

// The expert whose numbers begin at or before `slot` and end after it.
__device__ __forceinline__ int find_expert(const int* prefix, int experts, int slot) {
  int first = 0, last = experts;  // prefix[first] <= slot < prefix[last]
  while (last - first > 1) {
    const int middle = (first + last) / 2;
    (prefix[middle] <= slot ? first : last) = middle;
  }
  return first;
}

// `offsets` (E + 1) are the rows of the experts, in memory that this CTA sees.
__device__ __forceinline__ void make_lists(const Lists& lists, const ListMemory& memory,
                                           const int* offsets, int experts) {
  const auto rows_of = [&](int e) { return offsets[e + 1] - offsets[e]; };
  const auto parts_of = [&](int e, int block) {  // unsigned: the sum may be past 2^31
    return static_cast<int>((static_cast<uint32_t>(rows_of(e)) + block - 1) / block);
  };
  const auto part = [&](int e, int i, int block) {
    const int first = offsets[e] + i * block;
    return ExpertTile{e, first, min(block, offsets[e + 1] - first), -1};
  };
  constexpr ExpertTile kEmpty = {-1, 0, 0, -1};
  const int* const prefix = memory.prefix;

  sum_over_experts(memory, experts, [&](int e) { return parts_of(e, lists.block); });
  for (int slot = threadIdx.x; slot < lists.slots; slot += kScanThreads) {
    ExpertTile tile = kEmpty;
    if (slot < prefix[experts]) {
      const int e = find_expert(prefix, experts, slot);
      tile = part(e, slot - prefix[e], lists.block);
    }
    lists.tiles[slot] = tile;
  }
  if (lists.first_tile) {
    for (int e = threadIdx.x; e <= experts; e += kScanThreads) lists.first_tile[e] = prefix[e];
  }
  if (!lists.slices) return;

  const auto slices_of = [&](int e) { return max(parts_of(e, lists.slice), 1); };
  const auto sums_of = [&](int e) { return slices_of(e) > 1 ? slices_of(e) : 0; };
  __syncthreads();  // nobody reads the prefix of the tiles any more
  sum_over_experts(memory, experts, slices_of);
  for (int slot = threadIdx.x; slot < lists.slice_slots; slot += kScanThreads) {
    ExpertTile slice = kEmpty;
    if (slot < prefix[experts]) {
      const int e = find_expert(prefix, experts, slot);
      slice = part(e, slot - prefix[e], lists.slice);
    }
    lists.slices[slot] = slice;
  }
  if (threadIdx.x == 0) lists.first_sum[experts] = prefix[experts];
  __syncthreads();
  sum_over_experts(memory, experts, sums_of);
  for (int slot = threadIdx.x; slot < lists.slice_slots; slot += kScanThreads) {
    const ExpertTile slice = lists.slices[slot];  // what this thread wrote
    if (slice.expert < 0 || sums_of(slice.expert) == 0) continue;
    lists.slices[slot].sum =
        prefix[slice.expert] + (slice.first - offsets[slice.expert]) / lists.slice;
  }
  // The first sum of an expert is needed when that of the next list takes its place.
  for (int e = threadIdx.x; e < experts; e += kScanThreads) lists.first_sum[e] = prefix[e];
  __syncthreads();
  sum_over_experts(memory, experts, [&](int e) { return sums_of(e) > 0 ? 1 : 0; });
  for (int slot = prefix[experts] + threadIdx.x; slot < lists.sliced_slots; slot += kScanThreads) {
    lists.sliced[slot] = {-1, 0, 0, 0};
  }
  for (int e = threadIdx.x; e < experts; e += kScanThreads) {
    if (sums_of(e) > 0) lists.sliced[prefix[e]] = {e, lists.first_sum[e], sums_of(e), 0};
  }
}

}  // namespace flashmoe::cuda::moe
