// Random problems over the pages of a cache, with memory behind them: pages that no sequence has
// are NaN, and entries of the table that no sequence needs are anything.
#pragma once

#include <limits>
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

struct PagedCase {
  AttentionOptions options;
  int64_t max_seqlen_q = 0, max_seqlen_k = 0;
  Tensor query, key, value, block_table, seq_lens, cu_seqlens_q, k_scale, v_scale, sinks;
  Tensor out, lse;

  DType dtype() const { return query.spec().dtype; }
  int64_t sequences() const { return seq_lens.spec().shape[0]; }

  AttentionProblem problem(Pass pass, int num_threads = 1) const {
    AttentionProblem p;
    p.options = options;
    p.pass = pass;
    p.device = device_with_threads(num_threads);
    p.query = query.spec();
    p.key = key.spec();
    p.value = value.spec();
    p.paged = flashmoe::Paged{block_table.spec(), seq_lens.spec(), maybe_spec(cu_seqlens_q),
                              max_seqlen_q,       max_seqlen_k,    maybe_spec(k_scale),
                              maybe_spec(v_scale)};
    p.sinks = maybe_spec(sinks);
    p.out = out.spec();
    p.lse = maybe_spec(lse);
    return p;
  }

  AttentionTensors tensors() const {
    AttentionTensors t;
    t.query = query.data();
    t.key = key.data();
    t.value = value.data();
    t.block_table = block_table.data();
    t.seq_lens = seq_lens.data();
    t.cu_seqlens_q = cu_seqlens_q.data();
    t.k_scale = k_scale.data();
    t.v_scale = v_scale.data();
    t.sinks = sinks.data();
    t.out = out.data();
    t.lse = lse.data();
    return t;
  }

  using Named = std::pair<const char*, Tensor*>;
  std::vector<Named> results(Pass) { return {{"out", &out}, {"lse", &lse}}; }
};

inline std::string describe(const PagedCase& c) {
  std::ostringstream s;
  s << flashmoe::dtype_name(c.dtype()) << " cache " << flashmoe::dtype_name(c.key.spec().dtype);
  s << describe("query", c.query) << describe("key", c.key) << describe("value", c.value);
  s << describe("block_table", c.block_table);
  s << describe_integers("seq_lens", c.seq_lens);
  s << describe_integers("cu_seqlens_q", c.cu_seqlens_q);
  s << describe("k_scale", c.k_scale) << describe("v_scale", c.v_scale);
  s << describe("sinks", c.sinks);
  if (c.options.causal) s << " causal";
  s << " window " << c.options.window_left << " " << c.options.window_right;
  if (c.options.scale) s << " scale " << *c.options.scale;
  if (c.options.softcap > 0) s << " softcap " << c.options.softcap;
  return s.str();
}

// The way a case is made: which lengths to draw, and how large a case may become.
struct PagedRules {
  std::vector<int64_t> queries = {0, 1, 1, 1, 1, 2, 3, 7, 17};
  std::vector<int64_t> keys = {0, 1, 2, 15, 16, 17, 79, 80, 81, 131, 511, 512, 513, 800, 1537};
  std::vector<int64_t> head_dims = {1, 3, 8, 17, 32, 64, 100, 128, 256, 512};
  std::vector<int64_t> pages = {1, 2, 7, 16, 64, 128};
  double most_products = 1e6;
};

class PagedCaseMaker {
 public:
  PagedCaseMaker(Random& random, const PagedRules& rules) : random_(random), rules_(rules) {}

  PagedCase make() {
    do {
      draw_sizes();
    } while (products() > rules_.most_products);
    PagedCase c;
    make_options(c);
    make_tokens(c);
    make_cache(c);
    return c;
  }

 private:
  int64_t pick(const std::vector<int64_t>& from) {
    return from[uniform(random_, 0, from.size() - 1)];
  }

  double products() const {
    double pairs = 0;
    for (size_t i = 0; i < rows_.size(); ++i) pairs += double(rows_[i]) * keys_[i];
    return pairs * heads_q_ * (dim_ + dim_v_);
  }

