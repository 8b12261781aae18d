// Forward kernels without a bias.
#include "cuda/attention/kernels/instantiate.cuh"
#include "cuda/attention/mma_sync/fwd.cuh"

using namespace flashmoe::cuda;

constexpr auto kFwd = rows_of<family::kFwd>();
template <int kBlockQ, int kBlockK>
constexpr FwdTile kTile = find_row(kFwd, kBlockQ, kBlockK);

template <int kHeadDim, int kBlockQ, int kBlockK>
__global__ void __launch_bounds__(kTile<kBlockQ, kBlockK>.threads(), kTile<kBlockQ, kBlockK>.ctas)
    FLASHMOE_KERNEL(attention_fwd)(const __grid_constant__ AttentionFwdParams p) {
  attention_fwd<FwdConfig<family::Chip, family::KernelType, kTile<kBlockQ, kBlockK>>>(p);
}

FLASHMOE_INSTANTIATE(attention_fwd, kFwd)
