// Attention over pages on the host: which tile, how keys are split, the workspace, and what kernels
// are given. All families share it.
#pragma once

#include <optional>
#include <string>

#include "cuda/attention/call.h"
#include "cuda/attention/families.h"

namespace flashmoe::cuda {

// What no kernel over pages can do of the problem; empty: nothing.
std::string missing_over_pages(const AttentionPlan& plan);

// The family's tile for the problem, or null and why there is none.
const Kernel* choose_paged_tile(AttentionPlan& plan, const Family& family, const Gpu& gpu,
                                const std::optional<ForcedTile>& forced, std::string& why);

// Fills in launches, splits and workspace.
void lay_out_paged(AttentionPlan& plan, const Kernel& kernel, const Gpu& gpu);

Status run_paged(const Call& call);

}  // namespace flashmoe::cuda
