// Forward pass: a block of one expert's rows at a time, over the inner columns of its part.
//
//   X^T ── gate_up ──> H^T (G n x rows) ── activate ──> A^T (n x rows) ── down ──> Y^T (d x rows)
//
// Tokens are columns. So the weights are the left side of every product and are read as they lie in
// memory, only the tokens are transposed; and no activation leaves the scratch.
#pragma once

#include "cpu/moe/activation.h"
#include "cpu/moe/rows.h"

namespace flashmoe::cpu::moe {
namespace {

template <class M>
struct ForwardScratch {
  using A = typename M::A;
  using Element = typename M::Element;
  int64_t ld;          // rows of a block, padded to whole vectors
  Element* x;          // rows x d
  A* pre;              // G block_inner x ld   H^T; its first half becomes A^T
  Element* activated;  // block_inner x ld
  A* out;              // d x ld               Y^T
  A* weights;          // ld
  A* rows;             // ld x max(d, block_inner), for results on their way out
  void* left;          // operand, block_inner x d or d x block_inner: weights
  void* tokens;        // operand, d x ld: X^T
  void* inner;         // operand, block_inner x ld: A^T
  size_t bytes;

  ForwardScratch(const Params& p, void* memory) {
    Arena arena(memory);
    const int64_t d = p.s.width;
    ld = round_up(p.block_rows, kLanes<A>);
    x = arena.take<Element>(p.block_rows * d);
    pre = arena.take<A>(p.s.gates * p.block_inner * ld);
    activated = arena.take<Element>(p.block_inner * ld);
    out = arena.take<A>(d * ld);
    weights = arena.take<A>(ld);
    rows = arena.take<A>(ld * larger(d, p.block_inner));
    left = arena.take<char>(M::left_bytes(p.block_inner, d));
    tokens = arena.take<char>(M::right_bytes(d, p.block_rows));
    inner = arena.take<char>(M::right_bytes(p.block_inner, p.block_rows));
    bytes = arena.used();
  }
};

// The bias of a row of H^T or Y^T.
template <class A>
A bias_of(const Matrix& bias, int64_t expert, int64_t col) {
  A value = 0;
  if (bias) load_row(bias.dtype, element(bias, expert, col), 1, 1, &value);
  return value;
}

// H^T of the inner columns [col, col + cols).
template <class M, class Right>
void pre_activations(const Params& p, const Block& b, const Right& x, int64_t col, int64_t cols,
                     int64_t ld, const ForwardScratch<M>& t) {
  using A = typename M::A;
  const Matrix gate_up = at(p.gate_up, b.expert);
  for (int64_t g = 0; g < p.s.gates; ++g) {
    A* const pre = t.pre + g * cols * ld;
    const auto weights =
        M::left(part(gate_up, g * p.s.inner + col, 0), cols, p.s.width, b.rows, t.left);
    M::multiply(weights, x, cols, ld, p.s.width, pre, ld, false);
    for (int64_t i = 0; p.up_bias && i < cols; ++i) {
      const A bias = bias_of<A>(p.up_bias, b.expert, g * p.s.inner + col + i);
      for (int64_t j = 0; j < ld; ++j) pre[i * ld + j] += bias;
    }
    if (!p.pre) continue;
    transpose(pre, ld, cols, b.rows, t.rows, cols);
    const Matrix kept = at(p.pre, g);
    for (int64_t j = 0; j < b.rows; ++j) {
      store_row(kept.dtype, element(kept, b.first + j, col), kept.col, cols, t.rows + j * cols);
    }
  }
}

// A^T from H^T.
template <class M>
void activate(const Params& p, int64_t cols, int64_t ld, const ForwardScratch<M>& t) {
  using A = typename M::A;
  with_activation<A>(p.activation, [&](auto f) {
    const A* const up = t.pre + cols * ld;
    by_fours<A>(cols * ld, [&](int64_t i, auto count) {
      Vec<A> a[count];
      for (int k = 0; k < count; ++k) {
        a[k] = f.value(load<Vec<A>>(t.pre + i + k * kLanes<A>));
        if (p.s.gates == 2) a[k] *= load<Vec<A>>(up + i + k * kLanes<A>);
      }
      for (int k = 0; k < count; ++k) store(t.pre + i + k * kLanes<A>, a[k]);
    });
  });
  store_elements<M>(t.pre, cols * ld, t.activated);
}

template <class M>
void forward(const Params& p, int64_t item, void* memory) {
  using A = typename M::A;
  const ForwardScratch<M> t(p, memory);
  const Block b = p.blocks[item / p.parts];
  const int64_t part_index = item % p.parts, d = p.s.width;
  const int64_t ld = round_up(b.rows, kLanes<A>);
  const Matrix x = gather<M>(p, p.x, b.first, b.rows, 0, d, t.x), down = at(p.down, b.expert);
  const auto tokens = M::right(flipped(x), d, b.rows, p.block_inner, t.tokens);
  const Range inner = part_of_inner(p, part_index);
  for (int64_t i = 0; inner.begin == inner.end && i < d * ld; ++i) t.out[i] = 0;
  for (int64_t col = inner.begin; col < inner.end; col += p.block_inner) {
    const int64_t cols = smaller(p.block_inner, inner.end - col);
    pre_activations<M>(p, b, tokens, col, cols, ld, t);
    activate<M>(p, cols, ld, t);
    const auto weights = M::left(part(down, 0, col), d, cols, b.rows, t.left);
    const auto a = M::right(scratch_matrix<M>(t.activated, ld), cols, ld, d, t.inner);
    M::multiply(weights, a, d, ld, cols, t.out, ld, col > inner.begin);
  }
  for (int64_t j = 0; j < ld; ++j) {
    t.weights[j] = j < b.rows ? weight_of<A>(p, p.pairs[b.first + j]) : 0;
  }
  for (int64_t i = 0; i < d; ++i) {
    const A bias = part_index == 0 ? bias_of<A>(p.down_bias, b.expert, i) : 0;
    for (int64_t j = 0; j < ld; ++j) t.out[i * ld + j] = (t.out[i * ld + j] + bias) * t.weights[j];
  }
  transpose(t.out, ld, d, b.rows, t.rows, d);
  for (int64_t j = 0; j < b.rows; ++j) {
    store_sum(p, p.out, part_index, p.pairs[b.first + j], t.rows + j * d);
  }
}

template <class M>
size_t forward_scratch(const Params& p) {
  const size_t line = p.s.width * sizeof(typename M::A);  // what combine() needs
  const size_t bytes = ForwardScratch<M>(p, nullptr).bytes;
  return bytes > line ? bytes : line;
}

}  // namespace
}  // namespace flashmoe::cpu::moe
