// Compiled once for each head dim: FLASHMOE_HEAD_DIM.
#include "cuda/attention/kernels/instantiate.h"
#include "cuda/attention/kernels/sm80.h"
#include "cuda/attention/mma_sync/fwd.cuh"
#include "cuda/tile/chip_sm80.cuh"

#define KERNEL(D, BLOCK_Q, BLOCK_K, WARPS, Q_STEPS, STAGES, CTAS)                  \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, CTAS)                   \
      sm80_attention_fwd_fp16_d##D##_##BLOCK_Q##x##BLOCK_K(                        \
          const __grid_constant__ flashmoe::cuda::AttentionFwdParams p) {          \
    using namespace flashmoe::cuda;                                                \
    constexpr FwdTile kTile = {D, BLOCK_Q, BLOCK_K, WARPS, Q_STEPS, STAGES, CTAS}; \
    attention_fwd<FwdConfig<sm80::Chip, Fp16, kTile>>(p);                          \
  }

FLASHMOE_VARIANTS(FLASHMOE_SM80_ATTENTION_FWD, FLASHMOE_HEAD_DIM)(KERNEL)
