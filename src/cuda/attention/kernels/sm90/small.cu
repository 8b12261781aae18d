// Kernels without a tile: what goes row by row before and after a pass.
#include "cuda/attention/kernels/instantiate.cuh"
#include "cuda/attention/mma_sync/bias_align.cuh"
#include "cuda/attention/mma_sync/bwd_sinks.cuh"
#include "cuda/attention/ragged.cuh"
#include "cuda/attention/sm90/bwd_convert_dq.cuh"
#include "cuda/attention/sm90/bwd_key_sum.cuh"
#include "cuda/attention/sm90/bwd_packed_preprocess.cuh"
#include "cuda/attention/sm90/bwd_preprocess.cuh"
#include "cuda/attention/sm90/fwd_scheduler.cuh"
#include "cuda/attention/sm90/row_bounds.cuh"

using namespace flashmoe::cuda;

extern "C" __global__ void __launch_bounds__(kRaggedThreads)
    FLASHMOE_KERNEL(attention_ragged_blocks)(const __grid_constant__ RaggedParams p) {
  attention_ragged_blocks(p);
}

extern "C" __global__ void __launch_bounds__(kRaggedThreads)
    FLASHMOE_KERNEL(attention_row_bounds)(const __grid_constant__ Sm90PackedParams p) {
  sm90::attention_row_bounds(p);
}

extern "C" __global__ void __launch_bounds__(kRowThreads)
    FLASHMOE_KERNEL(attention_task_counter)(const __grid_constant__ Sm90FwdParams p) {
  sm90::attention_task_counter(p);
}

extern "C" __global__ void __launch_bounds__(kRowThreads)
    FLASHMOE_KERNEL(attention_bias_align)(const __grid_constant__ BiasAlignParams p) {
  attention_bias_align(p);
}

extern "C" __global__ void __launch_bounds__(kRowThreads, 8)
    FLASHMOE_KERNEL(attention_bwd_preprocess)(const __grid_constant__ Sm90BwdParams p) {
  sm90::attention_bwd_preprocess<family::KernelType>(p);
}

extern "C" __global__ void __launch_bounds__(kRaggedThreads) FLASHMOE_KERNEL(
    attention_bwd_packed_preprocess)(const __grid_constant__ Sm90PackedBwdParams p) {
  sm90::attention_bwd_packed_preprocess<family::KernelType>(p);
}

extern "C" __global__ void __launch_bounds__(sm90::kMostConvertDqThreads)
    FLASHMOE_KERNEL(attention_bwd_dq)(const __grid_constant__ Sm90BwdParams p) {
  sm90::attention_bwd_dq<family::KernelType>(p);
}

extern "C" __global__ void __launch_bounds__(sm90::kConvertDqThreads)
    FLASHMOE_KERNEL(attention_bwd_key_sum)(const __grid_constant__ Sm90BwdParams p) {
  sm90::attention_bwd_key_sum<family::KernelType>(p);
}

extern "C" __global__ void __launch_bounds__(kRowThreads)
    FLASHMOE_KERNEL(attention_bwd_sinks)(const __grid_constant__ AttentionBwdParams p) {
  attention_bwd_sinks<family::KernelType>(p);
}
