// Attention over the pages of a cache in the query's dtype, and what combines its splits.
#include "cuda/attention/kernels/instantiate.cuh"
#include "cuda/attention/kernels/paged.h"
#include "cuda/attention/mma_sync/paged.cuh"
#include "cuda/attention/mma_sync/paged_combine.cuh"

using namespace flashmoe::cuda;

constexpr auto kPaged = rows_of<family::kPaged>();
template <int kBlockQ, int kBlockK>
constexpr PagedTile kTile = find_row(kPaged, kBlockQ, kBlockK);
template <int kBlockQ, int kBlockK, bool kDecode>
using Shape = PagedShape<family::Chip, family::KernelType, family::KernelType,
                         kTile<kBlockQ, kBlockK>, kDecode>;

template <int kHeadDim, int kBlockQ, int kBlockK>
__global__ void __launch_bounds__(kTile<kBlockQ, kBlockK>.threads(), kTile<kBlockQ, kBlockK>.ctas)
    FLASHMOE_KERNEL(attention_paged)(const __grid_constant__ PagedParams p) {
  attention_paged<Shape<kBlockQ, kBlockK, true>, Shape<kBlockQ, kBlockK, false>>(p);
}

template <int kHeadDim, int kBlockQ, int kBlockK>
__global__ void __launch_bounds__(kPagedCombineThreads)
    FLASHMOE_KERNEL(attention_paged_combine)(const __grid_constant__ PagedParams p) {
  attention_paged_combine<family::KernelType, kHeadDim>(p);
}

FLASHMOE_INSTANTIATE(attention_paged, kPaged)
FLASHMOE_INSTANTIATE(attention_paged_combine, kPaged)
