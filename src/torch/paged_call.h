// From the arguments of attention over pages to a problem. Decides where the query and the result
// of a call will lie, and moves neither: the op plans the problem first, explain_paged() only plans
// it.
#pragma once

#include "paged_arguments.h"
#include "placement.h"

namespace flashmoe::ops {

struct PagedCall {
  Placement query, out;
  AttentionProblem problem;  // with the tensors as the kernels see them
};

// With results that the caller has memory for.
PagedCall paged_call(const PagedArguments& a, const Placement& out,
                     const std::optional<TensorSpec>& lse, const Device& device);

// With results that will be allocated, as those of all attention.
PagedCall paged_call(const PagedForwardArguments& f, const Device& device);

}  // namespace flashmoe::ops
