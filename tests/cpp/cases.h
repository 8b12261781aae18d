// Random attention problems with memory behind them, over every option there is, and what the
// oracle says about them.
#pragma once

#include <cmath>
#include <limits>
#include <optional>
#include <sstream>
#include <string>
#include <utility>

#include "flashmoe/attention.h"
#include "tensors.h"

namespace testing {

using flashmoe::AttentionOptions;
using flashmoe::AttentionProblem;
using flashmoe::AttentionTensors;
using flashmoe::Pass;

constexpr double kInf = std::numeric_limits<double>::infinity();

// A bias without a gradient.
inline bool is_mask(const Tensor& bias) { return bias && bias.spec().dtype == DType::kBool; }

// A problem and a tensor for each of its specs; problem() fills in those of the tensors there are.
struct Case {
  AttentionOptions options;
  int64_t max_seqlen_q = 0, max_seqlen_k = 0;  // of a ragged batch
  Tensor query, key, value, bias, sinks, key_lengths, cu_seqlens_q, cu_seqlens_k, seed;
  Tensor out, lse, grad_out, grad_lse, grad_query, grad_key, grad_value, grad_bias, grad_sinks;

  DType dtype() const { return query.spec().dtype; }
  bool ragged() const { return static_cast<bool>(cu_seqlens_q); }

  AttentionProblem problem(Pass pass, int num_threads = 1) const {
    AttentionProblem p;
    p.options = options;
    p.pass = pass;
    p.device = device_with_threads(num_threads);
    p.query = query.spec();
    p.key = key.spec();
    p.value = value.spec();
    p.bias = maybe_spec(bias);
    p.sinks = maybe_spec(sinks);
    p.key_lengths = maybe_spec(key_lengths);
    if (ragged()) {
      p.ragged = {cu_seqlens_q.spec(), cu_seqlens_k.spec(), max_seqlen_q, max_seqlen_k};
    }
    p.seed = maybe_spec(seed);
    p.out = out.spec();
    p.lse = maybe_spec(lse);
    if (pass == Pass::kForward) return p;
    p.grad_out = maybe_spec(grad_out);
    p.grad_lse = maybe_spec(grad_lse);
    p.grad_query = maybe_spec(grad_query);
    p.grad_key = maybe_spec(grad_key);
    p.grad_value = maybe_spec(grad_value);
    p.grad_bias = maybe_spec(grad_bias);
    p.grad_sinks = maybe_spec(grad_sinks);
    return p;
  }

  AttentionTensors tensors() const {
    AttentionTensors t;
    t.query = query.data();
    t.key = key.data();
    t.value = value.data();
    t.bias = bias.data();
    t.sinks = sinks.data();
    t.key_lengths = key_lengths.data();
    t.cu_seqlens_q = cu_seqlens_q.data();
    t.cu_seqlens_k = cu_seqlens_k.data();
    t.seed = seed.data();
    t.out = out.data();
    t.lse = lse.data();
    t.grad_out = grad_out.data();
    t.grad_lse = grad_lse.data();
    t.grad_query = grad_query.data();
    t.grad_key = grad_key.data();
    t.grad_value = grad_value.data();
    t.grad_bias = grad_bias.data();
    t.grad_sinks = grad_sinks.data();
    return t;
  }

