// Special registers.
#pragma once

#include <cstdint>

namespace flashmoe::cuda::ptx {

// Whether the code is compiled for Hopper or newer.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
inline constexpr bool kHopper = true;
#else
inline constexpr bool kHopper = false;
#endif

// No instruction at all: the compiler must not know that the result is `x`. What is computed from
// it is then computed here, and not once before a main loop that has no registers for it.
template <class Number>
__device__ __forceinline__ Number opaque(Number x) {
  asm volatile("" : "+r"(x));
  return x;
}

__device__ __forceinline__ int opaque_thread() { return opaque(static_cast<int>(threadIdx.x)); }

}  // namespace flashmoe::cuda::ptx
