// Second derivatives: the gradient of <dO, O'> + <dlse, lse'>, where O' and lse' (tangent.h) say
// how the results move along tangents Q', K', V', bias' of the inputs. In the loops of bwd.h, with
//
//   dP = dO V^T    dS = P * (dP - delta)    delta = rowsum(O * dO) - dlse
//   S' = K Q'^T + K' Q^T + bias', transposed, and lse' of the tangent pass
//
//   Y = P * (S' - lse')                                               dV += Y^T dO
//   X = (dP - delta) * S' - dP * lse' + dO V'^T
//   Z = P * (X - mean)     mean = rowsum(P * X)                       dBias = Z
//                               = rowsum(dO * O') - delta * lse'
//                                                                     dQ += Z K + dS K'
//                                                                     dK += Z^T Q + dS^T Q'
//
// A softcap has a slope, which Z and dS are multiplied by on their way to q.k, and a curvature: Z
// then gains dS * curvature * (how scale * q.k moves).
#pragma once

#include "cpu/attention/bwd.h"
#include "cpu/attention/tangent.h"

namespace flashmoe::cpu {
namespace {

template <class M>
struct SecondScratch : BackwardScratch<M> {
  using A = typename M::A;
  void* query_moves;      // operands, block_q x D: Q'
  void* query_moves_t;    //                        and Q'^T
  void* key_moves;        // operands, block_k x D: K' by rows
  void* key_moves_plain;  //                        and along the depth
  void* value_moves;      // operand, block_k x Dv
  A* moves;               // block_k x ld       S'^T, then Z^T
  A* weights;             // block_k x ld       (dO V'^T)^T, then Y^T
  A* bias_moves;          // block_k x ld
  A* lse_moves;           // ld
  A* mean;                // ld

