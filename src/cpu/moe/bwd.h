// Backward pass. First, a block of one expert's rows at a time, over the inner columns of its part,
// with tokens as rows:
//
//   dOut ── down ──> dA (rows x n) ── activate_backward ──> dH (rows x G n) ── gate_up ──> dX
//
// The activation is recomputed from the pre-activations, and each row's sum of dA * A is the
// gradient of its weight. dH and the weighted activations stay in the workspace for the second
// step, a tile of a weight's gradient at a time, over all rows of its expert:
//
//   dGate_up = dH^T X        dDown = dOut^T (weighted A)
#pragma once

#include "cpu/moe/activation.h"
#include "cpu/moe/fwd.h"

namespace flashmoe::cpu::moe {
namespace {

constexpr int64_t kGradRows = 120, kGradCols = 256;  // a tile of a weight's gradient
constexpr int64_t kGradDepth = 256;                  // rows that are summed up at once
constexpr int64_t kColumns = 256;                    // of gate_up, packed at once

template <class M>
struct BackwardScratch {
  using A = typename M::A;
  using Element = typename M::Element;
  int64_t ld, ld_x;  // block_inner and d, padded to whole vectors
  Element* tokens;   // rows x d             dOut
  A* grad;           // rows x ld, at least d   dA, then weighted A
  A* pre[2];         // rows x ld            H, then dH
  A* grad_x;         // rows x ld_x          dX
  A* weights;        // rows
  A* dots;           // rows                 gradients of the weights
  void* left;        // operand, rows x d
  void* inner;       // operand, rows x block_inner
  void* right;       // operand, d x block_inner or block_inner x kColumns
  size_t bytes;

