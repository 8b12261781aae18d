// The first product of the backward pass: dA, and dh from it.
#include "cuda/moe/kernels/instantiate.cuh"
#include "cuda/moe/mma_sync/bwd_act.cuh"

using namespace flashmoe::cuda::moe;

template <int kBlockM, int kBlockN>
__global__ void __launch_bounds__(kRowTile<kBlockM, kBlockN>.threads(),
                                  kRowTile<kBlockM, kBlockN>.ctas)
    FLASHMOE_KERNEL(moe_bwd_act)(const __grid_constant__ BwdActParams p) {
  moe_bwd_act<Chip, KernelType, kRowTile<kBlockM, kBlockN>, true>(p);
}

// Weights that lie the other way round.
template <int kBlockM, int kBlockN>
__global__ void __launch_bounds__(kRowTile<kBlockM, kBlockN>.threads(),
                                  kRowTile<kBlockM, kBlockN>.ctas)
    FLASHMOE_KERNEL(moe_bwd_act_t)(const __grid_constant__ BwdActParams p) {
  moe_bwd_act<Chip, KernelType, kRowTile<kBlockM, kBlockN>, false>(p);
}

FLASHMOE_INSTANTIATE(moe_bwd_act, FLASHMOE_FAMILY::kRows)
FLASHMOE_INSTANTIATE(moe_bwd_act_t, FLASHMOE_FAMILY::kRows)
