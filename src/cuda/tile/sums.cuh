// fp32 accumulators in global memory that several CTAs add to. They lie in the order of the
// registers they come from, so that the addresses of a warp are consecutive: fragment after
// fragment, 128 floats each.
#pragma once

#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/special_registers.cuh"

namespace flashmoe::cuda {

// Hopper adds four floats of a lane at once; before it, the 32 lanes add one float each.
inline constexpr bool kVectorSums = ptx::kHopper;

template <int kM, int kN>
__device__ __forceinline__ void add_sums(float* sums, const float (&acc)[kM][kN][4]) {
  const int lane = ptx::opaque_thread() % 32;
#pragma unroll
  for (int i = 0; i < kM * kN; ++i) {
    const float(&x)[4] = acc[i / kN][i % kN];
    if constexpr (kVectorSums) {
      ptx::red_add_v4_f32(sums + i * 128 + lane * 4, x);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) ptx::red_add_f32(sums + i * 128 + j * 32 + lane, x[j]);
    }
  }
}

// One fragment of what add_sums() added up.
__device__ __forceinline__ void read_sums(float (&x)[4], const float* sums, int fragment) {
  const int lane = ptx::opaque_thread() % 32;
  if constexpr (kVectorSums) {
    const float4 four = reinterpret_cast<const float4*>(sums + fragment * 128)[lane];
    x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j) x[j] = sums[fragment * 128 + j * 32 + lane];
  }
}

}  // namespace flashmoe::cuda
