// The emulator's: see machine.h. Each warp computes its 16 rows, at some time between issuing an
// MMA and waiting for it.
#pragma once

#include <array>

#include "cuda/ptx/math.cuh"

namespace emulator {

inline constexpr char kMma = 0, kMmaGroup = 0;

// A matrix in shared memory, as a descriptor has it: `depth` is along its rows, or across them.
struct Operand {
  uint64_t descriptor;
  bool across;

  uint32_t address(int i, int depth) const {
    const uint32_t start = (descriptor & 0x3fff) * 16, block = (descriptor >> 16 & 0x3fff) * 16;
    const uint32_t eight = (descriptor >> 32 & 0x3fff) * 16;
    const int row_bytes = descriptor >> 62 == 1 ? 128 : 64;
    const int row = across ? depth : i, column = across ? i : depth;
    const uint32_t plain = start + row / 8 * eight + row % 8 * row_bytes +
                           column * 2 / row_bytes * block + column * 2 % row_bytes;
    return plain ^ (plain >> 7 & (row_bytes / 16 - 1)) << 4;
  }
  uint16_t at(int i, int depth) const {
    uint16_t x;
    std::memcpy(&x, shared(address(i, depth), 2), 2);
    return x;
  }
  // `count` rows from `first` on are read, 16 bytes at a time: what is wrong with them.
  std::string note_read(int first, int count) const {
    std::string wrong;
    for (int i = 0; i < count; i += across ? 8 : 1) {
      for (int depth = 0; depth < 16 && wrong.empty(); depth += across ? 1 : 8) {
        wrong = mma_reads(address(first + i, depth), 16);
      }
    }
    return wrong;
  }
};

// What a lane has of an MMA of kN columns.
template <bool kBf16, int kN>
struct Mma {
  float* sums;
  bool adds;
  const uint32_t* a_registers;  // or null
  Operand a, b;

  static float number(uint16_t x) {
    return kBf16 ? flashmoe::cuda::ptx::cvt_f32_bf16(x) : flashmoe::cuda::ptx::cvt_f32_f16(x);
  }
  static void all(Lanes& lanes) {
    std::array<Mma, 32> each;
    for (int i = 0; i < 32; ++i) each[i] = *static_cast<Mma*>(lanes[i]);
    const int first_row = static_cast<int>(threadIdx.x / 32 % 4 * 16);
    const Mma& one = each[0];
    std::string wrong = one.a_registers ? std::string() : one.a.note_read(first_row, 16);
    if (wrong.empty()) wrong = one.b.note_read(0, kN);
    for (int i = 0; i < 32; ++i) {
      mma_registers(i, each[i].a_registers, each[i].sums, kN / 2, one.adds, wrong);
    }
    begin_mma([=] { multiply(each, first_row); });
  }
  static void multiply(const std::array<Mma, 32>& lanes, int first_row) {
    const Mma& first = lanes[0];
    float a[16][16], b[16][kN];
    for (int row = 0; row < 16; ++row) {
      for (int k = 0; k < 16; ++k) {
        uint16_t x;
        if (first.a_registers) {
          const Mma& owner = lanes[row % 8 * 4 + k % 8 / 2];
          x = static_cast<uint16_t>(owner.a_registers[row / 8 + k / 8 * 2] >> (k % 2 * 16));
        } else {
          x = first.a.at(first_row + row, k);
        }
        a[row][k] = number(x);
      }
    }
    for (int k = 0; k < 16; ++k) {
      for (int n = 0; n < kN; ++n) b[k][n] = number(first.b.at(n, k));
    }
    for (int row = 0; row < 16; ++row) {
      float sums[kN] = {};
      for (int k = 0; k < 16; ++k) {
        for (int n = 0; n < kN; ++n) sums[n] += a[row][k] * b[k][n];
      }
      for (int n = 0; n < kN; ++n) {
        const Mma& lane = lanes[row % 8 * 4 + n % 8 / 2];
        float& sum = lane.sums[n / 8 * 4 + row / 8 * 2 + n % 2];
        sum = lane.adds ? sum + sums[n] : sums[n];
      }
    }
  }
};

}  // namespace emulator

namespace flashmoe::cuda::ptx {

inline void wgmma_fence() { emulator::mma_fence(); }
inline void wgmma_commit_group() {
  char lane;
  emulator::collective(&emulator::kMmaGroup, &lane,
                       [](emulator::Lanes&) { emulator::commit_mmas(); });
}
template <int kPending>
void wgmma_wait_group() {
  emulator::wait_for_mmas(kPending);
}
template <int kPending, int kCount>
void wgmma_wait_group(float (&)[kCount]) {
  wgmma_wait_group<kPending>();
}
template <int kSteps>
void wgmma_keep_alive(const uint32_t (&)[kSteps][4]) {}
template <int kCount>
void wgmma_wait_all_after(bool, float (&)[kCount]) {
  wgmma_wait_group<0>();
}
template <int kRegisters>
void setmaxnreg_inc() {}
template <int kRegisters>
void setmaxnreg_dec() {}

template <bool kBf16, int kN>
struct Wgmma {
  using Sums = float[kN / 2];

  static void ss(Sums& sums, uint64_t a, uint64_t b, bool add) {
    of(sums, a, b, add, false, false);
  }
  static void ss_first(Sums& sums, uint64_t a, uint64_t b) { of(sums, a, b, false, false, false); }
  static void ss_tb(Sums& sums, uint64_t a, uint64_t b) { of(sums, a, b, true, false, true); }
  static void ss_tb_first(Sums& sums, uint64_t a, uint64_t b) {
    of(sums, a, b, false, false, true);
  }
  static void ss_ta(Sums& sums, uint64_t a, uint64_t b) { of(sums, a, b, true, true, false); }
  static void ss_ta_first(Sums& sums, uint64_t a, uint64_t b) {
    of(sums, a, b, false, true, false);
  }
  static void ss_tatb(Sums& sums, uint64_t a, uint64_t b) { of(sums, a, b, true, true, true); }
  static void rs(Sums& sums, const uint32_t (&a)[4], uint64_t b) { of(sums, a, b, false); }
  static void rs_tb(Sums& sums, const uint32_t (&a)[4], uint64_t b) { of(sums, a, b, true); }

 private:
  using Mma = emulator::Mma<kBf16, kN>;
  static void together(Mma mma) { emulator::collective(&emulator::kMma, &mma, Mma::all); }
  static void of(Sums& sums, uint64_t a, uint64_t b, bool add, bool ta, bool tb) {
    together({sums, add, nullptr, {a, ta}, {b, tb}});
  }
  static void of(Sums& sums, const uint32_t (&a)[4], uint64_t b, bool tb) {
    together({sums, true, a, {}, {b, tb}});
  }
};

}  // namespace flashmoe::cuda::ptx
