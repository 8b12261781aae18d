// Products of sorted rows: down of the forward pass, dX of the backward pass.
#include "cuda/moe/kernels/instantiate.cuh"
#include "cuda/moe/sm90/down.cuh"

using namespace flashmoe::cuda::moe;

template <int kBlockM, int kBlockN>
__global__ void __launch_bounds__(kRowTile<kBlockM, kBlockN>.kThreads, 1)
    FLASHMOE_KERNEL(moe_down)(const __grid_constant__ Sm90DownParams p) {
  sm90::moe_down<KernelType, kRowTile<kBlockM, kBlockN>, true>(p);
}

// Weights that lie the other way round.
template <int kBlockM, int kBlockN>
__global__ void __launch_bounds__(kRowTile<kBlockM, kBlockN>.kThreads, 1)
    FLASHMOE_KERNEL(moe_down_t)(const __grid_constant__ Sm90DownParams p) {
  sm90::moe_down<KernelType, kRowTile<kBlockM, kBlockN>, false>(p);
}

FLASHMOE_INSTANTIATE(moe_down, FLASHMOE_FAMILY::kRows)
FLASHMOE_INSTANTIATE(moe_down_t, FLASHMOE_FAMILY::kRows)
