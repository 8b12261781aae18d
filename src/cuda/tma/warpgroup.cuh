// Threads of a warpgroup, and where wgmma's accumulators lie in them.
#pragma once

#include <cstdint>

#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/special_registers.cuh"

namespace flashmoe::cuda::tma {

inline constexpr int kWarpgroupThreads = 128, kWarpgroupWarps = 4, kWarpgroupRows = 64;

// Indices of the thread. Opaque, so that what is computed from them is recomputed where it is used:
// main loops have no registers for addresses.
__device__ __forceinline__ int warpgroup_thread() {
  return static_cast<uint32_t>(ptx::opaque_thread()) % kWarpgroupThreads;
}
__device__ __forceinline__ int warpgroup_warp() { return warpgroup_thread() / 32; }
__device__ __forceinline__ int lane() { return warpgroup_thread() % 32; }

// Of the 64 rows of a wgmma accumulator a thread holds fragment_row() and fragment_row() + 8, and
// of each 8 columns fragment_column() and the next.
__device__ __forceinline__ int fragment_row() { return warpgroup_warp() * 16 + lane() / 4; }
__device__ __forceinline__ int fragment_column() { return lane() % 4 * 2; }

// One arrival for the whole warp, all of whose lanes are done with a stage.
//
// compute-sanitizer's racecheck reports the stages that are released so: it orders lane 0 before
// whoever waits, and does not know that __syncwarp() orders the other lanes before lane 0. Arrivals
// by every lane silence it, but then ptxas no longer knows that the warp is converged and
// serialises the wgmma of the backward kernels (warning C7520); in the forward kernels they cost 8%
// at D = 64.
__device__ __forceinline__ void warp_arrive(uint32_t barrier) {
  __syncwarp();
  if (lane() == 0) ptx::mbarrier_arrive(barrier);
}

}  // namespace flashmoe::cuda::tma
