// Random problems of a mixture of experts and its router with memory behind them, over every option
// there is, and the same in float64.
#pragma once

#include <algorithm>
#include <cmath>
#include <optional>
#include <sstream>
#include <string>
#include <utility>

#include "flashmoe/moe.h"
#include "tensors.h"

namespace testing {

using flashmoe::Activation;
using flashmoe::MoeProblem;
using flashmoe::MoeTensors;
using flashmoe::Pass;
using flashmoe::RouteProblem;
using flashmoe::RouteTensors;
using flashmoe::Scoring;
using NamedTensor = std::pair<const char*, Tensor*>;

inline DType weight_dtype(DType dtype) {
  return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

// A problem and a tensor for each of its specs; problem() fills in those of the tensors there are.
struct MoeCase {
  Activation activation = Activation::kSwiglu;
  Tensor x, gate_up, down, up_bias, down_bias, ids, weights;
  Tensor out, pre, routing;
  Tensor grad_out, grad_x, grad_gate_up, grad_down, grad_up_bias, grad_down_bias, grad_weights;

  DType dtype() const { return x.spec().dtype; }
  int64_t experts() const { return down.shape()[0]; }

  MoeProblem problem(Pass pass, int num_threads = 1) const {
    MoeProblem p;
    p.pass = pass;
    p.device = device_with_threads(num_threads);
    p.activation = activation;
    p.x = x.spec();
    p.gate_up = gate_up.spec();
    p.down = down.spec();
    p.up_bias = maybe_spec(up_bias);
    p.down_bias = maybe_spec(down_bias);
    p.ids = ids.spec();
    p.weights = maybe_spec(weights);
    p.out = out.spec();
    p.pre = maybe_spec(pre);
    p.routing = maybe_spec(routing);
    if (pass == Pass::kForward) return p;
    p.grad_out = maybe_spec(grad_out);
    p.grad_x = maybe_spec(grad_x);
    p.grad_gate_up = maybe_spec(grad_gate_up);
    p.grad_down = maybe_spec(grad_down);
    p.grad_up_bias = maybe_spec(grad_up_bias);
    p.grad_down_bias = maybe_spec(grad_down_bias);
    p.grad_weights = maybe_spec(grad_weights);
    return p;
  }

  MoeTensors tensors() const {
    MoeTensors t;
    t.x = x.data();
    t.gate_up = gate_up.data();
    t.down = down.data();
    t.up_bias = up_bias.data();
    t.down_bias = down_bias.data();
    t.ids = ids.data();
    t.weights = weights.data();
    t.out = out.data();
    t.pre = pre.data();
    t.routing = routing.data();
    t.grad_out = grad_out.data();
    t.grad_x = grad_x.data();
    t.grad_gate_up = grad_gate_up.data();
    t.grad_down = grad_down.data();
    t.grad_up_bias = grad_up_bias.data();
    t.grad_down_bias = grad_down_bias.data();
    t.grad_weights = grad_weights.data();
    return t;
  }

  std::vector<NamedTensor> inputs() {
    return {{"x", &x},
            {"gate_up", &gate_up},
            {"down", &down},
            {"up_bias", &up_bias},
            {"down_bias", &down_bias},
            {"weights", &weights},
            {"grad_out", &grad_out}};
  }
  std::vector<NamedTensor> results(Pass pass) {
    if (pass == Pass::kForward) return {{"out", &out}, {"pre", &pre}, {"routing", &routing}};
    return {{"grad_x", &grad_x},
            {"grad_gate_up", &grad_gate_up},
            {"grad_down", &grad_down},
            {"grad_up_bias", &grad_up_bias},
            {"grad_down_bias", &grad_down_bias},
            {"grad_weights", &grad_weights}};
  }
};

inline const char* name_of(Activation activation) {
  const char* names[] = {"swiglu", "geglu", "reglu", "silu", "gelu", "relu"};
  return names[static_cast<int>(activation)];
}

// Enough to rebuild it by hand.
inline std::string describe(const MoeCase& c) {
  std::ostringstream s;
  s << flashmoe::dtype_name(c.dtype()) << " " << name_of(c.activation) << describe("x", c.x)
    << describe("gate_up", c.gate_up) << describe("down", c.down) << describe("up_bias", c.up_bias)
    << describe("down_bias", c.down_bias) << describe("weights", c.weights)
    << describe("pre", c.pre) << (c.grad_out ? "" : " no grad_out");
  if (c.ids.count() <= 64) s << describe_integers("ids", c.ids);
  return s.str();
}

// The way a case is made: which sizes to draw, and how large a case may become.
struct MoeRules {
  std::vector<int64_t> tokens = {0, 1, 2, 3, 5, 16, 17, 31, 64, 65, 129, 200};
  std::vector<int64_t> widths = {1, 2, 3, 4, 7, 8, 15, 16, 17, 32, 33, 64, 100, 130};
  std::vector<int64_t> experts = {1, 1, 2, 3, 5, 8, 30};
  double most_products = 1e6;  // multiplications of the forward pass
  std::optional<DType> dtype;  // any
};

class MoeCaseMaker {
 public:
  MoeCaseMaker(Random& random, const MoeRules& rules) : random_(random), rules_(rules) {}

  MoeCase make() {
    const DType all[] = {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16};
    dtype_ = rules_.dtype ? *rules_.dtype : all[uniform(random_, 0, 3)];
    do {
      tokens_ = pick(rules_.tokens);
      width_ = pick(rules_.widths);
      inner_ = chance(random_, 0.03) ? 0 : pick(rules_.widths);
      experts_ = pick(rules_.experts);
      top_k_ = chance(random_, 0.05) ? 0 : uniform(random_, 1, 4);
    } while (3. * tokens_ * top_k_ * width_ * inner_ > rules_.most_products);
    MoeCase c;
    c.activation = static_cast<Activation>(uniform(random_, 0, 5));
    const int64_t gates = flashmoe::has_gate(c.activation) ? 2 : 1;
    // So that every sum of products is about 1.
    c.x = normal({tokens_, width_}, 1);
    c.gate_up = normal({experts_, gates * inner_, width_}, scale(width_));
    c.down = normal({experts_, width_, inner_}, scale(inner_));
    if (chance(random_, 0.4)) c.up_bias = normal({experts_, gates * inner_}, 1);
    if (chance(random_, 0.4)) c.down_bias = normal({experts_, width_}, 1);
    make_ids(c);
    const DType weight = weight_dtype(dtype_);
    if (chance(random_, 0.8)) {
      c.weights = empty(weight, {tokens_, top_k_}, true);
      c.weights.set(random_values(random_, c.weights.count()));
    }
    const int64_t rows = tokens_ * top_k_;
    c.out = empty(dtype_, {tokens_, width_}, false);
    c.pre = empty(dtype_, {rows, gates, inner_}, false);
    c.routing = Tensor(DType::kInt32, {flashmoe::routing_elems(tokens_, top_k_, experts_)});
    if (!chance(random_, 0.1)) c.grad_out = normal({tokens_, width_}, 1);
    for (auto& [grad, of] :
         {std::pair{&c.grad_x, &c.x}, std::pair{&c.grad_gate_up, &c.gate_up},
          std::pair{&c.grad_down, &c.down}, std::pair{&c.grad_up_bias, &c.up_bias},
          std::pair{&c.grad_down_bias, &c.down_bias}, std::pair{&c.grad_weights, &c.weights}}) {
      if (*of && !chance(random_, 0.2)) *grad = empty(of->spec().dtype, of->shape(), false);
    }
    return c;
  }

 private:
  int64_t pick(const std::vector<int64_t>& from) {
    return from[uniform(random_, 0, from.size() - 1)];
  }
  static double scale(int64_t terms) { return 1 / std::sqrt(std::max<double>(1, terms)); }

  Tensor empty(DType dtype, const std::vector<int64_t>& shape, bool only_read) {
    return Tensor(dtype, shape, random_layout(random_, static_cast<int>(shape.size()), only_read));
  }
  Tensor normal(const std::vector<int64_t>& shape, double spread) {
    Tensor t = empty(dtype_, shape, true);
    t.set(random_values(random_, t.count(), spread));
    return t;
  }

  // Any experts, all the same one, a few favourites; some that do not exist.
  void make_ids(MoeCase& c) {
    c.ids = empty(chance(random_, 0.5) ? DType::kInt32 : DType::kInt64, {tokens_, top_k_}, true);
    const int64_t favourites = chance(random_, 0.4) ? uniform(random_, 1, experts_) : experts_;
    const double absent = chance(random_, 0.3) ? 0.3 : 0;
    Values ids(c.ids.count());
    for (double& id : ids) {
      id = static_cast<double>(uniform(random_, experts_ - favourites, experts_ - 1));
      const double strange[] = {-1, -2147483648., double(experts_), 2147483647.};
      if (chance(random_, absent)) id = strange[uniform(random_, 0, 3)];
    }
    c.ids.set(ids);
  }

  Random& random_;
  const MoeRules& rules_;
  DType dtype_ = DType::kFloat32;
  int64_t tokens_ = 0, width_ = 0, inner_ = 0, experts_ = 0, top_k_ = 0;
};

inline MoeCase random_moe_case(Random& random, const MoeRules& rules = {}) {
  return MoeCaseMaker(random, rules).make();
}

// The same problem in float64 and dense, with every result asked for.
inline MoeCase float64_twin(const MoeCase& c) {
  const DType f64 = DType::kFloat64;
  MoeCase twin;
  twin.activation = c.activation;
  twin.x = dense_copy(c.x, f64);
  twin.gate_up = dense_copy(c.gate_up, f64);
  twin.down = dense_copy(c.down, f64);
  twin.up_bias = dense_copy(c.up_bias, f64);
  twin.down_bias = dense_copy(c.down_bias, f64);
  twin.ids = dense_copy(c.ids, DType::kInt64);
  twin.weights = dense_copy(c.weights, f64);
  twin.out = Tensor(f64, c.x.shape());
  twin.pre = Tensor(f64, c.pre.shape());
  twin.routing = Tensor(DType::kInt32, c.routing.shape());
  twin.grad_out = dense_copy(c.grad_out, f64);
  twin.grad_x = Tensor(f64, c.x.shape());
  twin.grad_gate_up = Tensor(f64, c.gate_up.shape());
  twin.grad_down = Tensor(f64, c.down.shape());
  if (c.up_bias) twin.grad_up_bias = Tensor(f64, c.up_bias.shape());
  if (c.down_bias) twin.grad_down_bias = Tensor(f64, c.down_bias.shape());
  if (c.weights) twin.grad_weights = Tensor(f64, c.weights.shape());
  return twin;
}

struct RouteCase {
  Scoring scoring = Scoring::kSoftmax;
  bool normalize = true;
  Tensor logits, bias, ids, weights, grad_weights, grad_logits;

  DType dtype() const { return logits.spec().dtype; }

  RouteProblem problem(Pass pass, int num_threads = 1) const {
    RouteProblem p;
    p.pass = pass;
    p.device = device_with_threads(num_threads);
    p.scoring = scoring;
    p.normalize = normalize;
    p.logits = logits.spec();
    p.bias = maybe_spec(bias);
    p.ids = ids.spec();
    p.weights = weights.spec();
    if (pass == Pass::kForward) return p;
    p.grad_weights = maybe_spec(grad_weights);
    p.grad_logits = maybe_spec(grad_logits);
    return p;
  }

  RouteTensors tensors() const {
    RouteTensors t;
    t.logits = logits.data();
    t.bias = bias.data();
    t.ids = ids.data();
    t.weights = weights.data();
    t.grad_weights = grad_weights.data();
    t.grad_logits = grad_logits.data();
    return t;
  }

  std::vector<NamedTensor> inputs() {
    return {{"logits", &logits}, {"bias", &bias}, {"grad_weights", &grad_weights}};
  }
  std::vector<NamedTensor> results(Pass pass) {
    if (pass == Pass::kForward) return {{"ids", &ids}, {"weights", &weights}};
    return {{"grad_logits", &grad_logits}};
  }
};

inline std::string describe(const RouteCase& c) {
  std::ostringstream s;
  s << flashmoe::dtype_name(c.dtype()) << (c.scoring == Scoring::kSoftmax ? " softmax" : " sigmoid")
    << (c.normalize ? " normalized" : "") << describe("logits", c.logits)
    << describe("bias", c.bias) << describe("ids", c.ids);
  return s.str();
}

// Logits are multiples of 1/16 and all different within a token, so that rounding decides nothing;
// or all the same, so that only ties do.
inline RouteCase random_route_case(Random& random, std::optional<DType> dtype = {}) {
  const DType all[] = {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16};
  const DType of = dtype ? *dtype : all[uniform(random, 0, 3)];
  const int64_t tokens = uniform(random, 0, 70), experts = uniform(random, 1, 90);
  const int64_t k = uniform(random, 0, std::min<int64_t>(experts, 16));
  const auto empty = [&](DType type, const std::vector<int64_t>& shape, bool only_read) {
    return Tensor(type, shape, random_layout(random, static_cast<int>(shape.size()), only_read));
  };
  RouteCase c;
  c.scoring = chance(random, 0.5) ? Scoring::kSoftmax : Scoring::kSigmoid;
  c.normalize = chance(random, 0.5);
  // Only read, but written here: broadcast logits are one row for all tokens.
  c.logits = empty(of, {tokens, experts}, true);
  const bool ties = chance(random, 0.1);
  Values logits;
  for (int64_t t = 0; t < tokens; ++t) {
    std::vector<double> row(experts);
    std::iota(row.begin(), row.end(), -static_cast<double>(experts) / 2);
    std::shuffle(row.begin(), row.end(), random);
    for (double x : row) logits.push_back(ties ? 0.25 : x / 16);
  }
  c.logits.set(logits);
  const DType weight = weight_dtype(of);
  if (chance(random, 0.4)) {
    c.bias = empty(weight, {experts}, true);
    c.bias.set(random_values(random, experts, 0.2));
  }
  c.ids = empty(DType::kInt32, {tokens, k}, false);
  c.weights = empty(weight, {tokens, k}, false);
  if (!chance(random, 0.1)) {
    c.grad_weights = empty(weight, {tokens, k}, true);
    c.grad_weights.set(random_values(random, tokens * k));
  }
  c.grad_logits = empty(of, {tokens, experts}, false);
  return c;
}

inline RouteCase float64_twin(const RouteCase& c) {
  const DType f64 = DType::kFloat64;
  RouteCase twin;
  twin.scoring = c.scoring;
  twin.normalize = c.normalize;
  twin.logits = dense_copy(c.logits, f64);
  twin.bias = dense_copy(c.bias, f64);
  twin.ids = Tensor(DType::kInt32, c.ids.shape());
  twin.weights = Tensor(f64, c.weights.shape());
  twin.grad_weights = dense_copy(c.grad_weights, f64);
  twin.grad_logits = Tensor(f64, c.logits.shape());
  return twin;
}

}  // namespace testing
