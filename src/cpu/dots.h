// C = A B^T for few rows of B: both are read along the depth, so that B needs no columns for whole
// vectors. One query over many keys is such a product.
#pragma once

#include <cstdint>
#include <utility>

#include "cpu/simd.h"

namespace flashmoe::cpu {
namespace {

// Sums of kDotRows x kDotCols vectors stay in registers over the whole depth.
constexpr int kDotCols = 4;
#if defined(__ARM_NEON) || defined(__AVX512F__)
constexpr int kDotRows = 4;
#else
constexpr int kDotRows = 2;
#endif

template <int kBy, class V, size_t... kLane>
inline V turned(V v, std::index_sequence<kLane...>) {
  return __builtin_shufflevector(v, v, ((kLane + kBy) % sizeof...(kLane))...);
}
// The sum of all lanes, half and half.
template <class A, int kHalf = kLanes<A> / 2>
inline A lane_sum(Vec<A> v) {
  if constexpr (kHalf == 0) {
    return v[0];
  } else {
    return lane_sum<A, kHalf / 2>(v + turned<kHalf>(v, std::make_index_sequence<kLanes<A>>()));
  }
}

template <int kRows, int kCols, class A>
void dot_tile(const A* a, int64_t lda, const A* b, int64_t ldb, int64_t depth, A* c, int64_t ldc) {
  Vec<A> acc[kRows][kCols] = {};
  for (int64_t k = 0; k < depth; k += kLanes<A>) {
    Vec<A> rb[kCols];
    for (int j = 0; j < kCols; ++j) rb[j] = load<Vec<A>>(b + j * ldb + k);
    for (int i = 0; i < kRows; ++i) {
      const Vec<A> ra = load<Vec<A>>(a + i * lda + k);
      for (int j = 0; j < kCols; ++j) acc[i][j] += ra * rb[j];
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kCols; ++j) c[i * ldc + j] = lane_sum<A>(acc[i][j]);
  }
}

template <int kCols, class A>
void dot_columns(int64_t rows, int64_t depth, const A* a, int64_t lda, const A* b, int64_t ldb,
                 A* c, int64_t ldc) {
  int64_t i = 0;
  for (; i + kDotRows <= rows; i += kDotRows) {
    dot_tile<kDotRows, kCols>(a + i * lda, lda, b, ldb, depth, c + i * ldc, ldc);
  }
  for (; i < rows; ++i) dot_tile<1, kCols>(a + i * lda, lda, b, ldb, depth, c + i * ldc, ldc);
}

// A has `rows` rows, B `cols`; both are padded with zeros to whole vectors.
template <class A>
void dots(int64_t rows, int64_t cols, int64_t depth, const A* a, int64_t lda, const A* b,
          int64_t ldb, A* c, int64_t ldc) {
  int64_t j = 0;
  for (; j + kDotCols <= cols; j += kDotCols) {
    dot_columns<kDotCols>(rows, depth, a, lda, b + j * ldb, ldb, c + j, ldc);
  }
  for (; j + 2 <= cols; j += 2) {
    dot_columns<2>(rows, depth, a, lda, b + j * ldb, ldb, c + j, ldc);
  }
  if (j < cols) dot_columns<1>(rows, depth, a, lda, b + j * ldb, ldb, c + j, ldc);
}

}  // namespace
}  // namespace flashmoe::cpu
