// Backward kernels with a mask.
#include "cuda/attention/kernels/instantiate.cuh"
#include "cuda/attention/sm90/bwd.cuh"

using namespace flashmoe::cuda;

constexpr auto kBwdMask = rows_of<sm90::kBwdMask>();
template <int kBlockQ, int kBlockK>
constexpr Sm90BwdTile kTile = find_row(kBwdMask, kBlockQ, kBlockK);

template <int kHeadDim, int kBlockQ, int kBlockK>
__global__ void __launch_bounds__(kTile<kBlockQ, kBlockK>.threads(), kTile<kBlockQ, kBlockK>.ctas)
    FLASHMOE_KERNEL(attention_bwd_mask)(const __grid_constant__ Sm90BwdParams p) {
  sm90::attention_bwd<sm90::BwdConfig<family::KernelType, kTile<kBlockQ, kBlockK>>>(p);
}

FLASHMOE_INSTANTIATE(attention_bwd_mask, kBwdMask)
