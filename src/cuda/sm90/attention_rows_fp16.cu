#include "cuda/any/attention_ragged.cuh"

extern "C" __global__ void __launch_bounds__(flashmoe::cuda::kRaggedThreads)
    sm90_attention_ragged_blocks_fp16(
        const __grid_constant__ flashmoe::cuda::AttentionRaggedParams p) {
  flashmoe::cuda::attention_ragged_blocks(p);
}
