// The plan of a call, looked at as data: no tensor is needed for any of this.
#include "plans.h"
#include "second_cases.h"

using namespace testing;

TEST(the_problem_as_numbers) {
  AttentionProblem p;
  p.query = contiguous(DType::kFloat16, {2, 3, 8, 50, 16});
  p.key = contiguous(DType::kFloat16, {2, 3, 2, 70, 16});
  p.value = contiguous(DType::kFloat16, {2, 3, 2, 70, 24});
  p.out = contiguous(DType::kFloat16, {2, 3, 8, 50, 24});
  const AttentionPlan plan = plan_for(p, 1);
  CHECK_EQ(plan.batch, 6);
  CHECK_EQ(plan.heads_q, 8);
  CHECK_EQ(plan.heads_k, 2);
  CHECK_EQ(plan.len_q, 50);
  CHECK_EQ(plan.len_k, 70);
  CHECK_EQ(plan.head_dim, 16);
  CHECK_EQ(plan.head_dim_v, 24);
  CHECK_EQ(*plan.problem.options.scale, 0.25);
}

TEST(a_given_scale_stays) {
  AttentionProblem p = problem(Pass::kForward, 1, 1, 4, 4);
  p.options.scale = 0;
  CHECK_EQ(*plan_for(p, 1).problem.options.scale, 0.);
}

// How the work is cut decides the bits of the result, so the number of threads must not.
TEST(the_cut_does_not_depend_on_threads) {
  for (int i = 0; i < 200; ++i) {
    Random random(i);
    const SecondCase c = random_second_case(random);
    const Note note(describe(c));
    for (Pass pass : kEveryPass) {
      const AttentionPlan one = plan_for(c.problem(pass), 1);
      CHECK_EQ(one.workers, 1);
      for (int threads : {2, 3, 64}) {
        const AttentionPlan many = plan_for(c.problem(pass), threads);
        CHECK_EQ(many.kernel, one.kernel);
        CHECK_EQ(many.block_q, one.block_q);
        CHECK_EQ(many.block_k, one.block_k);
        CHECK_EQ(many.chunks, one.chunks);
        CHECK_EQ(many.work_items, one.work_items);
        CHECK_EQ(many.scratch_bytes, one.scratch_bytes);
        CHECK(many.workers >= 1 && many.workers <= threads);
        CHECK_EQ(many.workspace_bytes - one.workspace_bytes,
                 (many.workers - 1) * one.scratch_bytes);
      }
    }
  }
}

TEST(blocks_and_items_are_sensible) {
  for (Pass pass : kEveryPass) {
    for (int64_t length : {1, 17, 96, 97, 1000, 100000}) {
      const AttentionPlan plan = plan_for(problem(pass, 2, 3, length, 32), 8);
      CHECK(plan.block_q >= 1 && plan.block_k >= 1);
      CHECK(plan.chunks >= 1);
      CHECK_EQ(plan.work_items, 2 * 3 * plan.chunks);
    }
    for (const AttentionProblem& p : {problem(pass, 0, 3, 20, 8), problem(pass, 2, 3, 0, 8)}) {
      const AttentionPlan plan = plan_for(p, 8);
      CHECK(plan.block_q >= 1 && plan.block_k >= 1 && plan.workers >= 1);
    }
  }
}

// No buffer of size S x S: twice the length takes at most about twice the memory.
TEST(workspace_is_linear_in_length) {
  for (Pass pass : kEveryPass) {
    for (bool with_bias : {false, true}) {
      const auto bytes = [&](int64_t length) {
        AttentionProblem p = problem(pass, 1, 4, length, 64);
        if (with_bias) {
          p.bias = contiguous(DType::kFloat32, {length, length});
          if (pass == Pass::kBackward || pass == Pass::kSecond) p.grad_bias = p.bias;
          if (pass == Pass::kTangent || pass == Pass::kSecond) p.tangent_bias = p.bias;
        }
        return static_cast<double>(plan_for(p, 4).workspace_bytes);
      };
      const double base = bytes(1 << 14), twice = bytes(1 << 15), much = bytes(1 << 18);
      CHECK(twice <= 2.1 * base, base, twice);
      CHECK(much <= 16.5 * base, base, much);
    }
  }
}

