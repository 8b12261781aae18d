// Sums over the lanes of a warp, and running sums over the threads of a CTA.
#pragma once

#include <cstdint>

namespace flashmoe::cuda {

inline constexpr uint32_t kWholeWarp = 0xffffffffu;

// `x` of all lanes, joined in a fixed order, in every lane.
template <class Number, class Join>
__device__ __forceinline__ Number join_lanes(Number x, const Join& join) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = join(x, __shfl_xor_sync(kWholeWarp, x, step));
  return x;
}
__device__ __forceinline__ float sum_of_lanes(float x) {
  return join_lanes(x, [](float a, float b) { return a + b; });
}
__device__ __forceinline__ float max_of_lanes(float x) {  // of what is no NaN
  return join_lanes(x, [](float a, float b) { return fmaxf(a, b); });
}

__device__ __forceinline__ uint32_t max_of_lanes(uint32_t x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return __reduce_max_sync(kWholeWarp, x);
#else
  return join_lanes(x, [](uint32_t a, uint32_t b) { return a > b ? a : b; });
#endif
}

// The sum of `mine` over the threads before this one; `all` becomes that of all threads. kThreads
// is a whole number of warps; `warps` has room for one number of each, and is free again after the
// next barrier.
template <int kThreads>
__device__ __forceinline__ int sum_before(int mine, int* warps, int& all) {
  constexpr int kWarps = kThreads / 32;
  static_assert(kThreads % 32 == 0 && kWarps <= 32);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto scan = [&](int x) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(kWholeWarp, x, step);
      if (lane >= step) x += other;
    }
    return x;
  };
  const int up_to_mine = scan(mine);
  if (lane == 31) warps[warp] = up_to_mine;
  __syncthreads();  // every warp's sum is there
  const int up_to_warp = scan(lane < kWarps ? warps[lane] : 0);
  all = __shfl_sync(kWholeWarp, up_to_warp, 31);
  const int warps_before = __shfl_sync(kWholeWarp, up_to_warp, max(warp - 1, 0));
  return up_to_mine - mine + (warp > 0 ? warps_before : 0);
}

}  // namespace flashmoe::cuda
