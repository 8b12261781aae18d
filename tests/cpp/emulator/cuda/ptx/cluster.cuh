// The emulator's: see machine.h.
#pragma once

namespace flashmoe::cuda::ptx {

inline int cluster_ctarank() { return emulator::cluster_rank(); }
inline void barrier_cluster_arrive_relaxed() { emulator::cluster_arrive(true); }
inline void barrier_cluster_wait() { emulator::cluster_wait(); }
inline void barrier_cluster_sync() {
  emulator::cluster_arrive();
  emulator::cluster_wait();
}
inline uint32_t mapa(uint32_t shared, int rank) { return (shared & 0xffffff) | (rank + 1) << 24; }
inline void st_shared_cluster_u32(uint32_t there, uint32_t x) {
  std::memcpy(emulator::shared(there, 4), &x, 4);
}
inline void st_async_v4(uint32_t there, const uint4& x, uint32_t barrier_there) {
  emulator::copy_writes(there, 16, barrier_there);
  emulator::later(
      [=] {
        std::memcpy(emulator::shared(there, 16), &x, 16);
        emulator::complete(barrier_there, 16);
      },
      false);
}
inline void mbarrier_arrive_release_cluster(uint32_t there) { emulator::arrive(there); }
inline void mbarrier_arrive_cluster(uint32_t there) { emulator::arrive(there); }
inline void mbarrier_wait_cluster(uint32_t barrier, int parity) { emulator::wait(barrier, parity); }
inline void cp_async_bulk_cluster(uint32_t there, uint32_t shared, int bytes,
                                  uint32_t barrier_there) {
  emulator::copy_reads(shared, bytes, barrier_there);
  emulator::copy_writes(there, bytes, barrier_there);
  emulator::later(
      [=] {
        std::memcpy(emulator::shared(there, bytes), emulator::shared(shared, bytes), bytes);
        emulator::complete(barrier_there, bytes);
      },
      false);
}

}  // namespace flashmoe::cuda::ptx
