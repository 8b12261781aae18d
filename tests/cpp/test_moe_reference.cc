// The oracle of the mixture of experts and its router: against numbers worked out by hand, against
// finite differences, and against itself where two problems must have one answer.
#include <cmath>

#include "differences.h"
#include "moe_cases.h"
#include "testing.h"

using namespace testing;

namespace {

template <class Case>
void run(const Case& c, Pass pass) {
  const flashmoe::Status status = run_reference(c.problem(pass), c.tensors());
  CHECK(status.ok(), status.message());
}

double dot(const Values& a, const Values& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

void check_values(const char* name, const Tensor& got, const Values& want) {
  const Values values = got.values();
  CHECK_EQ(values.size(), want.size());
  for (size_t i = 0; i < want.size(); ++i) {
    CHECK(std::fabs(values[i] - want[i]) < 1e-12 * (1 + std::fabs(want[i])), name, "element", i,
          "is", values[i], "and should be", want[i]);
  }
}

Tensor tensor(const std::vector<int64_t>& shape, const Values& values,
              DType dtype = DType::kFloat64) {
  Tensor t(dtype, shape);
  t.set(values);
  return t;
}

double silu(double x) { return x / (1 + std::exp(-x)); }

// Two tokens, three experts of width 1 and inner width 1, two choices a token.
MoeCase small_case() {
  MoeCase c;
  c.x = tensor({2, 1}, {2, 3});
  c.gate_up = tensor({3, 2, 1}, {1, 0.5, -1, 2, std::nan(""), std::nan("")});  // nobody's expert
  c.down = tensor({3, 1, 1}, {10, 100, std::nan("")});
  c.up_bias = tensor({3, 2}, {0, 1, 0, 0, 0, 0});
  c.down_bias = tensor({3, 1}, {0.25, 0, 0});
  c.ids = tensor({2, 2}, {1, 0, 7, 0}, DType::kInt32);
  c.weights = tensor({2, 2}, {0.5, 2, std::nan(""), 1});  // that of no expert
  c.out = Tensor(DType::kFloat64, {2, 1});
  c.pre = Tensor(DType::kFloat64, {4, 2, 1});
  c.routing = Tensor(DType::kInt32, {8});
  return c;
}

}  // namespace

TEST(by_hand) {
  MoeCase c = small_case();
  run(c, Pass::kForward);
  // Expert 0: gate x, up x / 2 + 1, times 10, plus 1/4. Expert 1: gate -x, up 2 x, times 100.
  const double e0t0 = silu(2) * 2 * 10 + 0.25, e0t1 = silu(3) * 2.5 * 10 + 0.25;
  const double e1t0 = silu(-2) * 4 * 100;
  check_values("out", c.out, {0.5 * e1t0 + 2 * e0t0, e0t1});
  const Values routing = c.routing.values(), pre = c.pre.values();
  CHECK((Values(routing.begin(), routing.begin() + 7) == Values{0, 2, 3, 3, 1, 3, 0}));
  CHECK((Values(pre.begin(), pre.begin() + 6) == Values{2, 2, 3, 2.5, -2, 4}));

  c.grad_out = tensor({2, 1}, {1, 10});
  c.grad_weights = Tensor(DType::kFloat64, {2, 2});
  c.grad_down = Tensor(DType::kFloat64, {3, 1, 1});
  c.grad_down_bias = Tensor(DType::kFloat64, {3, 1});
  c.grad_up_bias = Tensor(DType::kFloat64, {3, 2});
  run(c, Pass::kBackward);
  check_values("grad_weights", c.grad_weights, {e1t0, e0t0, 0, 10 * e0t1});
  check_values("grad_down", c.grad_down,
               {2 * silu(2) * 2 + 10 * silu(3) * 2.5, 0.5 * silu(-2) * 4, 0});
  check_values("grad_down_bias", c.grad_down_bias, {2 + 10, 0.5, 0});
  const Values grad = c.grad_up_bias.values();  // of up: gradient of A times silu(gate)
  CHECK(std::fabs(grad[1] - (2 * 10 * silu(2) + 10 * 10 * silu(3))) < 1e-9);
  CHECK(std::fabs(grad[3] - 0.5 * 100 * silu(-2)) < 1e-9);
  CHECK_EQ(grad[4], 0.);
}

TEST(activations_by_hand) {
  const double x = 0.7, s = 1 / (1 + std::exp(-x));
  const double gelu = x / 2 * (1 + std::erf(x / std::sqrt(2.)));
  const std::pair<Activation, double> all[] = {
      {Activation::kSwiglu, x * s * 3}, {Activation::kGeglu, gelu * 3}, {Activation::kReglu, x * 3},
      {Activation::kSilu, x * s},       {Activation::kGelu, gelu},      {Activation::kRelu, x},
  };
  for (const auto& [activation, want] : all) {
    const Note note(name_of(activation));
    MoeCase c;
    c.activation = activation;
    c.x = tensor({1, 1}, {1});
    c.gate_up = flashmoe::has_gate(activation) ? tensor({1, 2, 1}, {x, 3}) : tensor({1, 1, 1}, {x});
    c.down = tensor({1, 1, 1}, {1});
    c.ids = tensor({1, 1}, {0}, DType::kInt64);
    c.out = Tensor(DType::kFloat64, {1, 1});
    run(c, Pass::kForward);
    check_values("out", c.out, {want});
  }
}

TEST(gradients_match_finite_differences) {
  MoeRules rules;
  rules.tokens = {0, 1, 2, 3, 5};
  rules.widths = {1, 2, 3};
  rules.experts = {1, 2, 3};
  rules.dtype = DType::kFloat64;
  for (int i = 0; i < 120; ++i) {
    Random random(i);
    MoeCase c = float64_twin(random_moe_case(random, rules));
    const Note note("case ", i, " ", describe(c));
    const auto loss = [](const MoeCase& moved) {
      run(moved, Pass::kForward);
      return moved.grad_out ? dot(moved.grad_out.values(), moved.out.values()) : 0;
    };
    run(c, Pass::kBackward);
    check_gradient("grad_x", loss, c, c.x, c.grad_x);
    check_gradient("grad_gate_up", loss, c, c.gate_up, c.grad_gate_up);
    check_gradient("grad_down", loss, c, c.down, c.grad_down);
    check_gradient("grad_up_bias", loss, c, c.up_bias, c.grad_up_bias);
    check_gradient("grad_down_bias", loss, c, c.down_bias, c.grad_down_bias);
    check_gradient("grad_weights", loss, c, c.weights, c.grad_weights);
  }
}

// One expert that has all tokens is two matrices and an activation, whatever the order of choices.
TEST(the_order_of_choices_does_not_matter) {
  Random random(5);
  MoeRules rules;
  rules.tokens = {17};
  rules.experts = {5};
  rules.dtype = DType::kFloat64;
  for (int i = 0; i < 20; ++i) {
    MoeCase c = float64_twin(random_moe_case(random, rules));
    run(c, Pass::kForward);
    const Values before = c.out.values();
    const int64_t k = c.ids.shape()[1];
    Values ids = c.ids.values();
    Values weights = c.weights ? c.weights.values() : Values(ids.size());
    for (size_t t = 0; t < ids.size(); t += k) {
      std::reverse(ids.begin() + t, ids.begin() + t + k);
      std::reverse(weights.begin() + t, weights.begin() + t + k);
    }
    c.ids.set(ids);
    if (c.weights) c.weights.set(weights);
    run(c, Pass::kForward);
    check_values("out", c.out, before);
    if (k == 0) CHECK_EQ(dot(before, before), 0.);
  }
}

TEST(router_by_hand) {
  RouteCase c;
  c.logits = tensor({2, 4}, {0, std::log(3.), 0, std::log(4.), 1, 1, 1, 1});
  c.ids = Tensor(DType::kInt32, {2, 2});
  c.weights = Tensor(DType::kFloat64, {2, 2});
  c.normalize = false;
  run(c, Pass::kForward);  // scores 1/9, 3/9, 1/9, 4/9; ties to the lower id
  CHECK((c.ids.values() == Values{3, 1, 0, 1}));
  check_values("weights", c.weights, {4. / 9, 3. / 9, 0.25, 0.25});
  c.normalize = true;
  run(c, Pass::kForward);
  check_values("weights", c.weights, {4. / 7, 3. / 7, 0.5, 0.5});
  c.bias = tensor({4}, {1, 0, 0, 0});  // shifts the choice, not the weights
  run(c, Pass::kForward);
  CHECK((c.ids.values() == Values{0, 3, 0, 1}));
  check_values("weights", c.weights, {0.2, 0.8, 0.5, 0.5});
  c.scoring = Scoring::kSigmoid;
  c.normalize = false;
  run(c, Pass::kForward);
  check_values("weights", c.weights, {0.5, 0.8, 1 / (1 + std::exp(-1.)), 1 / (1 + std::exp(-1.))});
}

TEST(router_gradients_match_finite_differences) {
  for (int i = 0; i < 60; ++i) {
    Random random(700 + i);
    RouteCase c = float64_twin(random_route_case(random, DType::kFloat64));
    Values logits = c.logits.values();
    if (logits.size() > 600) continue;
    // No ties: a difference must not change the choice.
    if (logits.size() > 1 && logits[0] == logits[1]) continue;
    for (double& x : logits) x += std::uniform_real_distribution<double>(-0.02, 0.02)(random);
    c.logits.set(logits);
    const Note note("case ", i, " ", describe(c));
    const auto loss = [](const RouteCase& moved) {
      run(moved, Pass::kForward);
      return moved.grad_weights ? dot(moved.grad_weights.values(), moved.weights.values()) : 0;
    };
    run(c, Pass::kForward);
    run(c, Pass::kBackward);
    check_gradient("grad_logits", loss, c, c.logits, c.grad_logits);
  }
}
