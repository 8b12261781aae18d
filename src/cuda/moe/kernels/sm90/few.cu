// The forward pass of few rows an expert.
#include "cuda/moe/few.cuh"
#include "cuda/moe/kernels/instantiate.cuh"

using namespace flashmoe::cuda::moe;

template <int kBlockM, int kBlockN>
__global__ void __launch_bounds__(32 * kFewUpWarps, 2)
    FLASHMOE_KERNEL(moe_few_up)(const __grid_constant__ UpParams p) {
  static_assert(kBlockN == kFewColumns);
  moe_few_up<KernelType, kBlockM>(p);
}

template <int kBlockM, int kBlockN>
__global__ void __launch_bounds__(32 * kFewDownWarps, 1)
    FLASHMOE_KERNEL(moe_few_down)(const __grid_constant__ FewDownParams p) {
  static_assert(kBlockN == kFewColumns);
  moe_few_down<KernelType, kBlockM>(p);
}

FLASHMOE_INSTANTIATE(moe_few_up, FLASHMOE_FAMILY::kFew)
FLASHMOE_INSTANTIATE(moe_few_down, FLASHMOE_FAMILY::kFew)
