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
  int stages;           // of the steps' rows in shared memory
  int ctas, bias_ctas;  // without a bias, and with one, which takes registers

  constexpr int threads() const { return block_q * 2; }  // a warp for 16 rows
  // CTAs that share a tile of keys: dK and dV of 16 keys together take as many registers as D.
  constexpr int key_parts() const { return head_dim > 128 ? 2 : 1; }
  // K and V of the keys, the stages of Q and dO with LSE and delta, and the task; or the other way
  // round.
  constexpr int shared_bytes() const {
    return (2 * block_q + 2 * stages * step) * head_dim * 4 + stages * step * 8 + kTaskBytes;
  }
};

// Of the sum of the gradient of a bias that was broadcast: steps whose place is known ahead, and
// the bytes that a step takes.
inline constexpr int kFp32KnownSteps = 8, kFp32StepBytes = 96;

struct Fp32BiasSumTile {
  int head_dim;
  int block_q, block_k;
  int ctas;

  constexpr int threads() const { return block_q * 2; }  // a warp for 16 rows
  // Q, dO, K and V of a step, whose place the tile takes at the end; what is known of the steps,
  // and the task.
  constexpr int shared_bytes() const {
    const int step = 2 * (block_q + block_k) * head_dim * 4;
    const int tile = block_q * (block_k * 4 + 16);
    return (step > tile ? step : tile) + kFp32KnownSteps * kFp32StepBytes + kTaskBytes;
  }
};

}  // namespace flashmoe::cuda
