// The matrix products of attention in two arithmetics. A pass brings its operands into the form
// that the arithmetic wants, under one set of names, and multiplies:
//
//   rows(x)         A = x                 a tensor's rows against the depth
//   transposed(x)   B = x^T               a tensor's rows become the columns of the result
//   plain(x)        B = x                 a tensor's rows lie along the depth
//   block(b)        B = b                 the same, from accumulators in scratch
//   tile(t)         A = t                 a tile of scores (keys x queries) in scratch
//   tile_cols(t)    A = t^T
//
//   multiply        C = A B, or C += A B, in the accumulator's type
#pragma once

#include "cpu/attention/tile.h"
#include "cpu/product.h"
#include "cpu/product_amx.h"
#include "cpu/product_bfmmla.h"

namespace flashmoe::cpu {
namespace {

// In the accumulator's own type: fp32 (for fp16 and bf16 too) or fp64.
template <class T>
struct ExactProducts {
  using A = T;
  // 80 x 80 keeps a tile of scores and the operands of a product in the second-level cache.
  static constexpr int64_t kBlock = 80, kKeyStep = kProductRows;
  struct Rows {
    const A* data;
    int64_t ld;
  };
  struct Cols {
    const A* data;
    int64_t ld;
  };
  using Right = Block<A>;

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
  static Right plain(const Matrix& m, int64_t first, int64_t depth, int64_t cols, void* scratch) {
    return load_block(m, first, depth, cols, static_cast<A*>(scratch));
  }
  static Right block(const Block<A>& block, int64_t, int64_t, void*) { return block; }
  static Rows tile(const A* tile, int64_t ld, int64_t, int64_t, void*) { return {tile, ld}; }
  static Cols tile_cols(const A* tile, int64_t ld, int64_t, int64_t, void*) { return {tile, ld}; }

  static void multiply(const Rows& a, const Right& b, int64_t rows, int64_t cols, int64_t depth,
                       A* c, int64_t ldc, bool accumulate) {
    product<Order::kRowMajor>(rows, cols, depth, a.data, a.ld, b.data, b.ld, c, ldc, accumulate);
  }
  static void multiply(const Cols& a, const Right& b, int64_t rows, int64_t cols, int64_t depth,
                       A* c, int64_t ldc, bool accumulate) {
    product<Order::kColMajor>(rows, cols, depth, a.data, a.ld, b.data, b.ld, c, ldc, accumulate);
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
  static Packed plain(const Matrix& m, int64_t first, int64_t depth, int64_t cols, void* scratch) {
    pack_cols(m, first, depth, cols, static_cast<uint16_t*>(scratch));
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

  static void multiply(Packed a, Packed b, int64_t rows, int64_t cols, int64_t depth, A* c,
                       int64_t ldc, bool accumulate) {
    product_bf16(rows, cols, depth, a, b, c, ldc, accumulate);
  }
};
#else
using Bf16Products = ExactProducts<float>;
#endif

// A tile of scores as the left side of a product: the numbers, and the probabilities that tell
// which of them are masked; element (i, k) of both at i * i_step + k * k_step.
template <class A>
struct TileView {
  const A* data;
  const A* probability;
  int64_t i_step, k_step;
};

// C = A B or C += A B, A being a tile of scores and B rows of a tensor, such that a NaN or infinity
// in B meets unmasked terms only: in an ordinary product a masked 0 times NaN would reach results
// that may not see it. All finite results have the bits they would have had with a 0 in its place.
template <class M, class Left, class A = typename M::A>
void multiply_contained(const Left& left, const TileView<A>& tile, const Matrix& b, int64_t first,
                        int64_t rows, int64_t cols, int64_t depth, A* c, int64_t ldc,
                        bool accumulate, A* line, void* scratch) {
  const int64_t ld = round_up(cols, kLanes<A>);
  for (int64_t k = 0; k < depth; ++k) {
    load_row(b.dtype, element(b, first + k, 0), b.col, cols, line + k * ld);
    for (int64_t j = 0; j < ld; ++j) {
      if (j >= cols || !is_finite(line[k * ld + j])) line[k * ld + j] = 0;
    }
  }
  M::multiply(left, M::block({line, ld}, depth, cols, scratch), rows, ld, depth, c, ldc,
              accumulate);
  for (int64_t k = 0; k < depth; ++k) {
    load_row(b.dtype, element(b, first + k, 0), b.col, cols, line);
    for (int64_t j = 0; j < cols; ++j) {
      if (is_finite(line[j])) continue;
      for (int64_t i = 0; i < rows; ++i) {
        const int64_t at = i * tile.i_step + k * tile.k_step;
        if (!is_masked(tile.probability[at])) c[i * ldc + j] += tile.data[at] * line[j];
      }
    }
  }
}

}  // namespace
}  // namespace flashmoe::cpu
