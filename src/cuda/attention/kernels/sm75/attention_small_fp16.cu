#include "cuda/attention/mma_sync/bias_align.cuh"
#include "cuda/attention/mma_sync/bias_transpose.cuh"
#include "cuda/attention/mma_sync/bwd_preprocess.cuh"
#include "cuda/attention/mma_sync/fwd_combine.cuh"
#include "cuda/attention/ragged.cuh"
#include "cuda/tile/chip_sm75.cuh"

using namespace flashmoe::cuda;

extern "C" __global__ void __launch_bounds__(kRowThreads)
    sm75_attention_bwd_preprocess_fp16(const __grid_constant__ AttentionBwdParams p) {
  attention_bwd_preprocess<sm75::Fp16>(p);
}

extern "C" __global__ void __launch_bounds__(kRowThreads)
    sm75_attention_combine_fp16(const __grid_constant__ AttentionFwdParams p) {
  attention_combine<sm75::Fp16>(p);
}

extern "C" __global__ void __launch_bounds__(kRaggedThreads)
    sm75_attention_ragged_blocks_fp16(const __grid_constant__ RaggedParams p) {
  attention_ragged_blocks(p);
}

extern "C" __global__ void __launch_bounds__(kRowThreads)
    sm75_attention_bias_align_fp16(const __grid_constant__ BiasAlignParams p) {
  attention_bias_align(p);
}

extern "C" __global__ void __launch_bounds__(kRowThreads)
    sm75_attention_bias_transpose_fp16(const __grid_constant__ BiasTransposeParams p) {
  attention_bias_transpose(p);
}
