// The first product of the forward pass, with the activation.
#include "cuda/moe/kernels/instantiate.cuh"
#include "cuda/moe/sm90/up.cuh"

using namespace flashmoe::cuda::moe;

template <int kBlockM, int kBlockN>
__global__ void __launch_bounds__(kRowTile<kBlockM, kBlockN>.kThreads, 1)
    FLASHMOE_KERNEL(moe_up)(const __grid_constant__ Sm90UpParams p) {
  sm90::moe_up<KernelType, kRowTile<kBlockM, kBlockN>, true>(p);
}

// Weights that lie the other way round.
template <int kBlockM, int kBlockN>
__global__ void __launch_bounds__(kRowTile<kBlockM, kBlockN>.kThreads, 1)
    FLASHMOE_KERNEL(moe_up_t)(const __grid_constant__ Sm90UpParams p) {
  sm90::moe_up<KernelType, kRowTile<kBlockM, kBlockN>, false>(p);
}

FLASHMOE_INSTANTIATE(moe_up, FLASHMOE_FAMILY::kRows)
FLASHMOE_INSTANTIATE(moe_up_t, FLASHMOE_FAMILY::kRows)
