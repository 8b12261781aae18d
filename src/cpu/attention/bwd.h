// Backward pass: one (batch, key head), one block of queries of its group at a time, over all keys.
//
//   S^T = K Q^T     P^T = exp2(S^T - lse)               dV += P^T dO     (keys)
//   dP^T = V dO^T   dS^T = P^T * (dP^T - delta)         dK += dS^T Q     (keys)
//   delta = rowsum(O * dO) - dlse                       dQ += dS K       (queries)
//   dSink = -sum of exp(sink - lse) * delta             (rows of a head)
//
// A sink is in O and lse, and changes nothing else. With dropout, what is kept of dP, scaled, takes
// its place, and that of P in dV.
//
// dQ of a block is finished when its keys have passed. dK and dV are summed over the queries in
// fp32 (fp64) in scratch; where a head is cut into chunks, each chunk sums into memory of its own
// and `reduce` adds the chunks up in their order. No two work items write to one place, and no sum
// depends on who runs first.
//
// The loops are those of second.h too: what a block loads and a tile adds is found by the type of
// the scratch.
#pragma once

#include "cpu/attention/fwd.h"

namespace flashmoe::cpu {
namespace {

// dK and dV of one work item: (len_k x ld_in), then (len_k x ld_out).
template <class A>
int64_t partial_elems(const Geometry& g) {
  return g.len_k * (round_up(g.head_dim, kLanes<A>) + round_up(g.head_dim_v, kLanes<A>));
}

template <class Products>
struct BackwardScratch {
  using M = Products;
  using A = typename M::A;
  int64_t ld, ld_in, ld_out;  // queries in a block, D, Dv, padded to whole vectors
  A* rows;           // max(block_q, block_k) x max(ld_in, ld_out), for one tensor at a time
  void* queries;     // operands, block_q x D: Q
  void* queries_t;   //                        and Q^T
  void* grads;       // operands, block_q x Dv: dO
  void* grads_t;     //                         and dO^T
  void* keys;        // operands, block_k x D: K by rows
  void* keys_plain;  //                        and along the depth
  void* values;      // operand, block_k x Dv
  void* spare;       // operand of any tensor's size
  A* scores;         // block_k x ld       S^T, then P^T
  A* dscores;        // block_k x ld       dP^T, then dS^T
  void* packed;      // operand, block_k x ld
  A* bias;           // block_k x ld       then dBias
  A* bias_line;      // block_q x block_k
  A* bias_sum;       // block_k x ld       shared dBias of one tile
  A* grad_query;     // block_q x ld_in
  A* lse;            // ld, times log2(e),
  A* lse_rest;       // and what rounding took off it
  A* delta;          // ld
  Mask<A> mask;
  Int<A>* keep;  // block_k x ld, with dropout
  A* partial;    // dK and dV of this item, when a head is not cut
  size_t bytes;

  BackwardScratch(const Params& p, void* memory) {
    Arena arena(memory);
    const Geometry& g = p.geometry;
    ld = round_up(p.block_q, kLanes<A>);
    ld_in = round_up(g.head_dim, kLanes<A>);
    ld_out = round_up(g.head_dim_v, kLanes<A>);
    rows = arena.take<A>(larger(p.block_q, p.block_k) * larger(ld_in, ld_out));
    queries = arena.take<char>(M::operand_bytes(p.block_q, g.head_dim));
    queries_t = arena.take<char>(M::operand_bytes(p.block_q, g.head_dim));
    grads = arena.take<char>(M::operand_bytes(p.block_q, g.head_dim_v));
    grads_t = arena.take<char>(M::operand_bytes(p.block_q, g.head_dim_v));
    keys = arena.take<char>(M::operand_bytes(p.block_k, g.head_dim));
    keys_plain = arena.take<char>(M::operand_bytes(p.block_k, g.head_dim));
    values = arena.take<char>(M::operand_bytes(p.block_k, g.head_dim_v));
    spare = arena.take<char>(
        M::operand_bytes(larger(p.block_q, p.block_k), larger(g.head_dim, g.head_dim_v)));
    scores = arena.take<A>(p.block_k * ld);
    dscores = arena.take<A>(p.block_k * ld);
    packed = arena.take<char>(M::tile_bytes(p.block_k, ld));
    bias = arena.take<A>(p.has_bias ? p.block_k * ld : 0);
    bias_line = arena.take<A>(p.has_bias ? p.block_q * p.block_k : 0);
    bias_sum = arena.take<A>(p.bias_grad == Params::BiasGrad::kShared ? p.block_k * ld : 0);
    grad_query = arena.take<A>(p.block_q * ld_in);
    lse = arena.take<A>(ld);
    lse_rest = arena.take<A>(ld);
    delta = arena.take<A>(ld);
    mask.begin = arena.take<Int<A>>(ld);
    mask.end = arena.take<Int<A>>(ld);
    keep = arena.take<Int<A>>(g.dropped ? p.block_k * ld : 0);
    partial = arena.take<A>(p.chunks == 1 ? partial_elems<A>(g) : 0);
    bytes = arena.used();
  }
};

// The tensors of one (batch, query head).
struct HeadTensors {
  int64_t head;
  Matrix query, key, value, bias, out, lse, grad_out, grad_lse, grad_query, grad_bias;
  Matrix tangent_query, tangent_key, tangent_value, tangent_bias, tangent_out, tangent_lse;
  double sink, sink_move;