TEST(shapes_past_2_31_elements_are_planned) {
  const AttentionPlan plan =
      plan_for(problem(Pass::kForward, 64, 32, 1 << 20, 128, DType::kBFloat16), 64);
  CHECK(plan.work_items > 0);
}

TEST(planning_is_pure) {
  Random random(5);
  for (int i = 0; i < 50; ++i) {
    const Case c = random_case(random);
    CHECK_EQ(flashmoe::explain(c.problem(Pass::kBackward)),
             flashmoe::explain(c.problem(Pass::kBackward)));
  }
}

TEST(the_chosen_candidate_is_last_and_says_so) {
  const AttentionPlan plan = plan_for(problem(Pass::kForward, 1, 2, 100, 64), 2);
  CHECK(!plan.candidates.empty());
  CHECK_CONTAINS(plan.kernel, plan.candidates.back().name);
  CHECK_CONTAINS(plan.kernel, flashmoe::cpu_target());
  CHECK_CONTAINS(plan.candidates.back().verdict, "chosen");
  for (const flashmoe::Candidate& c : plan.candidates) CHECK(!c.verdict.empty(), c.name);
}

TEST(explain_names_the_kernel_and_the_options) {
  AttentionProblem p = problem(Pass::kBackward, 2, 4, 300, 24, DType::kFloat16);
  p.options.causal = true;
  p.options.softcap = 30;
  p.bias = contiguous(DType::kFloat32, {300, 300});
  const std::string words = flashmoe::explain(p);
  for (const std::string& part :
       {plan_for(p, 0).kernel, std::string("causal"), std::string("softcap 30"),
        std::string("float16"), std::string("backward"), std::string("(300, 300)")}) {
    CHECK_CONTAINS(words, part);
  }
}

TEST(passes_without_cuda_kernels_are_refused) {
  for (Pass pass : {Pass::kTangent, Pass::kSecond}) {
    AttentionProblem p = problem(pass, 1, 2, 100, 64, DType::kFloat64);
    CHECK(flashmoe::plan(p).ok());
    CHECK_CONTAINS(flashmoe::explain(p), pass == Pass::kTangent ? "tangent of" : "second");
    p.device = {.type = flashmoe::DeviceType::kCuda, .compute_capability = 90};
    const auto plan = flashmoe::plan(p);
    CHECK(plan.status().code() == flashmoe::StatusCode::kUnsupported);
    CHECK_CONTAINS(plan.status().message(), ".cpu()");
  }
}

TEST(another_machine_is_refused_with_a_reason) {
  AttentionProblem p = problem(Pass::kForward, 1, 2, 100, 64, DType::kFloat64);
  p.device = {.type = flashmoe::DeviceType::kCuda, .compute_capability = 90};
  const auto plan = flashmoe::plan(p);
  CHECK(plan.status().code() == flashmoe::StatusCode::kUnsupported);
  CHECK_CONTAINS(plan.status().message(),
                 "no CUDA kernel of this build can run this call on sm_90");
  CHECK_CONTAINS(plan.status().message(), ".cpu()");

  p.device = {.num_threads = -1};
  CHECK(!flashmoe::plan(p).ok());
  CHECK_CONTAINS(flashmoe::plan(p).status().message(), "num_threads");
}

TEST(targets) {
  CHECK(!flashmoe::cpu_targets().empty());
  bool found = false;
  for (const std::string& name : flashmoe::cpu_targets()) found |= name == flashmoe::cpu_target();
  CHECK(found, flashmoe::cpu_target());
  CHECK(std::string(flashmoe::version()).find('.') != std::string::npos);
}
