// Backward kernels for few queries and keys.
#include "cuda/attention/kernels/instantiate.cuh"
#include "cuda/attention/sm90/bwd_whole.cuh"

using namespace flashmoe::cuda;

constexpr auto kBwdWhole = rows_of<sm90::kBwdWhole>();
template <int kBlockQ, int kBlockK>
constexpr Sm90WholeBwdTile kTile = find_row(kBwdWhole, kBlockQ, kBlockK);

template <int kHeadDim, int kBlockQ, int kBlockK>
__global__ void __launch_bounds__(kTile<kBlockQ, kBlockK>.threads(), kTile<kBlockQ, kBlockK>.ctas)
    FLASHMOE_KERNEL(attention_bwd_whole)(const __grid_constant__ Sm90WholeBwdParams p) {
  sm90::attention_bwd_whole<sm90::BwdWholeConfig<family::KernelType, kTile<kBlockQ, kBlockK>>>(p);
}

FLASHMOE_INSTANTIATE(attention_bwd_whole, kBwdWhole)
