// Barriers in shared memory that also count bytes on their way, and named barriers of a CTA.
#pragma once

#include <cstdint>

namespace flashmoe::cuda::ptx {

// PTX ISA, "mbarrier.init": a phase ends after `count` arrivals.
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
// What was initialised is there for the asynchronous copies of the CTA.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// PTX ISA, "mbarrier.arrive".
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// The phase also waits for so many bytes.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// PTX ISA, "mbarrier.try_wait": until the phase of that parity has ended.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// PTX ISA, "bar": the named barriers 1 to 15, for `threads` in all.
__device__ __forceinline__ void bar_sync(int name, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}
__device__ __forceinline__ void bar_arrive(int name, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory");
}
// The same, and whether any of them said so.
__device__ __forceinline__ bool bar_any(int name, int threads, bool mine) {
  int any;
  asm volatile(
      "{ .reg .pred mine, any;\n"
      "setp.ne.b32 mine, %3, 0;\n"
      "bar.red.or.pred any, %1, %2, mine;\n"
      "selp.b32 %0, 1, 0, any; }"
      : "=r"(any)
      : "r"(name), "r"(threads), "r"(int{mine})
      : "memory");
  return any;
}

}  // namespace flashmoe::cuda::ptx
