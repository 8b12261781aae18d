// The oracle: attention and its derivatives exactly as docs/semantics.md defines them, in float64,
// one query row at a time. Every input becomes a dense array of doubles first and every result is
// rounded once at the end, so what lies between is only the mathematics.
#include <cmath>
#include <limits>

#include "attention/dropout.h"
#include "attention/lengths.h"
#include "attention/problem.h"
#include "core/text.h"
#include "cpu/oracle.h"

namespace flashmoe {
namespace {

using namespace cpu::oracle;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Where things are: the lengths of each sequence, and the place of a row or a bias element in its
// array.
class Layout {
 public:
  Layout(const AttentionProblem& problem, const AttentionTensors& tensors) : g_(geometry(problem)) {
    if (g_.paged) {
      place_pages(*problem.paged, tensors);
    } else if (g_.ragged) {
      place_sequences(*problem.ragged, tensors);
    } else {
      lengths_q_.assign(g_.batch, g_.len_q);
      lengths_k_.assign(g_.batch, g_.len_k);
      if (problem.key_lengths) place_key_lengths(*problem.key_lengths, tensors.key_lengths);
    }
    if (problem.bias) place_bias(*problem.bias);
  }

  const Geometry& g() const { return g_; }
  int64_t length_q(int64_t b) const { return lengths_q_[b]; }
  int64_t length_k(int64_t b) const { return lengths_k_[b]; }

  // Position i of head h of sequence b in (..., H, S, D) or, packed, (T, H, D).
  int64_t row_q(int64_t b, int64_t h, int64_t i) const {
    return g_.packed() ? (starts_q_[b] + i) * g_.heads_q + h : (b * g_.heads_q + h) * g_.len_q + i;
  }
  int64_t row_k(int64_t b, int64_t h, int64_t j) const {
    if (g_.paged) {  // in (blocks, page, H, D)
      const int64_t entry = b * table_.shape[1] + j / g_.page;
      return (read_int(table_, table_data_, entry) * g_.page + j % g_.page) * g_.heads_k + h;
    }
    return g_.ragged ? (starts_k_[b] + j) * g_.heads_k + h : (b * g_.heads_k + h) * g_.len_k + j;
  }
  int64_t bias_element(int64_t b, int64_t h, int64_t i, int64_t j) const {
    const int64_t row_step = g_.ragged ? lengths_k_[b] * bias_step_k_ : bias_step_q_;
    return bias_starts_[b] + h * bias_step_h_ + i * row_step + j * bias_step_k_;
  }

 private:
  void place_sequences(const Ragged& ragged, const AttentionTensors& tensors) {
    for (int64_t b = 0; b < g_.batch; ++b) {
      starts_q_.push_back(read_int(ragged.cu_seqlens_q, tensors.cu_seqlens_q, b));
      starts_k_.push_back(read_int(ragged.cu_seqlens_k, tensors.cu_seqlens_k, b));
      lengths_q_.push_back(read_int(ragged.cu_seqlens_q, tensors.cu_seqlens_q, b + 1) -
                           starts_q_[b]);
      lengths_k_.push_back(read_int(ragged.cu_seqlens_k, tensors.cu_seqlens_k, b + 1) -
                           starts_k_[b]);
    }
  }

  void place_pages(const Paged& paged, const AttentionTensors& tensors) {
    table_ = paged.block_table;
    table_data_ = tensors.block_table;
    for (int64_t b = 0; b < g_.batch; ++b) {
      starts_q_.push_back(
          paged.cu_seqlens_q ? read_int(*paged.cu_seqlens_q, tensors.cu_seqlens_q, b) : b);
      lengths_q_.push_back(paged_rows(paged, tensors.cu_seqlens_q, b));
      lengths_k_.push_back(read_int(paged.seq_lens, tensors.seq_lens, b));
    }
  }

  void place_key_lengths(const TensorSpec& spec, const void* data) {
    const std::vector<int64_t> steps = broadcast_steps(spec, 0);
    for (int64_t b = 0; b < g_.batch; ++b) {
      lengths_k_[b] = read_int(spec, data, lead_offset(b, steps));
    }
  }

  void place_bias(const TensorSpec& bias) {
    if (g_.ragged) {  // (sum n_i * m_i, H or 1): the block of a sequence follows those before it
      bias_step_h_ = bias.shape[1] == 1 ? 0 : 1;
      bias_step_k_ = bias.shape[1];
      int64_t rows = 0;
      for (int64_t b = 0; b < g_.batch; ++b) {
        bias_starts_.push_back(rows * bias.shape[1]);
        rows += lengths_q_[b] * lengths_k_[b];
      }
      return;
    }
    const std::vector<int64_t> steps = broadcast_steps(bias, 3);
    bias_step_h_ = steps[g_.num_lead];
    bias_step_q_ = steps[g_.num_lead + 1];
    bias_step_k_ = steps[g_.num_lead + 2];
    for (int64_t b = 0; b < g_.batch; ++b) bias_starts_.push_back(lead_offset(b, steps));
  }

