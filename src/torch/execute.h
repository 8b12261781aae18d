// Plan and run for torch: errors as exceptions, plans kept, workspace and threads from torch.
#pragma once

#include <memory>

#include "convert.h"

namespace flashmoe::ops {

// The plan of a problem, made once and kept for the next calls alike: a model asks for the same few
// over and over.
std::shared_ptr<const AttentionPlan> plan_or_fail(const AttentionProblem& problem);

// Runs it where `like` is, on torch's current stream or threads.
void run_or_fail(const AttentionPlan& plan, const AttentionTensors& tensors, const Tensor& like);

}  // namespace flashmoe::ops
