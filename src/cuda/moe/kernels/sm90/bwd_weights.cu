// The gradients of the weights.
#include "cuda/moe/kernels/instantiate.cuh"
#include "cuda/moe/sm90/bwd_weights.cuh"

using namespace flashmoe::cuda::moe;

template <int kBlockM, int kBlockN>
__global__ void __launch_bounds__(kTokenTile<kBlockM, kBlockN>.kThreads, 1)
    FLASHMOE_KERNEL(moe_bwd_weights)(const __grid_constant__ Sm90BwdWeightsParams p) {
  sm90::moe_bwd_weights<KernelType, kTokenTile<kBlockM, kBlockN>>(p);
}

template <int kBlockM, int kBlockN>
__global__ void __launch_bounds__(kRowThreads)
    FLASHMOE_KERNEL(moe_bwd_weights_sum)(const __grid_constant__ BwdWeightsParams p) {
  moe_bwd_weights_sum<KernelType, kBlockM * kBlockN>(p);
}

FLASHMOE_INSTANTIATE(moe_bwd_weights, FLASHMOE_FAMILY::kTokens)
FLASHMOE_INSTANTIATE(moe_bwd_weights_sum, FLASHMOE_FAMILY::kTokens)
