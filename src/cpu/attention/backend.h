// The CPU backend as the planner sees it: how a checked problem is cut, and how the cut is run.
#pragma once

#include "attention/problem.h"
#include "flashmoe/attention.h"

namespace flashmoe::cpu {

// Fills in kernel, blocks, chunks, workers and workspace.
void cut(AttentionPlan& plan);

// Runs a plan made by cut(). Run-time lengths have been checked.
void run(const AttentionPlan& plan, const AttentionTensors& tensors, void* workspace,
         const Launch& launch);

}  // namespace flashmoe::cpu
