// The emulator's: see machine.h.
#pragma once

namespace emulator {

inline constexpr char kMatrices = 0;
// `count` matrices of 8 x 8 elements of 16 bits, of which a lane has two of each.
struct Matrices {
  uint32_t address;
  uint32_t x[4];
  int count;
  bool transposed, stores;

  static void all(Lanes& lanes) {
    for (int lane = 0; lane < 32; ++lane) {
      auto& one = *static_cast<Matrices*>(lanes[lane]);
      for (int matrix = 0; matrix < one.count; ++matrix) {
        for (int i = 0; i < 2; ++i) {
          int row = lane / 4, column = lane % 4 * 2 + i;
          if (one.transposed) std::swap(row, column);
          const uint32_t at = static_cast<Matrices*>(lanes[8 * matrix + row])->address + 2 * column;
          char* const number = reinterpret_cast<char*>(&one.x[matrix]) + 2 * i;
          if (one.stores) {
            std::memcpy(shared(at, 2), number, 2);
          } else {
            std::memcpy(number, shared(at, 2), 2);
          }
        }
      }
    }
  }
  void together() { collective(&kMatrices, this, all); }
};

}  // namespace emulator

namespace flashmoe::cuda::ptx {

template <int kCount>
void load_matrices(uint32_t (&r)[kCount], uint32_t shared, bool transposed) {
  emulator::Matrices m{shared, {}, kCount, transposed, false};
  m.together();
  for (int i = 0; i < kCount; ++i) r[i] = m.x[i];
}
inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t shared) { load_matrices(r, shared, false); }
inline void ldmatrix_x2(uint32_t (&r)[2], uint32_t shared) { load_matrices(r, shared, false); }
inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t shared) { load_matrices(r, shared, true); }
inline void stmatrix_x4(uint32_t shared, const uint32_t (&x)[4]) {
  emulator::Matrices{shared, {x[0], x[1], x[2], x[3]}, 4, false, true}.together();
}
inline void stmatrix_x4_trans(uint32_t shared, const uint32_t (&x)[4]) {
  emulator::Matrices{shared, {x[0], x[1], x[2], x[3]}, 4, true, true}.together();
}

}  // namespace flashmoe::cuda::ptx
