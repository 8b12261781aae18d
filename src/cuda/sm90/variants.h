// The sm90 family's kernels, listed once: see sm80/variants.h.
#pragma once

#include "cuda/tiles.h"

// X(head_dim, block_q, block_k, stages)
//
// As many rows as registers allow: three warpgroups at D = 64, two above.
#define FLASHMOE_SM90_ATTENTION_FWD_64(X) X(64, 192, 128, 2)
#define FLASHMOE_SM90_ATTENTION_FWD_96(X) X(96, 128, 128, 2)
#define FLASHMOE_SM90_ATTENTION_FWD_128(X) X(128, 128, 128, 2)
#define FLASHMOE_SM90_ATTENTION_FWD_192(X) X(192, 128, 112, 2)
#define FLASHMOE_SM90_ATTENTION_FWD_256(X) X(256, 128, 64, 2)

#define FLASHMOE_SM90_ATTENTION_FWD(X) \
  FLASHMOE_SM90_ATTENTION_FWD_64(X)    \
  FLASHMOE_SM90_ATTENTION_FWD_96(X)    \
  FLASHMOE_SM90_ATTENTION_FWD_128(X)   \
  FLASHMOE_SM90_ATTENTION_FWD_192(X)   \
  FLASHMOE_SM90_ATTENTION_FWD_256(X)
