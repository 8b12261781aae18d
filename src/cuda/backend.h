// The CUDA backend as the planner sees it: which kernel a checked problem gets, and how it is
// launched.
#pragma once

#include "flashmoe/attention.h"

namespace flashmoe::cuda {

// Fills in kernel, tile and grid, or says why no kernel of this build can do it and what would
// work. Asks no device: all it knows of the chip is problem.device.
Status choose(AttentionPlan& plan);

// Runs a plan made by choose() on launch.stream.
Status run(const AttentionPlan& plan, const AttentionTensors& tensors, const Launch& launch);

// Whether kernels can address the tensor where it lies: its last dimension unit-stride, its rows
// 16-byte aligned, and its leading dimensions walkable with one stride.
bool in_place(const TensorSpec& spec);

}  // namespace flashmoe::cuda
