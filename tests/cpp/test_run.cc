// The backend against the oracle, over random problems, on every instruction set this machine can
// run: the program starts itself once for each.
#include "agreement.h"

using namespace testing;

namespace {

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
    const char* const name = put_nan(random, c, i);
    if (!name) continue;
    const Note where("NaN in ", name);
    check_case(random, c);
  }
}

TEST(tangents_and_second_derivatives_agree_with_the_oracle) {
  const CaseRules rules = rules_around_blocks();
  for (int i = 0; i < case_count(200); ++i) {
    Random random(2000000 + i);
    const Note note("case ", i);
    SecondCase c = random_second_case(random, rules);
    check_case(random, c);
  }
}

TEST(nan_goes_where_it_must_in_tangents_and_second_derivatives) {
  const CaseRules rules = rules_around_blocks();
  for (int i = 0; i < case_count(100); ++i) {
    Random random(2500000 + i);
    const Note note("case ", i);
    SecondCase c = random_second_case(random, rules);
    const char* const name = put_nan(random, c, i);
    if (!name) continue;
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

TEST(an_empty_plan_is_refused) {
  float numbers[8] = {};
  flashmoe::AttentionTensors tensors;
  tensors.query = tensors.key = tensors.value = tensors.out = numbers;
  const flashmoe::Status status = flashmoe::run(flashmoe::AttentionPlan(), tensors, nullptr);
  CHECK(!status.ok());
  CHECK(status.message().find("plan is empty") != std::string::npos);
}

int main(int argc, char** argv) { return run_for_every_target(argc, argv); }
