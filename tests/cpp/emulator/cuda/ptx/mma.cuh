// The emulator's: see machine.h.
#pragma once

#include "cuda/ptx/math.cuh"

namespace emulator {

inline constexpr char kWarpMma = 0;
// What a lane has of an MMA of 16 rows, 8 columns and kDepth steps.
template <bool kBf16, int kDepth>
struct WarpMma {
  float* d;
  const float* c;
  uint32_t a[4], b[2];

  static float number(uint32_t two, int i) {
    const auto x = static_cast<uint16_t>(two >> (i % 2 * 16));
    return kBf16 ? flashmoe::cuda::ptx::cvt_f32_bf16(x) : flashmoe::cuda::ptx::cvt_f32_f16(x);
  }
  static void all(Lanes& lanes) {
    const auto of = [&](int row, int pair) -> WarpMma& {
      return *static_cast<WarpMma*>(lanes[row % 8 * 4 + pair % 8 / 2]);
    };
    float sums[16][8];
    for (int row = 0; row < 16; ++row) {
      for (int column = 0; column < 8; ++column) {
        float sum = of(row, column).c[row / 8 * 2 + column % 2];
        for (int k = 0; k < kDepth; ++k) {
          sum += number(of(row, k).a[row / 8 + k / 8 * 2], k) * number(of(column, k).b[k / 8], k);
        }
        sums[row][column] = sum;
      }
    }
    for (int row = 0; row < 16; ++row) {
      for (int column = 0; column < 8; ++column) {
        of(row, column).d[row / 8 * 2 + column % 2] = sums[row][column];
      }
    }
  }
  void together() { collective(&kWarpMma, this, all); }
};

}  // namespace emulator

namespace flashmoe::cuda::ptx {

inline void mma_m16n8k16_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                             const float (&c)[4]) {
  emulator::WarpMma<false, 16>{d, c, {a[0], a[1], a[2], a[3]}, {b0, b1}}.together();
}
inline void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                              const float (&c)[4]) {
  emulator::WarpMma<true, 16>{d, c, {a[0], a[1], a[2], a[3]}, {b0, b1}}.together();
}
inline void mma_m16n8k8_f16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b,
                            const float (&c)[4]) {
  emulator::WarpMma<false, 8>{d, c, {a0, a1}, {b}}.together();
}

}  // namespace flashmoe::cuda::ptx
