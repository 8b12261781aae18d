// The sm90 family, on the host: see families.h.
#pragma once

#include <string>

#include "cuda/attention/families.h"

namespace flashmoe::cuda::sm90 {

std::string lacks(const AttentionPlan& plan);
std::string slower(const AttentionPlan& plan, const Gpu& gpu);
std::string cannot_pack(const AttentionPlan& plan, const Kernel& kernel);
std::string too_large(const AttentionPlan& plan, const Kernel& kernel, const Gpu& gpu);
void lay_out(AttentionPlan& plan, const Kernel& kernel, const Gpu& gpu);
Status run(const Call& call);

}  // namespace flashmoe::cuda::sm90
