// The 16-bit types as kernels see them: registers of two, a product and a rounding. No kernel needs
// more, so no half type is ever named.
#pragma once

#include "cuda/ptx/math.cuh"
#include "cuda/ptx/mma.cuh"

namespace flashmoe::cuda {

struct Fp16 {
  static __device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
    ptx::mma_m16n8k16_f16(d, a, b0, b1);
  }
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    return ptx::cvt_rn_f16x2(high, low);
  }
};

struct Bf16 {
  static __device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
    ptx::mma_m16n8k16_bf16(d, a, b0, b1);
  }
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    return ptx::cvt_rn_bf16x2(high, low);
  }
};

}  // namespace flashmoe::cuda
