// Asynchronous copies from global to shared memory, Ampere's kind.
#pragma once

#include <cstdint>

namespace flashmoe::cuda::ptx {

// PTX ISA, "cp.async": 16 bytes past the first-level cache. `source_bytes` 0 fills with zeros
// instead, reading nothing.
__device__ __forceinline__ void cp_async_cg_16(uint32_t shared, const void* global,
                                               int source_bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(source_bytes));
}

// PTX ISA, "cp.async.commit_group"
__device__ __forceinline__ void cp_async_commit_group() { asm volatile("cp.async.commit_group;"); }

// PTX ISA, "cp.async.wait_group": until at most kPending groups are under way.
template <int kPending>
__device__ __forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace flashmoe::cuda::ptx
