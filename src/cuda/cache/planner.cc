#include "cuda/cache/planner.h"

#include "core/text.h"

namespace flashmoe::cuda::cache {

Status plan_call(AppendPlan&) {
  return unsupported("no CUDA kernel of this build writes to a cache. The CPU backend does: move ",
                     "the tensors with .cpu()");
}

Status run(const AppendPlan& plan, const AppendTensors&, const Launch&) {
  return unsupported("the plan's kernel, ", plan.kernel, ", is not of this build");
}

}  // namespace flashmoe::cuda::cache
