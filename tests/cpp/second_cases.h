// Random attention problems with tangents: forward mode and second derivatives.
#pragma once

#include "cases.h"

namespace testing {

struct SecondCase : Case {
  static constexpr Pass kPasses[] = {Pass::kForward, Pass::kTangent, Pass::kSecond};
  Tensor tangent_query, tangent_key, tangent_value, tangent_bias, tangent_sinks;
  Tensor tangent_out, tangent_lse;

  AttentionProblem problem(Pass pass, int num_threads = 1) const {
    AttentionProblem p = Case::problem(pass, num_threads);
    if (pass == Pass::kForward) return p;
    p.tangent_query = maybe_spec(tangent_query);
    p.tangent_key = maybe_spec(tangent_key);
    p.tangent_value = maybe_spec(tangent_value);
    p.tangent_bias = maybe_spec(tangent_bias);
    p.tangent_sinks = maybe_spec(tangent_sinks);
    p.tangent_out = maybe_spec(tangent_out);
    p.tangent_lse = maybe_spec(tangent_lse);
    return p;
  }

  AttentionTensors tensors() const {
    AttentionTensors t = Case::tensors();
    t.tangent_query = tangent_query.data();
    t.tangent_key = tangent_key.data();
    t.tangent_value = tangent_value.data();
    t.tangent_bias = tangent_bias.data();
    t.tangent_sinks = tangent_sinks.data();
    t.tangent_out = tangent_out.data();
    t.tangent_lse = tangent_lse.data();
    return t;
  }

  std::vector<Named> inputs() {
    std::vector<Named> all = Case::inputs();
    all.insert(all.end(), {{"tangent_query", &tangent_query},
                           {"tangent_key", &tangent_key},
                           {"tangent_value", &tangent_value},
                           {"tangent_bias", &tangent_bias},
                           {"tangent_sinks", &tangent_sinks}});
    return all;
  }
  std::vector<Named> results(Pass pass) {
    if (pass != Pass::kTangent) return Case::results(pass);
    return {{"tangent_out", &tangent_out}, {"tangent_lse", &tangent_lse}};
  }
};

inline std::string describe(const SecondCase& c) {
  return describe(static_cast<const Case&>(c)) + describe("tangent_query", c.tangent_query) +
         describe("tangent_key", c.tangent_key) + describe("tangent_value", c.tangent_value) +
         describe("tangent_bias", c.tangent_bias) + describe("tangent_sinks", c.tangent_sinks);
}

// Without dropout, which has gradients alone.
inline SecondCase random_second_case(Random& random, const CaseRules& rules = {}) {
  SecondCase c{random_case(random, rules), {}, {}, {}, {}, {}, {}, {}};
  c.options.dropout_p = 0;
  c.seed = Tensor();
  const auto like = [&](const Tensor& of, bool only_read) {
    return Tensor(of.spec().dtype, of.shape(), random_layout(random, of.spec().rank, only_read));
  };
  const auto tangent = [&](Tensor& to, const Tensor& of) {
    if (!of || is_mask(of) || chance(random, 0.2)) return;
    to = like(of, true);
    to.set(random_values(random, of.count()));
  };
  tangent(c.tangent_query, c.query);
  tangent(c.tangent_key, c.key);
  tangent(c.tangent_value, c.value);
  tangent(c.tangent_bias, c.bias);
  tangent(c.tangent_sinks, c.sinks);
  c.tangent_out = like(c.out, false);
  c.tangent_lse = like(c.lse, false);
  return c;
}

inline SecondCase float64_twin(const SecondCase& c) {
  const DType f64 = DType::kFloat64;
  SecondCase twin{float64_twin(static_cast<const Case&>(c)), {}, {}, {}, {}, {}, {}, {}};
  twin.tangent_query = dense_copy(c.tangent_query, f64);
  twin.tangent_key = dense_copy(c.tangent_key, f64);
  twin.tangent_value = dense_copy(c.tangent_value, f64);
  twin.tangent_bias = dense_copy(c.tangent_bias, f64);
  twin.tangent_sinks = dense_copy(c.tangent_sinks, f64);
  twin.tangent_out = Tensor(f64, twin.out.shape());
  twin.tangent_lse = Tensor(f64, twin.lse.shape());
  return twin;
}

}  // namespace testing