  BackwardScratch(const Params& p, void* memory) {
    Arena arena(memory);
    const int64_t d = p.s.width, rows = p.block_rows;
    ld = round_up(p.block_inner, kLanes<A>);
    ld_x = round_up(d, kLanes<A>);
    tokens = arena.take<Element>(rows * d);
    grad = arena.take<A>(larger(rows * ld, d));
    pre[0] = arena.take<A>(rows * ld);
    pre[1] = arena.take<A>(p.s.gates == 2 ? rows * ld : 0);
    grad_x = arena.take<A>(rows * ld_x);
    weights = arena.take<A>(rows);
    dots = arena.take<A>(rows);
    left = arena.take<char>(M::left_bytes(rows, d));
    inner = arena.take<char>(M::left_bytes(rows, p.block_inner));
    right = arena.take<char>(
        larger(M::right_bytes(d, p.block_inner), M::right_bytes(p.block_inner, kColumns)));
    bytes = arena.used();
  }
};

// From dA and H to dH, weighted A and the gradients of the weights, in place.
template <class M>
void activate_backward(const Params& p, const Block& b, int64_t cols, const BackwardScratch<M>& t) {
  using A = typename M::A;
  with_activation<A>(p.activation, [&](auto f) {
    for (int64_t i = 0; i < b.rows; ++i) {
      A *const grad = t.grad + i * t.ld, *const gate = t.pre[0] + i * t.ld;
      A* const up = t.pre[1] + i * t.ld;
      const A weight = t.weights[i];
      Vec<A> dot = {};
      by_fours<A>(cols, [&](int64_t j, auto count) {
        Vec<A> grad_gate[count], grad_up[count] = {}, weighted[count];
        for (int k = 0; k < count; ++k) {
          const int64_t at = j + k * kLanes<A>;
          Vec<A> slope, a = f.value(load<Vec<A>>(gate + at), &slope);
          const Vec<A> g = load<Vec<A>>(grad + at);
          if (p.s.gates == 2) {
            const Vec<A> u = load<Vec<A>>(up + at);
            grad_up[k] = g * weight * a;
            a *= u;
            slope *= u;
          }
          grad_gate[k] = g * weight * slope;
          weighted[k] = a * weight;
          dot += g * a;
        }
        for (int k = 0; k < count; ++k) {
          const int64_t at = j + k * kLanes<A>;
          store(gate + at, grad_gate[k]);
          store(grad + at, weighted[k]);
          if (p.s.gates == 2) store(up + at, grad_up[k]);
        }
      });
      for (int k = 0; k < kLanes<A>; ++k) t.dots[i] += dot[k];
    }
  });
}

// The weights of a block's rows, and what their gradients have from the bias of `down`.
template <class M>
void start_rows(const Params& p, const Block& b, bool with_bias, const BackwardScratch<M>& t) {
  using A = typename M::A;
  const int64_t d = p.s.width;
  A *const bias = t.grad_x, *const grad = t.grad;  // not in use yet
  if (with_bias)
    load_row(p.down_bias.dtype, element(p.down_bias, b.expert, 0), p.down_bias.col, d, bias);
  for (int64_t i = 0; i < b.rows; ++i) {
    const int64_t pair = p.pairs[b.first + i];
    t.weights[i] = weight_of<A>(p, pair);
    t.dots[i] = 0;
    if (!with_bias) continue;
    load_row(p.grad_out.dtype, element(p.grad_out, pair / p.s.top_k, 0), p.grad_out.col, d, grad);
    for (int64_t j = 0; j < d; ++j) t.dots[i] += grad[j] * bias[j];
  }
}

// H of the inner columns [col, col + cols).
template <class M>
void load_pre(const Params& p, const Block& b, int64_t col, int64_t cols,
              const BackwardScratch<M>& t) {
  for (int64_t g = 0; g < p.s.gates; ++g) {
    const Matrix pre = at(p.pre, g);
    for (int64_t i = 0; i < b.rows; ++i) {
      auto* const row = t.pre[g] + i * t.ld;
      load_row(pre.dtype, element(pre, b.first + i, col), pre.col, cols, row);
      for (int64_t j = cols; j < round_up(cols, kLanes<typename M::A>); ++j) row[j] = 0;
    }
  }
}

// Where the gradients of a row's pre-activations are in the workspace.
template <class M>
typename M::Element* grad_pre_at(const Params& p, int64_t row, int64_t gate, int64_t col) {
  return static_cast<typename M::Element*>(p.grad_pre) + (row * p.s.gates + gate) * p.s.inner + col;
}

// dH and weighted A to the workspace.
template <class M>
void keep_inner(const Params& p, const Block& b, int64_t col, int64_t cols,
                const BackwardScratch<M>& t) {
  for (int64_t i = 0; i < b.rows; ++i) {
    const int64_t row = b.first + i;
    for (int64_t g = 0; p.grad_pre && g < p.s.gates; ++g) {
      store_elements<M>(t.pre[g] + i * t.ld, cols, grad_pre_at<M>(p, row, g, col));
    }
    if (!p.weighted) continue;
    auto* const weighted = static_cast<typename M::Element*>(p.weighted) + row * p.s.inner + col;
    store_elements<M>(t.grad + i * t.ld, cols, weighted);
  }
}

// dX += dH gate_up, of the inner columns [col, col + cols).
template <class M>
void add_grad_x(const Params& p, const Block& b, int64_t col, int64_t cols, bool accumulate,
                const BackwardScratch<M>& t) {
  const int64_t d = p.s.width;
  const Matrix gate_up = at(p.gate_up, b.expert);
  for (int64_t g = 0; g < p.s.gates; ++g) {
    const Matrix grad_pre =
        scratch_matrix<M>(grad_pre_at<M>(p, b.first, g, col), p.s.gates * p.s.inner);
    const auto grads = M::left(grad_pre, b.rows, cols, d, t.inner);
    for (int64_t j = 0; j < d; j += kColumns) {
      const int64_t wide = smaller(kColumns, d - j);
      const auto weights =
          M::right(part(gate_up, g * p.s.inner + col, j), cols, wide, b.rows, t.right);
      M::multiply(grads, weights, b.rows, round_up(wide, kLanes<typename M::A>), cols, t.grad_x + j,
                  t.ld_x, accumulate || g > 0);
    }
  }
}

template <class M>
void backward(const Params& p, int64_t item, void* memory) {
  using A = typename M::A;
  const BackwardScratch<M> t(p, memory);
  const Block b = p.blocks[item / p.parts];
  const int64_t part_index = item % p.parts, d = p.s.width;
  start_rows<M>(p, b, p.down_bias && p.grad_weights && part_index == 0, t);
  const Matrix down = at(p.down, b.expert);
  const Matrix grad_out = gather<M>(p, p.grad_out, b.first, b.rows, 0, d, t.tokens);
  const auto left = M::left(grad_out, b.rows, d, p.s.inner, t.left);
  const Range inner = part_of_inner(p, part_index);
  for (int64_t i = 0; inner.begin == inner.end && i < b.rows * t.ld_x; ++i) t.grad_x[i] = 0;
  for (int64_t col = inner.begin; col < inner.end; col += p.block_inner) {
    const int64_t cols = smaller(p.block_inner, inner.end - col);
    const auto right = M::right(part(down, 0, col), d, cols, b.rows, t.right);
    M::multiply(left, right, b.rows, round_up(cols, kLanes<A>), d, t.grad, t.ld, false);
    load_pre<M>(p, b, col, cols, t);
    activate_backward<M>(p, b, cols, t);
    keep_inner<M>(p, b, col, cols, t);
    if (p.grad_x) add_grad_x<M>(p, b, col, cols, col > inner.begin, t);
  }
  for (int64_t i = 0; i < b.rows; ++i) {
    const int64_t pair = p.pairs[b.first + i];
    if (p.grad_x) store_sum(p, p.grad_x, part_index, pair, t.grad_x + i * t.ld_x);
    if (p.grad_weight_sums) {
      static_cast<A*>(p.grad_weight_sums)[part_index * p.s.rows + pair] = t.dots[i];
    }
  }
}

// A tile of a weight's gradient: sums over the rows of its expert.
template <class M>
struct GradScratch {
  using A = typename M::A;
  using Element = typename M::Element;
  A* tile;          // kGradRows x kGradCols
  A* bias;          // kGradRows
  A* line;          // kGradRows
  Element* tokens;  // kGradDepth x max(kGradRows, kGradCols)
  void* left;       // operand, kGradRows x kGradDepth
  void* right;      // operand, kGradDepth x kGradCols
  size_t bytes;