  void draw_sizes() {
    const DType all[] = {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16};
    dtype_ = all[uniform(random_, 0, 3)];
    fp8_ = chance(random_, 0.3);
    ragged_ = chance(random_, 0.6);
    heads_k_ = uniform(random_, 1, 3);
    heads_q_ = heads_k_ * (chance(random_, 0.1) ? 16 : uniform(random_, 1, 7));
    dim_ = pick(rules_.head_dims);
    dim_v_ = chance(random_, 0.7) ? dim_ : pick(rules_.head_dims);
    page_ = pick(rules_.pages);
    rows_.clear();
    keys_.clear();
    const int64_t batch = uniform(random_, 0, 4);
    for (int64_t i = 0; i < batch; ++i) {
      rows_.push_back(ragged_ ? pick(rules_.queries) : 1);
      keys_.push_back(pick(rules_.keys));
    }
  }

  Tensor empty(DType dtype, const std::vector<int64_t>& shape, bool only_read) {
    return Tensor(dtype, shape, random_layout(random_, static_cast<int>(shape.size()), only_read));
  }
  Tensor normal(DType dtype, const std::vector<int64_t>& shape, double spread) {
    Tensor tensor = empty(dtype, shape, true);
    tensor.set(random_values(random_, element_count(shape), spread));
    return tensor;
  }
  Tensor integers(const std::vector<int64_t>& shape, const Values& values) {
    Tensor tensor = empty(chance(random_, 0.5) ? DType::kInt32 : DType::kInt64, shape, false);
    tensor.set(values);
    return tensor;
  }

  int64_t random_window() {
    if (chance(random_, 0.05)) return std::numeric_limits<int64_t>::max() - uniform(random_, 0, 5);
    return chance(random_, 0.5) ? uniform(random_, 0, 8) : uniform(random_, 0, 600);
  }

  void make_options(PagedCase& c) {
    c.options.causal = chance(random_, 0.6);
    if (chance(random_, 0.3)) c.options.window_left = random_window();
    if (chance(random_, 0.2)) c.options.window_right = random_window();
    if (chance(random_, 0.2))
      c.options.scale = std::uniform_real_distribution<double>(-1, 1)(random_);
    if (chance(random_, 0.25))
      c.options.softcap = std::uniform_real_distribution<double>(0.5, 20)(random_);
  }

  void make_tokens(PagedCase& c) {
    const int64_t batch = static_cast<int64_t>(rows_.size());
    int64_t tokens = batch;
    c.max_seqlen_q = 1;
    if (ragged_) {
      Values ends = {0};
      for (int64_t n : rows_) {
        ends.push_back(ends.back() + static_cast<double>(n));
        c.max_seqlen_q = std::max(c.max_seqlen_q, n);
      }
      tokens = static_cast<int64_t>(ends.back()) + (chance(random_, 0.3) ? 3 : 0);
      c.cu_seqlens_q = integers({batch + 1}, ends);
    }
    for (int64_t n : keys_) c.max_seqlen_k = std::max(c.max_seqlen_k, n);
    if (chance(random_, 0.3)) c.max_seqlen_q += uniform(random_, 1, 200);
    if (chance(random_, 0.3)) c.max_seqlen_k += uniform(random_, 1, 5000);
    c.seq_lens = integers({batch}, Values(keys_.begin(), keys_.end()));
    c.query = normal(dtype_, {tokens, heads_q_, dim_}, chance(random_, 0.1) ? 20 : 1);
    if (chance(random_, 0.4)) {
      c.sinks = normal(chance(random_, 0.5) ? dtype_ : DType::kFloat32, {heads_q_}, 3);
      Values sinks = c.sinks.values();
      if (chance(random_, 0.2)) sinks[0] = -std::numeric_limits<double>::infinity();
      c.sinks.set(sinks);
    }
    c.out = empty(dtype_, {tokens, heads_q_, dim_v_}, false);
    const DType lse = dtype_ == DType::kFloat64 ? dtype_ : DType::kFloat32;
    c.lse = empty(lse, {tokens, heads_q_}, false);
  }

  Tensor cache(const std::vector<int64_t>& shape, const std::vector<bool>& used) {
    Tensor tensor = empty(fp8_ ? DType::kFloat8E4M3 : dtype_, shape, false);
    const int64_t row = shape[2] * shape[3];
    Values values = random_values(random_, tensor.count());
    for (size_t i = 0; i < values.size(); ++i) {
      if (!used[i / row]) values[i] = std::numeric_limits<double>::quiet_NaN();
    }
    tensor.set(values);
    return tensor;
  }

