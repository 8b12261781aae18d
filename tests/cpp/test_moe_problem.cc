// What a problem of a mixture of experts or of its router may be, and what is said about one that
// it may not be: always which argument, its value and what would work.
#include <limits>

#include "moe_cases.h"
#include "refusals.h"
#include "testing.h"

using namespace testing;
using flashmoe::contiguous;
using flashmoe::StatusCode;

namespace {

constexpr int64_t kHuge = int64_t{1} << 40;

MoeProblem moe_problem(Pass pass = Pass::kForward) {
  const DType dtype = DType::kFloat32;
  MoeProblem p;
  p.pass = pass;
  p.x = p.out = contiguous(dtype, {5, 8});
  p.gate_up = contiguous(dtype, {3, 12, 8});
  p.down = contiguous(dtype, {3, 8, 6});
  p.up_bias = contiguous(dtype, {3, 12});
  p.down_bias = contiguous(dtype, {3, 8});
  p.ids = contiguous(DType::kInt64, {5, 2});
  p.weights = contiguous(DType::kFloat32, {5, 2});
  p.pre = contiguous(dtype, {10, 2, 6});
  p.routing = contiguous(DType::kInt32, {14});
  if (pass == Pass::kForward) return p;
  p.grad_out = p.grad_x = p.x;
  p.grad_gate_up = p.gate_up;
  p.grad_down = p.down;
  p.grad_up_bias = p.up_bias;
  p.grad_down_bias = p.down_bias;
  p.grad_weights = p.weights;
  return p;
}

RouteProblem route_problem(Pass pass = Pass::kForward) {
  RouteProblem p;
  p.pass = pass;
  p.logits = contiguous(DType::kBFloat16, {5, 8});
  p.bias = contiguous(DType::kFloat32, {8});
  p.ids = contiguous(DType::kInt32, {5, 3});
  p.weights = contiguous(DType::kFloat32, {5, 3});
  if (pass == Pass::kForward) return p;
  p.grad_weights = p.weights;
  p.grad_logits = p.logits;
  return p;
}

}  // namespace

