// The architecture that is compiled for, and values that are opaque to the compiler.
#pragma once

#include <cstdint>

namespace flashmoe::cuda::ptx {

// Whether the code is compiled for Hopper or newer.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
inline constexpr bool kHopper = true;
#else
inline constexpr bool kHopper = false;
#endif

// Returns `x` by no instruction at all, and hides from the compiler that it is `x`. What is
// computed from the result is then computed where it is used, and not hoisted before a main loop
// that has no registers to keep it.
template <class Number>
__device__ __forceinline__ Number opaque(Number x) {
  asm volatile("" : "+r"(x));
  return x;
}

// threadIdx.x as an opaque() value.
__device__ __forceinline__ int opaque_thread() { return opaque(static_cast<int>(threadIdx.x)); }

}  // namespace flashmoe::cuda::ptx
