// C = A B or C += A B, for tiles that live in cache. The one inner loop of the CPU backend: every
// product of attention, forward and backward, is this one with its operands in one of two orders.
//
//            B: depth x cols, row-major, cols a multiple of the vector (padded)
//            ┌────────────┐
//   A: rows  │            │      A row-major (a[i * lda + k]) or column-major (a[k * lda + i]):
//   x depth  │            │      single elements of it are broadcast, so both orders run alike
//   ┌────┐   ├────────────┤
//   │    │   │ C          │      kRows x kVecs vectors of C stay in registers over the whole depth
//   └────┘   └────────────┘
//
// On Arm, A may also come packed in strips of kStripRows rows, those of one column side by side: a
// vector of them is multiplied lane by lane, which takes no instruction to broadcast them (77
// instead of 62 GFLOP/s on a Neoverse V1 core).
#pragma once

#include <cstdint>
#include <utility>

#include "cpu/simd.h"

namespace flashmoe::cpu {
namespace {

enum class Order { kRowMajor, kColMajor, kStrips };

// 20 accumulators, 4 vectors of B and 5 elements of A fit 32 registers; one row more and two of
// them spill (43 for 60 GFLOP/s on a Neoverse V1 core). With 16 registers, 10 + 2 + 1.
constexpr int kProductRows = 5;
#if defined(__ARM_NEON) || defined(__AVX512F__)
constexpr int kProductVecs = 4;
#else
constexpr int kProductVecs = 2;
#endif

template <Order kOrder, int kRows, int kVecs, class A>
void product_tile(const A* a, int64_t lda, const A* b, int64_t ldb, A* c, int64_t ldc,
                  int64_t depth, bool accumulate) {
  Vec<A> acc[kRows][kVecs] = {};
#pragma GCC unroll 4
  for (int64_t k = 0; k < depth; ++k) {
    Vec<A> rb[kVecs];
    for (int j = 0; j < kVecs; ++j) rb[j] = load<Vec<A>>(b + k * ldb + j * kLanes<A>);
    for (int i = 0; i < kRows; ++i) {
      const A ra = kOrder == Order::kRowMajor ? a[i * lda + k] : a[k * lda + i];
      for (int j = 0; j < kVecs; ++j) acc[i][j] += rb[j] * ra;
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kVecs; ++j) {
      A* at = c + i * ldc + j * kLanes<A>;
      store(at, accumulate ? load<Vec<A>>(at) + acc[i][j] : acc[i][j]);
    }
  }
}

#if defined(__ARM_NEON)
constexpr int kStripRows = 4;

template <int kRows, int kVecs, class A, int... kRow>
inline void add_products(Vec<A> (&acc)[kRows][kVecs], const Vec<A>* a, Vec<A> b, int j,
                         std::integer_sequence<int, kRow...>) {
  ((acc[kRow][j] = add_product<kRow % kLanes<A>>(acc[kRow][j], b, a[kRow / kLanes<A>])), ...);
}

// The rows of one column of A lie side by side, those of the next one `next` elements on.
template <int kRows, int kVecs, class A>
void lane_tile(const A* a, int64_t next, const A* b, int64_t ldb, A* c, int64_t ldc, int64_t depth,
               bool accumulate) {
  constexpr int kParts = kStripRows / kLanes<A>;
  Vec<A> acc[kRows][kVecs] = {};
  for (int64_t k = 0; k < depth; ++k) {
    Vec<A> ra[kParts];
#pragma GCC unroll 4
    for (int i = 0; i < kParts; ++i) ra[i] = load<Vec<A>>(a + k * next + i * kLanes<A>);
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; ++j) {
      add_products<kRows, kVecs, A>(acc, ra, load<Vec<A>>(b + k * ldb + j * kLanes<A>), j,
                                    std::make_integer_sequence<int, kRows>());
    }
  }
  // Unrolled before GCC decides what stays in registers: otherwise acc lives in memory.
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; ++j) {
      A* at = c + i * ldc + j * kLanes<A>;
      store(at, accumulate ? load<Vec<A>>(at) + acc[i][j] : acc[i][j]);
    }
  }
}
template <int kRows, int kVecs, class A>
void strip_tile(const A* a, int64_t, const A* b, int64_t ldb, A* c, int64_t ldc, int64_t depth,
                bool accumulate) {
  lane_tile<kRows, kVecs>(a, kStripRows, b, ldb, c, ldc, depth, accumulate);
}
#endif

