// Global memory: what is read once, and what several CTAs share, accumulators and semaphores.
#pragma once

#include <cstdint>

namespace flashmoe::cuda::ptx {

// PTX ISA, "ld.global.nc" with .L1::no_allocate: 16 bytes that nobody writes and this SM reads
// once.
__device__ __forceinline__ uint4 ld_nc_no_allocate_v4(const void* global) {
  uint4 x;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(global));
  return x;
}

// PTX ISA, "red": adds to memory and returns nothing.
__device__ __forceinline__ void red_add_f32(float* global, float x) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(global), "f"(x) : "memory");
}

// PTX ISA, "red" with .v4.f32: four adjacent floats at once. Needs sm_90 and 16-byte alignment.
__device__ __forceinline__ void red_add_v4_f32(float* global, const float (&x)[4]) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(global), "f"(x[0]),
               "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
}

// PTX ISA, "ld.acquire" and "st.release": what a thread wrote before its release is visible to a
// thread whose acquire has read the released value.
__device__ __forceinline__ int ld_acquire(const int* global) {
  int x;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(global) : "memory");
  return x;
}
__device__ __forceinline__ void st_release(int* global, int x) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(global), "r"(x) : "memory");
}
// PTX ISA, "red.release": adds to a semaphore, after this thread's earlier writes.
__device__ __forceinline__ void red_release_add(int* global, int x) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(global), "r"(x) : "memory");
}

}  // namespace flashmoe::cuda::ptx
