// Backward kernels with dropout, and a bias or none: dK, dV and the bias's gradient, and dQ after
// them. The sum of the gradient of a bias that was broadcast is in bwd_bias.cu.
#include "cuda/attention/kernels/instantiate.cuh"
#include "cuda/attention/mma_sync/bwd.cuh"
#include "cuda/attention/mma_sync/bwd_dq.cuh"

using namespace flashmoe::cuda;

constexpr auto kBwd = rows_of<family::kBwdDropout, true>();
template <int kBlockQ, int kBlockK>
constexpr BwdTile kTile = find_row(kBwd, kBlockQ, kBlockK);
template <int kBlockQ, int kBlockK>
using Config = BwdConfig<family::Chip, family::KernelType, kTile<kBlockQ, kBlockK>, true, true>;

template <int kHeadDim, int kBlockQ, int kBlockK>
__global__ void __launch_bounds__(kTile<kBlockQ, kBlockK>.threads(), kTile<kBlockQ, kBlockK>.ctas)
    FLASHMOE_KERNEL(attention_bwd_dropout)(const __grid_constant__ AttentionBwdParams p) {
  attention_bwd<Config<kBlockQ, kBlockK>>(p);
}

template <int kHeadDim, int kBlockQ, int kBlockK>
__global__ void __launch_bounds__(kTile<kBlockQ, kBlockK>.threads(),
                                  kTile<kBlockQ, kBlockK>.query_tile().ctas)
    FLASHMOE_KERNEL(attention_bwd_dropout_dq)(const __grid_constant__ AttentionBwdParams p) {
  attention_bwd_dq<Config<kBlockQ, kBlockK>>(p);
}

FLASHMOE_INSTANTIATE(attention_bwd_dropout, kBwd)
FLASHMOE_INSTANTIATE(attention_bwd_dropout_dq, kBwd)