  // Steps of a dense array of this shape, along the leading dimensions and `more` after them; 0
  // where it is broadcast.
  std::vector<int64_t> broadcast_steps(const TensorSpec& spec, int more) const {
    std::vector<int64_t> steps(g_.num_lead + more, 0);
    int64_t step = 1;
    for (int i = 1; i <= spec.rank; ++i) {
      if (spec.size(-i) != 1) steps[steps.size() - i] = step;
      step *= spec.size(-i);
    }
    return steps;
  }

  // The leading dimensions are one index, b, with the last of them fastest.
  int64_t lead_offset(int64_t b, const std::vector<int64_t>& steps) const {
    int64_t offset = 0;
    for (int i = g_.num_lead - 1; i >= 0; --i) {
      offset += b % g_.lead[i] * steps[i];
      b /= g_.lead[i];
    }
    return offset;
  }

  Geometry g_;
  std::vector<int64_t> lengths_q_, lengths_k_;  // by sequence
  std::vector<int64_t> starts_q_, starts_k_;    // packed: first token of each
  TensorSpec table_;                            // paged
  const void* table_data_ = nullptr;
  std::vector<int64_t> bias_starts_;
  int64_t bias_step_h_ = 0, bias_step_q_ = 0, bias_step_k_ = 0;
};

// A boolean mask is the bias it stands for.
Array load_bias(const std::optional<TensorSpec>& spec, const void* data) {
  Array bias = load(spec, data);
  if (spec && spec->dtype == DType::kBool) {
    for (double& x : bias) x = x != 0 ? 0 : -kInfinity;
  }
  return bias;
}

// The numbers of a cache, (blocks, page, H, D): what is stored, times a scale for all or one for
// each head.
Array scaled(Array cache, const Geometry& g, int64_t head_dim, const Array& scale) {
  for (size_t i = 0; i < cache.size() && !scale.empty(); ++i) {
    const size_t head = i / head_dim % g.heads_k;
    cache[i] *= scale.size() == 1 ? scale[0] : scale[head];
  }
  return cache;
}

// One key that a query row sees.
struct Seen {
  int64_t key;       // position in the sequence
  double score;      // softcap(scale * q k) + bias
  double cap_slope;  // derivative of softcap there,
  double cap_bend;   // and the second one
  double weight;     // softmax of the scores
  double kept;       // 0 where dropout drops the pair; what it is multiplied by where not
};

struct Row {
  std::vector<Seen> seen;
  double sink_weight = 0;  // what the sink takes of the softmax
  double lse = -kInfinity;
};

// How inputs move; empty where they do not.
struct Tangents {
  Array query, key, value, bias, sinks;

  Tangents(const AttentionProblem& problem, const AttentionTensors& tensors)
      : query(load(problem.tangent_query, tensors.tangent_query)),
        key(load(problem.tangent_key, tensors.tangent_key)),
        value(load(problem.tangent_value, tensors.tangent_value)),
        bias(load(problem.tangent_bias, tensors.tangent_bias)),
        sinks(load(problem.tangent_sinks, tensors.tangent_sinks)) {}
};

// How the scores of a row move with the inputs: of scale * q k, and in all.
struct Moves {
  Array scaled, score;
  double sink = 0;
  double lse = 0;  // the mean over the weights
};

class Oracle {
 public:
  Oracle(const AttentionProblem& problem, const AttentionTensors& tensors)
      : layout_(problem, tensors),
        g_(layout_.g()),
        query_(load(problem.query, tensors.query)),
        key_(load(problem.key, tensors.key)),
        value_(load(problem.value, tensors.value)),
        bias_(load_bias(problem.bias, tensors.bias)),
        sinks_(load(problem.sinks, tensors.sinks)),
        has_bias_(problem.bias.has_value()) {
    if (tensors.seed) seed_ = static_cast<uint64_t>(*static_cast<const int64_t*>(tensors.seed));
    if (!problem.paged) return;
    const Paged& paged = *problem.paged;
    key_ = scaled(key_, g_, g_.head_dim, load(paged.k_scale, tensors.k_scale));
    value_ = scaled(value_, g_, g_.head_dim_v, load(paged.v_scale, tensors.v_scale));
  }

