// The way of global memory to the caches.
#pragma once

namespace flashmoe::cuda::ptx {

// PTX ISA, "prefetch": brings the sector of this address to the second-level cache.
__device__ __forceinline__ void prefetch_l2(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}
// PTX ISA, "cp.async.bulk.prefetch": the same for contiguous bytes, a multiple of 16, aligned
// to 16.
__device__ __forceinline__ void cp_async_bulk_prefetch_l2(const void* global, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
}

}  // namespace flashmoe::cuda::ptx
