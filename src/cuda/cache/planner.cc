#include "cuda/cache/planner.h"

#include <algorithm>
#include <string>

#include "core/numbers.h"
#include "core/text.h"
#include "cuda/cache/catalogue.h"
#include "cuda/cache/params.h"
#include "cuda/runtime/driver.h"
#include "cuda/runtime/families.h"

namespace flashmoe::cuda::cache {
namespace {

// What no kernel can do of the problem; empty: nothing.
std::string missing_everywhere(const AppendPlan& plan) {
  const AppendProblem& p = plan.problem;
  if (p.key.dtype == DType::kFloat64 && p.key_cache.dtype != DType::kFloat64) {
    return "key is float64; CUDA kernels convert float32, float16 and bfloat16 to float8_e4m3fn";
  }
  const int64_t numbers = plan.heads * std::max(p.key.size(-1), p.value.size(-1));
  if (plan.tokens > INT32_MAX || plan.page > INT32_MAX || numbers > INT32_MAX) {
    return "there are more than 2^31 - 1 tokens, rows in a page, or numbers of a token";
  }
  return {};
}

Conversion conversion_of(const AppendProblem& p) {
  if (p.key.dtype == p.key_cache.dtype) return Conversion::kNone;
  return p.key.dtype == DType::kFloat16    ? Conversion::kFromFp16
         : p.key.dtype == DType::kBFloat16 ? Conversion::kFromBf16
                                           : Conversion::kFromFp32;
}

AppendSide side_of(const TensorSpec& from, const void* data, const TensorSpec& cache, void* target,
                   const std::optional<TensorSpec>& scale, const void* scale_data) {
  const int64_t bytes = dtype_bytes(from.dtype), cache_bytes = dtype_bytes(cache.dtype);
  AppendSide s{};
  s.from = static_cast<const char*>(data);
  s.cache = static_cast<char*>(target);
  s.token = from.stride[0] * bytes;
  s.head = from.stride[1] * bytes;
  s.col = from.stride[2] * bytes;
  s.block = cache.stride[0] * cache_bytes;
  s.row = cache.stride[1] * cache_bytes;
  s.cache_head = cache.stride[2] * cache_bytes;
  s.cache_col = cache.stride[3] * cache_bytes;
  s.scale = static_cast<const float*>(scale_data);
  if (scale && scale->rank == 1 && scale->shape[0] > 1) s.scale_stride = scale->stride[0];
  // As many numbers at once as lie side by side, aligned, in both.
  const int64_t dim = from.size(-1);
  const auto fits = [&](int64_t numbers) {
    const auto divides = [](int64_t unit, std::initializer_list<int64_t> all) {
      return std::all_of(all.begin(), all.end(), [&](int64_t x) { return x % unit == 0; });
    };
    return from.stride[2] == 1 && cache.stride[3] == 1 && dim % numbers == 0 &&
           divides(numbers * bytes, {s.token, s.head, reinterpret_cast<int64_t>(s.from)}) &&
           divides(numbers * cache_bytes,
                   {s.block, s.row, s.cache_head, reinterpret_cast<int64_t>(s.cache)});
  };
  int64_t numbers = 1;
  if (bytes == cache_bytes) {
    for (int64_t unit = bytes; unit <= 16; unit *= 2) {
      if (fits(unit / bytes)) numbers = unit / bytes;
    }
  } else if (bytes == 2 && fits(8)) {
    numbers = 8;
  }
  s.units = static_cast<int32_t>(dim / numbers);
  s.unit = static_cast<int32_t>(numbers * bytes);
  if (numbers > 1) {
    s.col = numbers * bytes;
    s.cache_col = numbers * cache_bytes;
  }
  return s;
}

}  // namespace

Status plan_call(AppendPlan& plan) {
  const ChipFamily* forced = nullptr;
  if (Status status = read_forced_family("key", forced); !status.ok()) return status;
  const Gpu gpu = gpu_of(plan.problem.device);
  const std::string missing = missing_everywhere(plan);
  std::string reasons;
  for (const ChipFamily& family : chip_families()) {
    const Kernel* kernel = find_kernel(family.name);
    std::string why;
    if (forced && forced != &family) {
      why = text("FLASHMOE_FAMILY asks for ", forced->name);
    } else if (!kernel) {
      why = "this build has no kernels of it";
    } else if (why = other_chip(family, gpu); why.empty()) {
      why = missing;
    }
    if (!why.empty()) {
      plan.candidates.push_back({family.name, "passed over: " + why});
      reasons += text(reasons.empty() ? "" : "; ", family.name, ": ", why);
      continue;
    }
    LaunchStep step;
    step.kernel = kernel->id.name;
    step.role = kAppendRole;
    step.grid = {static_cast<uint32_t>(ceil_div(plan.tokens, int64_t{kAppendTokens})), 2, 1};
    step.threads = kAppendThreads;
    step.handle = kernel;
    plan.kernel = kernel->id.name;
    plan.family = family.name;
    plan.work_items = int64_t{step.grid[0]} * 2;
    plan.launches = {step};
    plan.candidates.push_back({kernel->id.name, "chosen"});
    return {};
  }
  return unsupported("no CUDA kernel of this build can write to this cache on ",
                     chip_name(gpu.compute_capability), " (", reasons,
                     "). The CPU backend does: move the tensors with .cpu()");
}

Status run(const AppendPlan& plan, const AppendTensors& t, const Launch& launch) {
  if (plan.launches.size() != 1) return invalid("the plan is not one that plan() made for a GPU");
  const AppendProblem& problem = plan.problem;
  const LaunchStep& step = plan.launches.front();
  AppendParams p{};
  p.sides[0] =
      side_of(problem.key, t.key, problem.key_cache, t.key_cache, problem.k_scale, t.k_scale);
  p.sides[1] = side_of(problem.value, t.value, problem.value_cache, t.value_cache, problem.v_scale,
                       t.v_scale);
  p.slots = t.slots;
  p.slots_stride = problem.slots.stride[0];
  p.slots_of_cache = problem.key_cache.size(0) * plan.page;
  p.slots_are_int64 = problem.slots.dtype == DType::kInt64;
  p.tokens = static_cast<int32_t>(plan.tokens);
  p.heads = static_cast<int32_t>(plan.heads);
  p.page = static_cast<int32_t>(plan.page);
  p.page_log2 = exact_log2(plan.page);
  p.conversion = conversion_of(problem);
  LaunchShape shape;
  std::copy(step.grid.begin(), step.grid.end(), shape.grid);
  shape.threads = step.threads;
  return cuda::launch(static_cast<const Kernel*>(step.handle)->id, shape, problem.device.ordinal,
                      launch.stream, &p, sizeof(p));
}

}  // namespace flashmoe::cuda::cache