TEST(bad_problems) {
  using P = MoeProblem&;
  const std::vector<BadProblem<MoeProblem>> bad = {
      {"integers", [](P p) { p.x.dtype = DType::kInt32; }, {"x", "int32", "float16"}},
      {"x rank", [](P p) { p.x.rank = 1; }, {"x", "(5,)", "(tokens, width)"}},
      {"rank beyond all", [](P p) { p.x.rank = 9; }, {"x", "9", "8"}},
      {"negative size", [](P p) { p.x.shape[0] = -5; }, {"x", "-5"}},
      {"gate_up dtype",
       [](P p) { p.gate_up.dtype = DType::kFloat16; },
       {"gate_up", "float16", "float32"}},
      {"down dtype", [](P p) { p.down.dtype = DType::kFloat64; }, {"down", "float64", "float32"}},
      {"gate_up rank", [](P p) { p.gate_up.rank = 2; }, {"gate_up", "(3, 12)", "experts"}},
      {"down rank", [](P p) { p.down.rank = 2; }, {"down", "(3, 8)", "inner"}},
      {"gate_up width", [](P p) { p.gate_up.shape[2] = 9; }, {"gate_up", "(3, 12, 9)", "8"}},
      {"down width", [](P p) { p.down.shape[1] = 9; }, {"down", "(3, 9, 6)", "8"}},
      {"experts", [](P p) { p.down.shape[0] = 4; }, {"down", "4", "gate_up", "3"}},
      {"inner", [](P p) { p.down.shape[2] = 5; }, {"gate_up", "12", "5", "10", "swiglu"}},
      {"no gate", [](P p) { p.activation = Activation::kGelu; }, {"gate_up", "12", "gelu", "6"}},
      {"up_bias shape", [](P p) { p.up_bias->shape[1] = 6; }, {"up_bias", "(3, 6)", "(3, 12)"}},
      {"up_bias dtype", [](P p) { p.up_bias->dtype = DType::kFloat16; }, {"up_bias", "float16"}},
      {"down_bias shape", [](P p) { p.down_bias->rank = 1; }, {"down_bias", "(3,)", "(3, 8)"}},
      {"down_bias dtype",
       [](P p) { p.down_bias->dtype = DType::kFloat64; },
       {"down_bias", "float64"}},
      {"ids dtype", [](P p) { p.ids.dtype = DType::kFloat32; }, {"ids", "float32", "int64"}},
      {"ids rank", [](P p) { p.ids.rank = 1; }, {"ids", "(5,)"}},
      {"ids tokens", [](P p) { p.ids.shape[0] = 6; }, {"ids", "(6, 2)", "(5, 2)"}},
      {"weights shape", [](P p) { p.weights->shape[1] = 3; }, {"weights", "(5, 3)", "(5, 2)"}},
      {"weights dtype",
       [](P p) { p.weights->dtype = DType::kBFloat16; },
       {"weights", "bfloat16", "float32"}},
      {"out shape", [](P p) { p.out.shape[1] = 6; }, {"out", "(5, 6)", "(5, 8)"}},
      {"out dtype", [](P p) { p.out.dtype = DType::kFloat16; }, {"out", "float16", "float32"}},
      {"out overlaps", [](P p) { p.out.stride[0] = 0; }, {"out", "stride 0"}},
      {"pre shape", [](P p) { p.pre->shape[1] = 1; }, {"pre", "(10, 1, 6)", "(10, 2, 6)"}},
      {"pre dtype", [](P p) { p.pre->dtype = DType::kFloat64; }, {"pre", "float64"}},
      {"pre overlaps", [](P p) { p.pre->stride[2] = 0; }, {"pre", "stride 0"}},
      {"pre alone", [](P p) { p.routing.reset(); }, {"pre", "routing"}},
      {"routing alone", [](P p) { p.pre.reset(); }, {"pre", "routing"}},
      {"routing size", [](P p) { p.routing->shape[0] = 13; }, {"routing", "(13,)", "(14,)"}},
      {"routing dtype", [](P p) { p.routing->dtype = DType::kInt64; }, {"routing", "int64"}},
      {"routing strided", [](P p) { p.routing->stride[0] = 2; }, {"routing", "contiguous"}},
      {"more than 2^63 elements",
       [](P p) {
         p.gate_up = huge_spec(DType::kFloat32, {kHuge, kHuge, 8});
       },
       {"gate_up", "2^63"}},
      {"more than 2^31 pairs",
       [](P p) {
         p.x = p.out = huge_spec(DType::kFloat32, {kHuge, 8});
         p.ids = huge_spec(DType::kInt32, {kHuge, 2});
         p.weights.reset();
       },
       {"ids", "2^31", "part of the tokens"}},
      {"threads", [](P p) { p.device.num_threads = -1; }, {"num_threads", "-1"}},
  };
  for (const auto& b : bad) {
    if (std::string(b.what) == "threads") continue;  // the oracle has none
    check_refused(moe_problem(), b);
  }
  MoeProblem p = moe_problem();
  bad.back().spoil(p);
  CHECK_CONTAINS(flashmoe::plan(p).status().message(), "num_threads is -1");
}

TEST(bad_backward_problems) {
  using P = MoeProblem&;
  const std::vector<BadProblem<MoeProblem>> bad = {
      {"no pre", [](P p) { p.pre.reset(); }, {"pre", "forward pass"}},
      {"no routing", [](P p) { p.routing.reset(); }, {"routing", "forward pass"}},
      {"grad_out shape", [](P p) { p.grad_out->shape[1] = 6; }, {"grad_out", "(5, 6)", "(5, 8)"}},
      {"grad_x dtype", [](P p) { p.grad_x->dtype = DType::kFloat16; }, {"grad_x", "float16"}},
      {"grad_gate_up shape",
       [](P p) { p.grad_gate_up->shape[1] = 6; },
       {"grad_gate_up", "(3, 6, 8)", "(3, 12, 8)"}},
      {"grad_down overlaps", [](P p) { p.grad_down->stride[1] = 0; }, {"grad_down", "stride 0"}},
      {"no up_bias", [](P p) { p.up_bias.reset(); }, {"grad_up_bias", "no up_bias"}},
      {"no down_bias", [](P p) { p.down_bias.reset(); }, {"grad_down_bias", "no down_bias"}},
      {"no weights", [](P p) { p.weights.reset(); }, {"grad_weights", "no weights"}},
      {"grad_weights dtype",
       [](P p) { p.grad_weights->dtype = DType::kFloat64; },
       {"grad_weights", "float64", "float32"}},
  };
  for (const auto& b : bad) check_refused(moe_problem(Pass::kBackward), b);
  MoeProblem p = moe_problem(Pass::kBackward);
  p.out = {};  // is not read
  CHECK(flashmoe::plan(p).ok(), flashmoe::plan(p).status().message());
}

