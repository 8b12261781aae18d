// Forward pass: one (batch, query head), one block of queries at a time, over all its keys.
//
//   Q^T ── scores ──> S^T (keys x queries) ── softmax_step ──> P^T ── accumulate ──> O
//
// Each query keeps a running maximum and a running sum of exponentials, base 2. When a block of
// keys raises the maximum, what was summed so far is scaled down. Memory: one tile of scores,
// whatever the length.
#pragma once

#include "cpu/attention/contained.h"
#include "cpu/attention/dropout.h"

namespace flashmoe::cpu {
namespace {

template <class M>
struct ForwardScratch {
  using A = typename M::A;
  int64_t ld;      // queries in a block, padded to whole vectors
  int64_t ld_out;  // Dv, padded
  A* rows;         // max(block_q, block_k) x max(D, Dv)
  void* queries;   // operand, block_q x D    Q^T
  void* keys;      // operand, block_k x D
  void* values;    // operand, block_k x Dv
  A* scores;       // block_k x ld           S^T, then P^T
  void* packed;    // operand, block_k x ld  P, where the arithmetic wants a copy
  A* bias;         // block_k x ld
  A* bias_line;    // block_q x block_k
  A* out;          // block_q x ld_out
  A* maximum;      // ld, times log2(e) like the scores
  A* sum;          // ld
  A* correction;   // ld
  Mask<A> mask;    // ld each
  Int<A>* keep;    // block_k x ld           with dropout
  size_t bytes;

  ForwardScratch(const Params& p, void* memory) {
    Arena arena(memory);
    const Geometry& g = p.geometry;
    ld = round_up(p.block_q, kLanes<A>);
    ld_out = round_up(g.head_dim_v, kLanes<A>);
    const int64_t ld_rows = larger(round_up(g.head_dim, kLanes<A>), ld_out);
    rows = arena.take<A>(larger(p.block_q, p.block_k) * ld_rows);
    queries = arena.take<char>(M::operand_bytes(p.block_q, g.head_dim));
    keys = arena.take<char>(M::operand_bytes(p.block_k, g.head_dim));
    values = arena.take<char>(M::operand_bytes(p.block_k, g.head_dim_v));
    scores = arena.take<A>(p.block_k * ld);
    packed = arena.take<char>(M::tile_bytes(p.block_k, ld));
    bias = arena.take<A>(p.has_bias ? p.block_k * ld : 0);
    bias_line = arena.take<A>(p.has_bias ? p.block_q * p.block_k : 0);
    out = arena.take<A>(p.block_q * ld_out);
    maximum = arena.take<A>(ld);
    sum = arena.take<A>(ld);
    correction = arena.take<A>(ld);
    mask.begin = arena.take<Int<A>>(ld);
    mask.end = arena.take<Int<A>>(ld);
    keep = arena.take<Int<A>>(g.dropped ? p.block_k * ld : 0);
    bytes = arena.used();
  }
};

// The raw products q.k of a tile become scores in base 2: scaled, capped, biased, masked.
// Everything about a score is decided here, for both passes.
template <class A>
struct ScoreRule {
  A factor;             // scale * log2(e), or scale / softcap,
  A factor_rest;        // and what rounding took off it: scores are large where precision is small
  A cap = 0;            // softcap * log2(e), 0 = none
  A bend = 0;           // -2 / softcap
  const A* bias;        // tile or null
  const Mask<A>* mask;  // or null
  int64_t ld;

  ScoreRule(const Geometry& g, const A* bias_tile, const Mask<A>* tile_mask, int64_t tile_ld)
      : bias(bias_tile), mask(tile_mask), ld(tile_ld) {
    const double exact = g.softcap > 0 ? g.scale / g.softcap : g.scale * kLog2e;
    factor = static_cast<A>(exact);
    factor_rest = static_cast<A>(exact - factor);
    cap = static_cast<A>(g.softcap * kLog2e);
    if (g.softcap > 0) bend = static_cast<A>(-2 / g.softcap);
  }

