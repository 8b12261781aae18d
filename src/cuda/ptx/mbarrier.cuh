// mbarriers (barriers in shared memory that also count the bytes of TMA copies) and the named
// barriers of a CTA.
#pragma once

#include <cstdint>

namespace flashmoe::cuda::ptx {

// PTX ISA, "mbarrier.init": a phase ends after `count` arrivals.
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
// PTX ISA, "fence.mbarrier_init": makes initialised mbarriers visible to asynchronous copies and to
// the cluster.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// PTX ISA, "mbarrier.arrive": one arrival.
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// PTX ISA, "mbarrier.arrive.expect_tx": one arrival, and the phase also waits for `bytes` bytes.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// PTX ISA, "mbarrier.try_wait": waits until the phase of that parity has ended.
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

// PTX ISA, "bar.sync" and "bar.arrive": named barriers 1 to 15 (0 is __syncthreads()). `threads` is
// how many take part, those that arrive and those that wait together.
__device__ __forceinline__ void bar_sync(int name, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}
__device__ __forceinline__ void bar_arrive(int name, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory");
}
// PTX ISA, "bar.red.or": bar_sync() that returns whether `mine` is true in any of the threads.
__device__ __forceinline__ bool bar_red_or(int name, int threads, bool mine) {
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