TEST(bad_routers) {
  using P = RouteProblem&;
  const std::vector<BadProblem<RouteProblem>> bad = {
      {"integers", [](P p) { p.logits.dtype = DType::kInt64; }, {"logits", "int64"}},
      {"logits rank", [](P p) { p.logits.rank = 1; }, {"logits", "(5,)", "(tokens, experts)"}},
      {"bias shape", [](P p) { p.bias->shape[0] = 7; }, {"bias", "(7,)", "(8,)"}},
      {"bias dtype", [](P p) { p.bias->dtype = DType::kBFloat16; }, {"bias", "bfloat16"}},
      {"ids dtype", [](P p) { p.ids.dtype = DType::kInt64; }, {"ids", "int64", "int32"}},
      {"ids tokens", [](P p) { p.ids.shape[0] = 4; }, {"ids", "(4, 3)", "(5, 3)"}},
      {"k", [](P p) { p.ids.shape[1] = 9; }, {"k is 9", "8"}},
      {"weights shape", [](P p) { p.weights.shape[1] = 2; }, {"weights", "(5, 2)", "(5, 3)"}},
      {"weights dtype", [](P p) { p.weights.dtype = DType::kBFloat16; }, {"weights", "bfloat16"}},
      {"ids overlap", [](P p) { p.ids.stride[1] = 0; }, {"ids", "stride 0"}},
  };
  for (const auto& b : bad) check_refused(route_problem(), b);
  const std::vector<BadProblem<RouteProblem>> backward = {
      {"grad_weights", [](P p) { p.grad_weights->shape[1] = 2; }, {"grad_weights", "(5, 2)"}},
      {"grad_logits", [](P p) { p.grad_logits->dtype = DType::kFloat32; }, {"grad_logits"}},
  };
  for (const auto& b : backward) check_refused(route_problem(Pass::kBackward), b);
}

TEST(empty_problems_are_legal) {
  for (Pass pass : {Pass::kForward, Pass::kBackward}) {
    for (bool no_tokens : {true, false}) {
      MoeProblem p = moe_problem(pass);
      const int64_t tokens = no_tokens ? 0 : 5, top_k = no_tokens ? 2 : 0;
      p.x = p.out = contiguous(DType::kFloat32, {tokens, 8});
      p.ids = contiguous(DType::kInt32, {tokens, top_k});
      p.weights = contiguous(DType::kFloat32, {tokens, top_k});
      p.pre = contiguous(DType::kFloat32, {0, 2, 6});
      p.routing = contiguous(DType::kInt32, {4});
      if (pass == Pass::kBackward) {
        p.grad_out = p.grad_x = p.x;
        p.grad_weights = p.weights;
      }
      CHECK(flashmoe::plan(p).ok(), flashmoe::plan(p).status().message());
    }
  }
}

TEST(a_missing_tensor_is_named) {
  const auto plan = flashmoe::plan(moe_problem());
  std::vector<std::byte> workspace(plan.value().workspace_bytes);
  CHECK_CONTAINS(flashmoe::run(plan.value(), {}, workspace.data()).message(), "x is null");
  const auto route = flashmoe::plan(route_problem());
  workspace.resize(route.value().workspace_bytes);
  CHECK_CONTAINS(flashmoe::run(route.value(), {}, workspace.data()).message(), "logits is null");
}

TEST(plans_say_who_and_how) {
  MoeProblem p = moe_problem();
  const auto plan = flashmoe::plan(p);
  CHECK_EQ(plan.value().kernel, "cpu_" + flashmoe::cpu_target() + "_moe_fwd");
  CHECK_EQ(plan.value().rows, 10);
  CHECK_EQ(plan.value().inner, 6);
  CHECK_EQ(plan.value().workspace_bytes % 64, size_t{0});
  CHECK_CONTAINS(flashmoe::explain(p), "2 of 3 experts");
  CHECK_CONTAINS(flashmoe::explain(p), "swiglu, up bias, down bias");
  p.pass = Pass::kBackward;
  CHECK_CONTAINS(flashmoe::explain(p), "_moe_bwd");
}

// What a call costs does not depend on how many threads there are, apart from their scratch.
TEST(the_cut_does_not_depend_on_threads) {
  MoeProblem one = moe_problem(), many = moe_problem();
  one.device.num_threads = 1;
  many.device.num_threads = 64;
  const auto a = flashmoe::plan(one).value(), b = flashmoe::plan(many).value();
  CHECK_EQ(a.block_m, b.block_m);
  CHECK_EQ(a.block_n, b.block_n);
  CHECK_EQ(a.work_items, b.work_items);
}
