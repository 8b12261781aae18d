#include "cuda/runtime/families.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "core/text.h"

namespace flashmoe::cuda {
namespace {

// An sm_80 image runs on 8.6 and 8.9 as it is. Hopper's own instructions exist on no other chip, so
// sm90 has no PTX.
const ChipFamily kFamilies[] = {
    {.name = "sm90",
     .oldest = 90,
     .newest = 90,
     .machine_code = {"sm_90a"},
     .ptx = "",
     .dtypes = {DType::kFloat16, DType::kBFloat16}},
    {.name = "sm80",
     .oldest = 80,
     .newest = 0,
     .machine_code = {"sm_80", "sm_90"},
     .ptx = "compute_80",
     .dtypes = {DType::kFloat16, DType::kBFloat16}},
    {.name = "sm75",
     .oldest = 75,
     .newest = 0,
     .machine_code = {"sm_75"},
     .ptx = "compute_75",
     .dtypes = {DType::kFloat16}},
};

}  // namespace

std::span<const ChipFamily> chip_families() { return kFamilies; }

const ChipFamily* find_chip_family(std::string_view name) {
  for (const ChipFamily& family : kFamilies) {
    if (family.name == name) return &family;
  }
  return nullptr;
}

Gpu gpu_of(const Device& device) {
  Gpu gpu{device.compute_capability, chip(device.compute_capability), device.multiprocessors};
  if (gpu.multiprocessors <= 0) gpu.multiprocessors = gpu.chip.multiprocessors;
  return gpu;
}

std::string chip_name(int compute_capability) { return text("sm_", compute_capability); }

std::string other_chip(const ChipFamily& family, const Gpu& gpu) {
  if (gpu.compute_capability < family.oldest) {
    return text("needs ", chip_name(family.oldest), " or newer, the device is ",
                chip_name(gpu.compute_capability));
  }
  if (family.newest && gpu.compute_capability > family.newest) {
    return text("is for ", chip_name(family.newest), " alone, the device is ",
                chip_name(gpu.compute_capability));
  }
  return {};
}

Status read_forced_family(const char* argument, const ChipFamily*& forced) {
  const char* value = std::getenv("FLASHMOE_FAMILY");
  if (!value || !*value) return {};
  if (!std::strcmp(value, "cpu")) {
    return unsupported("FLASHMOE_FAMILY is cpu, and ", argument,
                       " is on a CUDA device; move the tensors with .cpu()");
  }
  forced = find_chip_family(value);
  if (forced) return {};
  std::string names;  // oldest first
  for (const ChipFamily& family : kFamilies) {
    names = text(family.name, names.empty() ? "" : ", ", names);
  }
  return invalid("FLASHMOE_FAMILY is ", value, "; it must be ", names, " or cpu");
}

Status read_forced_tile(std::optional<ForcedTile>& tile) {
  const char* value = std::getenv("FLASHMOE_TILE");
  if (!value || !*value) return {};
  ForcedTile read;
  int end = 0;
  if (std::sscanf(value, "%dx%d%n", &read.rows, &read.columns, &end) != 2 || value[end]) {
    return invalid("FLASHMOE_TILE is ", value, "; it must be ROWSxCOLUMNS, like 128x64");
  }
  tile = read;
  return {};
}

}  // namespace flashmoe::cuda