  HeadTensors(const Params& p, const Sequence& s, int64_t query_head) : head(query_head) {
    const int64_t head_k = head / p.geometry.group;
    query = matrix(p, p.query, s.batch, head, s.first_row);
    key = matrix(p, p.key, s.batch, head_k, s.first_key);
    value = matrix(p, p.value, s.batch, head_k, s.first_key);
    bias = bias_matrix(p, p.bias, s, head);
    out = matrix(p, p.out, s.batch, head, s.first_row);
    lse = matrix(p, p.lse, s.batch, head, s.first_row);
    grad_out = matrix(p, p.grad_out, s.batch, head, s.first_row);
    grad_lse = matrix(p, p.grad_lse, s.batch, head, s.first_row);
    grad_query = matrix(p, p.grad_query, s.batch, head, s.first_row);
    grad_bias = bias_matrix(p, p.grad_bias, s, head);
    tangent_query = matrix(p, p.tangent_query, s.batch, head, s.first_row);
    tangent_key = matrix(p, p.tangent_key, s.batch, head_k, s.first_key);
    tangent_value = matrix(p, p.tangent_value, s.batch, head_k, s.first_key);
    tangent_bias = bias_matrix(p, p.tangent_bias, s, head);
    tangent_out = matrix(p, p.tangent_out, s.batch, head, s.first_row);
    tangent_lse = matrix(p, p.tangent_lse, s.batch, head, s.first_row);
    sink = sink_of<double>(p, head);
    sink_move = sink_move_of<double>(p, head);
  }
};

// A block of queries, ready to meet keys.
template <class M>
struct QueryBlock {
  int64_t row, rows, padded;
  typename M::Right queries, queries_t, grads, grads_t;
};

// The product of one row of two tensors like out. Where the first is 0 nobody looks at the second:
// a row that dropout left nothing of sees no gradient. (In any other row a NaN in the gradient
// comes in by dP, whatever out is.)
template <class M, class A = typename M::A>
A row_product(const Geometry& g, const Matrix& a, const Matrix& b, int64_t row,
              const BackwardScratch<M>& t) {
  const Block<A> x = load_block(a, row, 1, g.head_dim_v, t.rows);
  const Block<A> y = load_block(b, row, 1, g.head_dim_v, t.rows + t.ld_out);
  Vec<A> sums = {};
  for (int64_t d = 0; d < t.ld_out; d += kLanes<A>) {
    const Vec<A> out = load<Vec<A>>(x.data + d);
    sums += out == A(0) ? Vec<A>{} : out * load<Vec<A>>(y.data + d);
  }
  A sum = 0;
  for (int d = 0; d < kLanes<A>; ++d) sum += sums[d];
  return sum;
}

template <class A>
A row_number(const Matrix& of, int64_t row) {
  A number = 0;
  if (of) load_row(of.dtype, element(of, row, 0), 1, 1, &number);
  return number;
}

// lse and delta of each query. Queries past the last are as those that see no key.
template <class M>
void load_row_numbers(const Geometry& g, const HeadTensors& x, const QueryBlock<M>& q,
                      const BackwardScratch<M>& t) {
  using A = typename M::A;
  for (int64_t i = 0; i < q.padded; ++i) {
    t.lse[i] = kInf<A>;
    t.lse_rest[i] = 0;
    t.delta[i] = 0;
    if (i >= q.rows || !load_lse(x.lse, q.row + i, &t.lse[i], &t.lse_rest[i])) continue;
    t.delta[i] = -row_number<A>(x.grad_lse, q.row + i);
    if (x.grad_out) t.delta[i] += row_product(g, x.out, x.grad_out, q.row + i, t);
  }
}

template <class M>
QueryBlock<M> load_query_block(const Geometry& g, const HeadTensors& x, int64_t row, int64_t rows,
                               const BackwardScratch<M>& t) {
  QueryBlock<M> q{row, rows, round_up(rows, kLanes<typename M::A>), {}, {}, {}, {}};
  q.queries = M::plain(x.query, row, rows, g.head_dim, t.queries);
  q.queries_t = M::transposed(x.query, row, rows, g.head_dim, t.queries_t, t.rows);
  if (x.grad_out) {
    q.grads = M::plain(x.grad_out, row, rows, g.head_dim_v, t.grads);
    q.grads_t = M::transposed(x.grad_out, row, rows, g.head_dim_v, t.grads_t, t.rows);
  }
  load_row_numbers(g, x, q, t);
  return q;
}

// A block of keys.
template <class M>
struct KeyBlock {
  int64_t key, keys;
  typename M::Rows k, v;
  typename M::Right k_plain;
};

template <class M>
KeyBlock<M> load_key_block(const Geometry& g, const HeadTensors& x, int64_t key, int64_t keys,
                           const BackwardScratch<M>& t) {
  return {key, keys, M::rows(x.key, key, keys, g.head_dim, t.keys),
          M::rows(x.value, key, keys, g.head_dim_v, t.values),
          M::plain(x.key, key, keys, g.head_dim, t.keys_plain)};
}

// S^T and dP^T of one tile to P^T and dS^T. Where the bias was, its gradient stays.
template <bool kPlain, class M, class A = typename M::A>
void softmax_gradient(const ScoreRule<A>& rule, int64_t keys, int64_t queries,
                      const BackwardScratch<M>& t) {
  for (int64_t i = 0; i < queries; i += kLanes<A>) {
    const Vec<A> lse = load<Vec<A>>(t.lse + i), lse_rest = load<Vec<A>>(t.lse_rest + i);
    const Vec<A> delta = load<Vec<A>>(t.delta + i);
    for (int64_t j = 0; j < keys; ++j) {
      const int64_t at = j * t.ld + i;
      Vec<A> slope = splat(A(1));
      const Vec<A> score = rule.template score<kPlain>(load<Vec<A>>(t.scores + at), j, i, &slope);
      const Vec<A> p = rule.template probability<kPlain>(score, lse, lse_rest);
      Vec<A> gradient = p * (load<Vec<A>>(t.dscores + at) - delta);
      if constexpr (!kPlain) gradient = score == -kInf<A> ? Vec<A>{} : gradient;
      store(t.scores + at, p);
      if (!kPlain && rule.bias) store(t.bias + at, gradient);
      if constexpr (!kPlain) gradient = score == -kInf<A> ? Vec<A>{} : gradient * slope;
      store(t.dscores + at, gradient);
    }
  }
}

// P^T, as dV takes it, and dS^T of one tile, dS being the gradient of q.k * scale.
template <class M>
void score_gradients(const Params& p, const Sequence& s, const HeadTensors& x,
                     const QueryBlock<M>& q, const KeyBlock<M>& k, TileKind kind,
                     const BackwardScratch<M>& t) {
  using A = typename M::A;
  const Geometry& g = p.geometry;
  const bool masked = kind == TileKind::kMasked;
  if (masked) set_mask(p, s, q.row, q.rows, q.padded, k.key, k.keys, t.mask);
  if (x.bias) load_bias_tile(x.bias, q.row, q.rows, k.key, k.keys, t.bias_line, t.bias, t.ld);
  M::multiply(k.k, q.queries_t, k.keys, q.padded, g.head_dim, t.scores, t.ld, false);
  if (x.grad_out) {
    M::multiply(k.v, q.grads_t, k.keys, q.padded, g.head_dim_v, t.dscores, t.ld, false);
  } else {
    for (int64_t i = 0; i < k.keys * t.ld; ++i) t.dscores[i] = 0;
  }
  const auto kept_scale = static_cast<A>(g.kept_scale);
  if (g.dropped) {
    draw_tile<A>(p, s.batch, x.head, q.row, q.padded, k.key, k.keys, t.keep, t.ld);
    drop(t.keep, k.keys, q.padded, t.ld, kept_scale, A(0), t.dscores);
  }
  const ScoreRule<A> rule(g, x.bias ? t.bias : nullptr, masked ? &t.mask : nullptr, t.ld);
  if (rule.plain()) {
    softmax_gradient<true>(rule, k.keys, q.padded, t);
  } else {
    softmax_gradient<false>(rule, k.keys, q.padded, t);
  }
  if (g.dropped) {
    drop(t.keep, k.keys, q.padded, t.ld, kept_scale, kDroppedProbability<A>, t.scores);
  }
}

template <class M>
bool finite(const Matrix& m, int64_t first, int64_t rows, int64_t cols,
            const BackwardScratch<M>& t) {
  return !m || all_finite(load_block(m, first, rows, cols, t.rows), rows, cols);
}

// C += A B, A being a tile of scores and B rows of a tensor, which `ready` has as an operand.
template <class M, class Left, class A = typename M::A>
void add_tile(const Left& a, const TileView<A>& tile, const Matrix& b, int64_t first,
              const typename M::Right& ready, int64_t rows, int64_t cols, int64_t depth,
              bool may_be_masked, bool accumulate, A* c, const BackwardScratch<M>& t) {
  const int64_t ld = round_up(cols, kLanes<A>);
  if (may_be_masked && !finite(b, first, depth, cols, t)) {
    multiply_contained<M>(a, tile, b, first, rows, cols, depth, c, ld, accumulate, t.rows, t.spare);
  } else {
    M::multiply(a, ready, rows, ld, depth, c, ld, accumulate);
  }
}

// dQ, dK and dV gain one tile.
template <class M>
void accumulate_gradients(const Params& p, const HeadTensors& x, const QueryBlock<M>& q,
                          const KeyBlock<M>& k, bool may_be_masked, bool first,
                          typename M::A* grad_key, typename M::A* grad_value,
                          const BackwardScratch<M>& t) {
  const Geometry& g = p.geometry;
  if (p.grad_value && x.grad_out) {
    add_tile(M::tile(t.scores, t.ld, k.keys, q.rows, t.packed), {t.scores, t.scores, t.ld, 1},
             x.grad_out, q.row, q.grads, k.keys, g.head_dim_v, q.rows, may_be_masked, true,
             grad_value, t);
  }
  if (p.grad_key) {
    add_tile(M::tile(t.dscores, t.ld, k.keys, q.rows, t.packed), {t.dscores, t.scores, t.ld, 1},
             x.query, q.row, q.queries, k.keys, g.head_dim, q.rows, may_be_masked, true, grad_key,
             t);
  }
  if (p.grad_query) {
    add_tile(M::tile_cols(t.dscores, t.ld, k.keys, q.rows, t.packed),
             {t.dscores, t.scores, 1, t.ld}, x.key, k.key, k.k_plain, q.rows, g.head_dim, k.keys,
             may_be_masked, !first, t.grad_query, t);
  }
}

// A tile of dBias (keys x queries in scratch) to its place; null stands for zeros.
template <class A>
void store_bias_tile(const Matrix& grad_bias, int64_t row, int64_t rows, int64_t key, int64_t keys,
                     const A* tile, int64_t ld, A* line) {
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < keys; ++j) line[j] = tile ? tile[j * ld + i] : 0;
    store_row(grad_bias.dtype, element(grad_bias, row + i, key), grad_bias.col, keys, line);
  }
}

