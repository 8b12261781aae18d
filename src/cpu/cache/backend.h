// The CPU backend of writing to a cache, as the planner sees it.
#pragma once

#include "flashmoe/cache.h"

namespace flashmoe::cpu::cache {

// Fills in kernel, work items and workers.
void cut(AppendPlan& plan);

void run(const AppendPlan& plan, const AppendTensors& tensors, const Launch& launch);

}  // namespace flashmoe::cpu::cache
