// CTAs of a cluster (sm_90), and each other's shared memory.
#pragma once

#include <cstdint>

namespace flashmoe::cuda::ptx {

// PTX ISA, "%cluster_ctarank": which CTA of the cluster this is.
__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// PTX ISA, "barrier.cluster": until all threads of all CTAs that have not ended are here.
__device__ __forceinline__ void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release;\n"
      "barrier.cluster.wait.acquire;" ::
          : "memory");
}

// PTX ISA, "mapa": the same place in the shared memory of another CTA.
__device__ __forceinline__ uint32_t at_rank(uint32_t shared, int rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared), "r"(rank));
  return there;
}

// By such a place.
__device__ __forceinline__ void st_cluster_u32(uint32_t there, uint32_t x) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(there), "r"(x) : "memory");
}
// What the thread wrote before is there for who waits with mbarrier_wait_cluster(): that takes a
// fence for the whole GPU.
__device__ __forceinline__ void mbarrier_release_cluster(uint32_t there) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(there)
               : "memory");
}
// Nothing was written, only read.
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t there) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(there) : "memory");
}
// PTX ISA, "cp.async.bulk": from here to there, counted by a barrier over there.
__device__ __forceinline__ void bulk_send(uint32_t there, uint32_t shared, int bytes,
                                          uint32_t barrier_there) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(there),
      "r"(shared), "r"(bytes), "r"(barrier_there)
      : "memory");
}

// mbarrier_wait() for what another CTA has written.
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

}  // namespace flashmoe::cuda::ptx
