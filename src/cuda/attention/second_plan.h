// Forward mode and second derivatives on the host: kernels, workspace, launches, and what these are
// given. The families sm75 and sm80 share it.
#pragma once

#include <string>

#include "cuda/attention/call.h"
#include "cuda/attention/families.h"

namespace flashmoe::cuda {

// The family's kernel that does most of the work, or null and why there is none.
const Kernel* choose_second_kernel(const AttentionPlan& plan, const Family& family,
                                   std::string& why);

// Fills in launches and workspace.
void lay_out_second(AttentionPlan& plan, const Kernel& kernel, const Gpu& gpu);

Status run_second(Call& call);

}  // namespace flashmoe::cuda
