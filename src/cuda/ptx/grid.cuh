// Kernels that begin before the one ahead of them in the stream has ended (sm_90): those that are
// launched with LaunchShape::programmatic.
#pragma once

namespace flashmoe::cuda::ptx {

// PTX ISA, "griddepcontrol": once all CTAs have said so the next kernel may begin, where there is
// room.
__device__ __forceinline__ void grid_launch_next() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
// Until the one ahead has ended, and what it wrote is there.
__device__ __forceinline__ void grid_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

}  // namespace flashmoe::cuda::ptx
