// The CUDA backend of attention as the core sees it.
#pragma once

#include "flashmoe/attention.h"

namespace flashmoe::cuda {

// The second and third dimension of a grid are 16-bit.
inline constexpr int64_t kMaxGridYZ = 65535;

// A side of the window as kernels have it: kNoLimit, which no length reaches, is none.
int32_t window_limit(int64_t side);

// Fills in kernel, tile, launches and workspace, or says why no kernel of this build can do it and
// what would work. Asks no device: all it knows of the chip is problem.device.
Status plan_call(AttentionPlan& plan);

// Runs a plan made by plan_call() on launch.stream.
Status run(const AttentionPlan& plan, const AttentionTensors& tensors, void* workspace,
           const Launch& launch);

// Whether kernels can address the tensor where it lies: its last dimension unit-stride, its rows
// 16-byte aligned.
bool in_place(const TensorSpec& spec);

}  // namespace flashmoe::cuda
