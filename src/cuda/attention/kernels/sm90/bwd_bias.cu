// Backward kernels with a bias, and the sum of the gradient of a bias that was broadcast.
#include "cuda/attention/kernels/instantiate.cuh"
#include "cuda/attention/sm90/bwd.cuh"
#include "cuda/attention/sm90/bwd_bias_sum.cuh"

using namespace flashmoe::cuda;

constexpr auto kBwdBias = rows_of<sm90::kBwdBias>();
template <int kBlockQ, int kBlockK>
constexpr Sm90BwdTile kTile = find_row(kBwdBias, kBlockQ, kBlockK);

template <int kHeadDim, int kBlockQ, int kBlockK>
__global__ void __launch_bounds__(kTile<kBlockQ, kBlockK>.threads(), kTile<kBlockQ, kBlockK>.ctas)
    FLASHMOE_KERNEL(attention_bwd_bias)(const __grid_constant__ Sm90BwdParams p) {
  sm90::attention_bwd<sm90::BwdConfig<family::KernelType, kTile<kBlockQ, kBlockK>>>(p);
}

constexpr auto kSum = rows_of<sm90::kBiasSum>();
template <int kBlockQ, int kBlockK>
constexpr Sm90BiasSumTile kSumTile = find_row(kSum, kBlockQ, kBlockK);

template <int kHeadDim, int kBlockQ, int kBlockK>
__global__ void __launch_bounds__(kSumTile<kBlockQ, kBlockK>.threads(),
                                  kSumTile<kBlockQ, kBlockK>.ctas)
    FLASHMOE_KERNEL(attention_bwd_bias_sum)(const __grid_constant__ Sm90BwdParams p) {
  sm90::attention_bwd_bias_sum<sm90::BiasSumConfig<family::KernelType, kSumTile<kBlockQ, kBlockK>>>(
      p);
}

FLASHMOE_INSTANTIATE(attention_bwd_bias, kBwdBias)
FLASHMOE_INSTANTIATE(attention_bwd_bias_sum, kSum)
