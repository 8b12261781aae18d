// Forward kernels of ragged batches of many short sequences with a bias.
#include "cuda/attention/kernels/instantiate.cuh"
#include "cuda/attention/sm90/fwd_packed.cuh"

using namespace flashmoe::cuda;

constexpr auto kFwdPackedBias = rows_of<sm90::kFwdPackedBias>();
template <int kBlockQ, int kBlockK>
constexpr Sm90PackedTile kTile = find_row(kFwdPackedBias, kBlockQ, kBlockK);

template <int kHeadDim, int kBlockQ, int kBlockK>
__global__ void __launch_bounds__(kTile<kBlockQ, kBlockK>.threads(), kTile<kBlockQ, kBlockK>.ctas)
    FLASHMOE_KERNEL(attention_fwd_packed_bias)(const __grid_constant__ Sm90PackedParams p) {
  sm90::attention_fwd_packed<sm90::PackedConfig<family::KernelType, kTile<kBlockQ, kBlockK>>>(p);
}

FLASHMOE_INSTANTIATE(attention_fwd_packed_bias, kFwdPackedBias)
