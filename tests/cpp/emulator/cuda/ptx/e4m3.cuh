// The emulator's: see machine.h.
#pragma once

#include "cuda/ptx/math.cuh"

namespace flashmoe::cuda::ptx {

inline constexpr bool kConvertsE4m3 = true;

inline uint32_t cvt_f16x2_e4m3x2(uint16_t two) {
  const auto one = [&](int byte) -> uint32_t {
    return cpu::Float16::from_double(
        cpu::Float8E4M3::to_double(static_cast<uint8_t>(two >> 8 * byte)));
  };
  return one(1) << 16 | one(0);
}
inline uint16_t cvt_satfinite_e4m3x2(float high, float low) {
  return static_cast<uint16_t>(cpu::Float8E4M3::from_double(high) << 8 |
                               cpu::Float8E4M3::from_double(low));
}
inline ushort2 mov_b32_halves(uint32_t x) {
  return {static_cast<unsigned short>(x), static_cast<unsigned short>(x >> 16)};
}
inline uint32_t mul_f16x2(uint32_t a, uint32_t b) {
  const auto one = [&](int shift) -> uint32_t {
    const auto of = [&](uint32_t x) { return cpu::Float16::to_double(x >> shift & 0xffff); };
    return cpu::Float16::from_double(of(a) * of(b));
  };
  return one(16) << 16 | one(0);
}

}  // namespace flashmoe::cuda::ptx
