// The emulator's: see machine.h.
#pragma once

namespace flashmoe::cuda::ptx {

inline float rcp_approx_ftz(float x) {
  const float y = 1 / x;
  return std::fpclassify(y) == FP_SUBNORMAL ? std::copysign(0.f, y) : y;
}
inline const char* mad_wide(uint32_t a, uint32_t b, const char* c) { return c + uint64_t{a} * b; }

}  // namespace flashmoe::cuda::ptx
