// Tiles of the fp32 kernels. Read by nvcc and by the host compiler.
#pragma once

#include "cuda/attention/tiles.h"

namespace flashmoe::cuda {

struct Fp32FwdTile {
  int head_dim;          // D and Dv up to this
  int block_q, block_k;  // rows of queries and of keys in a tile
  int warps;             // each takes block_q / warps rows
  int stages;            // of K and V in shared memory: with one, K arrives while V is used
  int ctas;              // that an SM's registers are to hold

  constexpr int threads() const { return warps * 32; }
  // Q, the stages of K and V, and the task.
  constexpr int shared_bytes() const {
    return (block_q + 2 * stages * block_k) * head_dim * 4 + kTaskBytes;
  }
};

// Of the two kernels of a backward pass: one takes block_k keys and goes through the queries, the
// other takes block_q queries and goes through the keys, `step` of them at a time.
struct Fp32BwdTile {
  int head_dim;
  int block_q, block_k;
  int step;
  int stages;  // of the steps' rows in shared memory
  int ctas;

  constexpr int threads() const { return block_q * 2; }  // a warp for 16 rows
  // K and V of the keys, the stages of Q and dO with LSE and delta, and the task; or the other way
  // round.
  constexpr int shared_bytes() const {
    return (2 * block_q + 2 * stages * step) * head_dim * 4 + stages * step * 8 + kTaskBytes;
  }
};

// Of the sum of the gradient of a bias that was broadcast.
struct Fp32BiasSumTile {
  int head_dim;
  int block_q, block_k;
  int ctas;

  constexpr int threads() const { return block_q * 2; }
  // Q, dO, K and V of a step and its LSE and delta, whose place the tile takes at the end; and the
  // task.
  constexpr int shared_bytes() const {
    const int step = 2 * (block_q + block_k) * head_dim * 4 + block_q * 8;
    const int tile = block_q * (block_k * 4 + 16);
    return (step > tile ? step : tile) + kTaskBytes;
  }
};

}  // namespace flashmoe::cuda
