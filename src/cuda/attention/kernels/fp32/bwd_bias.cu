// Backward kernels in fp32, with a bias: dK and dV, dQ and the bias's gradient after them, and the
// sum of the gradient of a bias that was broadcast.
#include "cuda/attention/fp32/bias_sum.cuh"
#include "cuda/attention/fp32/bwd_keys.cuh"
#include "cuda/attention/fp32/bwd_queries.cuh"
#include "cuda/attention/kernels/fp32/instantiate.cuh"

using namespace flashmoe::cuda;

constexpr auto kBwd = rows_of<table::kBwd>();
template <int kBlockQ, int kBlockK>
constexpr Fp32BwdTile kTile = find_row(kBwd, kBlockQ, kBlockK);

template <int kHeadDim, int kBlockQ, int kBlockK>
__global__ void __launch_bounds__(kTile<kBlockQ, kBlockK>.threads(),
                                  kTile<kBlockQ, kBlockK>.bias_ctas)
    FLASHMOE_KERNEL(attention_bwd_bias)(const __grid_constant__ AttentionBwdParams p) {
  attention_fp32_bwd_keys<
      Fp32KeysConfig<family::Chip, KernelProduct, kTile<kBlockQ, kBlockK>, true>>(p);
}

template <int kHeadDim, int kBlockQ, int kBlockK>
__global__ void __launch_bounds__(kTile<kBlockQ, kBlockK>.threads(),
                                  kTile<kBlockQ, kBlockK>.bias_ctas)
    FLASHMOE_KERNEL(attention_bwd_bias_dq)(const __grid_constant__ AttentionBwdParams p) {
  attention_fp32_bwd_queries<
      Fp32QueriesConfig<family::Chip, KernelProduct, kTile<kBlockQ, kBlockK>, true>>(p);
}

constexpr auto kSum = rows_of<table::kBiasSum>();
template <int kBlockQ, int kBlockK>
constexpr Fp32BiasSumTile kSumTile = find_row(kSum, kBlockQ, kBlockK);

template <int kHeadDim, int kBlockQ, int kBlockK>
__global__ void __launch_bounds__(kSumTile<kBlockQ, kBlockK>.threads(),
                                  kSumTile<kBlockQ, kBlockK>.ctas)
    FLASHMOE_KERNEL(attention_bwd_bias_sum)(const __grid_constant__ AttentionBwdParams p) {
  attention_fp32_bias_sum<
      Fp32BiasSumConfig<family::Chip, KernelProduct, kSumTile<kBlockQ, kBlockK>>>(p);
}

FLASHMOE_INSTANTIATE(attention_bwd_bias, kBwd)
FLASHMOE_INSTANTIATE(attention_bwd_bias_dq, kBwd)
FLASHMOE_INSTANTIATE(attention_bwd_bias_sum, kSum)