  using Named = std::pair<const char*, Tensor*>;
  std::vector<Named> inputs() {
    return {{"query", &query}, {"key", &key},           {"value", &value},      {"bias", &bias},
            {"sinks", &sinks}, {"grad_out", &grad_out}, {"grad_lse", &grad_lse}};
  }
  std::vector<Named> results(Pass pass) {
    if (pass == Pass::kForward) return {{"out", &out}, {"lse", &lse}};
    return {{"grad_query", &grad_query},
            {"grad_key", &grad_key},
            {"grad_value", &grad_value},
            {"grad_bias", &grad_bias},
            {"grad_sinks", &grad_sinks}};
  }
};

// "float16 (2, 4, 17, 8) keys (2, 2, 33, 8) ..." enough to rebuild it by hand.
inline std::string describe(const Case& c) {
  std::ostringstream s;
  s << flashmoe::dtype_name(c.dtype());
  s << describe("query", c.query) << describe("key", c.key) << describe("value", c.value);
  s << describe("bias", c.bias);
  if (c.bias) s << " bias " << flashmoe::dtype_name(c.bias.spec().dtype);
  s << describe("sinks", c.sinks);
  if (c.sinks) s << " sinks " << flashmoe::dtype_name(c.sinks.spec().dtype);
  s << describe_integers("key_lengths", c.key_lengths);
  s << describe_integers("cu_seqlens_q", c.cu_seqlens_q);
  s << describe_integers("cu_seqlens_k", c.cu_seqlens_k);
  if (c.options.causal) s << " causal";
  s << " window " << c.options.window_left << " " << c.options.window_right;
  if (c.options.scale) s << " scale " << *c.options.scale;
  if (c.options.softcap > 0) s << " softcap " << c.options.softcap;
  if (c.seed) s << " dropout " << c.options.dropout_p << describe_integers("seed", c.seed);
  s << (c.grad_out ? "" : " no") << " grad_out" << (c.grad_lse ? "" : " no") << " grad_lse";
  return s.str();
}

// The way a case is made: which lengths to draw, and how large a case may become.
struct CaseRules {
  std::vector<int64_t> lengths = {0, 1, 2, 3, 7, 15, 16, 17, 31, 37, 95, 96, 97, 131};
  std::vector<int64_t> head_dims = {1,  2,  3,  5,  7,  8,   12,  16, 17,
                                    24, 32, 33, 48, 64, 100, 128, 256};
  double most_products = 2e6;  // multiplications of the forward pass
  std::optional<DType> dtype;  // any
};

class CaseMaker {
 public:
  CaseMaker(Random& random, const CaseRules& rules) : random_(random), rules_(rules) {}

  Case make() {
    do {
      draw_sizes();
    } while (products() > rules_.most_products);
    Case c;
    make_inputs(c);
    make_options(c);
    if (chance(random_, 0.5)) make_bias(c);
    make_results(c);
    if (chance(random_, 0.3)) make_sinks(c);
    return c;
  }

 private:
  int64_t pick(const std::vector<int64_t>& from) {
    return from[uniform(random_, 0, from.size() - 1)];
  }
  int64_t pick_length() { return pick(rules_.lengths); }

  double products() const {
    double pairs = 0;
    for (size_t i = 0; i < lengths_q_.size(); ++i) pairs += double(lengths_q_[i]) * lengths_k_[i];
    return pairs * heads_q_ * (dim_ + dim_v_);
  }

  void draw_sizes() {
    const DType all[] = {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16};
    dtype_ = rules_.dtype ? *rules_.dtype : all[uniform(random_, 0, 3)];
    ragged_ = chance(random_, 0.3);
    heads_k_ = uniform(random_, 1, 3);
    heads_q_ = heads_k_ * uniform(random_, 1, 3);
    dim_ = pick(rules_.head_dims);
    dim_v_ = chance(random_, 0.7) ? dim_ : pick(rules_.head_dims);
    lead_.clear();
    lengths_q_.clear();
    lengths_k_.clear();
    int64_t batch = 0;
    if (ragged_) {
      batch = uniform(random_, 0, 5);
    } else {
      batch = 1;
      const int64_t num_lead = chance(random_, 0.7) ? 1 : uniform(random_, 2, 5);
      for (int i = 0; i < num_lead; ++i) {
        lead_.push_back(chance(random_, 0.03) ? 0 : uniform(random_, 1, i == 0 ? 3 : 2));
        batch *= lead_.back();
      }
      len_q_ = pick_length();
      len_k_ = chance(random_, 0.3) ? len_q_ : pick_length();
    }
    for (int64_t i = 0; i < batch; ++i) {
      lengths_q_.push_back(ragged_ ? pick_length() : len_q_);
      lengths_k_.push_back(ragged_ ? (chance(random_, 0.5) ? lengths_q_[i] : pick_length())
                                   : len_k_);
    }
  }

  // (..., H, S, D), or (T, H, D).
  std::vector<int64_t> shape(int64_t heads, int64_t length,
                             std::initializer_list<int64_t> last) const {
    std::vector<int64_t> result = lead_;
    if (ragged_) {
      result.insert(result.end(), {length, heads});
    } else {
      result.insert(result.end(), {heads, length});
    }
    result.insert(result.end(), last);
    return result;
  }

  Tensor empty(DType dtype, const std::vector<int64_t>& shape, bool only_read) {
    return Tensor(dtype, shape, random_layout(random_, static_cast<int>(shape.size()), only_read));
  }
  Tensor normal(DType dtype, const std::vector<int64_t>& shape, double spread = 1) {
    Tensor tensor = empty(dtype, shape, true);
    tensor.set(random_values(random_, element_count(shape), spread));
    return tensor;
  }
  Tensor integers(DType dtype, const std::vector<int64_t>& shape, const Values& values) {
    Layout layout = random_layout(random_, static_cast<int>(shape.size()), false);
    Tensor tensor(dtype, shape, layout);
    tensor.set(values);
    return tensor;
  }

