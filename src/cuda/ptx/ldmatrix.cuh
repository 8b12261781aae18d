// Matrix fragments between shared memory and registers.
#pragma once

#include <cstdint>

namespace flashmoe::cuda::ptx {

// PTX ISA, "ldmatrix": four 8 x 8 matrices of 16-bit elements; lane i gives the address of row i %
// 8 of matrix i / 8.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared)
               : "memory");
}

// PTX ISA, "ldmatrix" with .x2: two matrices. The addresses of lanes 16 to 31 are not read.
__device__ __forceinline__ void ldmatrix_x2(uint32_t (&r)[2], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(shared)
               : "memory");
}

// PTX ISA, "ldmatrix" with .x4.trans: four matrices, each transposed.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared)
               : "memory");
}

// PTX ISA, "stmatrix" (sm_90): four 8 x 8 matrices; lane i gives the address of row i % 8 of matrix
// i / 8.
__device__ __forceinline__ void stmatrix_x4(uint32_t shared, const uint32_t (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared),
               "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

// PTX ISA, "stmatrix" with .trans: lane i gives the address of column i % 8 of matrix i / 8.
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t shared, const uint32_t (&x)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared),
      "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
      : "memory");
}

}  // namespace flashmoe::cuda::ptx
