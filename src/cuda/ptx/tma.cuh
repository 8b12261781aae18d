// Boxes of a tensor between global and shared memory, by the copy engine of sm_90. Maps are tensor
// maps, in constant memory.
#pragma once

#include <cstdint>

namespace flashmoe::cuda::ptx {

// PTX ISA, "createpolicy": what goes first from the second-level cache, because nobody will read it
// again, and what stays longest.
__device__ __forceinline__ uint64_t evict_first() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ uint64_t evict_last() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// PTX ISA, "cp.async.bulk.tensor": the box that begins there, of a tensor with four dimensions or
// with five. Its bytes are counted by `barrier`; what lies beyond the tensor is zeros, and counted
// as well.
__device__ __forceinline__ void tma_load(uint32_t shared, const void* map, uint32_t barrier, int c0,
                                         int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
__device__ __forceinline__ void tma_load_once(uint32_t shared, const void* map, uint32_t barrier,
                                              int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(evict_first())
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
// The same, to that place of every CTA of the cluster in `ctas`, a bit for each; counted there.
__device__ __forceinline__ void tma_load_to(uint32_t ctas, uint32_t shared, const void* map,
                                            uint32_t barrier, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"(static_cast<uint16_t>(ctas))
      : "memory");
}

// And back; what lies beyond the tensor is not written.
__device__ __forceinline__ void tma_store(uint32_t shared, const void* map, int c0, int c1, int c2,
                                          int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%1, {%2, %3, %4, %5, %6}], [%0];" ::
          "r"(shared),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}
__device__ __forceinline__ void tma_store_for_good(uint32_t shared, const void* map, int c0, int c1,
                                                   int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group.L2::cache_hint"
      " [%1, {%2, %3, %4, %5}], [%0], %6;" ::"r"(shared),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(evict_first())
      : "memory");
}

// PTX ISA, "cp.async.bulk": bytes that follow each other, a multiple of 16, counted by `barrier`.
__device__ __forceinline__ void bulk_load(uint32_t shared, const void* global, int bytes,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared),
      "l"(global), "r"(bytes), "r"(barrier)
      : "memory");
}
// And back: sums, that others will add to.
__device__ __forceinline__ void bulk_store_f32(float* global, uint32_t shared, int bytes) {
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(
          global),
      "r"(shared), "r"(bytes), "l"(evict_last())
      : "memory");
}
// PTX ISA, "cp.reduce.async.bulk": adds floats that follow each other.
__device__ __forceinline__ void bulk_add_f32(float* global, uint32_t shared, int bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.L2::cache_hint.add.f32"
      " [%0], [%1], %2, %3;" ::"l"(global),
      "r"(shared), "r"(bytes), "l"(evict_last())
      : "memory");
}

// Copies and sums from shared memory come in groups of a thread.
__device__ __forceinline__ void tma_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Until all that this thread committed has been read, or is done.
__device__ __forceinline__ void tma_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ __forceinline__ void tma_wait_group() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// PTX ISA, "fence.proxy": what this thread wrote to shared memory is there for the copy engine and
// the tensor cores.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// And in all memory, both ways: what others wrote, as this thread has seen, as well.
__device__ __forceinline__ void fence_proxy_async_all() {
  asm volatile("fence.proxy.async;" ::: "memory");
}

// PTX ISA, "prefetch": the map itself.
__device__ __forceinline__ void prefetch_tensormap(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

}  // namespace flashmoe::cuda::ptx
