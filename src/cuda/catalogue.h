// Which kernels exist: what the families list in their variants.h, as far as its image is in this
// build.
#pragma once

#include <string>
#include <vector>

#include "cuda/launch.h"
#include "cuda/sm80/variants.h"
#include "flashmoe/tensor.h"

namespace flashmoe::cuda {

struct FwdKernel {
  KernelId id;
  const char* family;
  DType dtype;
  sm80::FwdTile tile;
};

const std::vector<FwdKernel>& fwd_kernels();

// Families with kernels in this build, best first.
std::vector<std::string> families();

}  // namespace flashmoe::cuda
