// The emulator's: see machine.h.
#pragma once

#include "cuda/ptx/memory.cuh"

namespace flashmoe::cuda::ptx {

inline int box_bytes(const void* map) {
  const emulator::TensorMapContents& m = *static_cast<const emulator::TensorMapContents*>(map);
  int bytes = m.element_bytes;
  for (int i = 0; i < m.rank; ++i) bytes *= m.box[i];
  return bytes;
}
inline void load_box(uint32_t shared, const void* map, uint32_t barrier, const int (&at)[5]) {
  const int bytes = box_bytes(map);
  const int c0 = at[0], c1 = at[1], c2 = at[2], c3 = at[3], c4 = at[4];
  emulator::copy_writes(shared, bytes, barrier);
  emulator::later(
      [=] {
        emulator::copy_box(map, {c0, c1, c2, c3, c4}, shared, true);
        emulator::complete(barrier, bytes);
      },
      false);
}
template <class... More>
void tma_load(uint32_t shared, const void* map, uint32_t barrier, int c0, More... more) {
  load_box(shared, map, barrier, {c0, more...});
}
inline void tma_load_evict_first(uint32_t shared, const void* map, uint32_t barrier, int c0, int c1,
                                 int c2, int c3) {
  load_box(shared, map, barrier, {c0, c1, c2, c3});
}
inline void tma_load_multicast(uint32_t ctas, uint32_t shared, const void* map, uint32_t barrier,
                               int c0, int c1, int c2, int c3) {
  for (uint32_t rank = 0; ctas >> rank; ++rank) {
    const uint32_t there = (rank + 1) << 24;
    if (ctas >> rank & 1) load_box(shared | there, map, barrier | there, {c0, c1, c2, c3});
  }
}

inline void store_box(uint32_t shared, const void* map, const int (&at)[5]) {
  const int c0 = at[0], c1 = at[1], c2 = at[2], c3 = at[3], c4 = at[4];
  emulator::copy_reads(shared, box_bytes(map));
  emulator::later([=] { emulator::copy_box(map, {c0, c1, c2, c3, c4}, shared, false); }, true);
}
inline void tma_store(uint32_t shared, const void* map, int c0, int c1, int c2, int c3, int c4) {
  store_box(shared, map, {c0, c1, c2, c3, c4});
}
inline void tma_store(uint32_t shared, const void* map, int c0, int c1, int c2, int c3) {
  store_box(shared, map, {c0, c1, c2, c3});
}
inline void tma_store_evict_first(uint32_t shared, const void* map, int c0, int c1, int c2,
                                  int c3) {
  store_box(shared, map, {c0, c1, c2, c3});
}

inline void cp_async_bulk_load(uint32_t shared, const void* global, int bytes, uint32_t barrier) {
  emulator::copy_writes(shared, bytes, barrier);
  emulator::later(
      [=] {
        std::memcpy(emulator::shared(shared, bytes), global, bytes);
        emulator::complete(barrier, bytes);
      },
      false);
}
inline void cp_async_bulk_store_evict_last(float* global, uint32_t shared, int bytes) {
  emulator::copy_reads(shared, bytes);
  emulator::later([=] { std::memcpy(global, emulator::shared(shared, bytes), bytes); }, true);
}
inline void cp_reduce_async_bulk_add_f32(float* global, uint32_t shared, int bytes) {
  emulator::copy_reads(shared, bytes);
  emulator::later(
      [=] {
        const float* const from = reinterpret_cast<float*>(emulator::shared(shared, bytes));
        const std::lock_guard lock(emulator::global_sums);
        for (int i = 0; i < bytes / 4; ++i) global[i] += from[i];
      },
      true);
}
inline void cp_async_bulk_commit_group() { emulator::commit_copies(); }
inline void cp_async_bulk_wait_group_read() { emulator::wait_for_copies(); }
inline void cp_async_bulk_wait_group() { emulator::wait_for_copies(); }

inline void fence_proxy_async_shared() { emulator::fence(); }
inline void fence_proxy_async() { emulator::fence(); }
inline void tma_prefetch(const void*, int, int, int, int) {}
inline void prefetch_tensormap(const void*) {}

}  // namespace flashmoe::cuda::ptx
