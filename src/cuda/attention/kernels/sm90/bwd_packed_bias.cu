// Backward kernels of ragged batches of many short sequences with a bias.
#include "cuda/attention/kernels/instantiate.cuh"
#include "cuda/attention/sm90/bwd_packed.cuh"

using namespace flashmoe::cuda;

constexpr auto kBwdPackedBias = rows_of<sm90::kBwdPackedBias>();
template <int kBlockQ, int kBlockK>
constexpr Sm90PackedBwdTile kTile = find_row(kBwdPackedBias, kBlockQ, kBlockK);

template <int kHeadDim, int kBlockQ, int kBlockK>
__global__ void __launch_bounds__(kTile<kBlockQ, kBlockK>.threads(), kTile<kBlockQ, kBlockK>.ctas)
    FLASHMOE_KERNEL(attention_bwd_packed_bias)(const __grid_constant__ Sm90PackedBwdParams p) {
  sm90::attention_bwd_packed<sm90::PackedBwdConfig<family::KernelType, kTile<kBlockQ, kBlockK>>>(p);
}

FLASHMOE_INSTANTIATE(attention_bwd_packed_bias, kBwdPackedBias)
