// Forward mode: one (batch, query head), one block of queries at a time, over all its keys. With a
// prime for how something moves along the tangents of the inputs,
//
//   S^T = K Q^T                     P^T = exp2(S^T - lse)
//   S'^T = K Q'^T + K' Q^T + bias'  lse' = rowsum(P * S')
//   O' = (P * (S' - shift)) V + P V' - (lse' - shift) O
//
// O and lse come from the forward pass, so that one pass over the keys is enough. O comes rounded
// to its dtype: `shift`, any number for each query, takes the weight off it. It is the mean of S'
// over the first keys, and all of lse' where there are no others.
#pragma once

#include "cpu/attention/fwd.h"

namespace flashmoe::cpu {
namespace {

template <class M>
struct TangentScratch {
  using A = typename M::A;
  int64_t ld, ld_out;  // queries in a block, Dv, padded to whole vectors
  A* rows;             // max(block_q, block_k) x max(D, Dv)
  void* queries;       // operands, block_q x D: Q^T
  void* query_moves;   //                        and Q'^T
  void* keys;          // operands, block_k x D
  void* key_moves;
  void* values;  // operand, block_k x Dv: V, then V'
  A* scores;     // block_k x ld           S^T, then P^T
  A* moves;      // block_k x ld           S'^T, then (P * (S' - shift))^T
  void* packed;  // operand, block_k x ld
  A* bias;       // block_k x ld
  A* bias_moves;
  A* bias_line;  // block_q x block_k
  A* out;        // block_q x ld_out
  A* lse;        // ld, times log2(e),
  A* lse_rest;   // and what rounding took off it
  A* lse_moves;  // ld
  A* shift;      // ld
  Mask<A> mask;
  size_t bytes;

