// Kernels without a tile: what goes row by row before and after a pass.
#include "cuda/attention/kernels/instantiate.cuh"
#include "cuda/attention/mma_sync/bias_align.cuh"
#include "cuda/attention/mma_sync/bias_transpose.cuh"
#include "cuda/attention/mma_sync/bwd_preprocess.cuh"
#include "cuda/attention/mma_sync/bwd_sinks.cuh"
#include "cuda/attention/mma_sync/fwd_combine.cuh"
#include "cuda/attention/ragged.cuh"

using namespace flashmoe::cuda;

extern "C" __global__ void __launch_bounds__(kRowThreads)
    FLASHMOE_KERNEL(attention_bwd_preprocess)(const __grid_constant__ AttentionBwdParams p) {
  attention_bwd_preprocess<family::KernelType>(p);
}

extern "C" __global__ void __launch_bounds__(kRowThreads)
    FLASHMOE_KERNEL(attention_combine)(const __grid_constant__ AttentionFwdParams p) {
  attention_combine<family::KernelType>(p);
}

extern "C" __global__ void __launch_bounds__(kRaggedThreads)
    FLASHMOE_KERNEL(attention_ragged_blocks)(const __grid_constant__ RaggedParams p) {
  attention_ragged_blocks(p);
}

extern "C" __global__ void __launch_bounds__(kRowThreads)
    FLASHMOE_KERNEL(attention_bias_align)(const __grid_constant__ BiasAlignParams p) {
  attention_bias_align(p);
}

extern "C" __global__ void __launch_bounds__(kRowThreads)
    FLASHMOE_KERNEL(attention_bias_transpose)(const __grid_constant__ BiasTransposeParams p) {
  attention_bias_transpose(p);
}

extern "C" __global__ void __launch_bounds__(kRowThreads)
    FLASHMOE_KERNEL(attention_bwd_sinks)(const __grid_constant__ AttentionBwdParams p) {
  attention_bwd_sinks<family::KernelType>(p);
}
