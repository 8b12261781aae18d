// The emulator's: see machine.h.
#pragma once

#include "cuda/ptx/math.cuh"

namespace emulator {

inline constexpr char kTf32Mma = 0;
struct Tf32Mma {
  float* d;
  const float* c;
  uint32_t a[4], b[2];

  static float number(uint32_t x) { return __uint_as_float(x & ~0x1fffu); }
  static void all(Lanes& lanes) {
    const auto at = [&](int row, int column) -> Tf32Mma& {
      return *static_cast<Tf32Mma*>(lanes[row % 8 * 4 + column]);
    };
    float sums[16][8];
    for (int row = 0; row < 16; ++row) {
      for (int column = 0; column < 8; ++column) {
        float sum = at(row, column / 2).c[row / 8 * 2 + column % 2];
        for (int k = 0; k < 8; ++k) {
          sum += number(at(row, k % 4).a[row / 8 + k / 4 * 2]) * number(at(column, k % 4).b[k / 4]);
        }
        sums[row][column] = sum;
      }
    }
    for (int row = 0; row < 16; ++row) {
      for (int column = 0; column < 8; ++column) {
        at(row, column / 2).d[row / 8 * 2 + column % 2] = sums[row][column];
      }
    }
  }
};

}  // namespace emulator

namespace flashmoe::cuda::ptx {

// Ties away from 0.
inline uint32_t cvt_rna_tf32(float x) {
  return std::isfinite(x) ? (__float_as_uint(x) + 0x1000) & ~0x1fffu : __float_as_uint(x);
}
inline void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                             const float (&c)[4]) {
  emulator::Tf32Mma mma{d, c, {a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
  emulator::collective(&emulator::kTf32Mma, &mma, emulator::Tf32Mma::all);
}

}  // namespace flashmoe::cuda::ptx