  TangentScratch(const Params& p, void* memory) {
    Arena arena(memory);
    const Geometry& g = p.geometry;
    ld = round_up(p.block_q, kLanes<A>);
    ld_out = round_up(g.head_dim_v, kLanes<A>);
    const int64_t ld_rows = larger(round_up(g.head_dim, kLanes<A>), ld_out);
    rows = arena.take<A>(larger(p.block_q, p.block_k) * ld_rows);
    queries = arena.take<char>(M::operand_bytes(p.block_q, g.head_dim));
    query_moves = arena.take<char>(M::operand_bytes(p.block_q, g.head_dim));
    keys = arena.take<char>(M::operand_bytes(p.block_k, g.head_dim));
    key_moves = arena.take<char>(M::operand_bytes(p.block_k, g.head_dim));
    values = arena.take<char>(M::operand_bytes(p.block_k, g.head_dim_v));
    scores = arena.take<A>(p.block_k * ld);
    moves = arena.take<A>(p.block_k * ld);
    packed = arena.take<char>(M::tile_bytes(p.block_k, ld));
    bias = arena.take<A>(p.has_bias ? p.block_k * ld : 0);
    bias_moves = arena.take<A>(p.has_tangent_bias ? p.block_k * ld : 0);
    bias_line = arena.take<A>(p.has_bias ? p.block_q * p.block_k : 0);
    out = arena.take<A>(p.block_q * ld_out);
    lse = arena.take<A>(ld);
    lse_rest = arena.take<A>(ld);
    lse_moves = arena.take<A>(ld);
    shift = arena.take<A>(ld);
    mask.begin = arena.take<Int<A>>(ld);
    mask.end = arena.take<Int<A>>(ld);
    bytes = arena.used();
  }
};

template <class A>
void clear(A* tile, int64_t count) {
  for (int64_t i = 0; i < count; ++i) tile[i] = 0;
}

// How the products q.k of a tile move: K Q'^T + K' Q^T. `move` is null where a tensor does not.
template <class M, class A = typename M::A>
void product_moves(const typename M::Rows& key, const typename M::Rows* key_move,
                   const typename M::Right& query, const typename M::Right* query_move,
                   int64_t keys, int64_t padded, int64_t head_dim, A* tile, int64_t ld) {
  if (query_move) M::multiply(key, *query_move, keys, padded, head_dim, tile, ld, false);
  if (key_move) {
    M::multiply(*key_move, query, keys, padded, head_dim, tile, ld, query_move != nullptr);
  }
  if (!query_move && !key_move) clear(tile, keys * ld);
}

// S^T and the moves of q.k to P^T and (P * (S' - shift))^T; lse' gains what the tile adds.
template <bool kPlain, class M, class A = typename M::A>
void softmax_tangent(const ScoreRule<A>& rule, A scale, const A* bias_moves, int64_t keys,
                     int64_t queries, bool first, const TangentScratch<M>& t) {
  for (int64_t i = 0; i < queries; i += kLanes<A>) {
    const Vec<A> lse = load<Vec<A>>(t.lse + i), lse_rest = load<Vec<A>>(t.lse_rest + i);
    Vec<A> shift = load<Vec<A>>(t.shift + i), sum = {}, weight = {};
    for (int64_t j = 0; j < keys; ++j) {
      const int64_t at = j * t.ld + i;
      Vec<A> slope = splat(A(1));
      const Vec<A> score = rule.template score<kPlain>(load<Vec<A>>(t.scores + at), j, i, &slope);
      const Vec<A> p = rule.template probability<kPlain>(score, lse, lse_rest);
      Vec<A> move = load<Vec<A>>(t.moves + at) * scale;
      if constexpr (!kPlain) {
        move *= slope;
        if (bias_moves) move += load<Vec<A>>(bias_moves + at);
        move = score == -kInf<A> ? Vec<A>{} : move;
      }
      store(t.scores + at, p);
      store(t.moves + at, first ? move : p * (move - shift));
      sum += p * move;
      weight += p;
    }
    store(t.lse_moves + i, load<Vec<A>>(t.lse_moves + i) + sum);
    if (!first) continue;
    shift = weight > A(0) ? sum / weight : Vec<A>{};
    store(t.shift + i, shift);
    for (int64_t j = 0; j < keys; ++j) {
      const int64_t at = j * t.ld + i;
      store(t.moves + at, load<Vec<A>>(t.scores + at) * (load<Vec<A>>(t.moves + at) - shift));
    }
  }
}

// O' gains a tile of P or P * (S' - shift) times V' or V.
template <class M, class A = typename M::A>
void add_values(const A* tile, const Matrix& value, int64_t key, int64_t keys, int64_t rows,
                int64_t head_dim_v, bool first, bool may_be_masked, const TangentScratch<M>& t) {
  const auto left = M::tile_cols(tile, t.ld, keys, rows, t.packed);
  if (may_be_masked &&
      !all_finite(load_block(value, key, keys, head_dim_v, t.rows), keys, head_dim_v)) {
    multiply_contained<M>(left, {tile, t.scores, 1, t.ld}, value, key, rows, head_dim_v, keys,
                          t.out, t.ld_out, !first, t.rows, t.values);
    return;
  }
  const auto right = M::plain(value, key, keys, head_dim_v, t.values);
  M::multiply(left, right, rows, t.ld_out, keys, t.out, t.ld_out, !first);
}

template <class M>
void tangent_block(const Params& p, const Sequence& s, int64_t head, int64_t row, int64_t rows,
                   const TangentScratch<M>& t) {
  using A = typename M::A;
  const Geometry& g = p.geometry;
  const int64_t head_k = head / g.group;
  const Matrix query = matrix(p, p.query, s.batch, head, s.first_row);
  const Matrix query_move = matrix(p, p.tangent_query, s.batch, head, s.first_row);
  const Matrix key = matrix(p, p.key, s.batch, head_k, s.first_key);
  const Matrix key_move = matrix(p, p.tangent_key, s.batch, head_k, s.first_key);
  const Matrix value = matrix(p, p.value, s.batch, head_k, s.first_key);
  const Matrix value_move = matrix(p, p.tangent_value, s.batch, head_k, s.first_key);
  const Matrix bias = bias_matrix(p, p.bias, s, head);
  const Matrix bias_move = bias_matrix(p, p.tangent_bias, s, head);
  const Matrix lse = matrix(p, p.lse, s.batch, head, s.first_row);
  const A sink = sink_of<A>(p, head), sink_move = sink_move_of<A>(p, head);
  const int64_t padded = round_up(rows, kLanes<A>);

  const auto q = M::transposed(query, row, rows, g.head_dim, t.queries, t.rows);
  typename M::Right q_move{};
  if (query_move) q_move = M::transposed(query_move, row, rows, g.head_dim, t.query_moves, t.rows);
  for (int64_t i = 0; i < padded; ++i) {
    t.lse[i] = kInf<A>;
    t.lse_rest[i] = t.lse_moves[i] = t.shift[i] = 0;
    if (i < rows) load_lse(lse, row + i, &t.lse[i], &t.lse_rest[i]);
    if (sink != -kInf<A>) {
      const auto weight = __builtin_exp2(sink * kLog2e - t.lse[i] - t.lse_rest[i]);
      t.lse_moves[i] = static_cast<A>(weight * sink_move);
    }
  }

  bool first = true;
  const int64_t begin = row_range(p, s, row).begin, end = row_range(p, s, row + rows - 1).end;
  for (int64_t j = begin; j < end; j += p.block_k) {
    const int64_t keys = smaller(p.block_k, end - j);
    const bool masked = tile_kind(p, s, row, rows, j, keys) == TileKind::kMasked;
    if (masked) set_mask(p, s, row, rows, padded, j, keys, t.mask);
    if (bias) load_bias_tile(bias, row, rows, j, keys, t.bias_line, t.bias, t.ld);
    if (bias_move) load_bias_tile(bias_move, row, rows, j, keys, t.bias_line, t.bias_moves, t.ld);
    const auto k = M::rows(key, j, keys, g.head_dim, t.keys);
    typename M::Rows k_move{};
    if (key_move) k_move = M::rows(key_move, j, keys, g.head_dim, t.key_moves);
    M::multiply(k, q, keys, padded, g.head_dim, t.scores, t.ld, false);
    product_moves<M>(k, key_move ? &k_move : nullptr, q, query_move ? &q_move : nullptr, keys,
                     padded, g.head_dim, t.moves, t.ld);
    const ScoreRule<A> rule(g, bias ? t.bias : nullptr, masked ? &t.mask : nullptr, t.ld);
    const A* bias_moves = bias_move ? t.bias_moves : nullptr;
    const auto scale = static_cast<A>(g.scale);
    if (rule.plain()) {
      softmax_tangent<true>(rule, scale, bias_moves, keys, padded, first, t);
    } else {
      softmax_tangent<false>(rule, scale, bias_moves, keys, padded, first, t);
    }
    add_values(t.moves, value, j, keys, rows, g.head_dim_v, first, bias || masked, t);
    first = false;
    if (value_move) {
      add_values(t.scores, value_move, j, keys, rows, g.head_dim_v, first, bias || masked, t);
    }
  }

  const Matrix out = matrix(p, p.out, s.batch, head, s.first_row);
  const Matrix out_move = matrix(p, p.tangent_out, s.batch, head, s.first_row);
  const Matrix lse_move = matrix(p, p.tangent_lse, s.batch, head, s.first_row);
  for (int64_t i = 0; i < rows; ++i) {
    const A move = t.lse_moves[i];
    if (lse_move) store_row(lse_move.dtype, element(lse_move, row + i, 0), 1, 1, &move);
    if (!out_move) continue;
    A* to = t.out + i * t.ld_out;
    const Block<A> from = load_block(out, row + i, 1, g.head_dim_v, t.rows);
    for (int64_t d = 0; d < g.head_dim_v; ++d) {
      to[d] = first ? 0 : to[d] - (move - t.shift[i]) * from.data[d];
    }
    store_row(out_move.dtype, element(out_move, row + i, 0), out_move.col, g.head_dim_v, to);
  }
}

// Work item: (batch, query head, chunk of query blocks).
template <class M>
void tangent(const Params& p, int64_t item, void* scratch) {
  const Geometry& g = p.geometry;
  const TangentScratch<M> t(p, scratch);
  const int64_t chunk = p.chunks - 1 - item % p.chunks;  // causal: the longest rows first
  const int64_t head = item / p.chunks % g.heads_q;
  const Sequence s = sequence(p, item / p.chunks / g.heads_q);
  const int64_t blocks = (s.rows + p.block_q - 1) / p.block_q;
  for (int64_t b = blocks * chunk / p.chunks; b < blocks * (chunk + 1) / p.chunks; ++b) {
    tangent_block(p, s, head, b * p.block_q, smaller(p.block_q, s.rows - b * p.block_q), t);
  }
}

template <class M>
size_t tangent_scratch(const Params& p) {
  return TangentScratch<M>(p, nullptr).bytes;
}

}  // namespace
}  // namespace flashmoe::cpu