// The weight that a row gives its head's sink.
template <class Scratch>
double sink_weight(double sink, int64_t i, const Scratch& t) {
  return __builtin_exp2(sink * kLog2e - t.lse[i] - t.lse_rest[i]);
}

// What the rows of a block add to the gradient of their head's sink.
template <class M>
double sink_gradient(const HeadTensors& x, int64_t rows, const BackwardScratch<M>& t) {
  double sum = 0;
  for (int64_t i = 0; i < rows; ++i) sum -= sink_weight(x.sink, i, t) * t.delta[i];
  return sum;
}

template <class Scratch, class A = typename Scratch::A>
void gradients_of_block(const Params& p, const Sequence& s, const HeadTensors& x, int64_t row,
                        int64_t rows, A* grad_key, A* grad_value, double* grad_sink,
                        const Scratch& t) {
  const Geometry& g = p.geometry;
  const bool store_bias = p.bias_grad == Params::BiasGrad::kDirect;
  const auto q = load_query_block(g, x, row, rows, t);
  if (grad_sink && x.sink != -kInf<double>) *grad_sink += sink_gradient(x, rows, t);
  bool first = true;
  for (int64_t j = 0; j < s.all_keys; j += p.block_k) {
    const int64_t keys = smaller(p.block_k, s.all_keys - j);
    const TileKind kind = tile_kind(p, s, row, rows, j, keys);
    if (kind == TileKind::kEmpty) {
      if (store_bias) {
        store_bias_tile<A>(x.grad_bias, row, rows, j, keys, nullptr, t.ld, t.bias_line);
      }
      continue;
    }
    const auto k = load_key_block(g, x, j, keys, t);
    score_gradients(p, s, x, q, k, kind, t);
    if (store_bias) store_bias_tile(x.grad_bias, row, rows, j, keys, t.bias, t.ld, t.bias_line);
    accumulate_gradients(p, x, q, k, x.bias || kind == TileKind::kMasked || g.dropped, first,
                         grad_key + j * t.ld_in, grad_value + j * t.ld_out, t);
    first = false;
  }
  if (!x.grad_query) return;
  for (int64_t i = 0; i < rows; ++i) {
    A* from = t.grad_query + i * t.ld_in;
    for (int64_t d = 0; d < g.head_dim; ++d)
      from[d] = first ? 0 : from[d] * static_cast<A>(g.scale);
    store_row(x.grad_query.dtype, element(x.grad_query, row + i, 0), x.grad_query.col, g.head_dim,
              from);
  }
}

