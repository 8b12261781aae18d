// The matrix products of all operators in two arithmetics. A pass brings its operands into the form
// that the arithmetic wants, under one set of names, and multiplies:
//
//   rows(x)         A = x                 a tensor's rows against the depth
//   transposed(x)   B = x^T               a tensor's rows become the columns of the result
//   narrow(x)       B = x^T               the same, where x may have but a few rows
//   plain(x)        B = x                 a tensor's rows lie along the depth
//   block(b)        B = b                 the same, from accumulators in scratch
//   tile(t)         A = t                 a tile of scores (keys x queries) in scratch
//   tile_cols(t)    A = t^T
//   left(m)         A = m                 a matrix of any strides: unit stride along the rows or
//   the right(m)        B = m                 columns is fast, whichever it is
//
//   multiply        C = A B, or C += A B, in the accumulator's type
#pragma once

#include "cpu/dots.h"
#include "cpu/product.h"
#include "cpu/product_amx.h"
#include "cpu/product_bfmmla.h"
#include "cpu/tile.h"

namespace flashmoe::cpu {
namespace {

// Whether a matrix is better read row by row than column by column.
inline bool by_rows(const Matrix& m) { return m.col == 1 || m.row != 1; }

// In the accumulator's own type: fp32 (for fp16 and bf16 too) or fp64.
template <class T>
struct ExactProducts {
  using A = T;
  // 80 x 80 keeps a tile of scores and the operands of a product in the second-level cache.
  static constexpr int64_t kBlock = 80, kKeyStep = kProductRows;
  static constexpr int64_t kPanel = kProductPanel<A>;
  static constexpr int64_t kStripUses = 48;  // columns, where a copy in strips is as fast as none
  struct Rows {
    const A* data;
    int64_t ld;
  };
  struct Cols {
    const A* data;
    int64_t ld;
  };
  using Right = Block<A>;
  struct Left {
    const A* data;
    int64_t ld;
    Order order;
  };
  using Element = A;                         // what left() and right() take without converting it
  static constexpr int64_t kFewColumns = 8;  // from there on whole vectors of columns are as fast
  struct Narrow {
    Right right;
    int64_t few = 0;  // rows of x, as they are; 0: columns of the result, as transposed() has them
  };

  // Scratch for an operand of this size, whichever way it lies.
  static int64_t operand_bytes(int64_t rows, int64_t cols) {
    return round_up(rows, kLanes<A>) * round_up(cols, kLanes<A>) * static_cast<int64_t>(sizeof(A));
  }
  static int64_t tile_bytes(int64_t, int64_t) { return 0; }  // tiles are multiplied where they are

  static Rows rows(const Matrix& m, int64_t first, int64_t rows, int64_t depth, void* scratch) {
    const Block<A> block = load_block(m, first, rows, depth, static_cast<A*>(scratch));
    return {block.data, block.ld};
  }
  static Right transposed(const Matrix& m, int64_t first, int64_t rows, int64_t depth,
                          void* scratch, A* line) {
    const Block<A> block = load_block(m, first, rows, depth, line);
    const int64_t ld = round_up(rows, kLanes<A>);
    transpose(block.data, block.ld, rows, depth, static_cast<A*>(scratch), ld);
    return {static_cast<A*>(scratch), ld};
  }
  // Always a copy.
  static Narrow narrow(const Matrix& m, int64_t first, int64_t rows, int64_t depth, void* scratch,
                       A* line) {
    if (rows > kFewColumns) return {transposed(m, first, rows, depth, scratch, line)};
    const int64_t ld = round_up(depth, kLanes<A>);
    auto* const copy = static_cast<A*>(scratch);
    for (int64_t i = 0; i < rows; ++i) {
      load_row(m.dtype, element(m, first + i, 0), m.col, depth, copy + i * ld);
      for (int64_t k = depth; k < ld; ++k) copy[i * ld + k] = 0;
    }
    return {{copy, ld}, rows};
  }
  static Right plain(const Matrix& m, int64_t first, int64_t depth, int64_t cols, void* scratch) {
    return load_block(m, first, depth, cols, static_cast<A*>(scratch));
  }
  static Right block(const Block<A>& block, int64_t, int64_t, void*) { return block; }
  static Rows tile(const A* tile, int64_t ld, int64_t, int64_t, void*) { return {tile, ld}; }
  static Cols tile_cols(const A* tile, int64_t ld, int64_t, int64_t, void*) { return {tile, ld}; }

