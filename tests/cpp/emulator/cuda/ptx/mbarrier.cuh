// The emulator's: see machine.h.
#pragma once

namespace flashmoe::cuda::ptx {

inline void mbarrier_init(uint32_t barrier, int count) { emulator::init(barrier, count); }
inline void fence_mbarrier_init() { emulator::fence_barriers(); }
inline void mbarrier_arrive(uint32_t barrier) { emulator::arrive(barrier); }
inline void mbarrier_arrive_expect_tx(uint32_t barrier, int bytes) {
  emulator::arrive(barrier, bytes);
}
inline void mbarrier_wait(uint32_t barrier, int parity) { emulator::wait(barrier, parity); }
inline void bar_sync(int name, int threads) { emulator::barrier(name, threads, false); }
inline void bar_arrive(int name, int threads) { emulator::barrier(name, threads, false, false); }
inline bool bar_red_or(int name, int threads, bool mine) {
  return emulator::barrier(name, threads, mine);
}

}  // namespace flashmoe::cuda::ptx