// dK and dV, summed over the chunks from `partial` on, to their place.
template <class A>
void store_key_gradients(const Params& p, const Sequence& s, int64_t head_k, int64_t first,
                         int64_t last, A* partial, int64_t chunks) {
  const Geometry& g = p.geometry;
  const int64_t ld_in = round_up(g.head_dim, kLanes<A>), ld_out = round_up(g.head_dim_v, kLanes<A>);
  const Matrix grad_key = matrix(p, p.grad_key, s.batch, head_k, s.first_key);
  const Matrix grad_value = matrix(p, p.grad_value, s.batch, head_k, s.first_key);
  struct Part {
    const Matrix& to;
    A* from;
    int64_t ld, cols;
    A factor;
  };
  const Part parts[] = {
      {grad_key, partial, ld_in, g.head_dim, static_cast<A>(g.scale)},
      {grad_value, partial + g.len_k * ld_in, ld_out, g.head_dim_v, 1},
  };
  for (const Part& part : parts) {
    if (!part.to) continue;
    for (int64_t j = first; j < last; ++j) {
      A* line = part.from + j * part.ld;
      for (int64_t c = 1; c < chunks; ++c) {
        for (int64_t d = 0; d < part.cols; ++d) line[d] += line[c * partial_elems<A>(g) + d];
      }
      for (int64_t d = 0; d < part.cols; ++d) line[d] *= part.factor;
      store_row(part.to.dtype, element(part.to, j, 0), part.to.col, part.cols, line);
    }
  }
}

