// From a plan and its tensors to launches: what the families share.
#pragma once

#include <initializer_list>
#include <string>
#include <vector>

#include "attention/problem.h"
#include "core/text.h"
#include "cuda/attention/catalogue.h"
#include "cuda/attention/params.h"
#include "flashmoe/attention.h"

namespace flashmoe::cuda {

// The problem, as every kernel of it sees it.
void fill_problem(AttentionParams& p, const AttentionPlan& plan, const AttentionTensors& t,
                  const Geometry& g);
// A forward kernel wants a positive scale: see AttentionFwdParams::sign.
void fill_sign(AttentionFwdParams& p, const Geometry& g);

// Leading dimensions that every tensor walks with one stride become one: dividing is dear on a GPU.
void merge_batch(AttentionParams& p, std::initializer_list<int64_t*> tensors);

// Lists the blocks of a ragged batch.
Status launch_ragged(const AttentionPlan& plan, const AttentionTensors& t, const Launch& launch,
                     const std::vector<RaggedList>& lists, int32_t* tile_counter = nullptr);

// One kernel, for the part of the batch that begins at p.first_batch. `overlaps`: it may begin
// before the kernel ahead of it has ended, and waits for that itself.
template <class Params>
Status launch_part(const std::string& name, const uint32_t (&grid)[3], const AttentionPlan& plan,
                   const Launch& launch, const Params& p, bool overlaps = false) {
  const Kernel* kernel = find_kernel(name);
  if (!kernel) return invalid("the plan names kernel ", name, ", which is not in this build");
  LaunchShape shape;
  for (int i = 0; i < 3; ++i) shape.grid[i] = grid[i];
  shape.threads = static_cast<uint32_t>(kernel->threads);
  shape.shared_bytes = static_cast<uint32_t>(kernel->shared_bytes);
  shape.cluster = static_cast<uint32_t>(kernel->cluster);
  shape.programmatic = overlaps;
  return cuda::launch(kernel->id, shape, plan.problem.device.ordinal, launch.stream, &p, sizeof(p));
}

}  // namespace flashmoe::cuda
