// Backward kernels, with and without a general score.
#include "cuda/attention/kernels/instantiate.cuh"
#include "cuda/attention/sm90/bwd.cuh"

using namespace flashmoe::cuda;

constexpr auto kBwd = rows_of<sm90::kBwd>();
template <int kBlockQ, int kBlockK>
constexpr Sm90BwdTile kTile = find_row(kBwd, kBlockQ, kBlockK);

template <int kHeadDim, int kBlockQ, int kBlockK>
__global__ void __launch_bounds__(kTile<kBlockQ, kBlockK>.threads(), kTile<kBlockQ, kBlockK>.ctas)
    FLASHMOE_KERNEL(attention_bwd)(const __grid_constant__ Sm90BwdParams p) {
  sm90::attention_bwd<sm90::BwdConfig<family::KernelType, kTile<kBlockQ, kBlockK>>>(p);
}

constexpr auto kBwdGeneral = rows_of<sm90::kBwdGeneral>();
template <int kBlockQ, int kBlockK>
constexpr Sm90BwdTile kGeneralTile = find_row(kBwdGeneral, kBlockQ, kBlockK);

template <int kHeadDim, int kBlockQ, int kBlockK>
__global__ void __launch_bounds__(kGeneralTile<kBlockQ, kBlockK>.threads(),
                                  kGeneralTile<kBlockQ, kBlockK>.ctas)
    FLASHMOE_KERNEL(attention_bwd_general)(const __grid_constant__ Sm90BwdParams p) {
  sm90::attention_bwd<sm90::BwdConfig<family::KernelType, kGeneralTile<kBlockQ, kBlockK>>>(p);
}

FLASHMOE_INSTANTIATE(attention_bwd, kBwd)
FLASHMOE_INSTANTIATE(attention_bwd_general, kBwdGeneral)
