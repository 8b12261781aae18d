// TMA (sm_90): asynchronous copies of boxes of a tensor, and of plain bytes, between global and
// shared memory. `map` is a tensor map in constant memory.
#pragma once

#include <cstdint>

namespace flashmoe::cuda::ptx {

// PTX ISA, "createpolicy": L2 evicts such lines first (nobody reads them again), or last.
__device__ __forceinline__ uint64_t createpolicy_evict_first() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ uint64_t createpolicy_evict_last() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// PTX ISA, "cp.async.bulk.tensor": loads the box that begins at the coordinates (innermost first),
// of a tensor with two to five dimensions. `barrier` counts its bytes; elements beyond the
// tensor's end are zeros and are counted as well.
__device__ __forceinline__ void tma_load(uint32_t shared, const void* map, uint32_t barrier, int c0,
                                         int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
// tma_load() with L2::cache_hint, for what no other CTA loads.
__device__ __forceinline__ void tma_load_evict_first(uint32_t shared, const void* map,
                                                     uint32_t barrier, int c0, int c1, int c2,
                                                     int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(createpolicy_evict_first())
      : "memory");
}
__device__ __forceinline__ void tma_load(uint32_t shared, const void* map, uint32_t barrier, int c0,
                                         int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4}], [%2];" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1)
      : "memory");
}
__device__ __forceinline__ void tma_load(uint32_t shared, const void* map, uint32_t barrier, int c0,
                                         int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}
__device__ __forceinline__ void tma_load(uint32_t shared, const void* map, uint32_t barrier, int c0,
                                         int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}
// tma_load() with .multicast::cluster: to the same address in every CTA of the bit mask `ctas`,
// each of whose barriers counts the bytes it gets.
__device__ __forceinline__ void tma_load_multicast(uint32_t ctas, uint32_t shared, const void* map,
                                                   uint32_t barrier, int c0, int c1, int c2,
                                                   int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"(static_cast<uint16_t>(ctas))
      : "memory");
}

// PTX ISA, "cp.async.bulk.tensor" to global memory: stores a box. Elements beyond the tensor's end
// are not written.
__device__ __forceinline__ void tma_store(uint32_t shared, const void* map, int c0, int c1, int c2,
                                          int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%1, {%2, %3, %4, %5, %6}], [%0];" ::
          "r"(shared),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}
__device__ __forceinline__ void tma_store(uint32_t shared, const void* map, int c0, int c1, int c2,
                                          int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%1, {%2, %3, %4, %5}], [%0];" ::"r"(
          shared),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
// tma_store() with L2::cache_hint, for what no later kernel of the pass reads.
__device__ __forceinline__ void tma_store_evict_first(uint32_t shared, const void* map, int c0,
                                                      int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group.L2::cache_hint"
      " [%1, {%2, %3, %4, %5}], [%0], %6;" ::"r"(shared),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(createpolicy_evict_first())
      : "memory");
}

// PTX ISA, "cp.async.bulk": loads contiguous bytes, a multiple of 16. `barrier` counts them.
__device__ __forceinline__ void cp_async_bulk_load(uint32_t shared, const void* global, int bytes,
                                                   uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared),
      "l"(global), "r"(bytes), "r"(barrier)
      : "memory");
}
// PTX ISA, "cp.async.bulk" to global memory: stores accumulators that other CTAs will add to.
__device__ __forceinline__ void cp_async_bulk_store_evict_last(float* global, uint32_t shared,
                                                               int bytes) {
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(
          global),
      "r"(shared), "r"(bytes), "l"(createpolicy_evict_last())
      : "memory");
}
// PTX ISA, "cp.reduce.async.bulk": adds contiguous floats to accumulators in global memory.
__device__ __forceinline__ void cp_reduce_async_bulk_add_f32(float* global, uint32_t shared,
                                                             int bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.L2::cache_hint.add.f32"
      " [%0], [%1], %2, %3;" ::"l"(global),
      "r"(shared), "r"(bytes), "l"(createpolicy_evict_last())
      : "memory");
}

// PTX ISA, "cp.async.bulk.commit_group": the bulk stores and reductions that this thread issued
// since its last commit become a group.
__device__ __forceinline__ void cp_async_bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// PTX ISA, "cp.async.bulk.wait_group": waits until all groups of this thread have read their shared
// memory (.read), or are complete.
__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ __forceinline__ void cp_async_bulk_wait_group() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// PTX ISA, "fence.proxy": what this thread wrote to shared memory is visible to TMA and wgmma.
__device__ __forceinline__ void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// PTX ISA, "fence.proxy" for all memory: also orders what other threads wrote, as far as this
// thread has seen it, with the TMA operations that follow.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async;" ::: "memory");
}

// PTX ISA, "cp.async.bulk.prefetch.tensor": brings the box to L2.
__device__ __forceinline__ void tma_prefetch(const void* map, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];" ::"l"(map),
               "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}
// PTX ISA, "prefetch.tensormap": loads the tensor map itself.
__device__ __forceinline__ void prefetch_tensormap(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

}  // namespace flashmoe::cuda::ptx