template <class A>
using ProductTile = void (*)(const A*, int64_t, const A*, int64_t, A*, int64_t, int64_t, bool);

// Rows of a tile, and the tile functions for 1 .. so many rows.
template <Order kOrder>
constexpr int kRowsOf = kProductRows;
template <Order kOrder, int kVecs, class A>
constexpr ProductTile<A> kProductTiles[kProductRows] = {
    product_tile<kOrder, 1, kVecs, A>, product_tile<kOrder, 2, kVecs, A>,
    product_tile<kOrder, 3, kVecs, A>, product_tile<kOrder, 4, kVecs, A>,
    product_tile<kOrder, 5, kVecs, A>};
#if defined(__ARM_NEON)
template <>
constexpr int kRowsOf<Order::kStrips> = kStripRows;
template <>
constexpr int kRowsOf<Order::kColMajor> = kStripRows;
template <int kVecs, class A>
constexpr ProductTile<A> kProductTiles<Order::kColMajor, kVecs, A>[kStripRows] = {
    product_tile<Order::kColMajor, 1, kVecs, A>, product_tile<Order::kColMajor, 2, kVecs, A>,
    product_tile<Order::kColMajor, 3, kVecs, A>, lane_tile<kStripRows, kVecs, A>};
template <int kVecs, class A>
constexpr ProductTile<A> kProductTiles<Order::kStrips, kVecs, A>[kStripRows] = {
    strip_tile<1, kVecs, A>, strip_tile<2, kVecs, A>, strip_tile<3, kVecs, A>,
    strip_tile<4, kVecs, A>};
#endif

// One panel of kVecs vectors of B stays in the first-level cache while A passes by. The next row of
// A is lda elements on, 1, or for strips lda for each strip.
template <Order kOrder, int kVecs, class A>
void product_panel(int64_t rows, int64_t depth, const A* a, int64_t lda, const A* b, int64_t ldb,
                   A* c, int64_t ldc, bool accumulate) {
  constexpr int kRows = kRowsOf<kOrder>;
  const int64_t step = kOrder == Order::kRowMajor   ? kRows * lda
                       : kOrder == Order::kColMajor ? kRows
                                                    : lda;
  for (int64_t i = 0; i < rows; i += kRows, a += step) {
    const int64_t count = rows - i < kRows ? rows - i : kRows;
    kProductTiles<kOrder, kVecs, A>[count - 1](a, lda, b, ldb, c + i * ldc, ldc, depth, accumulate);
  }
}

// B in panels of kProductPanel columns, each `step` elements after the one before it and with rows
// `ld` apart: a row-major matrix, or one that was packed panel by panel.
template <class A>
constexpr int kProductPanel = kProductVecs* kLanes<A>;

template <class A>
struct Panels {
  const A* data;
  int64_t ld, step = kProductPanel<A>;
};

// A and C have `rows` rows; B and C have `cols` columns, a multiple of kLanes<A>.
template <Order kOrder, class A>
void product(int64_t rows, int64_t cols, int64_t depth, const A* a, int64_t lda, const Panels<A>& b,
             A* c, int64_t ldc, bool accumulate) {
  constexpr int kPanel = kProductPanel<A>;
  int64_t j = 0;
  const A* panel = b.data;
  for (; j + kPanel <= cols; j += kPanel, panel += b.step) {
    product_panel<kOrder, kProductVecs>(rows, depth, a, lda, panel, b.ld, c + j, ldc, accumulate);
  }
  if constexpr (kProductVecs > 2) {
    constexpr int kHalfPanel = 2 * kLanes<A>;
    if (j + kHalfPanel <= cols) {
      product_panel<kOrder, 2>(rows, depth, a, lda, panel, b.ld, c + j, ldc, accumulate);
      j += kHalfPanel;
      panel += kHalfPanel;
    }
  }
  if (j < cols) {
    product_panel<kOrder, 1>(rows, depth, a, lda, panel, b.ld, c + j, ldc, accumulate);
  }
}

}  // namespace
}  // namespace flashmoe::cpu
