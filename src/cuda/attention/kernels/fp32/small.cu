// Kernels without a tile, in fp32: what goes row by row before and after a pass.
#include "cuda/attention/kernels/fp32/instantiate.cuh"
#include "cuda/attention/mma_sync/bwd_preprocess.cuh"
#include "cuda/attention/mma_sync/bwd_sinks.cuh"
#include "cuda/attention/ragged.cuh"

using namespace flashmoe::cuda;

extern "C" __global__ void __launch_bounds__(kRowThreads)
    FLASHMOE_KERNEL(attention_bwd_preprocess)(const __grid_constant__ AttentionBwdParams p) {
  attention_bwd_preprocess<Fp32>(p);
}

extern "C" __global__ void __launch_bounds__(kRaggedThreads)
    FLASHMOE_KERNEL(attention_ragged_blocks)(const __grid_constant__ RaggedParams p) {
  attention_ragged_blocks(p);
}

extern "C" __global__ void __launch_bounds__(kRowThreads)
    FLASHMOE_KERNEL(attention_bwd_sinks)(const __grid_constant__ AttentionBwdParams p) {
  attention_bwd_sinks<Fp32>(p);
}
