#include "cuda/attention/families.h"

#include <algorithm>

#include "cuda/attention/mma_sync.h"
#include "cuda/attention/sm90.h"

namespace flashmoe::cuda {
namespace {

// An sm_80 image runs on 8.6 and 8.9 as it is. Hopper's own instructions exist on no other chip, so
// sm90 has no PTX.
const Family kFamilies[] = {
    {.name = "sm90",
     .oldest = 90,
     .newest = 90,
     .machine_code = {"sm_90a"},
     .ptx = "",
     .dtypes = {DType::kFloat16, DType::kBFloat16},
     .lacks = sm90::lacks,
     .slower = sm90::slower,
     .cannot_pack = sm90::cannot_pack,
     .too_large = sm90::too_large,
     .lay_out = sm90::lay_out,
     .run = sm90::run},
    {.name = "sm80",
     .oldest = 80,
     .newest = 0,
     .machine_code = {"sm_80", "sm_90"},
     .ptx = "compute_80",
     .dtypes = {DType::kFloat16, DType::kBFloat16},
     .lacks = mma_sync::lacks,
     .slower = mma_sync::slower,
     .cannot_pack = mma_sync::cannot_pack,
     .too_large = mma_sync::too_large,
     .lay_out = mma_sync::lay_out,
     .run = mma_sync::run},
    {.name = "sm75",
     .oldest = 75,
     .newest = 0,
     .machine_code = {"sm_75"},
     .ptx = "compute_75",
     .dtypes = {DType::kFloat16},
     .lacks = mma_sync::lacks,
     .slower = mma_sync::slower,
     .cannot_pack = mma_sync::cannot_pack,
     .too_large = mma_sync::too_large,
     .lay_out = mma_sync::lay_out,
     .run = mma_sync::run},
};

}  // namespace

std::span<const Family> families() { return kFamilies; }

const Family* find_family(std::string_view name) {
  for (const Family& family : kFamilies) {
    if (family.name == name) return &family;
  }
  return nullptr;
}

bool has_kernels(const Family& family) {
  const auto& all = kernels();
  return std::any_of(all.begin(), all.end(), [&](const Kernel& kernel) {
    return kernel.family == std::string_view(family.name);
  });
}

Gpu gpu_of(const Device& device) {
  Gpu gpu{device.compute_capability, chip(device.compute_capability), device.multiprocessors};
  if (gpu.multiprocessors <= 0) gpu.multiprocessors = gpu.chip.multiprocessors;
  return gpu;
}

}  // namespace flashmoe::cuda

namespace flashmoe {

std::vector<CudaFamily> cuda_families() {
  std::vector<CudaFamily> list;
  for (const cuda::Family& family : cuda::families()) {
    CudaFamily& row = list.emplace_back();
    row.name = family.name;
    row.oldest = family.oldest;
    row.newest = family.newest;
    row.machine_code.assign(family.machine_code.begin(), family.machine_code.end());
    row.ptx = family.ptx;
    row.dtypes = family.dtypes;
    for (const cuda::Kernel& kernel : cuda::kernels()) {
      if (kernel.family != row.name || kernel.head_dim == 0) continue;
      if (std::find(row.head_dims.begin(), row.head_dims.end(), kernel.head_dim) ==
          row.head_dims.end()) {
        row.head_dims.push_back(kernel.head_dim);
      }
    }
    std::sort(row.head_dims.begin(), row.head_dims.end());
    row.in_build = cuda::has_kernels(family);
  }
  return list;
}

}  // namespace flashmoe
