// The CPU backend of the mixture of experts and its router against the oracle, over random
// problems, on every instruction set this machine can run.
#include "moe_cases.h"
#include "runs.h"

using namespace testing;

namespace {

// `c` in float64 with every input changed by one rounding error of dtype.
template <class Case>
Case changed_twin(Random& random, const Case& twin, DType dtype) {
  Case result = float64_twin(twin);
  for (auto& [name, tensor] : result.inputs()) {
    if (*tensor) tensor->set(changed(random, tensor->values(), unit_roundoff(dtype)));
  }
  return result;
}

// Rows without an expert may hold anything: in both, what the oracle has.
void forget_rows_without_expert(MoeCase& c, MoeCase& twin) {
  const int64_t experts = c.experts(), rows = c.pre.shape()[0];
  const Values want = twin.routing.values();
  const int64_t used = static_cast<int64_t>(want[experts]);
  Values routing = c.routing.values();
  std::copy(want.begin() + experts + 1 + used, want.end(), routing.begin() + experts + 1 + used);
  c.routing.set(routing);
  if (rows == 0) return;
  Values pre = c.pre.values(), want_pre = twin.pre.values();
  const int64_t per_row = pre.size() / rows;
  std::copy(want_pre.begin() + used * per_row, want_pre.end(), pre.begin() + used * per_row);
  c.pre.set(pre);
}

double sum_terms(const MoeCase& c) {
  const auto x = c.x.shape(), down = c.down.shape(), ids = c.ids.shape();
  return std::max<double>({256., double(x[0] * ids[1]), double(x[1]), double(down[2])});
}

void check_case(Random& random, MoeCase& c) {
  const Note note(describe(c));
  MoeCase twin = float64_twin(c);
  run_oracle(twin);
  auto movement = movements(twin, 2, [&] { return changed_twin(random, twin, c.dtype()); });
  for (Pass pass : {Pass::kForward, Pass::kBackward}) {
    run_repeatedly(c, pass);
    if (pass == Pass::kForward) forget_rows_without_expert(c, twin);
    const auto got = c.results(pass), want = twin.results(pass);
    for (size_t i = 0; i < got.size(); ++i) {
      const auto& [name, tensor] = got[i];
      if (!*tensor) continue;
      compare(name, *tensor, want[i].second->values(), c.dtype(), movement[name], 0, sum_terms(c));
    }
  }
}

// Sizes around the planner's blocks, whatever those are.
MoeRules rules_around_blocks() {
  MoeProblem p;
  const DType dtype = DType::kFloat32;
  p.x = p.out = flashmoe::contiguous(dtype, {100000, 8});
  p.gate_up = flashmoe::contiguous(dtype, {2, 4000, 8});
  p.down = flashmoe::contiguous(dtype, {2, 8, 2000});
  p.ids = flashmoe::contiguous(DType::kInt32, {100000, 1});
  const auto plan = flashmoe::plan(p);
  CHECK(plan.ok(), plan.status().message());
  MoeRules rules;
  const int64_t m = plan.value().block_m, n = plan.value().block_n;
  rules.tokens.insert(rules.tokens.end(), {m - 1, m, m + 1, 2 * m + 1});
  rules.widths.insert(rules.widths.end(), {n - 1, n, n + 1, 2 * n + 1});
  return rules;
}

}  // namespace

TEST(agrees_with_the_oracle) {
  const MoeRules rules = rules_around_blocks();
  for (int i = 0; i < case_count(250); ++i) {
    Random random(2000 + i);
    const Note note("case ", i);
    MoeCase c = random_moe_case(random, rules);
    check_case(random, c);
  }
}

// What NaN reaches is what the oracle says it does: nothing of a token, a weight or an expert that
// no pair has.
TEST(nan_goes_where_it_must_and_no_further) {
  for (int i = 0; i < case_count(80); ++i) {
    Random random(600000 + i);
    const Note note("case ", i);
    MoeCase c = random_moe_case(random);
    auto inputs = c.inputs();
    auto& [name, tensor] = inputs[i % inputs.size()];
    Values values = *tensor ? tensor->values() : Values();
    if (values.empty()) continue;
    values[uniform(random, 0, values.size() - 1)] = std::nan("");
    tensor->set(values);
    const Note where("NaN in ", name);
    check_case(random, c);
  }
}

// A caller that keeps nothing for the backward pass gets the same out.
TEST(what_is_kept_is_optional) {
  for (int i = 0; i < 10; ++i) {
    Random random(910000 + i);
    MoeCase c = random_moe_case(random);
    const Note note(describe(c));
    const Bits with = run_pass(c, Pass::kForward, 1, backwards);
    c.pre = Tensor();
    c.routing = Tensor();
    const Bits without = run_pass(c, Pass::kForward, 1, backwards);
    CHECK(with.at(0) == without.at(0));
  }
}

TEST(strange_routing_is_refused) {
  Random random(920000);
  MoeRules rules;
  rules.tokens = {20};
  rules.experts = {3};
  MoeCase c = random_moe_case(random, rules);
  run_pass(c, Pass::kForward, 1, backwards);
  const Values good = c.routing.values();
  for (size_t i : {size_t{1}, size_t{4}}) {
    Values routing = good;
    routing[i] += 1;
    c.routing.set(routing);
    const auto plan = flashmoe::plan(c.problem(Pass::kBackward));
    std::vector<std::byte> workspace(plan.value().workspace_bytes);
    const auto status = flashmoe::run(plan.value(), c.tensors(), workspace.data());
    CHECK_CONTAINS(status.message(), "routing");
  }
}

TEST(router_agrees_with_the_oracle) {
  for (int i = 0; i < case_count(200); ++i) {
    Random random(3000 + i);
    RouteCase c = random_route_case(random);
    const Note note("case ", i, " ", describe(c));
    RouteCase twin = float64_twin(c);
    run_oracle(twin);
    auto movement = movements(twin, 2, [&] {
      RouteCase moved = changed_twin(random, twin, c.dtype());
      moved.bias = dense_copy(twin.bias, DType::kFloat64);  // it decides, and must go on to
      return moved;
    });
    for (Pass pass : {Pass::kForward, Pass::kBackward}) {
      run_repeatedly(c, pass);
      const auto got = c.results(pass), want = twin.results(pass);
      for (size_t n = 0; n < got.size(); ++n) {
        if (std::string(got[n].first) == "ids") {
          CHECK(got[n].second->values() == want[n].second->values(), "ids differ");
          continue;
        }
        compare(got[n].first, *got[n].second, want[n].second->values(), c.dtype(),
                movement[got[n].first], 0, 256);
      }
    }
  }
}

int main(int argc, char** argv) { return run_for_every_target(argc, argv); }
