// The emulator's: see machine.h.
#pragma once

namespace flashmoe::cuda::ptx {

// The first `bytes` of `of`, and zeros.
inline void copy_part(uint32_t shared, const void* global, int bytes, int of) {
  emulator::later(
      [=] {
        char* const to = emulator::shared(shared, of);
        std::memset(to, 0, of);
        std::memcpy(to, global, bytes);
      },
      true);
}
inline void cp_async_cg_16(uint32_t shared, const void* global, bool read) {
  copy_part(shared, global, read ? 16 : 0, 16);
}
inline void cp_async_cg_16_part(uint32_t shared, const void* global, int bytes) {
  copy_part(shared, global, bytes, 16);
}
inline void cp_async_ca_8(uint32_t shared, const void* global) { copy_part(shared, global, 8, 8); }
inline void cp_async_ca_8_part(uint32_t shared, const void* global, int bytes) {
  copy_part(shared, global, bytes, 8);
}
inline void cp_async_mbarrier_arrive_noinc(uint32_t barrier) {
  emulator::when_copied([=] { emulator::arrive(barrier); });
}
inline void cp_async_commit_group() { emulator::commit_copies(); }
template <int kPending>
void cp_async_wait_group() {
  emulator::wait_for_copies(kPending);
}

}  // namespace flashmoe::cuda::ptx
