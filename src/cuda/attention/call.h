// From a plan and its tensors to launches: what kernels are given, and the loop over the plan.
#pragma once

#include <vector>

#include "attention/problem.h"
#include "cuda/attention/params.h"
#include "cuda/attention/workspace.h"
#include "flashmoe/attention.h"

namespace flashmoe::cuda {

struct AttentionSecondParams;

// One call of run().
struct Call {
  const AttentionPlan& plan;
  const AttentionTensors& tensors;
  char* workspace;
  const Launch& launch;
  Geometry geometry;
  ForwardWorkspace forward;  // of the pass that the plan is of
  BackwardWorkspace backward;
};

// What the launches around the main ones are given.
struct SideParams {
  RaggedParams ragged{};
  BiasAlignParams bias_align{};
};

// All that kernels of either pass are given, whatever the family.
void fill_forward(AttentionFwdParams& p, const Call& call);
// `others`: batch strides of more tensors that the kernels walk.
void fill_backward(AttentionBwdParams& p, const Call& call, uint32_t preprocess_heads,
                   const std::vector<int64_t*>& others = {});
// The tangent pass too.
void fill_second(AttentionSecondParams& p, const Call& call);
// Of these: what makes a score of a product, and the keys that a row sees.
void fill_scores(AttentionParams& p, const Geometry& g);
// And the sinks, null where there are none.
void fill_sinks(AttentionParams& p, const Call& call);
// A forward kernel wants a positive scale: see AttentionFwdParams::sign.
void fill_sign(AttentionFwdParams& p, const Geometry& g);
// longest_first: whether the last blocks of a sequence, which a causal mask leaves most to do, come
// first in lists of blocks of keys. Lists of queries always have them so.
SideParams fill_side_params(const Call& call, const AttentionFwdParams& p, bool longest_first);
SideParams fill_side_params(const Call& call, const AttentionBwdParams& p, bool longest_first);

// Turns the params to one slice of the call.
void enter_slice(AttentionFwdParams& p, const Call& call, const Slice& slice);
void enter_slice(AttentionBwdParams& p, const Call& call, const Slice& slice);
// Turns them to the sum of a shared bias's gradient.
void enter_bias_sum(AttentionBwdParams& p, const Call& call, const AttentionLaunch& step);
// What the sum of the sinks' gradient is given.
AttentionBwdParams sink_sum(AttentionBwdParams p, const Call& call, const AttentionLaunch& step);

BiasTransposeParams bias_transpose(const Call& call, const Slice& slice, bool gradient);

// Launches one step with `params`, for a slice of `batch` sequences.
Status launch_step(const Call& call, const AttentionLaunch& step, int64_t batch, const void* params,
                   size_t params_bytes);

template <class Params>
Status run_step(const Call& call, Params& p, const SideParams& side, const AttentionLaunch& step,
                const Slice& slice) {
  const auto launch = [&](const auto& params) {
    return launch_step(call, step, slice.batch, &params, sizeof(params));
  };
  switch (step.given) {
    case Given::kCall:
      return launch(p);
    case Given::kRagged:
      return launch(side.ragged);
    case Given::kBiasAlign:
      return launch(side.bias_align);
    case Given::kBiasToHeads:
      return launch(bias_transpose(call, slice, false));
    case Given::kBiasFromHeads:
      return launch(bias_transpose(call, slice, true));
    case Given::kBiasSum:
    case Given::kBiasSumLast:
      if constexpr (requires { enter_bias_sum(p, call, step); }) enter_bias_sum(p, call, step);
      return launch(p);
    case Given::kSinkSum:
    case Given::kSinkSumLast:
      if constexpr (requires { sink_sum(p, call, step); }) return launch(sink_sum(p, call, step));
      break;
  }
  return {};
}

// Goes through the plan's launches. Neighbours that repeat do so together, slice by slice.
template <class Params>
Status run_launches(const Call& call, Params& p, const SideParams& side) {
  const std::vector<AttentionLaunch>& steps = call.plan.launches;
  for (size_t first = 0, end = 0; first < steps.size(); first = end) {
    const bool repeats = steps[first].per_slice;
    while (end < steps.size() && steps[end].per_slice == repeats) ++end;
    for (int64_t i = 0; i < (repeats ? call.plan.slices : 1); ++i) {
      const Slice slice = slice_of(call.plan, i);
      if (repeats) enter_slice(p, call, slice);
      for (size_t at = first; at < end; ++at) {
        Status status = run_step(call, p, side, steps[at], slice);
        if (!status.ok()) return status;
      }
    }
  }
  return {};
}

}  // namespace flashmoe::cuda