  // Whole strips, and rows that had to be converted on their way there.
  static int64_t left_bytes(int64_t rows, int64_t depth) {
    return 2 * round_up(rows, kLanes<A>) * depth * static_cast<int64_t>(sizeof(A));
  }
  // Whole panels, and rows on their way into one.
  static int64_t right_bytes(int64_t depth, int64_t cols) {
    return (round_up(cols, kPanel) + kPanel) * depth * static_cast<int64_t>(sizeof(A));
  }
  // `uses` is the number of columns on the right: a copy in strips pays when there are many.
  static Left left(const Matrix& m, int64_t rows, int64_t depth, [[maybe_unused]] int64_t uses,
                   void* scratch) {
    auto* const lines = static_cast<A*>(scratch);
    const bool as_rows = by_rows(m);
    const Block<A> block =
        as_rows ? load_lines(m, rows, depth, lines) : load_lines(flipped(m), depth, rows, lines);
#if defined(__ARM_NEON)
    if (uses >= kStripUses) {
      A* const strips = lines + rows * depth;
      for (int64_t i = 0; i < rows; i += kStripRows) {
        A* const to = strips + i * depth;
        const int64_t count = smaller(kStripRows, rows - i);
        if (as_rows) {
          transpose(block.data + i * block.ld, block.ld, count, depth, to, kStripRows);
          continue;
        }
        for (int64_t k = 0; k < depth; ++k) {
          const A* const from = block.data + k * block.ld + i;
          for (int64_t j = 0; j < kStripRows; ++j) to[k * kStripRows + j] = j < count ? from[j] : 0;
        }
      }
      return {strips, kStripRows * depth, Order::kStrips};
    }
#endif
    return {block.data, block.ld, as_rows ? Order::kRowMajor : Order::kColMajor};
  }
  // `uses` is the number of rows on the left: a copy in panels pays when there are many.
  static Panels<A> right(const Matrix& m, int64_t depth, int64_t cols, int64_t uses,
                         void* scratch) {
    const bool as_it_lies = m.dtype == kDTypeOf<A> && m.col == 1;
    if (as_it_lies && uses <= 2 * kProductRows && cols % kLanes<A> == 0) {
      return {reinterpret_cast<const A*>(m.data), m.row};
    }
    auto* const panels = static_cast<A*>(scratch);
    A* const lines = panels + round_up(cols, kPanel) * depth;
    for (int64_t j = 0; j < cols; j += kPanel) {
      A* const panel = panels + j * depth;
      const int64_t width = smaller(kPanel, cols - j), padded = round_up(width, kLanes<A>);
      if (!by_rows(m)) {
        const Block<A> block = load_lines(part(flipped(m), j, 0), width, depth, lines);
        transpose(block.data, block.ld, width, depth, panel, kPanel);
        continue;
      }
      if (as_it_lies && width == kPanel) {
        for (int64_t k = 0; k < depth; ++k) {
          const auto* const from = reinterpret_cast<const A*>(element(m, k, j));
          for (int64_t i = 0; i < kPanel; i += kLanes<A>) {
            store(panel + k * kPanel + i, load<Vec<A>>(from + i));
          }
        }
        continue;
      }
      for (int64_t k = 0; k < depth; ++k) {
        load_row(m.dtype, element(m, k, j), m.col, width, panel + k * kPanel);
        for (int64_t i = width; i < padded; ++i) panel[k * kPanel + i] = 0;
      }
    }
    return {panels, kPanel, kPanel * depth};
  }

  // A panel of B as deep as kDepth stays in the first-level cache while A passes by.
  static void multiply(const Left& a, const Panels<A>& b, int64_t rows, int64_t cols, int64_t depth,
                       A* c, int64_t ldc, bool accumulate) {
    constexpr int64_t kDepth = 256;
    auto run = product<Order::kRowMajor, A>;
    int64_t deeper = 1;  // to the next element of a row
    if (a.order == Order::kColMajor) {
      run = product<Order::kColMajor, A>;
      deeper = a.ld;
    }
#if defined(__ARM_NEON)
    if (a.order == Order::kStrips) {
      run = product<Order::kStrips, A>;
      deeper = kStripRows;
    }
#endif
    int64_t k = 0;
    do {
      run(rows, cols, smaller(kDepth, depth - k), a.data + k * deeper, a.ld,
          Panels<A>{b.data + k * b.ld, b.ld, b.step}, c, ldc, accumulate || k > 0);
      k += kDepth;
    } while (k < depth);
  }
  // Columns past the few are zeros.
  static void multiply(const Rows& a, const Narrow& b, int64_t rows, int64_t cols, int64_t depth,
                       A* c, int64_t ldc) {
    if (b.few == 0) return multiply(a, b.right, rows, cols, depth, c, ldc, false);
    dots(rows, b.few, depth, a.data, a.ld, b.right.data, b.right.ld, c, ldc);
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = b.few; j < cols; ++j) c[i * ldc + j] = 0;
    }
  }
  static void multiply(const Rows& a, const Right& b, int64_t rows, int64_t cols, int64_t depth,
                       A* c, int64_t ldc, bool accumulate) {
    product<Order::kRowMajor>(rows, cols, depth, a.data, a.ld, Panels<A>{b.data, b.ld}, c, ldc,
                              accumulate);
  }
  static void multiply(const Cols& a, const Right& b, int64_t rows, int64_t cols, int64_t depth,
                       A* c, int64_t ldc, bool accumulate) {
    product<Order::kColMajor>(rows, cols, depth, a.data, a.ld, Panels<A>{b.data, b.ld}, c, ldc,
                              accumulate);
  }
};