  SecondScratch(const Params& p, void* memory) : BackwardScratch<M>(p, memory) {
    Arena arena(static_cast<char*>(memory) + this->bytes);
    const Geometry& g = p.geometry;
    query_moves = arena.take<char>(M::operand_bytes(p.block_q, g.head_dim));
    query_moves_t = arena.take<char>(M::operand_bytes(p.block_q, g.head_dim));
    key_moves = arena.take<char>(M::operand_bytes(p.block_k, g.head_dim));
    key_moves_plain = arena.take<char>(M::operand_bytes(p.block_k, g.head_dim));
    value_moves = arena.take<char>(M::operand_bytes(p.block_k, g.head_dim_v));
    moves = arena.take<A>(p.block_k * this->ld);
    weights = arena.take<A>(p.block_k * this->ld);
    bias_moves = arena.take<A>(p.has_tangent_bias ? p.block_k * this->ld : 0);
    lse_moves = arena.take<A>(this->ld);
    mean = arena.take<A>(this->ld);
    this->bytes += arena.used();
  }
};

template <class M>
struct SecondQueryBlock : QueryBlock<M> {
  typename M::Right moves, moves_t;
};

template <class M>
struct SecondKeyBlock : KeyBlock<M> {
  typename M::Rows k_moves, v_moves;
  typename M::Right k_moves_plain;
};

template <class M>
SecondQueryBlock<M> load_query_block(const Geometry& g, const HeadTensors& x, int64_t row,
                                     int64_t rows, const SecondScratch<M>& t) {
  using A = typename M::A;
  const BackwardScratch<M>& first = t;
  SecondQueryBlock<M> q{load_query_block(g, x, row, rows, first), {}, {}};
  if (x.tangent_query) {
    q.moves = M::plain(x.tangent_query, row, rows, g.head_dim, t.query_moves);
    q.moves_t = M::transposed(x.tangent_query, row, rows, g.head_dim, t.query_moves_t, t.rows);
  }
  for (int64_t i = 0; i < q.padded; ++i) {
    const bool sees_keys = i < rows && row_number<A>(x.lse, row + i) != -kInf<A>;
    t.lse_moves[i] = sees_keys ? row_number<A>(x.tangent_lse, row + i) : 0;
    t.mean[i] = -t.delta[i] * t.lse_moves[i];
    if (sees_keys && x.grad_out) {
      t.mean[i] += row_product(g, x.tangent_out, x.grad_out, row + i, first);
    }
  }
  return q;
}

// A sink is the score of a key whose value is 0.
template <class M>
double sink_gradient(const HeadTensors& x, int64_t rows, const SecondScratch<M>& t) {
  double sum = 0;
  for (int64_t i = 0; i < rows; ++i) {
    sum -= sink_weight(x.sink, i, t) * (t.delta[i] * x.sink_move + t.mean[i]);
  }
  return sum;
}

template <class M>
SecondKeyBlock<M> load_key_block(const Geometry& g, const HeadTensors& x, int64_t key, int64_t keys,
                                 const SecondScratch<M>& t) {
  const BackwardScratch<M>& first = t;
  SecondKeyBlock<M> k{load_key_block(g, x, key, keys, first), {}, {}, {}};
  if (x.tangent_key) {
    k.k_moves = M::rows(x.tangent_key, key, keys, g.head_dim, t.key_moves);
    k.k_moves_plain = M::plain(x.tangent_key, key, keys, g.head_dim, t.key_moves_plain);
  }
  if (x.tangent_value) {
    k.v_moves = M::rows(x.tangent_value, key, keys, g.head_dim_v, t.value_moves);
  }
  return k;
}

// The four products of a tile to P^T, dS^T, Y^T and Z^T. Where the bias was, its gradient stays.
template <bool kPlain, class M, class A = typename M::A>
void softmax_second(const ScoreRule<A>& rule, A scale, const A* bias_moves, int64_t keys,
                    int64_t queries, const SecondScratch<M>& t) {
  for (int64_t i = 0; i < queries; i += kLanes<A>) {
    const Vec<A> lse = load<Vec<A>>(t.lse + i), lse_rest = load<Vec<A>>(t.lse_rest + i);
    const Vec<A> delta = load<Vec<A>>(t.delta + i), mean = load<Vec<A>>(t.mean + i);
    const Vec<A> lse_move = load<Vec<A>>(t.lse_moves + i);
    for (int64_t j = 0; j < keys; ++j) {
      const int64_t at = j * t.ld + i;
      Vec<A> slope = splat(A(1)), curvature = {};
      const Vec<A> score =
          rule.template score<kPlain>(load<Vec<A>>(t.scores + at), j, i, &slope, &curvature);
      const Vec<A> p = rule.template probability<kPlain>(score, lse, lse_rest);
      const Vec<A> weight = load<Vec<A>>(t.dscores + at);
      const Vec<A> raw_move = load<Vec<A>>(t.moves + at) * scale;
      Vec<A> move = raw_move;
      if constexpr (!kPlain) {
        move *= slope;
        if (bias_moves) move += load<Vec<A>>(bias_moves + at);
      }
      Vec<A> gradient = p * (weight - delta);
      Vec<A> second =
          p * ((weight - delta) * move - weight * lse_move + load<Vec<A>>(t.weights + at) - mean);
      Vec<A> change = p * (move - lse_move);
      if constexpr (!kPlain) {
        const auto masked = score == -kInf<A>;
        if (rule.bias) store(t.bias + at, masked ? Vec<A>{} : second);
        second = masked ? Vec<A>{} : second * slope + gradient * curvature * raw_move;
        gradient = masked ? Vec<A>{} : gradient * slope;
        change = masked ? Vec<A>{} : change;
      }
      store(t.scores + at, p);
      store(t.dscores + at, gradient);
      store(t.weights + at, change);
      store(t.moves + at, second);
    }
  }
}

// P^T, dS^T, Y^T and Z^T of one tile.
template <class M>
void score_gradients(const Params& p, const Sequence& s, const HeadTensors& x,
                     const SecondQueryBlock<M>& q, const SecondKeyBlock<M>& k, TileKind kind,
                     const SecondScratch<M>& t) {
  using A = typename M::A;
  const Geometry& g = p.geometry;
  const bool masked = kind == TileKind::kMasked;
  if (masked) set_mask(p, s, q.row, q.rows, q.padded, k.key, k.keys, t.mask);
  const auto load_bias = [&](const Matrix& bias, A* tile) {
    if (bias) load_bias_tile(bias, q.row, q.rows, k.key, k.keys, t.bias_line, tile, t.ld);
  };
  load_bias(x.bias, t.bias);
  load_bias(x.tangent_bias, t.bias_moves);
  M::multiply(k.k, q.queries_t, k.keys, q.padded, g.head_dim, t.scores, t.ld, false);
  product_moves<M>(k.k, x.tangent_key ? &k.k_moves : nullptr, q.queries_t,
                   x.tangent_query ? &q.moves_t : nullptr, k.keys, q.padded, g.head_dim, t.moves,
                   t.ld);
  const auto weights = [&](bool there, const typename M::Rows& values, A* tile) {
    if (there) {
      M::multiply(values, q.grads_t, k.keys, q.padded, g.head_dim_v, tile, t.ld, false);
    } else {
      clear(tile, k.keys * t.ld);
    }
  };
  weights(bool(x.grad_out), k.v, t.dscores);
  weights(x.grad_out && x.tangent_value, k.v_moves, t.weights);
  const ScoreRule<A> rule(g, x.bias ? t.bias : nullptr, masked ? &t.mask : nullptr, t.ld);
  const A* bias_moves = x.tangent_bias ? t.bias_moves : nullptr;
  if (rule.plain()) {
    softmax_second<true>(rule, static_cast<A>(g.scale), bias_moves, k.keys, q.padded, t);
  } else {
    softmax_second<false>(rule, static_cast<A>(g.scale), bias_moves, k.keys, q.padded, t);
  }
}

// dQ, dK and dV gain one tile.
template <class M>
void accumulate_gradients(const Params& p, const HeadTensors& x, const SecondQueryBlock<M>& q,
                          const SecondKeyBlock<M>& k, bool may_be_masked, bool first,
                          typename M::A* grad_key, typename M::A* grad_value,
                          const SecondScratch<M>& t) {
  using A = typename M::A;
  const Geometry& g = p.geometry;
  const BackwardScratch<M>& base = t;
  const auto add_to_keys = [&](const A* tile, const Matrix& rows, const typename M::Right& ready,
                               int64_t cols, A* to) {
    add_tile(M::tile(tile, t.ld, k.keys, q.rows, t.packed), {tile, t.scores, t.ld, 1}, rows, q.row,
             ready, k.keys, cols, q.rows, may_be_masked, true, to, base);
  };
  const auto add_to_queries = [&](const A* tile, const Matrix& rows, const typename M::Right& ready,
                                  bool accumulate) {
    add_tile(M::tile_cols(tile, t.ld, k.keys, q.rows, t.packed), {tile, t.scores, 1, t.ld}, rows,
             k.key, ready, q.rows, g.head_dim, k.keys, may_be_masked, accumulate, t.grad_query,
             base);
  };
  if (p.grad_value && x.grad_out) {
    add_to_keys(t.weights, x.grad_out, q.grads, g.head_dim_v, grad_value);
  }
  if (p.grad_key) {
    add_to_keys(t.moves, x.query, q.queries, g.head_dim, grad_key);
    if (x.tangent_query) add_to_keys(t.dscores, x.tangent_query, q.moves, g.head_dim, grad_key);
  }
  if (p.grad_query) {
    add_to_queries(t.moves, x.key, k.k_plain, !first);
    if (x.tangent_key) add_to_queries(t.dscores, x.tangent_key, k.k_moves_plain, true);
  }
}

}  // namespace
}  // namespace flashmoe::cpu