  // Nothing but the scale. Most tiles are plain, and their loops are compiled apart: 1.10x forward
  // and 1.06x backward at (1, 4, 1024, 64) in fp32 on a Neoverse V1.
  bool plain() const { return cap == 0 && !bias && !mask; }

  // The vector of queries from `query` on, against key `key` of the tile. With softcap, `slope` and
  // `curvature` (if not null) receive its derivatives by scale * product.
  template <bool kPlain>
  Vec<A> score(Vec<A> product, int64_t key, int64_t query, Vec<A>* slope = nullptr,
               Vec<A>* curvature = nullptr) const {
    Vec<A> score = product * factor + product * factor_rest;
    if constexpr (kPlain) return score;
    if (cap > 0) {
      Vec<A> derivative;
      const Vec<A> t = tanh(score, &derivative);
      score = t * cap;
      if (slope) *slope = derivative;
      if (curvature) *curvature = t * derivative * bend;
    }
    if (bias) {
      const Vec<A> b = load<Vec<A>>(bias + key * ld + query);
      score = b == -kInf<A>
                  ? b
                  : score + b * static_cast<A>(kLog2e);  // a mask, even where the score is NaN
    }
    if (mask) {
      using IntVec = Vec<Int<A>>;
      const IntVec k = splat(static_cast<Int<A>>(key));
      const IntVec allowed =
          (k >= load<IntVec>(mask->begin + query)) & (k < load<IntVec>(mask->end + query));
      score = allowed ? score : splat(-kInf<A>);
    }
    return score;
  }

  // The exponential of a score, relative to `reference` + `rest`; where it is masked, the negative
  // zero that says so.
  template <bool kPlain>
  static Vec<A> probability(Vec<A> score, Vec<A> reference, Vec<A> rest = Vec<A>{}) {
    const Vec<A> p = exp2(score - reference - rest);
    if constexpr (kPlain) return p;
    return score == -kInf<A> ? splat(A(-0.0)) : p;
  }
};

// Scores to probabilities relative to the new maximum, for kVecs vectors of queries from `query`
// on; their sums and corrections brought up to date.
template <bool kPlain, int kVecs, class M, class A = typename M::A>
void softmax_columns(const ScoreRule<A>& rule, int64_t keys, int64_t query,
                     const ForwardScratch<M>& t) {
  Vec<A> before[kVecs], maximum[kVecs], reference[kVecs], sum[kVecs] = {};
  for (int c = 0; c < kVecs; ++c) {
    before[c] = maximum[c] = load<Vec<A>>(t.maximum + query + c * kLanes<A>);
  }
  for (int64_t j = 0; j < keys; ++j) {
    for (int c = 0; c < kVecs; ++c) {
      const int64_t i = query + c * kLanes<A>;
      A* at = t.scores + j * t.ld + i;
      const Vec<A> score = rule.template score<kPlain>(load<Vec<A>>(at), j, i);
      if constexpr (!kPlain) store(at, score);  // a plain one is cheaper to compute twice
      maximum[c] = score > maximum[c] ? score : maximum[c];
    }
  }
  for (int c = 0; c < kVecs; ++c) {
    // A query that has seen no key yet keeps -inf, which must not meet another -inf.
    reference[c] = maximum[c] == -kInf<A> ? Vec<A>{} : maximum[c];
  }
  for (int64_t j = 0; j < keys; ++j) {
    for (int c = 0; c < kVecs; ++c) {
      const int64_t i = query + c * kLanes<A>;
      A* at = t.scores + j * t.ld + i;
      Vec<A> score = load<Vec<A>>(at);
      if constexpr (kPlain) score = rule.template score<kPlain>(score, j, i);
      const Vec<A> p = rule.template probability<kPlain>(score, reference[c]);
      store(at, p);
      sum[c] += p;
    }
  }
  for (int c = 0; c < kVecs; ++c) {
    const int64_t i = query + c * kLanes<A>;
    const Vec<A> correction =
        before[c] == maximum[c] ? splat(A(1)) : exp2(before[c] - reference[c]);
    store(t.maximum + i, maximum[c]);
    store(t.correction + i, correction);
    store(t.sum + i, load<Vec<A>>(t.sum + i) * correction + sum[c]);
  }
}

// All queries of a tile. Four vectors at a time hide the latency of the maximum and of the sum.
template <bool kPlain, class M, class A = typename M::A>
void softmax_step(const ScoreRule<A>& rule, int64_t keys, int64_t queries,
                  const ForwardScratch<M>& t) {
  int64_t i = 0;
  for (; i + 4 * kLanes<A> <= queries; i += 4 * kLanes<A>)
    softmax_columns<kPlain, 4>(rule, keys, i, t);
  for (; i < queries; i += kLanes<A>) softmax_columns<kPlain, 1>(rule, keys, i, t);
}

// O = correction * O + P V
template <class M>
void accumulate(const ForwardScratch<M>& t, int64_t rows, int64_t keys, const Matrix& value,
                int64_t key, bool first, bool may_be_masked, int64_t head_dim_v) {
  using A = typename M::A;
  for (int64_t i = 0; !first && i < rows; ++i) {
    if (t.correction[i] == 1) continue;
    const Vec<A> correction = splat(t.correction[i]);
    for (int64_t d = 0; d < t.ld_out; d += kLanes<A>) {
      A* at = t.out + i * t.ld_out + d;
      store(at, load<Vec<A>>(at) * correction);
    }
  }
  const auto p = M::tile_cols(t.scores, t.ld, keys, rows, t.packed);
  if (may_be_masked &&
      !all_finite(load_block(value, key, keys, head_dim_v, t.rows), keys, head_dim_v)) {
    multiply_contained<M>(p, {t.scores, t.scores, 1, t.ld}, value, key, rows, head_dim_v, keys,
                          t.out, t.ld_out, !first, t.rows, t.values);
    return;
  }
  const auto v = M::plain(value, key, keys, head_dim_v, t.values);
  M::multiply(p, v, rows, t.ld_out, keys, t.out, t.ld_out, !first);
}

// How a row of sums ends: what makes them its output, and the log of its softmax denominator.
template <class A>
struct RowEnd {
  bool empty;  // no key allowed; a NaN is not empty
  A factor = 0, lse = -kInf<A>;

