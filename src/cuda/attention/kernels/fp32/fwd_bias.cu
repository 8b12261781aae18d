// Forward kernels in fp32, with a bias.
#include "cuda/attention/fp32/fwd.cuh"
#include "cuda/attention/kernels/fp32/instantiate.cuh"

using namespace flashmoe::cuda;

constexpr auto kFwd = rows_of<table::kFwd>();
template <int kBlockQ, int kBlockK>
constexpr Fp32FwdTile kTile = find_row(kFwd, kBlockQ, kBlockK);

template <int kHeadDim, int kBlockQ, int kBlockK>
__global__ void __launch_bounds__(kTile<kBlockQ, kBlockK>.threads(), kTile<kBlockQ, kBlockK>.ctas)
    FLASHMOE_KERNEL(attention_fwd_bias)(const __grid_constant__ AttentionFwdParams p) {
  attention_fp32_fwd<Fp32FwdConfig<family::Chip, KernelProduct, kTile<kBlockQ, kBlockK>, true>>(p);
}

FLASHMOE_INSTANTIATE(attention_fwd_bias, kFwd)
