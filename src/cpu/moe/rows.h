// What the passes share: the matrices of an expert, rows of tokens on their way in,
// sums on their way out.
#pragma once

#include "cpu/moe/kernels.h"
#include "cpu/products.h"

namespace flashmoe::cpu::moe {
namespace {

inline Matrix at(const Stack& stack, int64_t i) {
  if (!stack) return {};
  Matrix m = stack.first;
  m.data += i * stack.step * dtype_bytes(m.dtype);
  return m;
}

inline int64_t id_of(const Params& p, int64_t pair) {
  const char* id = element(p.ids, pair / p.s.top_k, pair % p.s.top_k);
  return p.ids.dtype == DType::kInt32 ? *reinterpret_cast<const int32_t*>(id)
                                      : *reinterpret_cast<const int64_t*>(id);
}

// Whether the pair has an expert. None has where a backward pass has no gradient to start from.
inline bool has_expert(const Params& p, int64_t pair) {
  if (!p.ids) return false;
  const int64_t id = id_of(p, pair);
  return id >= 0 && id < p.s.experts;
}

template <class A>
A weight_of(const Params& p, int64_t pair) {
  if (!p.weights) return 1;
  return *reinterpret_cast<const A*>(element(p.weights, pair / p.s.top_k, pair % p.s.top_k));
}

// Where bf16 is multiplied as such it is kept as it is; all else as accumulators.
template <class M>
inline Matrix scratch_matrix(typename M::Element* data, int64_t ld) {
  const DType dtype = sizeof(typename M::Element) == 2 ? DType::kBFloat16 : kDTypeOf<typename M::A>;
  return {reinterpret_cast<char*>(data), dtype, ld, 1};
}

template <class M>
void load_elements(const Matrix& m, int64_t row, int64_t col, int64_t n, typename M::Element* to) {
  if constexpr (sizeof(typename M::Element) == 2) {
    const auto* from = reinterpret_cast<const uint16_t*>(element(m, row, col));
    if (m.col == 1) {
      __builtin_memcpy(to, from, n * sizeof(uint16_t));
    } else {
      for (int64_t i = 0; i < n; ++i) to[i] = from[i * m.col];
    }
  } else {
    load_row(m.dtype, element(m, row, col), m.col, n, to);
  }
}

template <class M>
void store_elements(const typename M::A* from, int64_t n, typename M::Element* to) {
  store_row(sizeof(typename M::Element) == 2 ? DType::kBFloat16 : kDTypeOf<typename M::A>, to, 1, n,
            from);
}

// Columns [col, col + cols) of the tokens that `rows` pairs belong to.
template <class M>
Matrix gather(const Params& p, const Matrix& tokens, int64_t first, int64_t rows, int64_t col,
              int64_t cols, typename M::Element* to) {
  for (int64_t i = 0; i < rows; ++i) {
    load_elements<M>(tokens, p.pairs[first + i] / p.s.top_k, col, cols, to + i * cols);
  }
  return scratch_matrix<M>(to, cols);
}

// The columns of an inner width that a part has.
struct Range {
  int64_t begin, end;
};
inline Range part_of_inner(const Params& p, int64_t part) {
  const int64_t blocks = (p.s.inner + p.block_inner - 1) / p.block_inner;
  return {blocks * part / p.parts * p.block_inner,
          smaller(blocks * (part + 1) / p.parts * p.block_inner, p.s.inner)};
}

// A row of what a pair adds to its token: to the sums, or as the result itself.
template <class A>
void store_sum(const Params& p, const Matrix& result, int64_t part, int64_t pair, const A* row) {
  if (p.sums) {
    auto* to = static_cast<A*>(p.sums) + (part * p.s.rows + pair) * p.s.width;
    __builtin_memcpy(to, row, p.s.width * sizeof(A));
  } else {
    store_row(result.dtype, element(result, pair, 0), result.col, p.s.width, row);
  }
}

// Each token's result is the sum of what its pairs added, in their order, part by part.
template <class A>
void combine_tokens(const Params& p, const Matrix& result, int64_t begin, int64_t end, A* line) {
  const int64_t d = p.s.width, k = p.s.top_k;
  for (int64_t t = begin; t < end; ++t) {
    if (!p.sums && k == 1 && has_expert(p, t)) continue;  // written already
    for (int64_t i = 0; i < d; ++i) line[i] = 0;
    for (int64_t pair = t * k; p.sums && pair < (t + 1) * k; ++pair) {
      if (!has_expert(p, pair)) continue;
      for (int64_t part = 0; part < p.parts; ++part) {
        const A* from = static_cast<const A*>(p.sums) + (part * p.s.rows + pair) * d;
        for (int64_t i = 0; i < d; ++i) line[i] += from[i];
      }
    }
    store_row(result.dtype, element(result, t, 0), result.col, d, line);
  }
}

template <class A>
void combine_grad_weights(const Params& p, int64_t begin, int64_t end) {
  for (int64_t pair = begin * p.s.top_k; pair < end * p.s.top_k; ++pair) {
    A sum = 0;
    for (int64_t part = 0; part < p.parts && has_expert(p, pair); ++part) {
      sum += static_cast<const A*>(p.grad_weight_sums)[part * p.s.rows + pair];
    }
    *reinterpret_cast<A*>(element(p.grad_weights, pair / p.s.top_k, pair % p.s.top_k)) = sum;
  }
}

template <class M>
void combine(const Params& p, int64_t item, void* scratch) {
  using A = typename M::A;
  const int64_t begin = item * kTokenBlock, end = smaller(begin + kTokenBlock, p.s.tokens);
  if (p.out) combine_tokens(p, p.out, begin, end, static_cast<A*>(scratch));
  if (p.grad_x) combine_tokens(p, p.grad_x, begin, end, static_cast<A*>(scratch));
  if (p.grad_weights) combine_grad_weights<A>(p, begin, end);
}

}  // namespace
}  // namespace flashmoe::cpu::moe
