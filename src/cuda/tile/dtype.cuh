// The 16-bit types as kernels see them: how many bytes an element has in memory, a product, and the
// way to registers of two and back. No kernel needs more, so no half type is ever named.
#pragma once

#include "cuda/ptx/math.cuh"
#include "cuda/ptx/mma.cuh"

namespace flashmoe::cuda {

struct Fp16 {
  using Storage = uint16_t;
  static constexpr int kBytes = sizeof(Storage);
  static constexpr uint32_t kExponent = 0x7c00;  // all ones: infinity or NaN
  static constexpr uint32_t kNan = 0x7e00;
  // d = a b + c
  static __device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1, const float (&c)[4]) {
    ptx::mma_m16n8k16_f16(d, a, b0, b1, c);
  }
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    return ptx::cvt_rn_f16x2(high, low);
  }
  static __device__ __forceinline__ float unpack(Storage x) { return ptx::cvt_f32_f16(x); }
};

struct Bf16 {
  using Storage = uint16_t;
  static constexpr int kBytes = sizeof(Storage);
  static constexpr uint32_t kExponent = 0x7f80;
  static constexpr uint32_t kNan = 0x7fc0;
  // d = a b + c
  static __device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1, const float (&c)[4]) {
    ptx::mma_m16n8k16_bf16(d, a, b0, b1, c);
  }
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    return ptx::cvt_rn_bf16x2(high, low);
  }
  static __device__ __forceinline__ float unpack(Storage x) { return __uint_as_float(x << 16); }
};

// Whether one of a register's two numbers is not finite.
template <class T>
__device__ __forceinline__ bool has_nonfinite(uint32_t two) {
  return (two & T::kExponent) == T::kExponent || (two >> 16 & T::kExponent) == T::kExponent;
}

// The infinity or NaN in the lower half of a register, or 0 if there is a finite number.
template <class T>
__device__ __forceinline__ float infinity_or_nan(uint32_t low) {
  if ((low & T::kExponent) != T::kExponent) return 0.f;
  if (low & 0x7fff & ~T::kExponent) return NAN;
  return low & 0x8000 ? -INFINITY : INFINITY;
}

}  // namespace flashmoe::cuda
