#include "execute.h"

#include <torch/csrc/stable/ops.h>

#include <array>
#include <cstdlib>
#include <string>
#include <utility>

#include "error.h"

namespace flashmoe::ops {
namespace {

// What the planner reads of the environment. A plan is only good for the values it was made under.
class PlannerEnvironment {
 public:
  bool changed() {
    bool any = false;
    for (auto& [name, seen] : variables_) {
      const char* set = std::getenv(name);
      const char* now = set ? set : "";
      if (seen == now) continue;
      seen = now;
      any = true;
    }
    return any;
  }

 private:
  std::array<std::pair<const char*, std::string>, 2> variables_{
      {{"FLASHMOE_FAMILY", ""}, {"FLASHMOE_TILE", ""}}};
};

class PlanCache {
 public:
  std::shared_ptr<const AttentionPlan> get(const AttentionProblem& problem) {
    if (environment_.changed()) entries_ = {};
    for (const Entry& entry : entries_) {
      if (entry.plan && entry.problem == problem) return entry.plan;
    }
    Result<AttentionPlan> result = plan(problem);
    raise_if_error(result.status());
    Entry& entry = entries_[next_++ % entries_.size()];
    entry = {problem, std::make_shared<const AttentionPlan>(std::move(result.value()))};
    return entry.plan;
  }

 private:
  struct Entry {
    AttentionProblem problem;  // as asked; the one in the plan has its scale filled in
    std::shared_ptr<const AttentionPlan> plan;
  };
  PlannerEnvironment environment_;
  std::array<Entry, 16> entries_;  // few enough to look through all of them
  size_t next_ = 0;                // the oldest, which makes room
};

void on_torch_threads(int tasks, const std::function<void(int)>& task) {
  torch::stable::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) task(static_cast<int>(i));
  });
}

}  // namespace

std::shared_ptr<const AttentionPlan> plan_or_fail(const AttentionProblem& problem) {
  thread_local PlanCache cache;  // one per thread, so that no call waits for another
  return cache.get(problem);
}

void run_or_fail(const AttentionPlan& plan, const AttentionTensors& tensors, const Tensor& like) {
  const Launch launch{stream_of(like), on_torch_threads};
  OptionalTensor workspace;
  if (plan.workspace_bytes > 0) workspace = allocate_bytes(plan.workspace_bytes, like);
  void* const scratch = workspace ? workspace->mutable_data_ptr() : nullptr;
  raise_if_error(run(plan, tensors, scratch, launch));
}

}  // namespace flashmoe::ops
