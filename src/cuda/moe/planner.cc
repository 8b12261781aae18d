#include "cuda/moe/planner.h"

#include "core/text.h"

namespace flashmoe::cuda::moe {
namespace {

Status no_kernels() {
  return unsupported(
      "this build has no CUDA kernels for a mixture of experts. The CPU backend runs it: move the "
      "tensors with .cpu()");
}

}  // namespace

Status plan_call(MoePlan&) { return no_kernels(); }
Status plan_call(RoutePlan&) { return no_kernels(); }

Status run(const MoePlan&, const MoeTensors&, void*, const Launch&) { return no_kernels(); }
Status run(const RoutePlan&, const RouteTensors&, void*, const Launch&) { return no_kernels(); }

bool in_place(const TensorSpec&) { return true; }

}  // namespace flashmoe::cuda::moe
