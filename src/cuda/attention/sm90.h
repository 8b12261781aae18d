// The sm90 family, on the host: see families.h.
#pragma once

#include <string>

#include "cuda/attention/families.h"
#include "cuda/attention/paged.h"

namespace flashmoe::cuda::sm90 {

std::string lacks(const AttentionPlan& plan);
std::string slower(const AttentionPlan& plan, const Gpu& gpu);
std::string cannot_serve(const AttentionPlan& plan, const Kernel& kernel);
std::string too_large(const AttentionPlan& plan, const Kernel& kernel, const Gpu& gpu);
void lay_out(AttentionPlan& plan, const Kernel& kernel, const Gpu& gpu);
Status run(const Call& call);

// Sequences of many queries over pages: the kernel for them, or null where it cannot run the
// problem; and its launch, from what the kernels for others are given.
const Kernel* find_chunk_kernel(const AttentionPlan& plan);
Status run_chunk(const Call& call, const AttentionLaunch& step, const PagedParams& pages);

}  // namespace flashmoe::cuda::sm90
