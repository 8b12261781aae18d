// Products with a tile of scores in which a NaN or infinity behind a mask stays behind it.
#pragma once

#include "cpu/attention/tile.h"
#include "cpu/products.h"

namespace flashmoe::cpu {
namespace {

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
