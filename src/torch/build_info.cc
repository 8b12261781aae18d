// What is in this build, as JSON: for `doctor` and the benchmark's records.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <string>
#include <vector>

#include "flashmoe/attention.h"

namespace flashmoe::ops {
namespace {

std::string quoted(const std::string& text) { return "\"" + text + "\""; }

std::string json_list(const std::vector<std::string>& items) {
  std::string list;
  for (const std::string& item : items) list += (list.empty() ? "" : ", ") + item;
  return "[" + list + "]";
}

std::string json_kernel(const CudaKernel& k) {
  const auto number = [](const char* name, int value) {
    return ", " + quoted(name) + ": " + std::to_string(value);
  };
  return "{\"name\": " + quoted(k.name) + ", \"family\": " + quoted(k.family) +
         ", \"image\": " + quoted(k.image) + ", \"role\": " + quoted(k.role) +
         ", \"dtype\": " + quoted(dtype_name(k.dtype)) + number("head_dim", k.head_dim) +
         number("block_q", k.block_q) + number("block_k", k.block_k) +
         number("threads", k.threads) + number("shared_bytes", k.shared_bytes) + "}";
}

std::string build_info() {
  std::vector<std::string> targets, families, kernels;
  for (const std::string& name : cpu_targets()) targets.push_back(quoted(name));
  for (const CudaKernel& k : cuda_kernels()) {
    const std::string family = quoted(k.family);
    if (std::find(families.begin(), families.end(), family) == families.end()) {
      families.push_back(family);
    }
    kernels.push_back(json_kernel(k));
  }
  const auto devices = cuda_devices();
  return "{\"version\": " + quoted(version()) + ", \"cpu_target\": " + quoted(cpu_target()) +
         ", \"cpu_targets\": " + json_list(targets) + ", \"families\": " + json_list(families) +
         ", \"kernels\": " + json_list(kernels) +
         ", \"cuda_problem\": " + quoted(devices.ok() ? "" : devices.status().message()) + "}";
}

}  // namespace
}  // namespace flashmoe::ops

STABLE_TORCH_LIBRARY_IMPL(flashmoe, CompositeExplicitAutograd, m) {
  m.impl("build_info", TORCH_BOX(&flashmoe::ops::build_info));
}
