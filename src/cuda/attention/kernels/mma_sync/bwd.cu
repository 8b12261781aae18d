// Backward kernels without a bias: dK and dV, and dQ after them.
#include "cuda/attention/kernels/instantiate.cuh"
#include "cuda/attention/mma_sync/bwd.cuh"
#include "cuda/attention/mma_sync/bwd_dq.cuh"

using namespace flashmoe::cuda;

constexpr auto kBwd = rows_of<family::kBwd>();
template <int kBlockQ, int kBlockK>
constexpr BwdTile kTile = find_row(kBwd, kBlockQ, kBlockK);

template <int kHeadDim, int kBlockQ, int kBlockK>
__global__ void __launch_bounds__(kTile<kBlockQ, kBlockK>.threads(), kTile<kBlockQ, kBlockK>.ctas)
    FLASHMOE_KERNEL(attention_bwd)(const __grid_constant__ AttentionBwdParams p) {
  attention_bwd<BwdConfig<family::Chip, family::KernelType, kTile<kBlockQ, kBlockK>>>(p);
}

template <int kHeadDim, int kBlockQ, int kBlockK>
__global__ void __launch_bounds__(kTile<kBlockQ, kBlockK>.threads(),
                                  kTile<kBlockQ, kBlockK>.query_tile().ctas)
    FLASHMOE_KERNEL(attention_bwd_dq)(const __grid_constant__ AttentionBwdParams p) {
  attention_bwd_dq<BwdConfig<family::Chip, family::KernelType, kTile<kBlockQ, kBlockK>>>(p);
}

FLASHMOE_INSTANTIATE(attention_bwd, kBwd)
FLASHMOE_INSTANTIATE(attention_bwd_dq, kBwd)
