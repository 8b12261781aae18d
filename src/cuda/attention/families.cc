#include "cuda/attention/families.h"

#include <algorithm>

#include "cuda/attention/mma_sync.h"
#include "cuda/attention/sm90.h"

namespace flashmoe::cuda {
namespace {

const Family kFamilies[] = {
    {.name = "sm90",
     .lacks = sm90::lacks,
     .slower = sm90::slower,
     .cannot_serve = sm90::cannot_serve,
     .too_large = sm90::too_large,
     .lay_out = sm90::lay_out,
     .run = sm90::run},
    {.name = "sm80",
     .lacks = mma_sync::lacks,
     .slower = mma_sync::slower,
     .cannot_serve = mma_sync::cannot_serve,
     .too_large = mma_sync::too_large,
     .lay_out = mma_sync::lay_out,
     .run = mma_sync::run},
    {.name = "sm75",
     .lacks = mma_sync::lacks,
     .slower = mma_sync::slower,
     .cannot_serve = mma_sync::cannot_serve,
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

bool has_kernels(const Family& family, DType dtype) {
  const auto& all = kernels();
  return std::any_of(all.begin(), all.end(), [&](const Kernel& kernel) {
    return kernel.family == std::string_view(family.name) && kernel.dtype == dtype;
  });
}

}  // namespace flashmoe::cuda
