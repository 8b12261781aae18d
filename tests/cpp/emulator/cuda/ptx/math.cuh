// The emulator's: see machine.h.
#pragma once

#include <vector>

#include "cpu/half.h"

namespace flashmoe::cuda::ptx {

inline float flushed(float x) {
  return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.f, x) : x;
}
inline float ex2_approx_ftz(float x) { return flushed(std::exp2(flushed(x))); }

inline float cvt_f32_f16(uint16_t x) {
  static const std::vector<float> all = [] {
    std::vector<float> floats(1 << 16);
    for (int i = 0; i < 1 << 16; ++i) floats[i] = static_cast<float>(cpu::Float16::to_double(i));
    return floats;
  }();
  return all[x];
}
inline uint16_t cvt_rn_f16(float x) { return cpu::Float16::from_double(x); }
inline uint32_t cvt_rn_f16x2(float high, float low) {
  return uint32_t{cvt_rn_f16(high)} << 16 | cvt_rn_f16(low);
}

inline float cvt_f32_bf16(uint16_t x) { return __uint_as_float(uint32_t{x} << 16); }
inline uint16_t cvt_rn_bf16(float x) {
  const uint32_t bits = __float_as_uint(x);
  if (isnan(x)) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline uint32_t cvt_rn_bf16x2(float high, float low) {
  return uint32_t{cvt_rn_bf16(high)} << 16 | cvt_rn_bf16(low);
}

inline uint32_t fma_rn_f16x2(uint32_t a, uint32_t b, uint32_t c) {
  const auto one = [&](int shift) -> uint32_t {
    const auto of = [&](uint32_t x) { return cpu::Float16::to_double(x >> shift & 0xffff); };
    return cpu::Float16::from_double(of(a) * of(b) + of(c));
  };
  return one(16) << 16 | one(0);
}
inline uint32_t fma_rn_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
  const auto one = [&](int shift) -> uint32_t {
    const auto of = [&](uint32_t x) { return cpu::BFloat16::to_double(x >> shift & 0xffff); };
    return cpu::BFloat16::from_double(of(a) * of(b) + of(c));
  };
  return one(16) << 16 | one(0);
}

}  // namespace flashmoe::cuda::ptx