// Work item: (batch, key head, chunk of the query blocks of all heads in the group).
template <class Scratch>
void gradients(const Params& p, int64_t item, void* scratch) {
  using A = typename Scratch::A;
  const Geometry& g = p.geometry;
  const Scratch t(p, scratch);
  const int64_t chunk = item % p.chunks;
  const int64_t head_k = item / p.chunks % g.heads_k;
  const Sequence s = sequence(p, item / p.chunks / g.heads_k);
  A* partial = p.chunks == 1 ? t.partial : static_cast<A*>(p.partial) + item * partial_elems<A>(g);
  A* grad_key = partial;
  A* grad_value = partial + g.len_k * t.ld_in;
  for (int64_t i = 0; i < s.all_keys * t.ld_in; ++i) grad_key[i] = 0;
  for (int64_t i = 0; i < s.all_keys * t.ld_out; ++i) grad_value[i] = 0;
  double* grad_sinks = p.grad_sinks ? p.sink_partial + item * g.group : nullptr;
  for (int64_t h = 0; grad_sinks && h < g.group; ++h) grad_sinks[h] = 0;

  const int64_t blocks = (s.rows + p.block_q - 1) / p.block_q;
  const int64_t units = blocks * g.group;
  for (int64_t u = units * chunk / p.chunks; u < units * (chunk + 1) / p.chunks; ++u) {
    const HeadTensors x(p, s, head_k * g.group + u / blocks);
    const int64_t row = u % blocks * p.block_q;
    gradients_of_block(p, s, x, row, smaller(p.block_q, s.rows - row), grad_key, grad_value,
                       grad_sinks ? grad_sinks + u / blocks : nullptr, t);
  }
  if (p.chunks == 1) store_key_gradients<A>(p, s, head_k, 0, s.all_keys, partial, 1);
}

