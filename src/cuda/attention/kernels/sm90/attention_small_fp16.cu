#include "cuda/attention/ragged.cuh"
#include "cuda/attention/sm90/bwd_convert_dq.cuh"
#include "cuda/attention/sm90/bwd_preprocess.cuh"

using namespace flashmoe::cuda;

extern "C" __global__ void __launch_bounds__(kRaggedThreads)
    sm90_attention_ragged_blocks_fp16(const __grid_constant__ RaggedParams p) {
  attention_ragged_blocks(p);
}

extern "C" __global__ void __launch_bounds__(kRowThreads, 8)
    sm90_attention_bwd_preprocess_fp16(const __grid_constant__ Sm90BwdParams p) {
  sm90::attention_bwd_preprocess<Fp16>(p);
}

extern "C" __global__ void __launch_bounds__(sm90::kConvertDqThreads)
    sm90_attention_bwd_dq_fp16(const __grid_constant__ Sm90BwdParams p) {
  sm90::attention_bwd_dq<Fp16>(p);
}
