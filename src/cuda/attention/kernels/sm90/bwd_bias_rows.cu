// Backward kernels with a bias that TMA cannot load: in rows that begin anywhere, and in fp32.
#include "cuda/attention/kernels/instantiate.cuh"
#include "cuda/attention/sm90/bwd.cuh"

using namespace flashmoe::cuda;

constexpr auto kBwdBiasRows = rows_of<sm90::kBwdBiasRows>();
template <int kBlockQ, int kBlockK>
constexpr Sm90BwdTile kTile = find_row(kBwdBiasRows, kBlockQ, kBlockK);

template <int kHeadDim, int kBlockQ, int kBlockK>
__global__ void __launch_bounds__(kTile<kBlockQ, kBlockK>.threads(), kTile<kBlockQ, kBlockK>.ctas)
    FLASHMOE_KERNEL(attention_bwd_bias_rows)(const __grid_constant__ Sm90BwdParams p) {
  sm90::attention_bwd<sm90::BwdConfig<family::KernelType, kTile<kBlockQ, kBlockK>>>(p);
}

constexpr auto kBwdBiasFloat = rows_of<sm90::kBwdBiasFloat>();
template <int kBlockQ, int kBlockK>
constexpr Sm90BwdTile kFloatTile = find_row(kBwdBiasFloat, kBlockQ, kBlockK);

template <int kHeadDim, int kBlockQ, int kBlockK>
__global__ void __launch_bounds__(kFloatTile<kBlockQ, kBlockK>.threads(),
                                  kFloatTile<kBlockQ, kBlockK>.ctas)
    FLASHMOE_KERNEL(attention_bwd_bias_float)(const __grid_constant__ Sm90BwdParams p) {
  sm90::attention_bwd<sm90::BwdConfig<family::KernelType, kFloatTile<kBlockQ, kBlockK>>>(p);
}

FLASHMOE_INSTANTIATE(attention_bwd_bias_rows, kBwdBiasRows)
FLASHMOE_INSTANTIATE(attention_bwd_bias_float, kBwdBiasFloat)
