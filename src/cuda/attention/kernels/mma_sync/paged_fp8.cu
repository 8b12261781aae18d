// Attention over the pages of an fp8 cache (e4m3) under 16-bit queries.
#include "cuda/attention/kernels/instantiate.cuh"
#include "cuda/attention/kernels/paged.h"
#include "cuda/attention/mma_sync/paged.cuh"

using namespace flashmoe::cuda;

constexpr auto kDecode = rows_of<family::kPagedDecodeFp8>();
constexpr auto kPaged = rows_of<family::kPagedFp8>();
template <const auto& kRows, int kBlockQ, int kBlockK>
constexpr PagedTile kTile = find_row(kRows, kBlockQ, kBlockK);
template <PagedTile kRow, bool kFewRows>
using Shape = PagedShape<family::Chip, family::KernelType, family::dtypes::fp16, kRow, kFewRows>;

template <int kHeadDim, int kBlockQ, int kBlockK>
__global__ void __launch_bounds__(kTile<kDecode, kBlockQ, kBlockK>.threads(),
                                  kTile<kDecode, kBlockQ, kBlockK>.ctas)
    FLASHMOE_KERNEL(attention_paged_decode_fp8)(const __grid_constant__ PagedParams p) {
  attention_paged<Shape<kTile<kDecode, kBlockQ, kBlockK>, true>>(p);
}

template <int kHeadDim, int kBlockQ, int kBlockK>
__global__ void __launch_bounds__(kTile<kPaged, kBlockQ, kBlockK>.threads(),
                                  kTile<kPaged, kBlockQ, kBlockK>.ctas)
    FLASHMOE_KERNEL(attention_paged_fp8)(const __grid_constant__ PagedParams p) {
  attention_paged<Shape<kTile<kPaged, kBlockQ, kBlockK>, false>>(p);
}

FLASHMOE_INSTANTIATE(attention_paged_decode_fp8, kDecode)
FLASHMOE_INSTANTIATE(attention_paged_fp8, kPaged)