#if defined(FLASHMOE_CPU_HAS_BF16_PRODUCT)
// bf16 operands, fp32 sums: for bf16 tensors, packed as the instruction set's product wants them.
// Probabilities and their gradients are rounded to bf16
// on their way into a product, as PyTorch's math does.
struct Bf16Products {
  using A = float;
  static constexpr int64_t kBlock = kBf16Block, kKeyStep = kBf16KeyStep;
  using Packed = const uint16_t*;
  using Rows = Packed;
  using Right = Packed;
  using Narrow = Packed;
  using Element = uint16_t;

  static int64_t operand_bytes(int64_t rows, int64_t cols) {
    return packed_elems(rows, cols) * static_cast<int64_t>(sizeof(uint16_t));
  }
  static int64_t tile_bytes(int64_t rows, int64_t cols) { return operand_bytes(rows, cols); }

  static Packed rows(const Matrix& m, int64_t first, int64_t rows, int64_t depth, void* scratch) {
    pack_rows<Side::kLeft>(m, first, rows, depth, static_cast<uint16_t*>(scratch));
    return static_cast<Packed>(scratch);
  }
  static Packed transposed(const Matrix& m, int64_t first, int64_t rows, int64_t depth,
                           void* scratch, A*) {
    pack_rows<Side::kRight>(m, first, rows, depth, static_cast<uint16_t*>(scratch));
    return static_cast<Packed>(scratch);
  }
  static Packed narrow(const Matrix& m, int64_t first, int64_t rows, int64_t depth, void* scratch,
                       A* line) {
    return transposed(m, first, rows, depth, scratch, line);
  }
  static Packed plain(const Matrix& m, int64_t first, int64_t depth, int64_t cols, void* scratch) {
    pack_cols<Side::kRight>(m, first, depth, cols, static_cast<uint16_t*>(scratch));
    return static_cast<Packed>(scratch);
  }
  static Packed block(const Block<A>& block, int64_t depth, int64_t cols, void* scratch) {
    pack_cols<Side::kRight>(block.data, block.ld, depth, cols, static_cast<uint16_t*>(scratch));
    return static_cast<Packed>(scratch);
  }
  static Packed tile(const A* tile, int64_t ld, int64_t rows, int64_t depth, void* scratch) {
    pack_rows(tile, ld, rows, depth, static_cast<uint16_t*>(scratch));
    return static_cast<Packed>(scratch);
  }
  static Packed tile_cols(const A* tile, int64_t ld, int64_t depth, int64_t cols, void* scratch) {
    pack_cols<Side::kLeft>(tile, ld, depth, cols, static_cast<uint16_t*>(scratch));
    return static_cast<Packed>(scratch);
  }

  static int64_t left_bytes(int64_t rows, int64_t depth) { return operand_bytes(rows, depth); }
  static int64_t right_bytes(int64_t depth, int64_t cols) { return operand_bytes(cols, depth); }
  static Packed left(const Matrix& m, int64_t rows, int64_t depth, int64_t, void* scratch) {
    auto* const to = static_cast<uint16_t*>(scratch);
    if (by_rows(m)) {
      pack_rows<Side::kLeft>(m, 0, rows, depth, to);
    } else {
      pack_cols<Side::kLeft>(flipped(m), 0, depth, rows, to);
    }
    return to;
  }
  static Packed right(const Matrix& m, int64_t depth, int64_t cols, int64_t, void* scratch) {
    auto* const to = static_cast<uint16_t*>(scratch);
    if (by_rows(m)) {
      pack_cols<Side::kRight>(m, 0, depth, cols, to);
    } else {
      pack_rows<Side::kRight>(flipped(m), 0, cols, depth, to);
    }
    return to;
  }

  static void multiply(Packed a, Packed b, int64_t rows, int64_t cols, int64_t depth, A* c,
                       int64_t ldc, bool accumulate = false) {
    product_bf16(rows, cols, depth, a, b, c, ldc, accumulate);
  }
};
#else
using Bf16Products = ExactProducts<float>;
#endif

}  // namespace
}  // namespace flashmoe::cpu
