// The emulator's: see machine.h.
#pragma once

namespace flashmoe::cuda::ptx {

inline uint32_t movmatrix_trans(uint32_t x) {
  const int lane = emulator::lane();
  uint32_t y = 0;
  for (int i = 0; i < 2; ++i) {
    // The number in row lane / 4 and column lane % 4 * 2 + i is that of this column and row.
    const uint32_t two = emulator::exchange(x, (lane % 4 * 2 + i) * 4 + lane / 8);
    y |= (lane / 4 % 2 ? two >> 16 : two & 0xffff) << 16 * i;
  }
  return y;
}

}  // namespace flashmoe::cuda::ptx
