// The oracle itself: against the definition written out once more, against finite differences, and
// against itself where two problems must have one answer.
#include <cmath>

#include "attention/dropout.h"
#include "cases.h"
#include "differences.h"
#include "second_cases.h"
#include "testing.h"

using namespace testing;

namespace {

template <class Case>
void run(const Case& c, Pass pass) {
  const flashmoe::Status status = flashmoe::run_reference(c.problem(pass), c.tensors());
  CHECK(status.ok(), status.message());
}

// What every legal problem of this size can be, small enough to differentiate element by element.
CaseRules small_rules() {
  CaseRules rules;
  rules.lengths = {0, 1, 2, 3, 4, 5};
  rules.head_dims = {1, 2, 3};
  rules.most_products = 600;
  rules.dtype = DType::kFloat64;
  return rules;
}

double dot(const Values& a, const Values& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::isfinite(b[i])) sum += a[i] * b[i];  // lse of a row without keys is -inf, and constant
  }
  return sum;
}

// The number that grad_out and grad_lse are gradients of.
double loss(const Case& c) {
  run(c, Pass::kForward);
  double sum = 0;
  if (c.grad_out) sum += dot(c.grad_out.values(), c.out.values());
  if (c.grad_lse) sum += dot(c.grad_lse.values(), c.lse.values());
  return sum;
}

// The number whose gradient the second pass gives.
double tangent_loss(const SecondCase& c) {
  run(c, Pass::kTangent);
  double sum = 0;
  if (c.grad_out) sum += dot(c.grad_out.values(), c.tangent_out.values());
  if (c.grad_lse) sum += dot(c.grad_lse.values(), c.tangent_lse.values());
  return sum;
}

// How `result` moves when the inputs go `step` along their tangents.
Values moved(SecondCase& c, const Tensor& result, double step) {
  const auto move = [&](Tensor& input, const Tensor& tangent, double by) {
    if (!tangent) return;
    Values values = input.values();
    const Values along = tangent.values();
    for (size_t i = 0; i < values.size(); ++i) values[i] += by * along[i];
    input.set(values);
  };
  const auto move_all = [&](double by) {
    move(c.query, c.tangent_query, by);
    move(c.key, c.tangent_key, by);
    move(c.value, c.tangent_value, by);
    move(c.bias, c.tangent_bias, by);
    move(c.sinks, c.tangent_sinks, by);
  };
  move_all(step);
  run(c, Pass::kForward);
  move_all(-step);
  return result.values();
}

}  // namespace

TEST(tangents_match_finite_differences) {
  constexpr double kStep = 1e-5;
  for (int i = 0; i < 150; ++i) {
    Random random(40000 + i);
    SecondCase c = float64_twin(random_second_case(random, small_rules()));
    const Note note("case ", i, " ", describe(c));
    run(c, Pass::kTangent);
    for (const auto& [result, tangent] :
         {std::pair{&c.out, &c.tangent_out}, std::pair{&c.lse, &c.tangent_lse}}) {
      const Values above = moved(c, *result, kStep), below = moved(c, *result, -kStep);
      const Values got = tangent->values();
      for (size_t n = 0; n < got.size(); ++n) {
        const double want = std::isfinite(above[n]) ? (above[n] - below[n]) / (2 * kStep) : 0;
        CHECK(std::fabs(got[n] - want) < 1e-7 * (1 + std::fabs(want)), n, got[n], want);
      }
    }
  }
}

TEST(second_derivatives_match_finite_differences) {
  for (int i = 0; i < 150; ++i) {
    Random random(50000 + i);
    SecondCase c = float64_twin(random_second_case(random, small_rules()));
    const Note note("case ", i, " ", describe(c));
    run(c, Pass::kSecond);
    check_gradient("grad_query", tangent_loss, c, c.query, c.grad_query);
    check_gradient("grad_key", tangent_loss, c, c.key, c.grad_key);
    check_gradient("grad_value", tangent_loss, c, c.value, c.grad_value);
    check_gradient("grad_bias", tangent_loss, c, c.bias, c.grad_bias);
    check_gradient("grad_sinks", tangent_loss, c, c.sinks, c.grad_sinks);
  }
}

TEST(gradients_match_finite_differences) {
  for (int i = 0; i < 150; ++i) {
    Random random(i);
    Case c =
        float64_twin(random_case(random, small_rules()));  // dense, so that each element is its own
    const Note note("case ", i, " ", describe(c));
    run(c, Pass::kForward);
    run(c, Pass::kBackward);
    check_gradient("grad_query", loss, c, c.query, c.grad_query);
    check_gradient("grad_key", loss, c, c.key, c.grad_key);
    check_gradient("grad_value", loss, c, c.value, c.grad_value);
    check_gradient("grad_bias", loss, c, c.bias, c.grad_bias);
    check_gradient("grad_sinks", loss, c, c.sinks, c.grad_sinks);
  }
}

