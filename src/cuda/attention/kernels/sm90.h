// The sm90 family's kernels, listed once: see sm80/variants.h.
#pragma once

#include "cuda/attention/sm90/tiles.h"

// X(head_dim, block_q, block_k, stages): best first.
//
// As many rows as registers allow, three warpgroups up to D = 96, two above; 128 where they leave
// less of a tile empty.
#define FLASHMOE_SM90_ATTENTION_FWD_64(X) X(64, 192, 128, 4) X(64, 128, 128, 4)
#define FLASHMOE_SM90_ATTENTION_FWD_96(X) X(96, 192, 96, 2) X(96, 128, 128, 2)
#define FLASHMOE_SM90_ATTENTION_FWD_128(X) X(128, 128, 128, 2)
#define FLASHMOE_SM90_ATTENTION_FWD_192(X) X(192, 128, 96, 2)
#define FLASHMOE_SM90_ATTENTION_FWD_256(X) X(256, 128, 64, 2)

#define FLASHMOE_SM90_ATTENTION_FWD(X) \
  FLASHMOE_SM90_ATTENTION_FWD_64(X)    \
  FLASHMOE_SM90_ATTENTION_FWD_96(X)    \
  FLASHMOE_SM90_ATTENTION_FWD_128(X)   \
  FLASHMOE_SM90_ATTENTION_FWD_192(X)   \
  FLASHMOE_SM90_ATTENTION_FWD_256(X)

// With a softcap, or a scale that is not positive: what that takes of registers leaves two
// warpgroups at D = 64 as well.
#define FLASHMOE_SM90_ATTENTION_FWD_ANY_64(X) X(64, 128, 128, 2)
#define FLASHMOE_SM90_ATTENTION_FWD_ANY_96(X) X(96, 128, 128, 2)
#define FLASHMOE_SM90_ATTENTION_FWD_ANY_128(X) X(128, 128, 128, 2)
#define FLASHMOE_SM90_ATTENTION_FWD_ANY_192(X) X(192, 128, 96, 2)
#define FLASHMOE_SM90_ATTENTION_FWD_ANY_256(X) X(256, 128, 64, 2)

#define FLASHMOE_SM90_ATTENTION_FWD_ANY(X) \
  FLASHMOE_SM90_ATTENTION_FWD_ANY_64(X)    \
  FLASHMOE_SM90_ATTENTION_FWD_ANY_96(X)    \
  FLASHMOE_SM90_ATTENTION_FWD_ANY_128(X)   \
  FLASHMOE_SM90_ATTENTION_FWD_ANY_192(X)   \
  FLASHMOE_SM90_ATTENTION_FWD_ANY_256(X)

// X(head_dim, block_q, block_k)
//
// As many queries as registers allow beside dK and dV of 64 keys; above D = 128 a warpgroup has one
// of the two, and two CTAs share the block.
#define FLASHMOE_SM90_ATTENTION_BWD_64(X) X(64, 128, 128)
#define FLASHMOE_SM90_ATTENTION_BWD_96(X) X(96, 64, 128)
#define FLASHMOE_SM90_ATTENTION_BWD_128(X) X(128, 64, 128)
#define FLASHMOE_SM90_ATTENTION_BWD_192(X) X(192, 64, 128)
#define FLASHMOE_SM90_ATTENTION_BWD_256(X) X(256, 64, 128)

// With a softcap. There are no registers for its derivative at D = 64 and 128: those above do.
#define FLASHMOE_SM90_ATTENTION_BWD_ANY_64(X)
#define FLASHMOE_SM90_ATTENTION_BWD_ANY_96(X) X(96, 64, 128)
#define FLASHMOE_SM90_ATTENTION_BWD_ANY_128(X)
#define FLASHMOE_SM90_ATTENTION_BWD_ANY_192(X) X(192, 64, 128)
#define FLASHMOE_SM90_ATTENTION_BWD_ANY_256(X) X(256, 64, 128)

#define FLASHMOE_SM90_ATTENTION_BWD_ANY(X) \
  FLASHMOE_SM90_ATTENTION_BWD_ANY_96(X)    \
  FLASHMOE_SM90_ATTENTION_BWD_ANY_192(X)   \
  FLASHMOE_SM90_ATTENTION_BWD_ANY_256(X)

#define FLASHMOE_SM90_ATTENTION_BWD(X) \
  FLASHMOE_SM90_ATTENTION_BWD_64(X)    \
  FLASHMOE_SM90_ATTENTION_BWD_96(X)    \
  FLASHMOE_SM90_ATTENTION_BWD_128(X)   \
  FLASHMOE_SM90_ATTENTION_BWD_192(X)   \
  FLASHMOE_SM90_ATTENTION_BWD_256(X)
