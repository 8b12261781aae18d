// Compiled once for each head dim: FLASHMOE_HEAD_DIM.
#include "cuda/attention/kernels/instantiate.h"
#include "cuda/attention/kernels/sm80.h"
#include "cuda/attention/mma_sync/bias_sum.cuh"
#include "cuda/attention/mma_sync/bwd.cuh"
#include "cuda/attention/mma_sync/bwd_dq.cuh"
#include "cuda/tile/chip_sm80.cuh"

#define KERNEL(D, BLOCK_Q, BLOCK_K, WARPS, STAGES, CTAS, S, GK, GQ)                                \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, CTAS)                                   \
      sm80_attention_bwd_bias_bf16_d##D##_##BLOCK_Q##x##BLOCK_K(                                   \
          const __grid_constant__ flashmoe::cuda::AttentionBwdParams p) {                          \
    using namespace flashmoe::cuda;                                                                \
    constexpr BwdTile kTile = {D, BLOCK_Q, BLOCK_K, WARPS, STAGES, CTAS, S, GK, GQ};               \
    attention_bwd<BwdConfig<sm80::Chip, Bf16, kTile, true>>(p);                                    \
  }                                                                                                \
  extern "C" __global__ void __launch_bounds__(WARPS * 32,                                         \
                                               flashmoe::cuda::dq_ctas(D, BLOCK_Q, BLOCK_K, CTAS)) \
      sm80_attention_bwd_bias_dq_bf16_d##D##_##BLOCK_Q##x##BLOCK_K(                                \
          const __grid_constant__ flashmoe::cuda::AttentionBwdParams p) {                          \
    using namespace flashmoe::cuda;                                                                \
    constexpr BwdTile kTile = {D, BLOCK_Q, BLOCK_K, WARPS, STAGES, CTAS, S, GK, GQ};               \
    attention_bwd_dq<BwdConfig<sm80::Chip, Bf16, kTile, true>>(p);                                 \
  }

#define SUM(D, BLOCK_Q, BLOCK_K, WARPS, COLS, STAGES, CTAS)                         \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, CTAS)                    \
      sm80_attention_bwd_bias_sum_bf16_d##D##_##BLOCK_Q##x##BLOCK_K(                \
          const __grid_constant__ flashmoe::cuda::AttentionBwdParams p) {           \
    using namespace flashmoe::cuda;                                                 \
    constexpr BiasSumTile kTile = {D, BLOCK_Q, BLOCK_K, WARPS, COLS, STAGES, CTAS}; \
    attention_bwd_bias_sum<BiasSumConfig<sm80::Chip, Bf16, kTile>>(p);              \
  }

FLASHMOE_VARIANTS(FLASHMOE_SM80_ATTENTION_BWD_BIAS, FLASHMOE_HEAD_DIM)
(KERNEL) FLASHMOE_VARIANTS(FLASHMOE_SM80_ATTENTION_BIAS_SUM, FLASHMOE_HEAD_DIM)(SUM)
