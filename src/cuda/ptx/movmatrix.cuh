// Matrices in registers, moved between lanes.
#pragma once

#include <cstdint>

namespace flashmoe::cuda::ptx {

// PTX ISA, "movmatrix": an 8 x 8 matrix of 16-bit elements, transposed from registers to registers.
__device__ __forceinline__ uint32_t movmatrix_trans(uint32_t x) {
  uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

}  // namespace flashmoe::cuda::ptx