  void forward(const AttentionProblem& problem, const AttentionTensors& tensors) const {
    // What a row without keys or sink, and a token of no sequence, has.
    Array out = filled(problem.out, 0);
    Array lse(out.size() / g_.head_dim_v, -kInfinity);
    for_each_row([&](int64_t b, int64_t h, int64_t i) {
      const Row row = softmax(b, h, i);
      const int64_t place = layout_.row_q(b, h, i);
      for (const Seen& s : row.seen) {
        if (s.kept == 0 && !std::isnan(s.weight)) continue;  // its value is never looked at
        add(&out[place * g_.head_dim_v], value_row(b, h, s.key), s.weight * s.kept, g_.head_dim_v);
      }
      lse[place] = row.lse;
    });
    store(problem.out, tensors.out, out);
    store(problem.lse, tensors.lse, lse);
  }

  void backward(const AttentionProblem& problem, const AttentionTensors& tensors) const {
    const Array grad_out = load(problem.grad_out, tensors.grad_out);
    const Array grad_lse = load(problem.grad_lse, tensors.grad_lse);
    Array grad_query(query_.size()), grad_key(key_.size()), grad_value(value_.size());
    Array grad_bias(bias_.size()), grad_sinks(sinks_.size());

    for_each_row([&](int64_t b, int64_t h, int64_t i) {
      const int64_t place = layout_.row_q(b, h, i);
      const double* d_out = grad_out.empty() ? nullptr : &grad_out[place * g_.head_dim_v];
      const Row row = softmax(b, h, i);

      // How the loss changes with each weight, and the mean of that: softmax passes on only the
      // difference. lse grows with every score by its weight, so its gradient adds to the
      // difference.
      Array d_weight(row.seen.size());
      double mean = 0;
      for (size_t n = 0; d_out && n < row.seen.size(); ++n) {
        const Seen& s = row.seen[n];
        if (s.kept == 0) continue;
        d_weight[n] = s.kept * dot(d_out, value_row(b, h, s.key), g_.head_dim_v);
        mean += s.weight * d_weight[n];
      }
      const double d_lse = grad_lse.empty() ? 0 : grad_lse[place];

      for (size_t n = 0; n < row.seen.size(); ++n) {
        const Seen& s = row.seen[n];
        const int64_t place_k = layout_.row_k(b, h / g_.group, s.key);
        const double d_score = s.weight * (d_weight[n] - mean + d_lse);
        const double d_dot = d_score * s.cap_slope * g_.scale;
        add(&grad_query[place * g_.head_dim], &key_[place_k * g_.head_dim], d_dot, g_.head_dim);
        add(&grad_key[place_k * g_.head_dim], &query_[place * g_.head_dim], d_dot, g_.head_dim);
        if (d_out && s.kept > 0) {
          add(&grad_value[place_k * g_.head_dim_v], d_out, s.weight * s.kept, g_.head_dim_v);
        }
        if (has_bias_) grad_bias[layout_.bias_element(b, h, i, s.key)] += d_score;
      }
      // A sink is the score of a key whose value is 0.
      if (sink(h) != -kInfinity) grad_sinks[h] += row.sink_weight * (d_lse - mean);
    });
    store(problem.grad_query, tensors.grad_query, grad_query);
    store(problem.grad_key, tensors.grad_key, grad_key);
    store(problem.grad_value, tensors.grad_value, grad_value);
    store(problem.grad_bias, tensors.grad_bias, grad_bias);
    store(problem.grad_sinks, tensors.grad_sinks, grad_sinks);
  }

  void tangent(const AttentionProblem& problem, const AttentionTensors& tensors) const {
    const Tangents tangents(problem, tensors);
    Array out = filled(problem.out, 0);
    Array lse(out.size() / g_.head_dim_v, 0);
    for_each_row([&](int64_t b, int64_t h, int64_t i) {
      const int64_t place = layout_.row_q(b, h, i);
      const Row row = softmax(b, h, i);
      const Moves moves = row_moves(row, tangents, b, h, i);
      for (size_t n = 0; n < row.seen.size(); ++n) {
        const Seen& s = row.seen[n];
        const double d_weight = s.weight * (moves.score[n] - moves.lse);
        add(&out[place * g_.head_dim_v], value_row(b, h, s.key), d_weight, g_.head_dim_v);
        if (tangents.value.empty()) continue;
        add(&out[place * g_.head_dim_v],
            &tangents.value[layout_.row_k(b, h / g_.group, s.key) * g_.head_dim_v], s.weight,
            g_.head_dim_v);
      }
      lse[place] = moves.lse;
    });
    store(problem.tangent_out, tensors.tangent_out, out);
    store(problem.tangent_lse, tensors.tangent_lse, lse);
  }

