// Asynchronous copies from global to shared memory, Ampere's kind.
#pragma once

#include <cstdint>

namespace flashmoe::cuda::ptx {

// PTX ISA, "cp.async" with "ignore-src": 16 bytes past the first-level cache, or zeros with nothing
// read.
__device__ __forceinline__ void cp_async_cg_16(uint32_t shared, const void* global, bool read) {
  asm volatile(
      "{\n"
      ".reg .pred ignore;\n"
      "setp.eq.u32 ignore, %2, 0;\n"
      "cp.async.cg.shared.global [%0], [%1], 16, ignore;\n"
      "}" ::"r"(shared),
      "l"(global), "r"(static_cast<uint32_t>(read)));
}

// The same with "src-size": the first `bytes` bytes, and zeros up to 16. The machine has no such
// instruction and spends six on it.
__device__ __forceinline__ void cp_async_cg_16_part(uint32_t shared, const void* global,
                                                    int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(bytes));
}

// 8 bytes, which pass through the first-level cache.
__device__ __forceinline__ void cp_async_ca_8(uint32_t shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared), "l"(global));
}
__device__ __forceinline__ void cp_async_ca_8_part(uint32_t shared, const void* global, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared), "l"(global),
               "r"(bytes));
}

// PTX ISA, "cp.async.mbarrier.arrive" with .noinc: one of the arrivals that `barrier` waits for, as
// soon as the copies are complete that this thread has begun.
__device__ __forceinline__ void cp_async_mbarrier_arrive_noinc(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

// PTX ISA, "cp.async.commit_group"
__device__ __forceinline__ void cp_async_commit_group() { asm volatile("cp.async.commit_group;"); }

// PTX ISA, "cp.async.wait_group": until at most kPending groups are under way.
template <int kPending>
__device__ __forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace flashmoe::cuda::ptx
