// Compiled once for each head dim: FLASHMOE_HEAD_DIM.
#include "cuda/attention/kernels/instantiate.h"
#include "cuda/attention/kernels/sm90.h"
#include "cuda/attention/sm90/bwd.cuh"

#define KERNEL(NAME, ANY_SCORE, D, BLOCK_Q, BLOCK_K)                                            \
  extern "C" __global__ void __launch_bounds__(384, 1)                                          \
      sm90_attention_##NAME##_fp16_d##D##_##BLOCK_Q##x##BLOCK_K(                                \
          const __grid_constant__ flashmoe::cuda::Sm90BwdParams p) {                            \
    using namespace flashmoe::cuda;                                                             \
    sm90::attention_bwd<sm90::BwdConfig<Fp16, Sm90BwdTile{D, BLOCK_Q, BLOCK_K, ANY_SCORE}>>(p); \
  }
#define PLAIN(...) KERNEL(bwd, false, __VA_ARGS__)
#define ANY(...) KERNEL(bwd_general, true, __VA_ARGS__)

FLASHMOE_VARIANTS(FLASHMOE_SM90_ATTENTION_BWD, FLASHMOE_HEAD_DIM)
(PLAIN) FLASHMOE_VARIANTS(FLASHMOE_SM90_ATTENTION_BWD_GENERAL, FLASHMOE_HEAD_DIM)(ANY)
