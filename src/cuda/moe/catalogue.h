// Which kernels exist: the rows of the families' tables (kernels/sm80.h and so on) and those
// without a tile, as far as an image of theirs is in this build.
#pragma once

#include <string_view>
#include <vector>

#include "cuda/runtime/launch.h"
#include "cuda/tile/gemm_tile.h"
#include "flashmoe/tensor.h"

namespace flashmoe::cuda::moe {

enum class Role {
  kSort,
  kCount,
  kScan,
  kPlace,
  kUp,
  kDown,  // backward: dX
  kCombine,
  kFewUp,    // few rows an expert
  kFewDown,  // with the sum over a token's pairs
  kPrepare,
  kBwdAct,
  kBwdWeights,
  kBwdWeightsSum,
  kBwdBias,
  kBwdBiasSum,
  kBwdScale,
  kRoute,
  kRouteBwd,
};
const char* role_name(Role role);

struct Kernel {
  KernelId id;
  const char* family;
  Role role;
  DType dtype;
  GemmTile tile = {};  // zeros for kernels that go row by row; sm90: without warps and CTAs
  // Products: weights lie along the depth, or across it.
  bool along = true;
  int threads = 0;
  int shared_bytes = 0;  // without a tile: at most, for as many experts as there may be
};

// Grouped by family and role, and there the largest tile first.
const std::vector<Kernel>& kernels();

bool has_kernels(std::string_view family);

// A kernel without a tile, or with that tile and that order of weights. Null: this build has none.
const Kernel* find_kernel(Role role, std::string_view family, DType dtype);
const Kernel* find_kernel(Role role, std::string_view family, DType dtype, const GemmTile& tile,
                          bool along = true);

}  // namespace flashmoe::cuda::moe
