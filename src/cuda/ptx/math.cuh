// Arithmetic that CUDA C++ has no exact name for.
#pragma once

#include <cstdint>

namespace flashmoe::cuda::ptx {

// PTX ISA, "ex2": 2^x, about 2 units in the last place; -inf gives 0, subnormal results are
// flushed.
__device__ __forceinline__ float ex2_approx_ftz(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// PTX ISA, "cvt": one fp16 number to fp32.
__device__ __forceinline__ float cvt_f32_f16(uint16_t x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}

// PTX ISA, "cvt": two floats to one register of two 16-bit numbers, `low` in the lower half.
__device__ __forceinline__ uint32_t cvt_rn_f16x2(float high, float low) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// One number: what there is before sm_80.
__device__ __forceinline__ uint16_t cvt_rn_f16(float x) {
  uint16_t y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ uint32_t cvt_rn_bf16x2(float high, float low) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// PTX ISA, "fma": a b + c of two 16-bit numbers each.
__device__ __forceinline__ uint32_t fma_rn_f16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
__device__ __forceinline__ uint32_t fma_rn_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

}  // namespace flashmoe::cuda::ptx
