// The families whose kernels multiply by mma.sync, sm75 and sm80, on the host: see families.h.
#pragma once

#include <string>

#include "cuda/attention/families.h"

namespace flashmoe::cuda::mma_sync {

std::string lacks(const AttentionPlan& plan);
std::string slower(const AttentionPlan& plan, const Gpu& gpu);
std::string cannot_serve(const AttentionPlan& plan, const Kernel& kernel);
std::string too_large(const AttentionPlan& plan, const Kernel& kernel, const Gpu& gpu);
void lay_out(AttentionPlan& plan, const Kernel& kernel, const Gpu& gpu);
Status run(const Call& call);

}  // namespace flashmoe::cuda::mma_sync
