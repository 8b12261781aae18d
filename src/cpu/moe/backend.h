// The CPU backend as the planner sees it: how a checked problem is cut, and how the cut is run.
#pragma once

#include "flashmoe/moe.h"

namespace flashmoe::cpu::moe {

// Fills in kernel, blocks, workers and workspace.
void cut(MoePlan& plan);
void cut(RoutePlan& plan);

// Runs a plan made by cut(). Fails, with nothing computed, where `routing` contradicts the problem.
Status run(const MoePlan& plan, const MoeTensors& tensors, void* workspace, const Launch& launch);
Status run(const RoutePlan& plan, const RouteTensors& tensors, void* workspace,
           const Launch& launch);

}  // namespace flashmoe::cpu::moe