  explicit GradScratch(void* memory) {
    Arena arena(memory);
    tile = arena.take<A>(kGradRows * kGradCols);
    bias = arena.take<A>(round_up(kGradRows, kLanes<A>));
    line = arena.take<A>(round_up(kGradRows, kLanes<A>));
    tokens = arena.take<Element>(kGradDepth * larger(kGradRows, kGradCols));
    left = arena.take<char>(M::left_bytes(kGradRows, kGradDepth));
    right = arena.take<char>(M::right_bytes(kGradDepth, kGradCols));
    bytes = arena.used();
  }
};

struct GradTile {
  int64_t expert, row, rows, col, cols;
};
inline GradTile grad_tile(int64_t item, int64_t rows, int64_t cols) {
  const int64_t down = grad_tiles(rows, kGradRows), wide = grad_tiles(cols, kGradCols);
  GradTile tile;
  tile.expert = item / (down * wide);
  tile.row = item / wide % down * kGradRows;
  tile.rows = smaller(kGradRows, rows - tile.row);
  tile.col = item % wide * kGradCols;
  tile.cols = smaller(kGradCols, cols - tile.col);
  return tile;
}

// sum over rows of an expert: left(first, count)^T right(first, count), those being matrices of
// `count` rows of it.
template <class M, class LeftRows, class RightRows>
void sum_over_rows(const Params& p, const GradTile& tile, const Stack& result,
                   const GradScratch<M>& t, const LeftRows& left_rows,
                   const RightRows& right_rows) {
  using A = typename M::A;
  const int64_t begin = p.offsets[tile.expert], end = p.offsets[tile.expert + 1];
  for (int64_t i = 0; begin == end && i < kGradRows * kGradCols; ++i) t.tile[i] = 0;
  for (int64_t first = begin; first < end; first += kGradDepth) {
    const int64_t count = smaller(kGradDepth, end - first);
    const auto left =
        M::left(flipped(left_rows(first, count)), tile.rows, count, tile.cols, t.left);
    const auto right = M::right(right_rows(first, count), count, tile.cols, tile.rows, t.right);
    M::multiply(left, right, tile.rows, round_up(tile.cols, kLanes<A>), count, t.tile, kGradCols,
                first > begin);
  }
  const Matrix to = at(result, tile.expert);
  for (int64_t i = 0; i < tile.rows; ++i) {
    store_row(to.dtype, element(to, tile.row + i, tile.col), to.col, tile.cols,
              t.tile + i * kGradCols);
  }
}

template <class M>
void grad_gate_up(const Params& p, int64_t item, void* memory) {
  using A = typename M::A;
  const GradScratch<M> t(memory);
  const int64_t wide = p.s.gates * p.s.inner;
  const GradTile tile = grad_tile(item, wide, p.s.width);
  const auto grad_pre = [&](int64_t first, int64_t) {
    return scratch_matrix<M>(grad_pre_at<M>(p, first, 0, tile.row), wide);
  };
  if (p.grad_gate_up) {
    sum_over_rows<M>(p, tile, p.grad_gate_up, t, grad_pre, [&](int64_t first, int64_t count) {
      return gather<M>(p, p.x, first, count, tile.col, tile.cols, t.tokens);
    });
  }
  if (!p.grad_up_bias || tile.col > 0) return;
  for (int64_t i = 0; i < tile.rows; ++i) t.bias[i] = 0;
  for (int64_t row = p.offsets[tile.expert]; row < p.offsets[tile.expert + 1]; ++row) {
    const Matrix m = grad_pre(row, 1);
    load_row(m.dtype, m.data, 1, tile.rows, t.line);
    for (int64_t i = 0; i < tile.rows; ++i) t.bias[i] += t.line[i];
  }
  store_row<A>(p.grad_up_bias.dtype, element(p.grad_up_bias, tile.expert, tile.row),
               p.grad_up_bias.col, tile.rows, t.bias);
}

template <class M>
void grad_down(const Params& p, int64_t item, void* memory) {
  using A = typename M::A;
  const GradScratch<M> t(memory);
  const GradTile tile = grad_tile(item, p.s.width, p.s.inner);
  if (p.grad_down) {
    sum_over_rows<M>(
        p, tile, p.grad_down, t,
        [&](int64_t first, int64_t count) {
          return gather<M>(p, p.grad_out, first, count, tile.row, tile.rows, t.tokens);
        },
        [&](int64_t first, int64_t) {
          return scratch_matrix<M>(
              static_cast<typename M::Element*>(p.weighted) + first * p.s.inner + tile.col,
              p.s.inner);
        });
  }
  if (!p.grad_down_bias || tile.col > 0) return;
  for (int64_t i = 0; i < tile.rows; ++i) t.bias[i] = 0;
  for (int64_t row = p.offsets[tile.expert]; row < p.offsets[tile.expert + 1]; ++row) {
    const int64_t pair = p.pairs[row];
    const A weight = weight_of<A>(p, pair);
    load_row(p.grad_out.dtype, element(p.grad_out, pair / p.s.top_k, tile.row), p.grad_out.col,
             tile.rows, t.line);
    for (int64_t i = 0; i < tile.rows; ++i) t.bias[i] += weight * t.line[i];
  }
  store_row<A>(p.grad_down_bias.dtype, element(p.grad_down_bias, tile.expert, tile.row),
               p.grad_down_bias.col, tile.rows, t.bias);
}

template <class M>
size_t backward_scratch(const Params& p) {
  const size_t first = BackwardScratch<M>(p, nullptr).bytes, second = GradScratch<M>(nullptr).bytes;
  const size_t line = p.s.width * sizeof(typename M::A);  // what combine() needs
  const size_t most = first > second ? first : second;
  return most > line ? most : line;
}

}  // namespace
}  // namespace flashmoe::cpu::moe
