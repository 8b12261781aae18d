// Numbers of an fp8 cache (e4m3) on their way to 16 bits, and floats on their way to fp8. All
// conversions to fp16 and bf16 are exact: both have every number that e4m3 has.
#pragma once

#include <type_traits>

#include "cuda/ptx/e4m3.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/dtype.cuh"

namespace flashmoe::cuda {

struct E4m3 {
  using Storage = uint8_t;
  static constexpr int kBytes = sizeof(Storage);
  static constexpr uint32_t kNan = 0x7f;  // besides the sign; there is no infinity

  // Of a register's four numbers, the first and third, and the second and fourth, as fp16.
  static __device__ __forceinline__ void unpack(uint32_t four, uint32_t& even, uint32_t& odd) {
    if constexpr (ptx::kConvertsE4m3) {
      convert(__byte_perm(four, 0, 0x3120), even, odd);
    } else {
      even = from_upper_bytes(four << 8);
      odd = from_upper_bytes(four);
    }
  }

  // The first and second, and the third and fourth.
  static __device__ __forceinline__ void unpack_pairs(uint32_t four, uint32_t& low,
                                                      uint32_t& high) {
    if constexpr (ptx::kConvertsE4m3) {
      convert(four, low, high);
    } else {
      low = from_upper_bytes(__byte_perm(four, 0, 0x1404));
      high = from_upper_bytes(__byte_perm(four, 0, 0x3424));
    }
  }

  // The same as T, which is Fp16 or Bf16. No instruction makes bf16 of e4m3, but a float's upper
  // half is its bf16, since no number has more digits; that of a NaN is a NaN.
  template <class T>
  static __device__ __forceinline__ void unpack_pairs_as(uint32_t four, uint32_t& low,
                                                         uint32_t& high) {
    unpack_pairs(four, low, high);
    if constexpr (std::is_same_v<T, Bf16>) {
      low = upper_halves(low);
      high = upper_halves(high);
    }
  }

  static __device__ __forceinline__ float unpack(Storage x) {
    uint32_t low, high;
    unpack_pairs(x, low, high);
    return ptx::cvt_f32_f16(static_cast<uint16_t>(low));
  }

  // Rounds to nearest even; what is beyond 448 becomes 448, and NaN stays.
  static __device__ __forceinline__ uint32_t round(float x) {
    if constexpr (ptx::kConvertsE4m3) {
      return ptx::cvt_satfinite_e4m3x2(0, x) & 0xff;
    } else {
      const uint32_t bits = __float_as_uint(x), sign = bits >> 24 & 0x80;
      const float magnitude = fabsf(x);
      if (!(magnitude <= 448.f)) return sign | (isnan(x) ? kNan : 0x7e);
      // Below 2^-6 numbers are multiples of 2^-9: adding 2^14 leaves just these bits, rounded.
      if (magnitude < 0x1p-6f) return sign | (__float_as_uint(magnitude + 0x1p14f) & 0xf);
      const uint32_t kept = bits & 0x7fffffff;
      const uint32_t rounded = kept + 0x7ffff + (kept >> 20 & 1);  // 20 bits of mantissa go
      return sign | ((rounded >> 20) - (120 << 3));                // the exponent's bias is 7
    }
  }

 private:
  // Those of two fp16 numbers as floats.
  static __device__ __forceinline__ uint32_t upper_halves(uint32_t two) {
    const float low = ptx::cvt_f32_f16(static_cast<uint16_t>(two));
    const float high = ptx::cvt_f32_f16(static_cast<uint16_t>(two >> 16));
    return __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632);
  }
  static __device__ __forceinline__ void convert(uint32_t four, uint32_t& low, uint32_t& high) {
    const ushort2 halves = ptx::mov_b32_halves(four);
    low = ptx::cvt_f16x2_e4m3x2(halves.x);
    high = ptx::cvt_f16x2_e4m3x2(halves.y);
  }
  // From the upper bytes of both halves. The bits of e4m3, one place further right, are an fp16
  // number 2^8 times too small, subnormal ones too. NaN comes out as 480, the only one that
  // overflows when multiplied by 140; 0 times infinity is NaN again.
  static __device__ __forceinline__ uint32_t from_upper_bytes(uint32_t bytes) {
    constexpr uint32_t k256 = 0x5c005c00, k140 = 0x58605860;
    const uint32_t small = (bytes & 0x80008000) | (bytes >> 1 & 0x3f803f80);
    const uint32_t numbers = ptx::mul_f16x2(small, k256);
    return ptx::fma_rn_f16x2(ptx::mul_f16x2(numbers, k140), 0, numbers);
  }
};

}  // namespace flashmoe::cuda
