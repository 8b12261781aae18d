// Attention over the pages of a cache in the query's dtype, and what combines its splits.
#include "cuda/attention/kernels/instantiate.cuh"
#include "cuda/attention/kernels/paged.h"
#include "cuda/attention/mma_sync/paged.cuh"
#include "cuda/attention/mma_sync/paged_combine.cuh"

using namespace flashmoe::cuda;

constexpr auto kDecode = rows_of<family::kPagedDecode>();
constexpr auto kPaged = rows_of<family::kPaged>();
template <const auto& kRows, int kBlockQ, int kBlockK>
constexpr PagedTile kTile = find_row(kRows, kBlockQ, kBlockK);
template <PagedTile kRow, bool kFewRows>
using Shape = PagedShape<family::Chip, family::KernelType, family::KernelType, kRow, kFewRows>;

template <int kHeadDim, int kBlockQ, int kBlockK>
__global__ void __launch_bounds__(kTile<kDecode, kBlockQ, kBlockK>.threads(),
                                  kTile<kDecode, kBlockQ, kBlockK>.ctas)
    FLASHMOE_KERNEL(attention_paged_decode)(const __grid_constant__ PagedParams p) {
  attention_paged<Shape<kTile<kDecode, kBlockQ, kBlockK>, true>>(p);
}

template <int kHeadDim, int kBlockQ, int kBlockK>
__global__ void __launch_bounds__(kTile<kPaged, kBlockQ, kBlockK>.threads(),
                                  kTile<kPaged, kBlockQ, kBlockK>.ctas)
    FLASHMOE_KERNEL(attention_paged)(const __grid_constant__ PagedParams p) {
  attention_paged<Shape<kTile<kPaged, kBlockQ, kBlockK>, false>>(p);
}

template <int kHeadDim, int kBlockQ, int kBlockK>
__global__ void __launch_bounds__(kPagedCombineThreads)
    FLASHMOE_KERNEL(attention_paged_combine)(const __grid_constant__ PagedParams p) {
  attention_paged_combine<family::KernelType, kHeadDim>(p);
}

template <int kHeadDim, int kBlockQ, int kBlockK>
__global__ void __launch_bounds__(kPagedTicketThreads)
    FLASHMOE_KERNEL(attention_paged_tickets)(const __grid_constant__ PagedParams p) {
  attention_paged_tickets(p);
}

FLASHMOE_INSTANTIATE(attention_paged_tickets, kPaged)
FLASHMOE_INSTANTIATE(attention_paged_decode, kDecode)
FLASHMOE_INSTANTIATE(attention_paged, kPaged)
FLASHMOE_INSTANTIATE(attention_paged_combine, kPaged)
