// The backend against the oracle, over random problems, on every instruction set this machine can
// run: the program starts itself once for each.
#include "cases.h"
#include "runs.h"

using namespace testing;

namespace {

// `twin` with every input changed by one rounding error of dtype.
Case changed_twin(Random& random, const Case& twin, DType dtype) {
  const double u = unit_roundoff(dtype);
  Case result = float64_twin(twin);
  for (auto& [name, tensor] : result.inputs()) {
    if (*tensor) tensor->set(changed(random, tensor->values(), u));
  }
  // Rounding errors of one score after the other may all point the same way, as when all products
  // in a sum are alike: the scores grow together.
  const double dim_in = static_cast<double>(twin.query.spec().size(-1));
  const double scale = twin.options.scale ? *twin.options.scale : 1 / std::sqrt(dim_in);
  result.options.scale = scale * (1 + std::sqrt(dim_in) * accumulator_roundoff(dtype));
  if (!twin.grad_out) return result;
  // The backward pass needs sum(grad_out * out) of each row, and has out rounded; and it adds up
  // products of grad_out and value. That sum is subtracted where the gradient of lse is added, so
  // its error is put there.
  const Values grad_out = twin.grad_out.values(), out = twin.out.values();
  const double most = largest(twin.value.values());
  const int64_t dim = twin.out.spec().size(-1);
  Values grad_lse(out.size() / dim);
  if (result.grad_lse) grad_lse = result.grad_lse.values();
  for (size_t row = 0; row < grad_lse.size(); ++row) {
    double squares = 0, products = 0;
    for (int64_t d = 0; d < dim; ++d) {
      squares += std::pow(grad_out[row * dim + d] * out[row * dim + d], 2);
      products += std::fabs(grad_out[row * dim + d]) * most;
    }
    const double error = u * std::sqrt(squares) + accumulator_roundoff(dtype) * products;
    grad_lse[row] += chance(random, 0.5) ? error : -error;
  }
  result.grad_lse = Tensor(DType::kFloat64, result.lse.shape());
  result.grad_lse.set(grad_lse);
  return result;
}

// At most how many numbers are added up for one element of a result.
double sum_terms(const Case& c, const Tensor& result) {
  const bool ragged = c.ragged();
  const double rows = c.query.spec().size(ragged ? 0 : -2),
               keys = c.key.spec().size(ragged ? 0 : -2);
  const double heads = c.query.spec().size(ragged ? 1 : -3);
  if (&result == &c.grad_bias) {
    return static_cast<double>(c.lse.count()) * keys / std::max<double>(1, c.bias.count());
  }
  if (&result == &c.grad_sinks) return static_cast<double>(c.lse.count()) / heads;
  return std::max({rows * heads, keys, 256.});
}

void check_case(Random& random, Case& c) {
  const Note note(describe(c));
  Case twin = float64_twin(c);
  run_oracle(twin);
  // The largest of many movements is much the same every time; of a few it may be small by luck.
  const bool few = (twin.grad_bias && twin.grad_bias.count() < 64) || twin.grad_sinks;
  auto movement =
      movements(twin, few ? 6 : 1, [&] { return changed_twin(random, twin, c.dtype()); });
  // The backward pass computes exp(score - lse) from an lse as large as the scores, and rounded
  // like them.
  const double lse_error = 4 * accumulator_roundoff(c.dtype()) * largest(twin.lse.values());
  for (Pass pass : {Pass::kForward, Pass::kBackward}) {
    run_repeatedly(c, pass);
    const auto got = c.results(pass), want = twin.results(pass);
    for (size_t i = 0; i < got.size(); ++i) {
      const auto& [name, tensor] = got[i];
      if (!*tensor) continue;
      compare(name, *tensor, want[i].second->values(), c.dtype(), movement[name],
              pass == Pass::kBackward ? lse_error : 0, sum_terms(c, *tensor));
    }
  }
}

// Lengths around the size of the planner's blocks, whatever that is.
CaseRules rules_around_blocks() {
  AttentionProblem p;
  p.query = p.key = p.value = p.out = flashmoe::contiguous(DType::kFloat32, {1, 1, 100000, 32});
  const auto plan = flashmoe::plan(p);
  CaseRules rules;
  for (int64_t block : {plan.value().block_q, plan.value().block_k}) {
    rules.lengths.insert(rules.lengths.end(), {block - 1, block, block + 1, 2 * block + 1});
  }
  return rules;
}

}  // namespace

TEST(agrees_with_the_oracle) {
  const CaseRules rules = rules_around_blocks();
  for (int i = 0; i < case_count(300); ++i) {
    Random random(1000 + i);
    const Note note("case ", i);
    Case c = random_case(random, rules);
    check_case(random, c);
  }
}

// What NaN reaches is exactly what the oracle says it does: results that depend on it, and nothing
// behind a mask, a length or another sequence.
TEST(nan_goes_where_it_must_and_no_further) {
  const CaseRules rules = rules_around_blocks();
  for (int i = 0; i < case_count(100); ++i) {
    Random random(500000 + i);
    const Note note("case ", i);
    Case c = random_case(random, rules);
    auto inputs = c.inputs();
    auto& [name, tensor] = inputs[i % inputs.size()];
    Values values = *tensor ? tensor->values() : Values();
    if (values.empty()) continue;
    for (int n = 0; n < 2; ++n) values[uniform(random, 0, values.size() - 1)] = std::nan("");
    tensor->set(values);
    const Note where("NaN in ", name);
    check_case(random, c);
  }
}

// A caller that does not want lse gets the same out.
TEST(lse_is_optional) {
  for (int i = 0; i < 10; ++i) {
    Random random(900000 + i);
    Case c = random_case(random);
    const Note note(describe(c));
    const Bits with = run_pass(c, Pass::kForward, 1, backwards);
    c.lse = Tensor();
    const Bits without = run_pass(c, Pass::kForward, 1, backwards);
    CHECK(with.at(0) == without.at(0));
  }
}

int main(int argc, char** argv) { return run_for_every_target(argc, argv); }
