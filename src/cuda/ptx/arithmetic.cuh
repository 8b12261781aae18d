// Arithmetic that C++ has no short way to say.
#pragma once

#include <cstdint>

namespace flashmoe::cuda::ptx {

// PTX ISA, "rcp": 1 / x, within 1 unit in the last place; 0 for what is infinite or has a subnormal
// inverse.
__device__ __forceinline__ float rcp_approx_ftz(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// PTX ISA, "mad.wide": a b + c in 64 bits, one instruction where C++ gets five.
__device__ __forceinline__ const char* mad_wide(uint32_t a, uint32_t b, const char* c) {
  uint64_t sum;
  asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(sum) : "r"(a), "r"(b), "l"(c));
  return reinterpret_cast<const char*>(sum);
}

}  // namespace flashmoe::cuda::ptx
