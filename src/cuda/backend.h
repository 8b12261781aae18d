// The CUDA backend as the planner sees it: which kernel a checked problem gets, and how it is
// launched.
#pragma once

#include <string_view>

#include "flashmoe/attention.h"

namespace flashmoe::cuda {

// The second and third dimension of a grid are 16-bit.
inline constexpr int64_t kMaxGridYZ = 65535;

// Fills in kernel, tile and grid, or says why no kernel of this build can do it and what would
// work. Asks no device: all it knows of the chip is problem.device.
Status choose(AttentionPlan& plan);

// Runs a plan made by choose() on launch.stream.
Status run(const AttentionPlan& plan, const AttentionTensors& tensors, void* workspace,
           const Launch& launch);

// Whether kernels can address the tensor where it lies: its last dimension unit-stride, its rows
// 16-byte aligned.
bool in_place(const TensorSpec& spec);

// Whether this build has kernels of the family.
bool has_family(std::string_view family);

// What lies where in the workspace of a backward pass, in bytes: see AttentionBwdParams.
struct BackwardWorkspace {
  int64_t rows = 0;  // of one head, all sequences, in whole blocks
  size_t row_terms = 0, grad_query_sums = 0, turns = 0, tickets = 0;
  size_t bytes = 0;  // of all
};
BackwardWorkspace backward_workspace(const AttentionPlan& plan);

}  // namespace flashmoe::cuda
