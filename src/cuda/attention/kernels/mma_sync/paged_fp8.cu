// Attention over the pages of an fp8 cache (e4m3) under 16-bit queries.
#include "cuda/attention/kernels/instantiate.cuh"
#include "cuda/attention/kernels/paged.h"
#include "cuda/attention/mma_sync/paged.cuh"

using namespace flashmoe::cuda;

constexpr auto kPaged = rows_of<family::kPagedFp8>();
template <int kBlockQ, int kBlockK>
constexpr PagedTile kTile = find_row(kPaged, kBlockQ, kBlockK);
template <int kBlockQ, int kBlockK, bool kDecode>
using Shape = PagedShape<family::Chip, family::KernelType, family::dtypes::fp16,
                         kTile<kBlockQ, kBlockK>, kDecode>;

template <int kHeadDim, int kBlockQ, int kBlockK>
__global__ void __launch_bounds__(kTile<kBlockQ, kBlockK>.threads(), kTile<kBlockQ, kBlockK>.ctas)
    FLASHMOE_KERNEL(attention_paged_fp8)(const __grid_constant__ PagedParams p) {
  attention_paged<Shape<kBlockQ, kBlockK, true>, Shape<kBlockQ, kBlockK, false>>(p);
}

FLASHMOE_INSTANTIATE(attention_paged_fp8, kPaged)
