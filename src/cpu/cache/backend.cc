#include "cpu/cache/backend.h"

#include "core/numbers.h"
#include "core/text.h"
#include "cpu/cache/kernels.h"
#include "cpu/targets.h"
#include "cpu/threads.h"

namespace flashmoe::cpu::cache {
namespace {

constexpr int64_t kTokensOfItem = 16;

Side side(const TensorSpec& spec, const void* data, const TensorSpec& cache, void* target,
          const std::optional<TensorSpec>& scale, const void* scale_data) {
  Side s;
  s.from = static_cast<const char*>(data);
  s.dtype = spec.dtype;
  s.token = spec.stride[0];
  s.head = spec.stride[1];
  s.col = spec.stride[2];
  s.cache = static_cast<char*>(target);
  s.cache_dtype = cache.dtype;
  s.block = cache.stride[0];
  s.row = cache.stride[1];
  s.cache_head = cache.stride[2];
  s.cache_col = cache.stride[3];
  s.dim = spec.size(-1);
  if (scale) {
    s.scale = static_cast<const float*>(scale_data);
    s.scale_step = scale->rank ? scale->stride[0] : 0;
  }
  return s;
}

}  // namespace

void cut(AppendPlan& plan) {
  plan.kernel = text("cpu_", target().name, "_cache_append");
  plan.work_items = ceil_div(plan.tokens, kTokensOfItem);
  plan.workers = workers_for(plan.problem.device, plan.work_items);
}

void run(const AppendPlan& plan, const AppendTensors& t, const Launch& launch) {
  const AppendProblem& problem = plan.problem;
  Params p;
  p.sides[0] = side(problem.key, t.key, problem.key_cache, t.key_cache, problem.k_scale, t.k_scale);
  p.sides[1] =
      side(problem.value, t.value, problem.value_cache, t.value_cache, problem.v_scale, t.v_scale);
  p.slots = t.slots;
  p.slots_dtype = problem.slots.dtype;
  p.slots_step = problem.slots.stride[0];
  p.tokens = plan.tokens;
  p.heads = plan.heads;
  p.page = plan.page;
  p.rows = problem.key_cache.size(0) * plan.page;
  p.tokens_of_item = kTokensOfItem;
  const Kernels& kernels = kernels_for(problem.key.dtype, *target().cache);
  run_items(plan.work_items, plan.workers, launch,
            [&](int64_t item, int) { kernels.append(p, item); });
}

}  // namespace flashmoe::cpu::cache
