// The matrix products of attention in two arithmetics. A pass brings its operands into the form
// that the arithmetic wants, under one set of names, and multiplies:
//
//   rows(x)         A = x                 a tensor's rows against the depth
//   transposed(x)   B = x^T               a tensor's rows become the columns of the result
//   plain(x)        B = x                 a tensor's rows lie along the depth
//   tile(t)         A = t                 a tile of scores (keys x queries) in scratch
//   tile_cols(t)    A = t^T
//
//   multiply        C = A B, or C += A B, in the accumulator's type
#pragma once

#include "cpu/product.h"
#include "cpu/product_bf16.h"
#include "cpu/tile.h"

namespace flashmoe::cpu {
namespace {

// In the accumulator's own type: fp32 (for fp16 and bf16 too) or fp64.
template <class T>
struct ExactProducts {
  using A = T;
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
// bf16 operands, fp32 sums: for bf16 tensors. Probabilities and their gradients are rounded to bf16
// on their way into a product, as PyTorch's math does.
struct Bf16Products {
  using A = float;
  using Packed = const uint16_t*;
  using Rows = Packed;
  using Right = Packed;

  static int64_t operand_bytes(int64_t rows, int64_t cols) {
    return packed_elems(rows, cols) * static_cast<int64_t>(sizeof(uint16_t));
  }
  static int64_t tile_bytes(int64_t rows, int64_t cols) { return operand_bytes(rows, cols); }

  static Packed rows(const Matrix& m, int64_t first, int64_t rows, int64_t depth, void* scratch) {
    pack_rows(m, first, rows, depth, static_cast<uint16_t*>(scratch));
    return static_cast<Packed>(scratch);
  }
  static Packed transposed(const Matrix& m, int64_t first, int64_t rows, int64_t depth,
                           void* scratch, A*) {
    return Bf16Products::rows(m, first, rows, depth, scratch);
  }
  static Packed plain(const Matrix& m, int64_t first, int64_t depth, int64_t cols, void* scratch) {
    pack_cols(m, first, depth, cols, static_cast<uint16_t*>(scratch));
    return static_cast<Packed>(scratch);
  }
  static Packed tile(const A* tile, int64_t ld, int64_t rows, int64_t depth, void* scratch) {
    pack_rows(tile, ld, rows, depth, static_cast<uint16_t*>(scratch));
    return static_cast<Packed>(scratch);
  }
  static Packed tile_cols(const A* tile, int64_t ld, int64_t depth, int64_t cols, void* scratch) {
    pack_cols(tile, ld, depth, round_up(cols, 4), static_cast<uint16_t*>(scratch));
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

}  // namespace
}  // namespace flashmoe::cpu
