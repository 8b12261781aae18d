// Compiled once for each head dim: FLASHMOE_HEAD_DIM.
#include "cuda/attention/kernels/instantiate.h"
#include "cuda/attention/kernels/sm90.h"
#include "cuda/attention/sm90/fwd.cuh"

#define KERNEL(NAME, ANY_SCORE, D, BLOCK_Q, BLOCK_K, STAGES)                \
  extern "C" __global__ void __launch_bounds__((BLOCK_Q / 64 + 1) * 128, 1) \
      sm90_attention_##NAME##_fp16_d##D##_##BLOCK_Q##x##BLOCK_K(            \
          const __grid_constant__ flashmoe::cuda::Sm90FwdParams p) {        \
    using namespace flashmoe::cuda;                                         \
    constexpr Sm90FwdTile kTile{D, BLOCK_Q, BLOCK_K, STAGES, ANY_SCORE};    \
    sm90::attention_fwd<sm90::FwdConfig<Fp16, kTile>>(p);                   \
  }
#define PLAIN(...) KERNEL(fwd, false, __VA_ARGS__)
#define ANY(...) KERNEL(fwd_general, true, __VA_ARGS__)

FLASHMOE_VARIANTS(FLASHMOE_SM90_ATTENTION_FWD, FLASHMOE_HEAD_DIM)
(PLAIN) FLASHMOE_VARIANTS(FLASHMOE_SM90_ATTENTION_FWD_GENERAL, FLASHMOE_HEAD_DIM)(ANY)
