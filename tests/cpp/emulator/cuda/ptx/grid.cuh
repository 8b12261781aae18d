// The emulator's: see machine.h. Kernels run one after the other.
#pragma once

#include "cuda/ptx/special_registers.cuh"

namespace flashmoe::cuda::ptx {

inline void griddepcontrol_launch_dependents() {}
inline void griddepcontrol_wait() {}

}  // namespace flashmoe::cuda::ptx
