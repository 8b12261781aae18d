// Writing to a cache: problems that are not legal, and what is said about them.
#include "flashmoe/cache.h"
#include "refusals.h"
#include "testing.h"

using namespace testing;
using flashmoe::AppendProblem;
using flashmoe::contiguous;
using flashmoe::DType;

namespace {

AppendProblem append_problem() {
  AppendProblem p;
  p.key = contiguous(DType::kFloat32, {5, 2, 8});
  p.value = contiguous(DType::kFloat32, {5, 2, 6});
  p.key_cache = contiguous(DType::kFloat8E4M3, {3, 4, 2, 8});
  p.value_cache = contiguous(DType::kFloat8E4M3, {3, 4, 2, 6});
  p.slots = contiguous(DType::kInt64, {5});
  p.k_scale = contiguous(DType::kFloat32, {2});
  p.v_scale = contiguous(DType::kFloat32, {});
  return p;
}

}  // namespace

TEST(bad_problems) {
  using P = AppendProblem&;
  const std::vector<BadProblem<AppendProblem>> bad = {
      {"key dtype", [](P p) { p.key.dtype = DType::kInt32; }, {"key", "int32"}},
      {"value dtype", [](P p) { p.value.dtype = DType::kFloat16; }, {"value", "float16"}},
      {"cache dtype",
       [](P p) { p.key_cache.dtype = p.value_cache.dtype = DType::kFloat16; },
       {"k_cache", "float16", "float32"}},
      {"key rank", [](P p) { p.key.rank = 2; }, {"key", "(5, 2)"}},
      {"cache rank", [](P p) { p.key_cache.rank = 3; }, {"k_cache", "(3, 4, 2)"}},
      {"heads", [](P p) { p.key.shape[1] = 1; }, {"key", "(5, 1, 8)", "(5, 2, 8)"}},
      {"head dim", [](P p) { p.value.shape[2] = 8; }, {"value", "(5, 2, 8)", "(5, 2, 6)"}},
      {"tokens", [](P p) { p.value.shape[0] = 4; }, {"value", "(4, 2, 6)", "(5, 2, 6)"}},
      {"slots dtype", [](P p) { p.slots.dtype = DType::kFloat32; }, {"slot_mapping", "float32"}},
      {"slots shape", [](P p) { p.slots.shape[0] = 6; }, {"slot_mapping", "(6,)", "(5,)"}},
      {"cache overlaps", [](P p) { p.key_cache.stride[1] = 0; }, {"k_cache", "stride 0"}},
      {"scale shape", [](P p) { p.k_scale->shape[0] = 3; }, {"k_scale", "(3,)", "2"}},
      {"scale of a float32 cache",
       [](P p) { p.key_cache.dtype = p.value_cache.dtype = DType::kFloat32; },
       {"k_scale", "float32", "float8_e4m3fn"}},
      {"threads", [](P p) { p.device.num_threads = -1; }, {"num_threads", "-1"}},
  };
  for (const auto& b : bad) {
    if (std::string(b.what) == "threads") {  // the oracle has none
      AppendProblem p = append_problem();
      b.spoil(p);
      CHECK_CONTAINS(flashmoe::plan(p).status().message(), "num_threads");
      continue;
    }
    check_refused(append_problem(), b);
  }
}

TEST(pointers_are_checked) {
  const auto plan = flashmoe::plan(append_problem());
  CHECK(plan.ok(), plan.status().message());
  CHECK_CONTAINS(flashmoe::run(plan.value(), {}).message(), "key is null");
}
