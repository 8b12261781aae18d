// The first product of the backward pass: dA, and dh from it.
#include "cuda/moe/kernels/instantiate.cuh"
#include "cuda/moe/sm90/bwd_act.cuh"

using namespace flashmoe::cuda::moe;

template <int kBlockM, int kBlockN>
__global__ void __launch_bounds__(kRowTile<kBlockM, kBlockN>.kThreads, 1)
    FLASHMOE_KERNEL(moe_bwd_act)(const __grid_constant__ Sm90BwdActParams p) {
  sm90::moe_bwd_act<KernelType, kRowTile<kBlockM, kBlockN>, true>(p);
}

// Weights that lie the other way round.
template <int kBlockM, int kBlockN>
__global__ void __launch_bounds__(kRowTile<kBlockM, kBlockN>.kThreads, 1)
    FLASHMOE_KERNEL(moe_bwd_act_t)(const __grid_constant__ Sm90BwdActParams p) {
  sm90::moe_bwd_act<KernelType, kRowTile<kBlockM, kBlockN>, false>(p);
}

FLASHMOE_INSTANTIATE(moe_bwd_act, FLASHMOE_FAMILY::kRows)
FLASHMOE_INSTANTIATE(moe_bwd_act_t, FLASHMOE_FAMILY::kRows)
