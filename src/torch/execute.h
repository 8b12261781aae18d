// Plan and run for torch: errors as exceptions, plans kept, workspace and threads from torch. For
// any operator with problem -> plan -> run: plan(Problem) and run(Plan, tensors, workspace,
// Launch).
#pragma once

#include <array>
#include <memory>
#include <string>
#include <utility>

#include "convert.h"
#include "error.h"

namespace flashmoe::ops {

// What the planner reads of the environment. A plan is only good for the values it was made under.
class PlannerEnvironment {
 public:
  bool changed();

 private:
  std::array<std::pair<const char*, std::string>, 2> variables_{
      {{"FLASHMOE_FAMILY", ""}, {"FLASHMOE_TILE", ""}}};
};

template <class Plan>
class PlanCache {
 public:
  using Problem = decltype(Plan::problem);

  std::shared_ptr<const Plan> get(const Problem& problem) {
    if (environment_.changed()) entries_ = {};
    for (const Entry& entry : entries_) {
      if (entry.plan && entry.problem == problem) return entry.plan;
    }
    Result<Plan> result = plan(problem);
    raise_if_error(result.status());
    Entry& entry = entries_[next_++ % entries_.size()];
    entry = {problem, std::make_shared<const Plan>(std::move(result.value()))};
    return entry.plan;
  }

 private:
  struct Entry {
    Problem problem;  // as asked; the one in the plan has its defaults filled in
    std::shared_ptr<const Plan> plan;
  };
  PlannerEnvironment environment_;
  std::array<Entry, 16> entries_;  // few enough to look through all of them
  size_t next_ = 0;                // the oldest, which makes room
};

// The plan of a problem, made once and kept for the next calls alike: a model asks for the same few
// over and over.
template <class Plan>
std::shared_ptr<const Plan> plan_or_fail(const decltype(Plan::problem)& problem) {
  thread_local PlanCache<Plan> cache;  // one per thread, so that no call waits for another
  return cache.get(problem);
}

// torch's current stream where `like` is, and its threads.
Launch launch_for(const Tensor& like);

// Runs it where `like` is.
template <class Plan, class Tensors>
void run_or_fail(const Plan& plan, const Tensors& tensors, const Tensor& like) {
  OptionalTensor workspace;
  if (plan.workspace_bytes > 0) workspace = allocate_bytes(plan.workspace_bytes, like);
  void* const scratch = workspace ? workspace->mutable_data_ptr() : nullptr;
  raise_if_error(run(plan, tensors, scratch, launch_for(like)));
}

}  // namespace flashmoe::ops
