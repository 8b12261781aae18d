// The emulator's: see machine.h.
#pragma once

namespace flashmoe::cuda::ptx {

inline constexpr bool kHopper = true;

template <class Number>
Number opaque(Number x) {
  return x;
}
inline int opaque_thread() { return static_cast<int>(threadIdx.x); }

}  // namespace flashmoe::cuda::ptx
