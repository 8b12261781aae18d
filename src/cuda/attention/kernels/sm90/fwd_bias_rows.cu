// Forward kernels with a bias that TMA cannot load: in rows that begin anywhere, and in fp32.
#include "cuda/attention/kernels/instantiate.cuh"
#include "cuda/attention/sm90/fwd.cuh"

using namespace flashmoe::cuda;

constexpr auto kFwdBiasRows = rows_of<sm90::kFwdBiasRows>();
template <int kBlockQ, int kBlockK>
constexpr Sm90FwdTile kTile = find_row(kFwdBiasRows, kBlockQ, kBlockK);

template <int kHeadDim, int kBlockQ, int kBlockK>
__global__ void __launch_bounds__(kTile<kBlockQ, kBlockK>.threads(), kTile<kBlockQ, kBlockK>.ctas)
    FLASHMOE_KERNEL(attention_fwd_bias_rows)(const __grid_constant__ Sm90FwdParams p) {
  sm90::attention_fwd<sm90::FwdConfig<family::KernelType, kTile<kBlockQ, kBlockK>>>(p);
}

constexpr auto kFwdBiasFloat = rows_of<sm90::kFwdBiasFloat>();
template <int kBlockQ, int kBlockK>
constexpr Sm90FwdTile kFloatTile = find_row(kFwdBiasFloat, kBlockQ, kBlockK);

template <int kHeadDim, int kBlockQ, int kBlockK>
__global__ void __launch_bounds__(kFloatTile<kBlockQ, kBlockK>.threads(),
                                  kFloatTile<kBlockQ, kBlockK>.ctas)
    FLASHMOE_KERNEL(attention_fwd_bias_float)(const __grid_constant__ Sm90FwdParams p) {
  sm90::attention_fwd<sm90::FwdConfig<family::KernelType, kFloatTile<kBlockQ, kBlockK>>>(p);
}

FLASHMOE_INSTANTIATE(attention_fwd_bias_rows, kFwdBiasRows)
FLASHMOE_INSTANTIATE(attention_fwd_bias_float, kFwdBiasFloat)
