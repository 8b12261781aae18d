// Which kernels exist: what the families list in their variants.h, as far as its image is in this
// build.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "cuda/launch.h"
#include "flashmoe/tensor.h"

namespace flashmoe::cuda {

enum class Role {
  kForward,
  kCombine,  // after a forward pass that was split over keys
  kPrepare,  // before the backward pass
  kBackward,
  kFinish,  // after it
};
const char* role_name(Role role);

struct Kernel {
  KernelId id;
  const char* family;
  Role role;
  DType dtype;
  // The tile; 0 for kernels that go row by row.
  int head_dim = 0, block_q = 0, block_k = 0;
  int threads = 0;
  int shared_bytes = 0;
  int ctas = 0;  // that the registers of an SM hold
};

// Grouped by family and role, and there best tile first.
const std::vector<Kernel>& kernels();

const Kernel* find_kernel(std::string_view name);
const Kernel* find_kernel(Role role, std::string_view family, DType dtype);

}  // namespace flashmoe::cuda