// Work item: (batch, key head, block of keys).
template <class M>
void reduce(const Params& p, int64_t item, void*) {
  using A = typename M::A;
  const Geometry& g = p.geometry;
  const int64_t blocks = (g.len_k + p.block_k - 1) / p.block_k;
  const int64_t head = item / blocks;  // counted over the batch
  const Sequence s = sequence(p, head / g.heads_k);
  const int64_t first = smaller(item % blocks * p.block_k, s.all_keys);
  const int64_t last = smaller(first + p.block_k, s.all_keys);
  A* partial = static_cast<A*>(p.partial) + head * p.chunks * partial_elems<A>(g);
  store_key_gradients<A>(p, s, head % g.heads_k, first, last, partial, p.chunks);
}

// Adds the tile t.bias to t.bias_sum, folded to the rows and columns that the bias has of its own.
template <class M>
void add_bias_tile(const Params& p, int64_t rows, int64_t keys, const BackwardScratch<M>& t) {
  for (int64_t j = 0; j < keys; ++j) {
    for (int64_t i = 0; i < rows; ++i) {
      t.bias_sum[(p.bias_cols ? j : 0) * t.ld + (p.bias_rows ? i : 0)] += t.bias[j * t.ld + i];
    }
  }
}

// The (batch, head) that share one slice of a bias. Both are counted together in mixed radix,
// leading dims first and heads last: a part that the slice fixes, and a part that runs over what
// was broadcast.
struct Sharing {
  const Params& p;
  int64_t size[kMaxLead + 1], place[kMaxLead + 1];
  int64_t fixed = 0;     // batch * heads_q + head of the first member
  int64_t members = 1;   // 0 where there is nothing to sum
  int64_t sequence = 0;  // ragged: the slice's sequence, which a packed bias always has of its own

  Sharing(const Params& params, int64_t slice) : p(params) {
    const Geometry& g = p.geometry;
    int64_t weight = 1;
    for (int i = g.num_lead; i >= 0; --i) {
      size[i] = i == g.num_lead ? g.heads_q : g.lead[i];
      place[i] = weight;
      weight *= larger(size[i], 1);
      if (p.bias_own[i]) {
        fixed += slice % size[i] * place[i];
        slice /= size[i];
      } else {
        members *= size[i];
      }
    }
    if (g.len_q == 0 || g.len_k == 0) members = 0;
    sequence = slice;
  }

  int64_t member(int64_t m) const {
    int64_t which = fixed;
    for (int i = p.geometry.num_lead; i >= 0; --i) {
      if (p.bias_own[i]) continue;
      which += m % size[i] * place[i];
      m /= size[i];
    }
    return which;
  }
  int64_t batch(int64_t member) const {
    return p.geometry.ragged ? sequence : member / p.geometry.heads_q;
  }
};

