// Loads from and stores to shared memory by 32-bit address.
#pragma once

#include <cstdint>

namespace flashmoe::cuda::ptx {

// PTX ISA, "st.shared": 16 bytes.
__device__ __forceinline__ void st_shared_v4(uint32_t shared, const uint4& x) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(x.x), "r"(x.y),
               "r"(x.z), "r"(x.w)
               : "memory");
}

// PTX ISA, "st.shared": 4 bytes.
__device__ __forceinline__ void st_shared_u32(uint32_t shared, uint32_t x) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared), "r"(x) : "memory");
}

// PTX ISA, "st.shared": a float.
__device__ __forceinline__ void st_shared_f32(uint32_t shared, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(shared), "f"(x) : "memory");
}

// PTX ISA, "st.shared": two floats.
__device__ __forceinline__ void st_shared_v2_f32(uint32_t shared, const float2& x) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(shared), "f"(x.x), "f"(x.y) : "memory");
}

// PTX ISA, "ld.shared": 4 bytes.
__device__ __forceinline__ uint32_t ld_shared_u32(uint32_t shared) {
  uint32_t x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(shared) : "memory");
  return x;
}

// PTX ISA, "ld.shared": 1 byte.
__device__ __forceinline__ uint32_t ld_shared_u8(uint32_t shared) {
  uint32_t x;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(x) : "r"(shared) : "memory");
  return x;
}

// PTX ISA, "ld.shared": a float.
__device__ __forceinline__ float ld_shared_f32(uint32_t shared) {
  return __uint_as_float(ld_shared_u32(shared));
}

// PTX ISA, "ld.shared": 16 bytes.
__device__ __forceinline__ uint4 ld_shared_v4(uint32_t shared) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(shared)
               : "memory");
  return x;
}

// PTX ISA, "ld.shared": two and four floats.
__device__ __forceinline__ float2 ld_shared_v2_f32(uint32_t shared) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(shared) : "memory");
  return x;
}
__device__ __forceinline__ float4 ld_shared_v4_f32(uint32_t shared) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(shared)
               : "memory");
  return x;
}

// PTX ISA, "ld.shared": one 16-bit number.
__device__ __forceinline__ uint16_t ld_shared_u16(uint32_t shared) {
  uint16_t x;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(shared) : "memory");
  return x;
}

}  // namespace flashmoe::cuda::ptx