  void make_inputs(Case& c) {
    const DType int_dtype = chance(random_, 0.5) ? DType::kInt32 : DType::kInt64;
    if (ragged_) {
      c.cu_seqlens_q = cu_seqlens(int_dtype, lengths_q_, &len_q_, &c.max_seqlen_q);
      c.cu_seqlens_k = cu_seqlens(int_dtype, lengths_k_, &len_k_, &c.max_seqlen_k);
    } else if (chance(random_, 0.3)) {
      make_key_lengths(c, int_dtype);
    }
    const double sharpness = chance(random_, 0.1) ? 20 : 1;  // of the softmax
    c.query = normal(dtype_, shape(heads_q_, len_q_, {dim_}), sharpness);
    c.key = normal(dtype_, shape(heads_k_, len_k_, {dim_}));
    c.value = normal(dtype_, shape(heads_k_, len_k_, {dim_v_}));
  }

  // Sometimes with tokens after the last sequence, and a maximum larger than any.
  Tensor cu_seqlens(DType dtype, const std::vector<int64_t>& lengths, int64_t* tokens,
                    int64_t* most) {
    Values ends = {0};
    *most = 0;
    for (int64_t n : lengths) {
      ends.push_back(ends.back() + static_cast<double>(n));
      *most = std::max(*most, n);
    }
    *tokens =
        static_cast<int64_t>(ends.back()) + (chance(random_, 0.3) ? uniform(random_, 1, 9) : 0);
    if (chance(random_, 0.3)) *most += uniform(random_, 1, 200);
    return integers(dtype, {static_cast<int64_t>(ends.size())}, ends);
  }

  void make_key_lengths(Case& c, DType dtype) {
    std::vector<int64_t> shape(lead_.begin() + uniform(random_, 0, lead_.size()), lead_.end());
    for (int64_t& size : shape) {
      if (chance(random_, 0.2)) size = 1;
    }
    Values lengths(element_count(shape));
    for (double& n : lengths)
      n = static_cast<double>(chance(random_, 0.3) ? len_k_ : uniform(random_, 0, len_k_));
    c.key_lengths = integers(dtype, shape, lengths);
  }

  int64_t random_window() {
    if (chance(random_, 0.05)) return std::numeric_limits<int64_t>::max() - uniform(random_, 0, 5);
    return chance(random_, 0.5) ? uniform(random_, 0, 8) : uniform(random_, 0, 140);
  }

  void make_options(Case& c) {
    c.options.causal = chance(random_, 0.35);
    if (chance(random_, 0.25)) c.options.window_left = random_window();
    if (chance(random_, 0.25)) c.options.window_right = random_window();
    if (chance(random_, 0.2))
      c.options.scale = std::uniform_real_distribution<double>(-1, 1)(random_);
    if (chance(random_, 0.25))
      c.options.softcap = std::uniform_real_distribution<double>(0.5, 20)(random_);
    c.options.deterministic = chance(random_, 0.5);
    if (chance(random_, 0.25)) {
      const double p[] = {0.1, 0.5, 0.9, 1, 1e-9, 1 - 1e-9};
      c.options.dropout_p = p[uniform(random_, 0, 5)];
      c.seed = integers(DType::kInt64, {}, {static_cast<double>(uniform(random_, -1e9, 1e9))});
    }
  }

  void make_bias(Case& c) {
    std::vector<int64_t> shape;
    if (ragged_) {
      int64_t rows = 0;
      for (size_t i = 0; i < lengths_q_.size(); ++i) rows += lengths_q_[i] * lengths_k_[i];
      shape = {rows, chance(random_, 0.5) ? heads_q_ : 1};
    } else {
      shape = lead_;
      shape.insert(shape.end(), {heads_q_, len_q_, len_k_});
      if (chance(random_, 0.3))
        shape.erase(shape.begin(), shape.begin() + uniform(random_, 0, shape.size()));
      for (int64_t& size : shape) {
        if (chance(random_, 0.25)) size = 1;
      }
    }
    const bool mask = chance(random_, 0.2);
    c.bias = empty(mask                   ? DType::kBool
                   : chance(random_, 0.5) ? dtype_
                                          : DType::kFloat32,
                   shape, true);
    Values values = random_values(random_, element_count(shape));
    if (chance(random_, 0.4)) {
      const double hidden = chance(random_, 0.2) ? 0.95 : 0.1;  // some rows end up without a key
      for (double& x : values) x = chance(random_, hidden) ? -kInf : x;
    }
    if (mask) {
      for (double& x : values) x = x != -kInf;
    }
    c.bias.set(values);
  }

