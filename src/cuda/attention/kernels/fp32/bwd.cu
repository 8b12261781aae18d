// Backward kernels in fp32, without a bias: dK and dV, and dQ after them.
#include "cuda/attention/fp32/bwd_keys.cuh"
#include "cuda/attention/fp32/bwd_queries.cuh"
#include "cuda/attention/kernels/fp32/instantiate.cuh"

using namespace flashmoe::cuda;

constexpr auto kBwd = rows_of<table::kBwd>();
template <int kBlockQ, int kBlockK>
constexpr Fp32BwdTile kTile = find_row(kBwd, kBlockQ, kBlockK);

template <int kHeadDim, int kBlockQ, int kBlockK>
__global__ void __launch_bounds__(kTile<kBlockQ, kBlockK>.threads(), kTile<kBlockQ, kBlockK>.ctas)
    FLASHMOE_KERNEL(attention_bwd)(const __grid_constant__ AttentionBwdParams p) {
  attention_fp32_bwd_keys<
      Fp32KeysConfig<family::Chip, KernelProduct, kTile<kBlockQ, kBlockK>, false>>(p);
}

template <int kHeadDim, int kBlockQ, int kBlockK>
__global__ void __launch_bounds__(kTile<kBlockQ, kBlockK>.threads(), kTile<kBlockQ, kBlockK>.ctas)
    FLASHMOE_KERNEL(attention_bwd_dq)(const __grid_constant__ AttentionBwdParams p) {
  attention_fp32_bwd_queries<
      Fp32QueriesConfig<family::Chip, KernelProduct, kTile<kBlockQ, kBlockK>, false>>(p);
}

FLASHMOE_INSTANTIATE(attention_bwd, kBwd)
FLASHMOE_INSTANTIATE(attention_bwd_dq, kBwd)
