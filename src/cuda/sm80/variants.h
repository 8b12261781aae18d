// The sm80 family's kernels, listed once: the .cu files instantiate this list, the catalogue plans
// with it, and the tests hold it against what was really compiled.
#pragma once

#include <cstdint>

namespace flashmoe::cuda::sm80 {

// One tile configuration of the forward kernel.
struct FwdTile {
  int head_dim;
  bool causal;
  int block_q, block_k;  // rows of queries and of keys in a tile
  int warps;             // each takes block_q / warps rows
  int q_steps;           // of the head_dim / 16 pieces of Q, how many stay in registers

  constexpr int threads() const { return warps * 32; }
  // Q, and two stages of K and V, in 16-bit elements. The output leaves through Q's place.
  constexpr int shared_bytes() const { return (block_q + 4 * block_k) * head_dim * 2; }
};

// X(head_dim, mask, block_q, block_k, warps, q_steps)
//
// 32 rows a warp: each fragment of K and V read from shared memory then feeds two products, and
// reading stays below the 128 bytes a clock that shared memory gives. 128 x 64 at D = 128 leaves
// two CTAs on an SM of Hopper, one on an A100.
#define FLASHMOE_SM80_ATTENTION_FWD(X) \
  X(64, full, 128, 64, 4, 4)           \
  X(64, causal, 128, 64, 4, 4)         \
  X(128, full, 128, 64, 4, 0)          \
  X(128, causal, 128, 64, 4, 0)

// "mask" as a number, for both compilers.
enum Mask : int { full = 0, causal = 1 };

}  // namespace flashmoe::cuda::sm80
