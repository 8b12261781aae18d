// Attention over the pages of an fp8 cache for sequences with many queries.
#include "cuda/attention/kernels/instantiate.cuh"
#include "cuda/attention/kernels/paged_chunk.h"
#include "cuda/attention/sm90/fwd_paged_fp8.cuh"

using namespace flashmoe::cuda;

constexpr auto kChunk = rows_of<sm90::kPagedChunkFp8>();
template <int kBlockQ, int kBlockK>
constexpr Sm90ChunkTile kTile = find_row(kChunk, kBlockQ, kBlockK);

template <int kHeadDim, int kBlockQ, int kBlockK>
__global__ void __launch_bounds__(kTile<kBlockQ, kBlockK>.threads(), 1)
    FLASHMOE_KERNEL(attention_paged_chunk_fp8)(const __grid_constant__ Sm90PagedParams p) {
  using Config = sm90::FwdPagedFp8Config<family::KernelType, kTile<kBlockQ, kBlockK>>;
  sm90::attention_fwd_paged<Config>(p);
}

FLASHMOE_INSTANTIATE(attention_paged_chunk_fp8, kChunk)
