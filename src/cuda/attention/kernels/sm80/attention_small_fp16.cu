#include "cuda/attention/mma_sync/bias_align.cuh"
#include "cuda/attention/mma_sync/bias_transpose.cuh"
#include "cuda/attention/mma_sync/bwd_preprocess.cuh"
#include "cuda/attention/mma_sync/fwd_combine.cuh"
#include "cuda/attention/ragged.cuh"
#include "cuda/tile/chip_sm80.cuh"

using namespace flashmoe::cuda;

extern "C" __global__ void __launch_bounds__(kRowThreads)
    sm80_attention_bwd_preprocess_fp16(const __grid_constant__ AttentionBwdParams p) {
  attention_bwd_preprocess<Fp16>(p);
}

extern "C" __global__ void __launch_bounds__(kRowThreads)
    sm80_attention_combine_fp16(const __grid_constant__ AttentionFwdParams p) {
  attention_combine<Fp16>(p);
}

extern "C" __global__ void __launch_bounds__(kRaggedThreads)
    sm80_attention_ragged_blocks_fp16(const __grid_constant__ RaggedParams p) {
  attention_ragged_blocks(p);
}

extern "C" __global__ void __launch_bounds__(kRowThreads)
    sm80_attention_bias_align_fp16(const __grid_constant__ BiasAlignParams p) {
  attention_bias_align(p);
}

extern "C" __global__ void __launch_bounds__(kRowThreads)
    sm80_attention_bias_transpose_fp16(const __grid_constant__ BiasTransposeParams p) {
  attention_bias_transpose(p);
}
