#include "execute.h"

#include <torch/csrc/stable/ops.h>

#include <cstdlib>

namespace flashmoe::ops {
namespace {

void on_torch_threads(int tasks, const std::function<void(int)>& task) {
  torch::stable::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) task(static_cast<int>(i));
  });
}

}  // namespace

bool PlannerEnvironment::changed() {
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

Launch launch_for(const Tensor& like) { return {stream_of(like), on_torch_threads}; }

}  // namespace flashmoe::ops