  // Gradients of what a row of tangent() adds to <grad_out, tangent_out> + <grad_lse, tangent_lse>,
  //   sum of weight * ((move - mean move) * d_weight + d_value_move) + d_lse * mean move
  // over the keys, d_weight being grad_out . v as in backward() and d_value_move grad_out . v'.
  void second(const AttentionProblem& problem, const AttentionTensors& tensors) const {
    const Tangents tangents(problem, tensors);
    const Array grad_out = load(problem.grad_out, tensors.grad_out);
    const Array grad_lse = load(problem.grad_lse, tensors.grad_lse);
    Array grad_query(query_.size()), grad_key(key_.size()), grad_value(value_.size());
    Array grad_bias(bias_.size()), grad_sinks(sinks_.size());

    for_each_row([&](int64_t b, int64_t h, int64_t i) {
      const int64_t place = layout_.row_q(b, h, i);
      const double* d_out = grad_out.empty() ? nullptr : &grad_out[place * g_.head_dim_v];
      const double d_lse = grad_lse.empty() ? 0 : grad_lse[place];
      const Row row = softmax(b, h, i);
      const Moves moves = row_moves(row, tangents, b, h, i);
      const size_t count = row.seen.size();

      Array d_weight(count), d_value_move(count);
      double mean_d_weight = 0;
      for (size_t n = 0; d_out && n < count; ++n) {
        const int64_t place_v = layout_.row_k(b, h / g_.group, row.seen[n].key) * g_.head_dim_v;
        d_weight[n] = dot(d_out, &value_[place_v], g_.head_dim_v);
        mean_d_weight += row.seen[n].weight * d_weight[n];
        if (!tangents.value.empty()) {
          d_value_move[n] = dot(d_out, &tangents.value[place_v], g_.head_dim_v);
        }
      }

      // By each weight, and the mean of that: softmax passes on only the difference.
      Array by_weight(count);
      const double by_sink_weight = (d_lse - mean_d_weight) * moves.sink;
      double mean = row.sink_weight * by_sink_weight;
      for (size_t n = 0; n < count; ++n) {
        by_weight[n] = (d_weight[n] - mean_d_weight + d_lse) * moves.score[n] -
                       d_weight[n] * moves.lse + d_value_move[n];
        mean += row.seen[n].weight * by_weight[n];
      }

      for (size_t n = 0; n < count; ++n) {
        const Seen& s = row.seen[n];
        const int64_t place_k = layout_.row_k(b, h / g_.group, s.key);
        const double d_move = s.weight * (d_weight[n] - mean_d_weight + d_lse);
        const double d_score = s.weight * (by_weight[n] - mean);
        const double d_dot =
            (d_score * s.cap_slope + d_move * s.cap_bend * moves.scaled[n]) * g_.scale;
        const double d_dot_move = d_move * s.cap_slope * g_.scale;
        double* d_query = &grad_query[place * g_.head_dim];
        double* d_key = &grad_key[place_k * g_.head_dim];
        add(d_query, &key_[place_k * g_.head_dim], d_dot, g_.head_dim);
        add(d_key, &query_[place * g_.head_dim], d_dot, g_.head_dim);
        if (!tangents.key.empty()) {
          add(d_query, &tangents.key[place_k * g_.head_dim], d_dot_move, g_.head_dim);
        }
        if (!tangents.query.empty()) {
          add(d_key, &tangents.query[place * g_.head_dim], d_dot_move, g_.head_dim);
        }
        if (d_out) {
          add(&grad_value[place_k * g_.head_dim_v], d_out, s.weight * (moves.score[n] - moves.lse),
              g_.head_dim_v);
        }
        if (has_bias_) grad_bias[layout_.bias_element(b, h, i, s.key)] += d_score;
      }
      if (sink(h) != -kInfinity) grad_sinks[h] += row.sink_weight * (by_sink_weight - mean);
    });
    store(problem.grad_query, tensors.grad_query, grad_query);
    store(problem.grad_key, tensors.grad_key, grad_key);
    store(problem.grad_value, tensors.grad_value, grad_value);
    store(problem.grad_bias, tensors.grad_bias, grad_bias);
    store(problem.grad_sinks, tensors.grad_sinks, grad_sinks);
  }

