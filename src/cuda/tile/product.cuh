// Products of tiles in shared memory with mma.sync, accumulated in a warp's registers.
//
// An operand is kept as it came and read along its rows or across them: ldmatrix gives the
// fragments either way. Four 8 x 8 matrices make a fragment of 16 x 16; which lane gives which
// address:
//   A from rows of the depth        lane_rows()
//   A from rows across the depth    lane_cols(), transposed
//   B from rows of the depth        lane_cols()
//   B from rows across the depth    lane_rows(), transposed
#pragma once

#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/special_registers.cuh"

namespace flashmoe::cuda {

// The address that this lane gives to ldmatrix: 16 rows first, or 8 rows of two chunks first.
template <class Layout>
__device__ __forceinline__ uint32_t lane_rows(uint32_t tile, int row, int chunk) {
  const int lane = ptx::opaque_thread() % 32;
  return tile + Layout::at(row + lane % 16, chunk + lane / 16);
}
template <class Layout>
__device__ __forceinline__ uint32_t lane_cols(uint32_t tile, int row, int chunk) {
  const int lane = ptx::opaque_thread() % 32;
  return tile + Layout::at(row + lane % 8 + lane / 16 * 8, chunk + lane / 8 % 2);
}

// Operands by how they lie: `Along` has the depth in its rows, `Across` one row for each of the
// depth. kStride is how many fragments of 16 lie between two of this warp.

template <class Layout, int kStride = 1>
struct AlongA {
  uint32_t lane;  // of lane_rows
  __device__ __forceinline__ void load(uint32_t (&a)[4], int m, int step) const {
    ptx::ldmatrix_x4(a, Layout::along(lane, 2 * step) + 16 * kStride * m * Layout::kRowBytes);
  }
};
template <class Layout, int kStride = 1>
struct AcrossA {
  uint32_t lane;  // of lane_cols
  __device__ __forceinline__ void load(uint32_t (&a)[4], int m, int step) const {
    ptx::ldmatrix_x4_trans(a, Layout::along(lane, 2 * kStride * m) + 16 * step * Layout::kRowBytes);
  }
};
template <class Layout>
struct AlongB {
  uint32_t lane;  // of lane_cols
  __device__ __forceinline__ void load(uint32_t (&b)[4], int pair, int step) const {
    ptx::ldmatrix_x4(b, Layout::along(lane, 2 * step) + 16 * pair * Layout::kRowBytes);
  }
  __device__ __forceinline__ void load_half(uint32_t (&b)[2], int pair, int step) const {
    ptx::ldmatrix_x2(b, Layout::along(lane, 2 * step) + 16 * pair * Layout::kRowBytes);
  }
};
template <class Layout, int kStride = 1>
struct AcrossB {
  uint32_t lane;  // of lane_rows
  __device__ __forceinline__ void load(uint32_t (&b)[4], int pair, int step) const {
    ptx::ldmatrix_x4_trans(b,
                           Layout::along(lane, 2 * kStride * pair) + 16 * step * Layout::kRowBytes);
  }
};

// Accumulators as the A operand of a next product: two n8 fragments are exactly its k16 step.
template <class T>
__device__ __forceinline__ void pack_operand(uint32_t (&a)[4], const float (&left)[4],
                                             const float (&right)[4]) {
  a[0] = T::pack(left[0], left[1]);
  a[1] = T::pack(left[2], left[3]);
  a[2] = T::pack(right[0], right[1]);
  a[3] = T::pack(right[2], right[3]);
}

// acc = start(m, n) + A B over kSteps times 16 of the depth, where start(m, n) is what fragment
// (m, n) begins with. An odd number of n8 fragments has half a fragment of B at its end.
template <class T, int kSteps, int kUnroll, int kM, int kN, class A, class B, class Start>
__device__ __forceinline__ void multiply_from(float (&acc)[kM][kN][4], const A& left,
                                              const B& right, const Start& start) {
#pragma unroll kUnroll
  for (int step = 0; step < kSteps; ++step) {
    const auto add = [&](int m, int n, const uint32_t(&a)[4], uint32_t b0, uint32_t b1) {
      if (step == 0) {
        T::mma(acc[m][n], a, b0, b1, start(m, n));
      } else {
        T::mma(acc[m][n], a, b0, b1, acc[m][n]);
      }
    };
    uint32_t a[kM][4];
#pragma unroll
    for (int m = 0; m < kM; ++m) left.load(a[m], m, step);
#pragma unroll
    for (int n = 0; n + 1 < kN; n += 2) {
      uint32_t b[4];
      right.load(b, n / 2, step);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        add(m, n, a[m], b[0], b[1]);
        add(m, n + 1, a[m], b[2], b[3]);
      }
    }
    if constexpr (kN % 2) {
      uint32_t b[2];
      right.load_half(b, kN / 2, step);
#pragma unroll
      for (int m = 0; m < kM; ++m) add(m, kN - 1, a[m], b[0], b[1]);
    }
  }
}
// acc += A B
template <class T, int kSteps, int kUnroll = kSteps, int kM, int kN, class A, class B>
__device__ __forceinline__ void multiply(float (&acc)[kM][kN][4], const A& left, const B& right) {
  multiply_from<T, kSteps, kUnroll>(acc, left, right,
                                    [&](int m, int n) -> const float(&)[4] { return acc[m][n]; });
}

template <int kM, int kN>
__device__ __forceinline__ void set_zero(float (&acc)[kM][kN][4]) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[m][n][i] = 0;
    }
  }
}

}  // namespace flashmoe::cuda