// One head, every mask option, written straight from the definition: which keys are seen is decided
// here for each pair, without the range that the library computes.
TEST(forward_follows_the_definition) {
  for (int n = 0; n < 300; ++n) {
    Random random(7000 + n);
    const int64_t rows = uniform(random, 1, 6), keys = uniform(random, 0, 6),
                  length = uniform(random, 0, keys);
    Case c;
    c.query = Tensor(DType::kFloat64, {1, 1, rows, 1});
    c.key = Tensor(DType::kFloat64, {1, 1, keys, 1});
    c.value = Tensor(DType::kFloat64, {1, 1, keys, 1});
    c.bias = Tensor(DType::kFloat64, {rows, keys});
    if (chance(random, 0.5)) c.sinks = Tensor(DType::kFloat64, {1});
    for (auto& [name, tensor] : c.inputs()) {
      if (*tensor) tensor->set(random_values(random, tensor->count()));
    }
    c.key_lengths = Tensor(DType::kInt32, {1});
    c.key_lengths.set({static_cast<double>(length)});
    c.out = Tensor(DType::kFloat64, {1, 1, rows, 1});
    c.lse = Tensor(DType::kFloat64, {1, 1, rows});
    c.options.causal = chance(random, 0.5);
    c.options.window_left = uniform(random, -1, 4);
    c.options.window_right = uniform(random, -1, 4);
    c.options.scale = 0.7;
    c.options.softcap = chance(random, 0.5) ? 1.5 : 0;
    const Note note(describe(c));
    run(c, Pass::kForward);

    const Values q = c.query.values(), k = c.key.values(), v = c.value.values(),
                 bias = c.bias.values();
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t p = i + length - rows;
      double sum = c.sinks ? std::exp(c.sinks.values()[0]) : 0, weighted = 0;
      for (int64_t j = 0; j < length; ++j) {
        if (c.options.causal && j > p) continue;
        if (c.options.window_left >= 0 && j < p - c.options.window_left) continue;
        if (c.options.window_right >= 0 && j > p + c.options.window_right) continue;
        double score = 0.7 * q[i] * k[j];
        if (c.options.softcap > 0) score = 1.5 * std::tanh(score / 1.5);
        const double weight = std::exp(score + bias[i * keys + j]);
        sum += weight;
        weighted += weight * v[j];
      }
      const double out = c.out.values()[i], lse = c.lse.values()[i];
      if (sum == 0) {
        CHECK_EQ(out, 0.);
        CHECK_EQ(lse, -kInf);
      } else {
        CHECK(std::fabs(out - weighted / sum) < 1e-14 * 10, out, weighted / sum);
        CHECK(std::fabs(lse - std::log(sum)) < 1e-14 * 10, lse, std::log(sum));
      }
    }
  }
}

// In any dtype and layout the oracle gives the float64 result of the same numbers, rounded once.
TEST(results_are_rounded_once) {
  CaseRules rules;
  rules.lengths = {0, 1, 3, 9};
  rules.head_dims = {1, 4, 5};
  for (int i = 0; i < 200; ++i) {
    Random random(20000 + i);
    Case c = random_case(random, rules);
    const Note note(describe(c));
    Case twin = float64_twin(c);
    for (Pass pass : {Pass::kForward, Pass::kBackward}) {
      run(c, pass);
      run(twin, pass);
      const auto got = c.results(pass), want = twin.results(pass);
      for (size_t n = 0; n < got.size(); ++n) {
        if (!*got[n].second) continue;
        CHECK(got[n].second->gaps_untouched(), got[n].first);
        Tensor rounded(got[n].second->spec().dtype, got[n].second->shape());
        rounded.set(want[n].second->values());
        CHECK(got[n].second->values() == rounded.values(), got[n].first);
      }
    }
  }
}

// The known answers of Random123's kat_vectors for philox4x32, 7 rounds.
TEST(philox_gives_its_known_answers) {
  using flashmoe::dropout::Block;
  const struct {
    Block counter;
    uint64_t seed;
    Block answer;
  } known[] = {
      {{0, 0, 0, 0}, 0, {0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48}},
      {{~0u, ~0u, ~0u, ~0u}, ~0ull, {0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662}},
      {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
       0x299f31d0a4093822,
       {0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a}},
  };
  for (const auto& k : known) {
    const Block got = flashmoe::dropout::philox(k.counter, k.seed);
    for (int i = 0; i < 4; ++i) CHECK_EQ(got.word[i], k.answer.word[i]);
  }
}

