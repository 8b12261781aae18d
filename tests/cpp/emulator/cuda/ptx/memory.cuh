// The emulator's: see machine.h. Outside of kernels one function after the other is called, so that
// whoever waits there does so for ever.
#pragma once

#include <mutex>

namespace emulator {
struct WaitsForever : std::runtime_error {
  using std::runtime_error::runtime_error;
};
inline std::mutex global_sums;
}  // namespace emulator

namespace flashmoe::cuda::ptx {

inline uint4 ld_nc_no_allocate_v4(const void* global) { return *static_cast<const uint4*>(global); }
inline void red_add_f32(float* global, float x) {
  const std::lock_guard lock(emulator::global_sums);
  *global += x;
}
inline void red_add_v4_f32(float* global, const float (&x)[4]) {
  const std::lock_guard lock(emulator::global_sums);
  for (int i = 0; i < 4; ++i) global[i] += x[i];
}

inline int ld_acquire(const int* global) {
  constexpr int kPatience = 1 << 22;  // many in turn may ask, and be answered without waiting
  thread_local const int* last = nullptr;
  thread_local int times = 0;
  emulator::yield();
  times = global == last ? times + 1 : 0;
  last = global;
  if (times > kPatience) throw emulator::WaitsForever("waits for ever");
  return __atomic_load_n(global, __ATOMIC_ACQUIRE);
}
inline void st_release(int* global, int x) { __atomic_store_n(global, x, __ATOMIC_RELEASE); }
inline void red_release_add(int* global, int x) { __atomic_fetch_add(global, x, __ATOMIC_ACQ_REL); }

}  // namespace flashmoe::cuda::ptx