  RowEnd(A maximum, A sum, A sink) : empty(sum == 0) {
    const double top = maximum * kLn2;
    if (sink == -kInf<A>) {
      if (empty) return;
      factor = 1 / sum;
      lse = static_cast<A>(sum != sum ? sum : top + __builtin_log(static_cast<double>(sum)));
      return;
    }
    // One key more, whose value is 0.
    const double highest = top > sink ? top : static_cast<double>(sink);
    const double share = __builtin_exp(top - highest);
    const double all = sum * share + __builtin_exp(sink - highest);
    factor = static_cast<A>(share / all);
    lse = static_cast<A>(highest + __builtin_log(all));
  }
};

template <class M, class A = typename M::A>
void store_output(const ForwardScratch<M>& t, int64_t row, int64_t rows, A sink, const Matrix& out,
                  const Matrix& lse, int64_t head_dim_v, double kept_scale = 1) {
  for (int64_t i = 0; i < rows; ++i) {
    A* from = t.out + i * t.ld_out;
    const RowEnd<A> end(t.maximum[i], t.sum[i], sink);
    const A factor = end.factor * static_cast<A>(kept_scale);
    for (int64_t d = 0; d < head_dim_v; ++d) from[d] = end.empty ? 0 : from[d] * factor;
    store_row(out.dtype, element(out, row + i, 0), out.col, head_dim_v, from);
    if (lse) store_row(lse.dtype, element(lse, row + i, 0), 1, 1, &end.lse);
  }
}

// The weights of a block of keys, whose scores are in t.scores as products, in their place.
template <class M, class A = typename M::A>
void find_weights(const ScoreRule<A>& rule, int64_t keys, int64_t padded,
                  const ForwardScratch<M>& t) {
  if (rule.plain()) {
    softmax_step<true>(rule, keys, padded, t);
  } else {
    softmax_step<false>(rule, keys, padded, t);
  }
}

// A block of keys, from their scores to the sums of the output.
template <class M, class A = typename M::A>
void forward_keys(const ScoreRule<A>& rule, int64_t rows, int64_t keys, const Matrix& value,
                  int64_t key, bool first, int64_t head_dim_v, const ForwardScratch<M>& t) {
  find_weights(rule, keys, round_up(rows, kLanes<A>), t);
  accumulate(t, rows, keys, value, key, first, rule.bias || rule.mask, head_dim_v);
}

template <class M>
void forward_block(const Params& p, const Sequence& s, int64_t head, int64_t row, int64_t rows,
                   const ForwardScratch<M>& t) {
  using A = typename M::A;
  const Geometry& g = p.geometry;
  const Matrix query = matrix(p, p.query, s.batch, head, s.first_row);
  const Matrix key = matrix(p, p.key, s.batch, head / g.group, s.first_key);
  const Matrix value = matrix(p, p.value, s.batch, head / g.group, s.first_key);
  const Matrix bias = bias_matrix(p, p.bias, s, head);
  const int64_t padded = round_up(rows, kLanes<A>);

  const auto q = M::transposed(query, row, rows, g.head_dim, t.queries, t.rows);
  for (int64_t i = 0; i < padded; ++i) {
    t.maximum[i] = -kInf<A>;
    t.sum[i] = 0;
  }

  bool first = true;
  const int64_t begin = row_range(p, s, row).begin, end = row_range(p, s, row + rows - 1).end;
  for (int64_t j = begin; j < end; j += p.block_k) {
    const int64_t keys = smaller(p.block_k, end - j);
    const TileKind kind = tile_kind(p, s, row, rows, j, keys);
    if (kind == TileKind::kMasked) set_mask(p, s, row, rows, padded, j, keys, t.mask);
    if (bias) load_bias_tile(bias, row, rows, j, keys, t.bias_line, t.bias, t.ld);
    const auto k = M::rows(key, j, keys, g.head_dim, t.keys);
    M::multiply(k, q, keys, padded, g.head_dim, t.scores, t.ld, false);
    const ScoreRule<A> rule(g, bias ? t.bias : nullptr,
                            kind == TileKind::kMasked ? &t.mask : nullptr, t.ld);
    find_weights(rule, keys, padded, t);
    if (g.dropped) {
      draw_tile<A>(p, s.batch, head, row, padded, j, keys, t.keep, t.ld);
      drop(t.keep, keys, padded, t.ld, A(1), kDroppedProbability<A>, t.scores);
    }
    accumulate(t, rows, keys, value, j, first, bias || kind == TileKind::kMasked || g.dropped,
               g.head_dim_v);
    first = false;
  }
  const Matrix out = matrix(p, p.out, s.batch, head, s.first_row);
  const Matrix lse = matrix(p, p.lse, s.batch, head, s.first_row);
  store_output(t, row, rows, sink_of<A>(p, head), out, lse, g.head_dim_v, g.kept_scale);
}

// Work item: (batch, query head, chunk of query blocks).
template <class M>
void forward(const Params& p, int64_t item, void* scratch) {
  const Geometry& g = p.geometry;
  const ForwardScratch<M> t(p, scratch);
  const int64_t chunk = p.chunks - 1 - item % p.chunks;  // causal: the longest rows first
  const int64_t head = item / p.chunks % g.heads_q;
  const Sequence s = sequence(p, item / p.chunks / g.heads_q);
  const int64_t blocks = (s.rows + p.block_q - 1) / p.block_q;
  for (int64_t b = blocks * chunk / p.chunks; b < blocks * (chunk + 1) / p.chunks; ++b) {
    forward_block(p, s, head, b * p.block_q, smaller(p.block_q, s.rows - b * p.block_q), t);
  }
}

template <class M>
size_t forward_scratch(const Params& p) {
  return ForwardScratch<M>(p, nullptr).bytes;
}

}  // namespace
}  // namespace flashmoe::cpu
