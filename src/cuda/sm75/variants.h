// The sm75 family's kernels: see sm80/variants.h. Tiles are for 64 KB of shared memory, all that a
// Turing SM has; without copies in the background, one CTA's computing hides another's loading, or
// else nothing does.
#pragma once

#include "cuda/tiles.h"

// X(head_dim, block_q, block_k, warps, q_steps, stages, ctas)
#define FLASHMOE_SM75_ATTENTION_FWD_16(X) X(16, 64, 64, 4, 1, 2, 2)
#define FLASHMOE_SM75_ATTENTION_FWD_32(X) X(32, 64, 64, 4, 2, 2, 2)
#define FLASHMOE_SM75_ATTENTION_FWD_48(X) X(48, 64, 64, 4, 3, 2, 2)
#define FLASHMOE_SM75_ATTENTION_FWD_64(X) X(64, 128, 64, 8, 4, 2, 1)
#define FLASHMOE_SM75_ATTENTION_FWD_96(X) X(96, 64, 32, 4, 6, 2, 2)
#define FLASHMOE_SM75_ATTENTION_FWD_128(X) X(128, 64, 32, 4, 8, 2, 2)
#define FLASHMOE_SM75_ATTENTION_FWD_192(X) X(192, 64, 16, 4, 0, 2, 2)
#define FLASHMOE_SM75_ATTENTION_FWD_256(X) X(256, 48, 16, 3, 0, 2, 2)

// X(head_dim, block_q, block_k, warps, stages, ctas, score_rows, grad_key_rows, grad_query_rows)
#define FLASHMOE_SM75_ATTENTION_BWD_16(X) X(16, 64, 64, 4, 1, 2, 2, 4, 4)
#define FLASHMOE_SM75_ATTENTION_BWD_32(X) X(32, 64, 64, 4, 1, 2, 2, 4, 4)
#define FLASHMOE_SM75_ATTENTION_BWD_48(X) X(48, 64, 64, 4, 1, 2, 2, 4, 4)
#define FLASHMOE_SM75_ATTENTION_BWD_64(X) X(64, 64, 64, 4, 1, 2, 2, 2, 2)
#define FLASHMOE_SM75_ATTENTION_BWD_96(X) X(96, 32, 64, 4, 1, 2, 2, 2, 2)
#define FLASHMOE_SM75_ATTENTION_BWD_128(X) X(128, 32, 64, 8, 1, 1, 2, 4, 2)
#define FLASHMOE_SM75_ATTENTION_BWD_192(X) X(192, 32, 32, 4, 1, 2, 2, 2, 2)
#define FLASHMOE_SM75_ATTENTION_BWD_256(X) X(256, 32, 16, 4, 1, 2, 2, 1, 2)

#define FLASHMOE_SM75_ATTENTION_FWD(X) \
  FLASHMOE_SM75_ATTENTION_FWD_16(X)    \
  FLASHMOE_SM75_ATTENTION_FWD_32(X)    \
  FLASHMOE_SM75_ATTENTION_FWD_48(X)    \
  FLASHMOE_SM75_ATTENTION_FWD_64(X)    \
  FLASHMOE_SM75_ATTENTION_FWD_96(X)    \
  FLASHMOE_SM75_ATTENTION_FWD_128(X)   \
  FLASHMOE_SM75_ATTENTION_FWD_192(X)   \
  FLASHMOE_SM75_ATTENTION_FWD_256(X)

#define FLASHMOE_SM75_ATTENTION_BWD(X) \
  FLASHMOE_SM75_ATTENTION_BWD_16(X)    \
  FLASHMOE_SM75_ATTENTION_BWD_32(X)    \
  FLASHMOE_SM75_ATTENTION_BWD_48(X)    \
  FLASHMOE_SM75_ATTENTION_BWD_64(X)    \
  FLASHMOE_SM75_ATTENTION_BWD_96(X)    \
  FLASHMOE_SM75_ATTENTION_BWD_128(X)   \
  FLASHMOE_SM75_ATTENTION_BWD_192(X)   \
  FLASHMOE_SM75_ATTENTION_BWD_256(X)
