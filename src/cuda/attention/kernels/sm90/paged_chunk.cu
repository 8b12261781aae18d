// Attention over pages for sequences with many queries.
#include "cuda/attention/kernels/instantiate.cuh"
#include "cuda/attention/kernels/paged_chunk.h"
#include "cuda/attention/sm90/fwd_paged.cuh"

using namespace flashmoe::cuda;

constexpr auto kChunk = rows_of<sm90::kPagedChunk>();
template <int kBlockQ, int kBlockK>
constexpr Sm90ChunkTile kTile = find_row(kChunk, kBlockQ, kBlockK);

template <int kHeadDim, int kBlockQ, int kBlockK>
__global__ void __launch_bounds__(kTile<kBlockQ, kBlockK>.threads(), 1)
    FLASHMOE_KERNEL(attention_paged_chunk)(const __grid_constant__ Sm90PagedParams p) {
  sm90::attention_fwd_paged<sm90::FwdPagedConfig<family::KernelType, kTile<kBlockQ, kBlockK>>>(p);
}

FLASHMOE_INSTANTIATE(attention_paged_chunk, kChunk)

constexpr auto kChunkRows = rows_of<sm90::kPagedChunkRows>();
template <int kBlockQ, int kBlockK>
constexpr Sm90ChunkTile kRowsTile = find_row(kChunkRows, kBlockQ, kBlockK);

template <int kHeadDim, int kBlockQ, int kBlockK>
__global__ void __launch_bounds__(kRowsTile<kBlockQ, kBlockK>.threads(), 1)
    FLASHMOE_KERNEL(attention_paged_chunk_rows)(const __grid_constant__ Sm90PagedParams p) {
  using Config = sm90::FwdPagedConfig<family::KernelType, kRowsTile<kBlockQ, kBlockK>>;
  sm90::attention_fwd_paged<Config>(p);
}

FLASHMOE_INSTANTIATE(attention_paged_chunk_rows, kChunkRows)