  // Blocks are handed out in any order, and some to nobody.
  void make_cache(PagedCase& c) {
    const int64_t batch = static_cast<int64_t>(rows_.size());
    int64_t needed = 0, entries = 0;
    for (int64_t n : keys_) {
      needed += (n + page_ - 1) / page_;
      entries = std::max(entries, (n + page_ - 1) / page_);
    }
    entries += uniform(random_, 0, 3);
    const int64_t blocks = needed + uniform(random_, 0, 3);
    std::vector<int64_t> order(blocks);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random_);
    std::vector<bool> used(blocks * page_);
    const double garbage[] = {-1, -7, double(blocks), 1 << 30, -2147483648., 2147483647.};
    Values table(batch * entries);
    int64_t next = 0;
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t j = 0; j < keys_[b]; ++j) {
        if (j % page_ == 0) table[b * entries + j / page_] = static_cast<double>(order[next++]);
        used[static_cast<int64_t>(table[b * entries + j / page_]) * page_ + j % page_] = true;
      }
    }
    // What no query of the sequence sees may be anything, before a window and past the last key.
    for (int64_t b = 0; b < batch; ++b) {
      const int64_t position = keys_[b] - rows_[b];  // of the first query
      const int64_t left = c.options.window_left;
      for (int64_t n = 0; n < entries; ++n) {
        const bool before = left >= 0 && left < position - ((n + 1) * page_ - 1);
        const bool past = n * page_ >= keys_[b] || rows_[b] == 0;
        if (before || past) table[b * entries + n] = garbage[uniform(random_, 0, 5)];
      }
    }
    c.block_table = integers({batch, entries}, table);
    c.key = cache({blocks, page_, heads_k_, dim_}, used);
    c.value = cache({blocks, page_, heads_k_, dim_v_}, used);
    for (Tensor* scale : {&c.k_scale, &c.v_scale}) {
      if (!fp8_ || chance(random_, 0.3)) continue;
      const bool by_head = chance(random_, 0.5);
      *scale = empty(DType::kFloat32,
                     by_head ? std::vector<int64_t>{heads_k_} : std::vector<int64_t>{}, true);
      Values values(by_head ? heads_k_ : 1);
      for (double& x : values) x = std::uniform_real_distribution<double>(0.1, 2)(random_);
      scale->set(values);
    }
  }

  Random& random_;
  const PagedRules& rules_;
  DType dtype_ = DType::kFloat32;
  bool fp8_ = false, ragged_ = false;
  int64_t heads_q_ = 0, heads_k_ = 0, dim_ = 0, dim_v_ = 0, page_ = 0;
  std::vector<int64_t> rows_, keys_;
};

inline PagedCase random_paged_case(Random& random, const PagedRules& rules = {}) {
  return PagedCaseMaker(random, rules).make();
}

// A cache as dense float64, with its scales multiplied in.
inline Tensor unscaled(const Tensor& cache, const Tensor& scale) {
  Tensor result = dense_copy(cache, DType::kFloat64);
  if (!scale) return result;
  const Values scales = scale.values();
  Values values = result.values();
  const int64_t dim = cache.spec().size(3), heads = cache.spec().size(2);
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] *= scales[scales.size() == 1 ? 0 : i / dim % heads];
  }
  result.set(values);
  return result;
}

// The same problem in float64, dense and without scales. Integers are shared by copying.
inline PagedCase float64_twin(const PagedCase& c) {
  PagedCase twin;
  twin.options = c.options;
  twin.max_seqlen_q = c.max_seqlen_q;
  twin.max_seqlen_k = c.max_seqlen_k;
  twin.query = dense_copy(c.query, DType::kFloat64);
  twin.key = unscaled(c.key, c.k_scale);
  twin.value = unscaled(c.value, c.v_scale);
  twin.block_table = dense_copy(c.block_table, DType::kInt64);
  twin.seq_lens = dense_copy(c.seq_lens, DType::kInt64);
  twin.cu_seqlens_q = dense_copy(c.cu_seqlens_q, DType::kInt64);
  twin.sinks = dense_copy(c.sinks, DType::kFloat64);
  twin.out = Tensor(DType::kFloat64, c.out.shape());
  twin.lse = Tensor(DType::kFloat64, c.lse.shape());
  return twin;
}

}  // namespace testing
