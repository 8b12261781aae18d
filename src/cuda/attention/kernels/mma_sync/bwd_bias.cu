// Backward kernels with a bias: dK, dV and the bias's gradient, dQ after them, and the sum of the
// gradient of a bias that was broadcast.
#include "cuda/attention/kernels/instantiate.cuh"
#include "cuda/attention/mma_sync/bias_sum.cuh"
#include "cuda/attention/mma_sync/bwd.cuh"
#include "cuda/attention/mma_sync/bwd_dq.cuh"

using namespace flashmoe::cuda;

constexpr auto kBwd = rows_of<family::kBwdBias, true>();
template <int kBlockQ, int kBlockK>
constexpr BwdTile kTile = find_row(kBwd, kBlockQ, kBlockK);

template <int kHeadDim, int kBlockQ, int kBlockK>
__global__ void __launch_bounds__(kTile<kBlockQ, kBlockK>.threads(), kTile<kBlockQ, kBlockK>.ctas)
    FLASHMOE_KERNEL(attention_bwd_bias)(const __grid_constant__ AttentionBwdParams p) {
  attention_bwd<BwdConfig<family::Chip, family::KernelType, kTile<kBlockQ, kBlockK>, true>>(p);
}

template <int kHeadDim, int kBlockQ, int kBlockK>
__global__ void __launch_bounds__(kTile<kBlockQ, kBlockK>.threads(),
                                  kTile<kBlockQ, kBlockK>.query_tile().ctas)
    FLASHMOE_KERNEL(attention_bwd_bias_dq)(const __grid_constant__ AttentionBwdParams p) {
  attention_bwd_dq<BwdConfig<family::Chip, family::KernelType, kTile<kBlockQ, kBlockK>, true>>(p);
}

constexpr auto kSum = rows_of<family::kBiasSum>();
template <int kBlockQ, int kBlockK>
constexpr BiasSumTile kSumTile = find_row(kSum, kBlockQ, kBlockK);

template <int kHeadDim, int kBlockQ, int kBlockK>
__global__ void __launch_bounds__(kSumTile<kBlockQ, kBlockK>.threads(),
                                  kSumTile<kBlockQ, kBlockK>.ctas)
    FLASHMOE_KERNEL(attention_bwd_bias_sum)(const __grid_constant__ AttentionBwdParams p) {
  attention_bwd_bias_sum<
      BiasSumConfig<family::Chip, family::KernelType, kSumTile<kBlockQ, kBlockK>>>(p);
}

FLASHMOE_INSTANTIATE(attention_bwd_bias, kBwd)
FLASHMOE_INSTANTIATE(attention_bwd_bias_dq, kBwd)
FLASHMOE_INSTANTIATE(attention_bwd_bias_sum, kSum)
