// The gradients of the weights.
#include "cuda/moe/kernels/instantiate.cuh"
#include "cuda/moe/mma_sync/bwd_weights.cuh"

using namespace flashmoe::cuda::moe;

template <int kBlockM, int kBlockN>
__global__ void __launch_bounds__(kTokenTile<kBlockM, kBlockN>.threads(),
                                  kTokenTile<kBlockM, kBlockN>.ctas)
    FLASHMOE_KERNEL(moe_bwd_weights)(const __grid_constant__ BwdWeightsParams p) {
  moe_bwd_weights<Chip, KernelType, kTokenTile<kBlockM, kBlockN>>(p);
}

template <int kBlockM, int kBlockN>
__global__ void __launch_bounds__(kRowThreads)
    FLASHMOE_KERNEL(moe_bwd_weights_sum)(const __grid_constant__ BwdWeightsParams p) {
  moe_bwd_weights_sum<KernelType, kBlockM * kBlockN>(p);
}

FLASHMOE_INSTANTIATE(moe_bwd_weights, FLASHMOE_FAMILY::kTokens)
FLASHMOE_INSTANTIATE(moe_bwd_weights_sum, FLASHMOE_FAMILY::kTokens)