  // Of some heads -inf, which is none; of all sometimes so large that they take the whole softmax.
  void make_sinks(Case& c) {
    c.sinks = empty(chance(random_, 0.5) ? dtype_ : DType::kFloat32, {heads_q_}, true);
    Values values = random_values(random_, heads_q_, 2);
    const double offset = chance(random_, 0.2) ? 200 : 0;
    for (double& x : values) x = chance(random_, 0.1) ? -kInf : x + offset;
    c.sinks.set(values);
    if (!chance(random_, 0.15)) c.grad_sinks = empty(c.sinks.spec().dtype, {heads_q_}, false);
  }

  void make_results(Case& c) {
    const DType lse_dtype = dtype_ == DType::kFloat64 ? dtype_ : DType::kFloat32;
    const std::vector<int64_t> out = shape(heads_q_, len_q_, {dim_v_}),
                               lse = shape(heads_q_, len_q_, {});
    c.out = empty(dtype_, out, false);
    c.lse = empty(lse_dtype, lse, false);
    if (!chance(random_, 0.1)) c.grad_out = normal(dtype_, out);
    if (chance(random_, 0.4)) c.grad_lse = normal(lse_dtype, lse);
    const auto gradient = [&](Tensor& grad, const Tensor& of) {
      if (of && !chance(random_, 0.15)) grad = empty(of.spec().dtype, of.shape(), false);
    };
    gradient(c.grad_query, c.query);
    gradient(c.grad_key, c.key);
    gradient(c.grad_value, c.value);
    if (!is_mask(c.bias)) gradient(c.grad_bias, c.bias);
  }

  Random& random_;
  const CaseRules& rules_;
  DType dtype_ = DType::kFloat32;
  bool ragged_ = false;
  int64_t heads_q_ = 0, heads_k_ = 0, dim_ = 0, dim_v_ = 0;
  int64_t len_q_ = 0, len_k_ = 0;  // ragged: all tokens
  std::vector<int64_t> lead_, lengths_q_, lengths_k_;
};

inline Case random_case(Random& random, const CaseRules& rules = {}) {
  return CaseMaker(random, rules).make();
}

// The same problem in float64 and dense, with every result asked for. Integers are shared by
// copying.
inline Case float64_twin(const Case& c) {
  const DType f64 = DType::kFloat64;
  Case twin;
  twin.options = c.options;
  twin.max_seqlen_q = c.max_seqlen_q;
  twin.max_seqlen_k = c.max_seqlen_k;
  twin.query = dense_copy(c.query, f64);
  twin.key = dense_copy(c.key, f64);
  twin.value = dense_copy(c.value, f64);
  twin.bias = dense_copy(c.bias, is_mask(c.bias) ? DType::kBool : f64);
  twin.sinks = dense_copy(c.sinks, f64);
  if (c.key_lengths) twin.key_lengths = dense_copy(c.key_lengths, DType::kInt64);
  if (c.ragged()) {
    twin.cu_seqlens_q = dense_copy(c.cu_seqlens_q, DType::kInt64);
    twin.cu_seqlens_k = dense_copy(c.cu_seqlens_k, DType::kInt64);
  }
  if (c.seed) twin.seed = dense_copy(c.seed, DType::kInt64);
  twin.out = Tensor(f64, c.out.shape());
  std::vector<int64_t> rows = c.out.shape();
  rows.pop_back();
  twin.lse = Tensor(f64, rows);
  twin.grad_out = dense_copy(c.grad_out, f64);
  twin.grad_lse = dense_copy(c.grad_lse, f64);
  twin.grad_query = Tensor(f64, c.query.shape());
  twin.grad_key = Tensor(f64, c.key.shape());
  twin.grad_value = Tensor(f64, c.value.shape());
  if (c.bias && !is_mask(c.bias)) twin.grad_bias = Tensor(f64, c.bias.shape());
  if (c.sinks) twin.grad_sinks = Tensor(f64, c.sinks.shape());
  return twin;
}

}  // namespace testing
