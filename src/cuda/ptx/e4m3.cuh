// Eight-bit floats, e4m3: 4 bits of exponent, 3 of mantissa, no infinity, 448 the largest.
#pragma once

#include <cstdint>

namespace flashmoe::cuda::ptx {

// Whether the chip that is compiled for converts them by itself.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
inline constexpr bool kConvertsE4m3 = true;

// PTX ISA, "cvt" with .f16x2.e4m3x2: two numbers to fp16, exactly.
__device__ __forceinline__ uint32_t cvt_f16x2_e4m3x2(uint16_t two) {
  uint32_t packed;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(packed) : "h"(two));
  return packed;
}
// PTX ISA, "cvt" with .satfinite.e4m3x2.f32: two floats, `low` in the lower half, to the nearest
// even; what is beyond 448 becomes 448.
__device__ __forceinline__ uint16_t cvt_satfinite_e4m3x2(float high, float low) {
  uint16_t two;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(two) : "f"(high), "f"(low));
  return two;
}
#else
inline constexpr bool kConvertsE4m3 = false;
__device__ __forceinline__ uint32_t cvt_f16x2_e4m3x2(uint16_t) { return 0; }
__device__ __forceinline__ uint16_t cvt_satfinite_e4m3x2(float, float) { return 0; }
#endif

// PTX ISA, "mov" that takes a register apart: its lower and its upper half.
__device__ __forceinline__ ushort2 mov_b32_halves(uint32_t x) {
  ushort2 halves;
  asm("mov.b32 {%0, %1}, %2;" : "=h"(halves.x), "=h"(halves.y) : "r"(x));
  return halves;
}

// PTX ISA, "mul" with .f16x2: rounded to nearest even, subnormal numbers kept.
__device__ __forceinline__ uint32_t mul_f16x2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

}  // namespace flashmoe::cuda::ptx
