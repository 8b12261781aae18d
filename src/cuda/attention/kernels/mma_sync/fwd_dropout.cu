// Forward kernels with dropout, and a bias or none.
#include "cuda/attention/kernels/instantiate.cuh"
#include "cuda/attention/mma_sync/fwd.cuh"

using namespace flashmoe::cuda;

constexpr auto kFwd = rows_of<family::kFwdDropout>();
template <int kBlockQ, int kBlockK>
constexpr FwdTile kTile = find_row(kFwd, kBlockQ, kBlockK);

template <int kHeadDim, int kBlockQ, int kBlockK>
__global__ void __launch_bounds__(kTile<kBlockQ, kBlockK>.threads(), kTile<kBlockQ, kBlockK>.ctas)
    FLASHMOE_KERNEL(attention_fwd_dropout)(const __grid_constant__ AttentionFwdParams p) {
  attention_fwd<
      FwdConfig<family::Chip, family::KernelType, kTile<kBlockQ, kBlockK>, true, 1, true>>(p);
}

FLASHMOE_INSTANTIATE(attention_fwd_dropout, kFwd)
