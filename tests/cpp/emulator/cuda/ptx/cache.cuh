// The emulator's: see machine.h.
#pragma once

namespace flashmoe::cuda::ptx {

inline void prefetch_l2(const void*) {}

}  // namespace flashmoe::cuda::ptx