 private:
  // Calls visit(sequence, query head, position) for every query row.
  template <class Visit>
  void for_each_row(Visit&& visit) const {
    if (query_.empty()) return;
    for (int64_t b = 0; b < g_.batch; ++b) {
      for (int64_t h = 0; h < g_.heads_q; ++h) {
        for (int64_t i = 0; i < layout_.length_q(b); ++i) visit(b, h, i);
      }
    }
  }

  const double* value_row(int64_t b, int64_t query_head, int64_t j) const {
    return &value_[layout_.row_k(b, query_head / g_.group, j) * g_.head_dim_v];
  }

  // -inf where the head has none.
  double sink(int64_t h) const { return sinks_.empty() ? -kInfinity : sinks_[h]; }

  Row softmax(int64_t b, int64_t h, int64_t i) const {
    Row row;
    const double* q = &query_[layout_.row_q(b, h, i) * g_.head_dim];
    const KeyRange range =
        allowed_keys(i, layout_.length_q(b), layout_.length_k(b), g_.left, g_.right);
    for (int64_t j = range.begin; j < range.end; ++j) {
      const double bias = has_bias_ ? bias_[layout_.bias_element(b, h, i, j)] : 0;
      if (bias == -kInfinity) continue;  // a mask: this key is never looked at
      const double* k = &key_[layout_.row_k(b, h / g_.group, j) * g_.head_dim];
      double score = g_.scale * dot(q, k, g_.head_dim);
      double cap_slope = 1, cap_bend = 0;
      if (g_.softcap > 0) {
        const double x = score / g_.softcap;
        score = g_.softcap * std::tanh(x);
        cap_slope =
            1 / (std::cosh(x) * std::cosh(x));  // 1 - tanh^2 would cancel where it saturates
        cap_bend = -2 * std::tanh(x) * cap_slope / g_.softcap;
      }
      const bool kept = g_.dropped == 0 || dropout::keeps(seed_, g_.dropped, b, h, i, j);
      row.seen.push_back({j, score + bias, cap_slope, cap_bend, 0, kept ? g_.kept_scale : 0});
    }
    if (row.seen.empty() && sink(h) == -kInfinity) return row;

    double largest = sink(h);  // taken out of the exponent, so that nothing overflows
    for (const Seen& s : row.seen) largest = std::max(largest, s.score);
    double sum = std::exp(sink(h) - largest);
    for (const Seen& s : row.seen) sum += std::exp(s.score - largest);
    for (Seen& s : row.seen) s.weight = std::exp(s.score - largest) / sum;
    row.sink_weight = std::exp(sink(h) - largest) / sum;
    row.lse = largest + std::log(sum);
    return row;
  }

  Moves row_moves(const Row& row, const Tangents& tangents, int64_t b, int64_t h, int64_t i) const {
    Moves moves;
    const int64_t at_q = layout_.row_q(b, h, i) * g_.head_dim;
    for (const Seen& s : row.seen) {
      const int64_t at_k = layout_.row_k(b, h / g_.group, s.key) * g_.head_dim;
      double product = 0;
      if (!tangents.query.empty()) product += dot(&tangents.query[at_q], &key_[at_k], g_.head_dim);
      if (!tangents.key.empty()) product += dot(&query_[at_q], &tangents.key[at_k], g_.head_dim);
      moves.scaled.push_back(g_.scale * product);
      double move = s.cap_slope * moves.scaled.back();
      if (!tangents.bias.empty()) move += tangents.bias[layout_.bias_element(b, h, i, s.key)];
      moves.score.push_back(move);
      moves.lse += s.weight * move;
    }
    if (!tangents.sinks.empty() && sink(h) != -kInfinity) {
      moves.sink = tangents.sinks[h];
      moves.lse += row.sink_weight * moves.sink;
    }
    return moves;
  }

  Layout layout_;
  const Geometry& g_;
  Array query_, key_, value_, bias_, sinks_;
  bool has_bias_;
  uint64_t seed_ = 0;
};

}  // namespace

Status run_reference(const AttentionProblem& problem, const AttentionTensors& tensors) {
  if (Status status = check(problem); !status.ok()) return status;
  if (problem.device.type != DeviceType::kCpu) {
    return unsupported("the reference runs on host memory only");
  }
  if (Status status = check_lengths(problem, tensors); !status.ok()) return status;
  return with_memory([&] {
    const Oracle oracle(problem, tensors);
    switch (problem.pass) {
      case Pass::kForward:
        return oracle.forward(problem, tensors);
      case Pass::kBackward:
        return oracle.backward(problem, tensors);
      case Pass::kTangent:
        return oracle.tangent(problem, tensors);
      case Pass::kSecond:
        return oracle.second(problem, tensors);
    }
  });
}

}  // namespace flashmoe
