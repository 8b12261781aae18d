#include "cuda/sm80/attention_fwd.cuh"

#define KERNEL(D, MASK, BLOCK_Q, BLOCK_K, WARPS, Q_STEPS)                                         \
  extern "C" __global__ void __launch_bounds__(WARPS * 32) sm80_attention_fwd_fp16_d##D##_##MASK( \
      const __grid_constant__ flashmoe::cuda::AttentionFwdParams p) {                             \
    using namespace flashmoe::cuda;                                                               \
    sm80::attention_fwd<                                                                          \
        sm80::FwdConfig<Fp16, D, sm80::MASK == sm80::causal, BLOCK_Q, BLOCK_K, WARPS, Q_STEPS>>(  \
        p);                                                                                       \
  }

FLASHMOE_SM80_ATTENTION_FWD(KERNEL)
