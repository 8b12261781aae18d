// CTAs of a cluster (sm_90) and each other's shared memory.
#pragma once

#include <cstdint>

namespace flashmoe::cuda::ptx {

// PTX ISA, "%cluster_ctarank": the rank of this CTA in its cluster.
__device__ __forceinline__ int cluster_ctarank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// PTX ISA, "barrier.cluster": waits until all threads of the cluster that have not ended are here.
__device__ __forceinline__ void barrier_cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release;\n"
      "barrier.cluster.wait.acquire;" ::
          : "memory");
}

// PTX ISA, "barrier.cluster": the same in two steps, by threads that have written nothing for
// others but mbarriers (fence_mbarrier_init()). To publish more costs a fence of the whole GPU.
__device__ __forceinline__ void barrier_cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}
__device__ __forceinline__ void barrier_cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// PTX ISA, "mapa": the address of the same variable in the shared memory of CTA `rank`.
__device__ __forceinline__ uint32_t mapa(uint32_t shared, int rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared), "r"(rank));
  return there;
}

// PTX ISA, "st.shared::cluster": 4 bytes to an address made by mapa().
__device__ __forceinline__ void st_shared_cluster_u32(uint32_t there, uint32_t x) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(there), "r"(x) : "memory");
}

// PTX ISA, "st.async": 16 bytes to such an address, which the mbarrier `barrier_there` of that CTA
// counts.
__device__ __forceinline__ void st_async_v4(uint32_t there, const uint4& x,
                                            uint32_t barrier_there) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(there),
      "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(barrier_there)
      : "memory");
}

// PTX ISA, "mbarrier.arrive" with .release.cluster: what this thread wrote before is visible to a
// thread of the other CTA that returns from mbarrier_wait_cluster(). Costs a fence of the whole
// GPU.
__device__ __forceinline__ void mbarrier_arrive_release_cluster(uint32_t there) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(there)
               : "memory");
}
// PTX ISA, "mbarrier.arrive" on a barrier of another CTA, by a thread that has only read.
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t there) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(there) : "memory");
}
// PTX ISA, "mbarrier.try_wait" with .acquire.cluster: mbarrier_wait() for what another CTA wrote.
__device__ __forceinline__ void mbarrier_wait_cluster(uint32_t barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// PTX ISA, "cp.async.bulk" from shared::cta to shared::cluster: `bytes` bytes to another CTA, whose
// barrier `barrier_there` counts them.
__device__ __forceinline__ void cp_async_bulk_cluster(uint32_t there, uint32_t shared, int bytes,
                                                      uint32_t barrier_there) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(there),
      "r"(shared), "r"(bytes), "r"(barrier_there)
      : "memory");
}

}  // namespace flashmoe::cuda::ptx
