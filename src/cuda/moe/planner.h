// The CUDA backend of the mixture of experts as the core sees it.
#pragma once

#include "flashmoe/moe.h"

namespace flashmoe::cuda::moe {

// Fills in kernel, tile, launches and workspace, or says why no kernel of this build can do it and
// what would work. Asks no device: all it knows of the chip is problem.device.
Status plan_call(MoePlan& plan);
Status plan_call(RoutePlan& plan);

// Runs a plan made by plan_call() on launch.stream.
Status run(const MoePlan& plan, const MoeTensors& tensors, void* workspace, const Launch& launch);
Status run(const RoutePlan& plan, const RouteTensors& tensors, void* workspace,
           const Launch& launch);

// Whether kernels can address the tensor where it lies: rows of 16-byte aligned chunks with a unit
// last stride, or such columns (E, rows, columns) of a multiple of 16 rows. Biases lie as they
// like.
bool in_place(const TensorSpec& spec);

}  // namespace flashmoe::cuda::moe
