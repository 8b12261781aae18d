// TF32: fp32 numbers of which the tensor cores read the upper 19 bits.
#pragma once

#include <cstdint>

namespace flashmoe::cuda::ptx {

// PTX ISA, "cvt" to .tf32: rounded to the nearest, ties away from 0.
__device__ __forceinline__ uint32_t cvt_rna_tf32(float x) {
  uint32_t y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
}

// PTX ISA, "mma.m16n8k8" with .tf32: A 16 x 8 row-major, B 8 x 8 column-major, of whose numbers the
// low 13 bits are cut off; fp32 accumulators.
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4],
                                                 const uint32_t (&b)[2], const float (&c)[4]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, "
      "%9}, {%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]),
        "f"(c[2]), "f"(c[3]));
}

}  // namespace flashmoe::cuda::ptx
