// The kernels that write to a cache: one of each family, as far as its image is in this build.
#pragma once

#include <string_view>
#include <vector>

#include "cuda/runtime/launch.h"

namespace flashmoe::cuda::cache {

inline constexpr const char* kAppendRole = "cache_append";

struct Kernel {
  KernelId id;
  const char* family;
};

// Best family first.
const std::vector<Kernel>& kernels();
const Kernel* find_kernel(std::string_view family);  // null: this build has none

}  // namespace flashmoe::cuda::cache
