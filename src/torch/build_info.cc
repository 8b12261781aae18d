// What is in this build, as JSON: for `doctor` and the benchmark's records.
#include <torch/csrc/stable/library.h>

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
  std::vector<std::string> chips;
  for (const std::string& chip : k.chips) chips.push_back(quoted(chip));
  return "{\"name\": " + quoted(k.name) + ", \"family\": " + quoted(k.family) +
         ", \"image\": " + quoted(k.image) + ", \"symbol\": " + quoted(k.symbol) +
         ", \"chips\": " + json_list(chips) + ", \"role\": " + quoted(k.role) +
         ", \"dtype\": " + quoted(dtype_name(k.dtype)) + number("head_dim", k.head_dim) +
         number("block_q", k.block_q) + number("block_k", k.block_k) +
         number("threads", k.threads) + number("shared_bytes", k.shared_bytes) + "}";
}

std::string json_family(const CudaFamily& family) {
  std::vector<std::string> machine_code, dtypes, head_dims;
  for (const std::string& chip : family.machine_code) machine_code.push_back(quoted(chip));
  for (const DType dtype : family.dtypes) dtypes.push_back(quoted(dtype_name(dtype)));
  for (const int head_dim : family.head_dims) head_dims.push_back(std::to_string(head_dim));
  return "{\"name\": " + quoted(family.name) + ", \"oldest\": " + std::to_string(family.oldest) +
         ", \"newest\": " + std::to_string(family.newest) +
         ", \"machine_code\": " + json_list(machine_code) + ", \"ptx\": " + quoted(family.ptx) +
         ", \"dtypes\": " + json_list(dtypes) + ", \"head_dims\": " + json_list(head_dims) +
         ", \"in_build\": " + (family.in_build ? "true" : "false") + "}";
}

// "families" has the names of those in this build, "cuda_families" every one the library knows.
std::string build_info() {
  std::vector<std::string> targets, families, every_family, kernels;
  for (const std::string& name : cpu_targets()) targets.push_back(quoted(name));
  for (const CudaFamily& family : cuda_families()) {
    if (family.in_build) families.push_back(quoted(family.name));
    every_family.push_back(json_family(family));
  }
  for (const CudaKernel& kernel : cuda_kernels()) kernels.push_back(json_kernel(kernel));
  const auto devices = cuda_devices();
  return "{\"version\": " + quoted(version()) + ", \"cpu_target\": " + quoted(cpu_target()) +
         ", \"cpu_targets\": " + json_list(targets) + ", \"families\": " + json_list(families) +
         ", \"cuda_families\": " + json_list(every_family) +
         ", \"kernels\": " + json_list(kernels) +
         ", \"cuda_problem\": " + quoted(devices.ok() ? "" : devices.status().message()) + "}";
}

}  // namespace
}  // namespace flashmoe::ops

STABLE_TORCH_LIBRARY_IMPL(flashmoe, CompositeExplicitAutograd, m) {
  m.impl("build_info", TORCH_BOX(&flashmoe::ops::build_info));
}