// No p is rounded to 0 or 1 but these, and what is kept makes up for what is dropped.
TEST(dropout_keeps_the_mean) {
  using namespace flashmoe::dropout;
  CHECK_EQ(dropped_of(0), 0u);
  CHECK_EQ(dropped_of(1e-300), 1u);
  CHECK_EQ(dropped_of(0.5), kOutOf / 2);
  CHECK_EQ(dropped_of(1 - 1e-16), kOutOf - 1);
  CHECK_EQ(dropped_of(1), kOutOf);
  CHECK_EQ(kept_scale(0), 1.);
  CHECK_EQ(kept_scale(kOutOf / 2), 2.);
  CHECK_EQ(kept_scale(kOutOf), 0.);
}

// A ragged batch is its sequences one by one.
TEST(ragged_is_its_sequences) {
  Random random(1);
  const std::vector<int64_t> ends_q = {0, 3, 3, 8},
                             ends_k = {0, 4, 6, 11};  // the second has no queries
  const int64_t heads = 2, dim = 3;
  Case c;
  c.options.causal = true;
  c.max_seqlen_q = c.max_seqlen_k = 5;
  const auto tensor = [&](std::vector<int64_t> shape) {
    Tensor t(DType::kFloat64, shape);
    t.set(random_values(random, t.count()));
    return t;
  };
  c.query = tensor({9, heads, dim});  // one token belongs to no sequence
  c.key = tensor({11, heads, dim});
  c.value = tensor({11, heads, dim});
  c.bias = tensor({3 * 4 + 0 * 2 + 5 * 5, heads});
  c.out = tensor({9, heads, dim});
  c.lse = tensor({9, heads});
  c.cu_seqlens_q = Tensor(DType::kInt64, {4});
  c.cu_seqlens_k = Tensor(DType::kInt32, {4});
  c.cu_seqlens_q = Tensor(DType::kInt32, {4});
  c.cu_seqlens_q.set({ends_q.begin(), ends_q.end()});
  c.cu_seqlens_k.set({ends_k.begin(), ends_k.end()});
  run(c, Pass::kForward);

  int64_t bias_start = 0;
  for (int s = 0; s < 3; ++s) {
    const int64_t rows = ends_q[s + 1] - ends_q[s], keys = ends_k[s + 1] - ends_k[s];
    // The same memory seen as (1, heads, length, dim).
    AttentionProblem p;
    p.options.causal = true;
    const auto view = [&](int64_t length) {
      TensorSpec spec = flashmoe::contiguous(DType::kFloat64, {1, heads, length, dim});
      spec.stride = {0, dim, heads * dim, 1};
      return spec;
    };
    p.query = view(rows);
    p.key = p.value = view(keys);
    p.bias = flashmoe::contiguous(DType::kFloat64, {1, heads, rows, keys});
    p.bias->stride = {0, 1, keys * heads, heads};
    Tensor out(DType::kFloat64, {1, heads, rows, dim});
    p.out = out.spec();
    AttentionTensors t;
    t.query = static_cast<double*>(c.query.data()) + ends_q[s] * heads * dim;
    t.key = static_cast<double*>(c.key.data()) + ends_k[s] * heads * dim;
    t.value = static_cast<double*>(c.value.data()) + ends_k[s] * heads * dim;
    t.bias = static_cast<double*>(c.bias.data()) + bias_start * heads;
    t.out = out.data();
    const flashmoe::Status status = flashmoe::run_reference(p, t);
    CHECK(status.ok(), status.message());
    const Values packed = c.out.values(), alone = out.values();
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t i = 0; i < rows * dim; ++i) {
        CHECK_EQ(packed[((ends_q[s] + i / dim) * heads + h) * dim + i % dim],
                 alone[h * rows * dim + i]);
      }
    }
    bias_start += rows * keys;
  }
  for (int64_t i = 8 * heads * dim; i < 9 * heads * dim; ++i) CHECK_EQ(c.out.values()[i], 0.);
  for (int64_t h = 0; h < heads; ++h) CHECK_EQ(c.lse.values()[8 * heads + h], -kInf);
}

TEST(only_host_memory) {
  Random random(3);
  const Case c = random_case(random);
  AttentionProblem p = c.problem(Pass::kForward);
  p.device.type = flashmoe::DeviceType::kCuda;
  CHECK(flashmoe::run_reference(p, c.tensors()).code() == flashmoe::StatusCode::kUnsupported);
}
