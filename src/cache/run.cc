#include "core/check.h"
#include "cpu/cache/backend.h"
#include "cuda/cache/planner.h"
#include "flashmoe/cache.h"

namespace flashmoe {

Status run(const AppendPlan& plan, const AppendTensors& t, const Launch& launch) {
  const AppendProblem& p = plan.problem;
  const Status status = check_pointers(
      {
          {"key", &p.key, t.key},
          {"value", &p.value, t.value},
          // Without tokens nothing is written.
          {"k_cache", plan.tokens ? &p.key_cache : nullptr, t.key_cache},
          {"v_cache", plan.tokens ? &p.value_cache : nullptr, t.value_cache},
          {"slot_mapping", &p.slots, t.slots},
          {"k_scale", if_any(p.k_scale), t.k_scale},
          {"v_scale", if_any(p.v_scale), t.v_scale},
      },
      0, nullptr);
  if (!status.ok()) return status;
  if (p.device.type == DeviceType::kCuda) return cuda::cache::run(plan, t, launch);
  cpu::cache::run(plan, t, launch);
  return {};
}

}  // namespace flashmoe
