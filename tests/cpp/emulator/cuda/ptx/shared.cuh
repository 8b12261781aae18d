// The emulator's: see machine.h.
#pragma once

namespace flashmoe::cuda::ptx {

template <class T>
T ld_shared(uint32_t shared) {
  T x;
  std::memcpy(&x, emulator::shared(shared, sizeof x), sizeof x);
  return x;
}
template <class T>
void st_shared(uint32_t shared, const T& x) {
  std::memcpy(emulator::shared(shared, sizeof x), &x, sizeof x);
}

inline void st_shared_v4(uint32_t shared, const uint4& x) { st_shared(shared, x); }
inline void st_shared_u32(uint32_t shared, uint32_t x) { st_shared(shared, x); }
inline void st_shared_f32(uint32_t shared, float x) { st_shared(shared, x); }
inline void st_shared_v2_f32(uint32_t shared, const float2& x) { st_shared(shared, x); }
inline uint32_t ld_shared_u32(uint32_t shared) { return ld_shared<uint32_t>(shared); }
inline uint32_t ld_shared_u8(uint32_t shared) { return ld_shared<uint8_t>(shared); }
inline float ld_shared_f32(uint32_t shared) { return ld_shared<float>(shared); }
inline uint4 ld_shared_v4(uint32_t shared) { return ld_shared<uint4>(shared); }
inline float2 ld_shared_v2_f32(uint32_t shared) { return ld_shared<float2>(shared); }
inline float4 ld_shared_v4_f32(uint32_t shared) { return ld_shared<float4>(shared); }
inline uint16_t ld_shared_u16(uint32_t shared) { return ld_shared<uint16_t>(shared); }

}  // namespace flashmoe::cuda::ptx
