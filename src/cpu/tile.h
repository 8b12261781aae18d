// What kernels of all operators do to tiles besides multiplying them: scratch memory, rows of any
// dtype and stride into it and back, transposes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/matrix.h"
#include "cpu/simd.h"

namespace flashmoe::cpu {
namespace {

constexpr int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// Of a product, whose operands need not be packed alike.
enum class Side { kLeft, kRight };

// Hands out pieces of a work item's scratch, 64-byte aligned. With no memory behind it, it counts.
class Arena {
 public:
  explicit Arena(void* memory) : memory_(static_cast<char*>(memory)) {}
  template <class T>
  T* take(int64_t count) {
    char* piece = memory_ + used_;
    used_ += round_up(count * static_cast<int64_t>(sizeof(T)), 64);
    return reinterpret_cast<T*>(piece);
  }
  size_t used() const { return static_cast<size_t>(used_); }

 private:
  char* memory_;
  int64_t used_ = 0;
};

inline char* element(const Matrix& m, int64_t row, int64_t col) {
  return m.data + (row * m.row + col * m.col) * dtype_bytes(m.dtype);
}

// The transpose, where it lies.
inline Matrix flipped(const Matrix& m) { return {m.data, m.dtype, m.col, m.row}; }

// The matrix from that element on.
inline Matrix part(const Matrix& m, int64_t row, int64_t col) {
  return {element(m, row, col), m.dtype, m.row, m.col};
}

// n elements of any float dtype, `stride` apart, to accumulators.
template <class A>
void load_row(DType dtype, const void* source, int64_t stride, int64_t n, A* to) {
  int64_t i = 0;
  const auto* half = static_cast<const uint16_t*>(source);
  switch (dtype) {
    case DType::kBFloat16:
      if constexpr (sizeof(A) == sizeof(float)) {
        if (stride == 1) {
          for (; i + kLanes<A> <= n; i += kLanes<A>) store(to + i, widen_bf16(half + i));
        }
      }
      for (; i < n; ++i) to[i] = from_bf16(half[i * stride]);
      return;
    case DType::kFloat16:
      if constexpr (sizeof(A) == sizeof(float)) {
        if (stride == 1) {
          for (; i + kLanes<A> <= n; i += kLanes<A>) store(to + i, widen_fp16(half + i));
        }
      }
      for (; i < n; ++i) to[i] = from_fp16(half[i * stride]);
      return;
    case DType::kFloat8E4M3: {
      const auto* byte = static_cast<const uint8_t*>(source);
      if constexpr (sizeof(A) == sizeof(float)) {
        for (; stride == 1 && i + 2 * kLanes<A> <= n; i += 2 * kLanes<A>) {
          Vec<A> low, high;
          widen_e4m3(byte + i, &low, &high);
          store(to + i, low);
          store(to + i + kLanes<A>, high);
        }
      }
      for (; i < n; ++i) to[i] = from_e4m3(byte[i * stride]);
      return;
    }
    case DType::kFloat64:
      for (; i < n; ++i) to[i] = static_cast<A>(static_cast<const double*>(source)[i * stride]);
      return;
    default:
      for (; i < n; ++i) to[i] = static_cast<A>(static_cast<const float*>(source)[i * stride]);
      return;
  }
}

template <class A>
void store_row(DType dtype, void* target, int64_t stride, int64_t n, const A* from) {
  int64_t i = 0;
  auto* half = static_cast<uint16_t*>(target);
  switch (dtype) {
    case DType::kBFloat16:
      if constexpr (sizeof(A) == sizeof(float)) {
        if (stride == 1) {
          for (; i + kLanes<A> <= n; i += kLanes<A>) narrow_bf16(half + i, load<Vec<A>>(from + i));
        }
      }
      for (; i < n; ++i) half[i * stride] = to_bf16(static_cast<float>(from[i]));
      return;
    case DType::kFloat16:
      if constexpr (sizeof(A) == sizeof(float)) {
        if (stride == 1) {
          for (; i + kLanes<A> <= n; i += kLanes<A>) narrow_fp16(half + i, load<Vec<A>>(from + i));
        }
      }
      for (; i < n; ++i) half[i * stride] = to_fp16(static_cast<float>(from[i]));
      return;
    case DType::kFloat8E4M3: {
      auto* byte = static_cast<uint8_t*>(target);
      if constexpr (sizeof(A) == sizeof(float)) {
        if (stride == 1) {
          for (; i + kLanes<A> <= n; i += kLanes<A>) narrow_e4m3(byte + i, load<Vec<A>>(from + i));
        }
      }
      for (; i < n; ++i) byte[i * stride] = to_e4m3(from[i]);
      return;
    }
    case DType::kFloat64:
      for (; i < n; ++i) static_cast<double*>(target)[i * stride] = from[i];
      return;
    default:
      for (; i < n; ++i) static_cast<float*>(target)[i * stride] = static_cast<float>(from[i]);
      return;
  }
}

template <class A>
constexpr DType kDTypeOf = sizeof(A) == sizeof(double) ? DType::kFloat64 : DType::kFloat32;

// A row-major matrix in scratch.
template <class A>
inline Matrix matrix_of(A* data, int64_t ld) {
  return {reinterpret_cast<char*>(data), kDTypeOf<A>, ld, 1};
}

// Rows of a tensor as accumulators, padded to whole vectors with zeros.
template <class A>
struct Block {
  const A* data;
  int64_t ld;
};

// Used where it lies if it can be; otherwise brought to `scratch`, which holds rows x
// round_up(cols).
template <class A>
Block<A> load_block(const Matrix& m, int64_t first, int64_t rows, int64_t cols, A* scratch) {
  if (m.dtype == kDTypeOf<A> && m.col == 1 && cols % kLanes<A> == 0) {
    return {reinterpret_cast<const A*>(element(m, first, 0)), m.row};
  }
  const int64_t ld = round_up(cols, kLanes<A>);
  for (int64_t i = 0; i < rows; ++i) {
    A* to = scratch + i * ld;
    load_row(m.dtype, element(m, first + i, 0), m.col, cols, to);
    for (int64_t j = cols; j < ld; ++j) to[j] = 0;
  }
  return {scratch, ld};
}

// The same without the padding.
template <class A>
Block<A> load_lines(const Matrix& m, int64_t rows, int64_t cols, A* scratch) {
  if (m.dtype == kDTypeOf<A> && m.col == 1) return {reinterpret_cast<const A*>(m.data), m.row};
  for (int64_t i = 0; i < rows; ++i) {
    load_row(m.dtype, element(m, i, 0), m.col, cols, scratch + i * cols);
  }
  return {scratch, cols};
}

// to (cols x ld) = from^T (rows x cols), zeros in the columns past `rows`: square by square, so
// that each line of the target is filled while it is at hand.
template <class A>
void transpose(const A* from, int64_t from_ld, int64_t rows, int64_t cols, A* to, int64_t ld) {
  constexpr int64_t n = kLanes<A>;
  for (int64_t j = 0; j < cols; j += n) {
    for (int64_t i = 0; i < rows; i += n) {
      if (i + n <= rows && j + n <= cols) {
        Vec<A> square[n];
        for (int64_t k = 0; k < n; ++k) square[k] = load<Vec<A>>(from + (i + k) * from_ld + j);
        transpose<A>(square);
        for (int64_t k = 0; k < n; ++k) store(to + (j + k) * ld + i, square[k]);
        continue;
      }
      for (int64_t l = j; l < smaller(j + n, cols); ++l) {
        for (int64_t k = i; k < smaller(i + n, rows); ++k) to[l * ld + k] = from[k * from_ld + l];
      }
    }
  }
  for (int64_t j = 0; j < cols; ++j) {
    for (int64_t i = rows; i < ld; ++i) to[j * ld + i] = 0;
  }
}

template <class A>
bool is_finite(A x) {
  return x * 0 == 0;
}

template <class A>
bool all_finite(const Block<A>& block, int64_t rows, int64_t cols) {
  Vec<A> sum = {};  // x * 0 is 0 for a finite x and NaN for any other
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; j += kLanes<A>) {
      sum += load<Vec<A>>(block.data + i * block.ld + j) * A(0);
    }
  }
  for (int i = 0; i < kLanes<A>; ++i) {
    if (sum[i] != 0) return false;
  }
  return true;
}

}  // namespace
}  // namespace flashmoe::cpu
