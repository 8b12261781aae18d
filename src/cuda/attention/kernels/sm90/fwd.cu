// Forward kernels, with and without a general score.
#include "cuda/attention/kernels/instantiate.cuh"
#include "cuda/attention/sm90/fwd.cuh"

using namespace flashmoe::cuda;

constexpr auto kFwd = rows_of<sm90::kFwd>();
template <int kBlockQ, int kBlockK>
constexpr Sm90FwdTile kTile = find_row(kFwd, kBlockQ, kBlockK);

template <int kHeadDim, int kBlockQ, int kBlockK>
__global__ void __launch_bounds__(kTile<kBlockQ, kBlockK>.threads(), kTile<kBlockQ, kBlockK>.ctas)
    FLASHMOE_KERNEL(attention_fwd)(const __grid_constant__ Sm90FwdParams p) {
  sm90::attention_fwd<sm90::FwdConfig<family::KernelType, kTile<kBlockQ, kBlockK>>>(p);
}

constexpr auto kFwdGeneral = rows_of<sm90::kFwdGeneral>();
template <int kBlockQ, int kBlockK>
constexpr Sm90FwdTile kGeneralTile = find_row(kFwdGeneral, kBlockQ, kBlockK);

template <int kHeadDim, int kBlockQ, int kBlockK>
__global__ void __launch_bounds__(kGeneralTile<kBlockQ, kBlockK>.threads(),
                                  kGeneralTile<kBlockQ, kBlockK>.ctas)
    FLASHMOE_KERNEL(attention_fwd_general)(const __grid_constant__ Sm90FwdParams p) {
  sm90::attention_fwd<sm90::FwdConfig<family::KernelType, kGeneralTile<kBlockQ, kBlockK>>>(p);
}

FLASHMOE_INSTANTIATE(attention_fwd, kFwd)
FLASHMOE_INSTANTIATE(attention_fwd_general, kFwdGeneral)
