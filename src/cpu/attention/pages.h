// Attention over the pages of a cache on the CPU: how a problem is cut, and how the cut is run.
#pragma once

#include "flashmoe/attention.h"

namespace flashmoe::cpu {

void cut_pages(AttentionPlan& plan);

void run_pages(const AttentionPlan& plan, const AttentionTensors& tensors, void* workspace,
               const Launch& launch);

}  // namespace flashmoe::cpu