// Adds up dS of one (batch, head) over rows [row, last_row) and keys [key, last_key).
template <class Scratch>
void sum_bias_tile(const Params& p, const Sequence& s, int64_t head, int64_t row, int64_t last_row,
                   int64_t key, int64_t last_key, const Scratch& t) {
  const HeadTensors x(p, s, head);
  for (int64_t i = row; i < last_row; i += p.block_q) {
    const int64_t rows = smaller(p.block_q, last_row - i);
    const auto q = load_query_block(p.geometry, x, i, rows, t);
    for (int64_t j = key; j < last_key; j += p.block_k) {
      const int64_t keys = smaller(p.block_k, last_key - j);
      const TileKind kind = tile_kind(p, s, i, rows, j, keys);
      if (kind == TileKind::kEmpty) continue;
      score_gradients(p, s, x, q, load_key_block(p.geometry, x, j, keys, t), kind, t);
      add_bias_tile(p, rows, keys, t);
    }
  }
}

// Work item: one tile of a dBias that several (batch, head) share, as (slice, block of rows, block
// of keys). Goes through all that share it and computes their dS anew: two products more than
// keeping a copy of dBias per head, which would be S x S memory.
template <class Scratch>
void bias_gradient(const Params& p, int64_t item, void* scratch) {
  const Geometry& g = p.geometry;
  const Scratch t(p, scratch);
  const int64_t row_blocks = p.bias_rows ? (g.len_q + p.block_q - 1) / p.block_q : 1;
  const int64_t key_blocks = p.bias_cols ? (g.len_k + p.block_k - 1) / p.block_k : 1;
  const int64_t key = item % key_blocks * p.block_k;
  const int64_t row = item / key_blocks % row_blocks * p.block_q;
  const Sharing sharing(p, item / key_blocks / row_blocks);

  for (int64_t i = 0; i < p.block_k * t.ld; ++i) t.bias_sum[i] = 0;
  Sequence s;  // with an empty batch there is none, and dBias is zero
  s.batch = sharing.batch(sharing.fixed);
  s.rows = g.len_q;
  s.all_keys = g.len_k;
  for (int64_t m = 0; m < sharing.members; ++m) {
    const int64_t member = sharing.member(m);
    s = sequence(p, sharing.batch(member));
    sum_bias_tile(p, s, member % g.heads_q, row,
                  p.bias_rows ? smaller(row + p.block_q, s.rows) : s.rows, key,
                  p.bias_cols ? smaller(key + p.block_k, s.keys) : s.keys, t);
  }
  const Matrix grad_bias = bias_matrix(p, p.grad_bias, s, sharing.fixed % g.heads_q);
  const int64_t rows = p.bias_rows ? smaller(p.block_q, s.rows - row) : 1;
  const int64_t keys = p.bias_cols ? smaller(p.block_k, s.all_keys - key) : 1;
  store_bias_tile(grad_bias, row, rows, key, keys, t.bias_sum, t.ld, t.bias_line);
}

// Work item: one query head, over the whole batch in its order.
template <class M>
void sink_grad(const Params& p, int64_t head, void*) {
  using A = typename M::A;
  const Geometry& g = p.geometry;
  double sum = 0;
  for (int64_t item = head / g.group * p.chunks; item < p.items; item += g.heads_k * p.chunks) {
    for (int64_t c = 0; c < p.chunks; ++c) {
      sum += p.sink_partial[(item + c) * g.group + head % g.group];
    }
  }
  const A value = static_cast<A>(sum);
  const Matrix grad_sinks = matrix(p, p.grad_sinks, 0, head, 0);
  store_row(grad_sinks.dtype, grad_sinks.data, 1, 1, &value);
}

template <class Scratch>
size_t gradient_scratch(const Params& p) {
  return Scratch(p, nullptr).bytes;
}

template <class M>
size_t partial_bytes(const Params& p) {
  using A = typename M::A;
  const Geometry& g = p.geometry;
  if (p.chunks == 1) return 0;
  return static_cast<size_t>(g.batch * g.heads_k * p.chunks * partial_elems<A>(g)) * sizeof(A);
}

}  // namespace
}  // namespace flashmoe::cpu
