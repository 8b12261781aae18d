// The CUDA backend of writing to a cache, as the core sees it.
#pragma once

#include "flashmoe/cache.h"

namespace flashmoe::cuda::cache {

// Fills in kernel and launches, or says why no kernel of this build can do it and what would work.
// Asks no device: all it knows of the chip is problem.device.
Status plan_call(AppendPlan& plan);

// Runs a plan made by plan_call() on launch.stream.
Status run(const AppendPlan& plan, const AppendTensors& tensors, const Launch& launch);

}  // namespace flashmoe::cuda::cache
