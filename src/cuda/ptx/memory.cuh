// Memory that several blocks share: sums and turns.
#pragma once

#include <cstdint>

namespace flashmoe::cuda::ptx {

// PTX ISA, "red": adds to memory, nothing comes back.
__device__ __forceinline__ void red_add_f32(float* global, float x) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(global), "f"(x) : "memory");
}

// Four adjacent floats at once. Loop sm_90 and 16-byte alignment.
__device__ __forceinline__ void red_add_v4_f32(float* global, const float (&x)[4]) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(global), "f"(x[0]),
               "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
}

// PTX ISA, "ld" and "st" with .acquire and .release: what the writer did before its release is
// there for who has read it.
__device__ __forceinline__ int ld_acquire(const int* global) {
  int x;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(global) : "memory");
  return x;
}
__device__ __forceinline__ void st_release(int* global, int x) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(global), "r"(x) : "memory");
}
// PTX ISA, "red" with .release: counts one who is done.
__device__ __forceinline__ void red_release_add(int* global, int x) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(global), "r"(x) : "memory");
}

}  // namespace flashmoe::cuda::ptx
