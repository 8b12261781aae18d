// The way of global memory to the caches.
#pragma once

namespace flashmoe::cuda::ptx {

// PTX ISA, "prefetch": brings the sector of this address to the second-level cache.
__device__ __forceinline__ void prefetch_l2(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

}  // namespace flashmoe::cuda::ptx
