// Special registers.
#pragma once

#include <cstdint>

namespace flashmoe::cuda::ptx {

// PTX ISA, "%tid". Volatile, unlike threadIdx.x: read anew each time, so that what is computed from
// it is not kept in registers over a main loop that needs them all.
__device__ __forceinline__ int tid_x_volatile() {
  int tid;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(tid));
  return tid;
}

}  // namespace flashmoe::cuda::ptx
