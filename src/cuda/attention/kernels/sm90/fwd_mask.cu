// Forward kernels with a mask.
#include "cuda/attention/kernels/instantiate.cuh"
#include "cuda/attention/sm90/fwd.cuh"

using namespace flashmoe::cuda;

constexpr auto kFwdMask = rows_of<sm90::kFwdMask>();
template <int kBlockQ, int kBlockK>
constexpr Sm90FwdTile kTile = find_row(kFwdMask, kBlockQ, kBlockK);

template <int kHeadDim, int kBlockQ, int kBlockK>
__global__ void __launch_bounds__(kTile<kBlockQ, kBlockK>.threads(), kTile<kBlockQ, kBlockK>.ctas)
    FLASHMOE_KERNEL(attention_fwd_mask)(const __grid_constant__ Sm90FwdParams p) {
  sm90::attention_fwd<sm90::FwdConfig<family::KernelType, kTile<kBlockQ, kBlockK>>>(p);
}

FLASHMOE_INSTANTIATE(attention_fwd_mask, kFwdMask)
