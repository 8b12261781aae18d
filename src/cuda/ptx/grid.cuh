// Programmatic dependent launch (sm_90): a kernel launched with LaunchShape::programmatic begins
// before the kernel ahead of it in the stream has ended. Older chips do nothing here.
#pragma once

#include "cuda/ptx/special_registers.cuh"

namespace flashmoe::cuda::ptx {

// PTX ISA, "griddepcontrol.launch_dependents": the next kernel may begin where there is room, once
// every CTA of this one has called this or ended.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
  if constexpr (kHopper) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
// PTX ISA, "griddepcontrol.wait": waits until the kernel ahead has ended and its writes are
// visible.
__device__ __forceinline__ void griddepcontrol_wait() {
  if constexpr (kHopper) asm volatile("griddepcontrol.wait;" ::: "memory");
}

}  // namespace flashmoe::cuda::ptx
