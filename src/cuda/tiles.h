// Tile configurations: what distinguishes one compiled kernel from another besides its dtype. Read
// by nvcc and by the host compiler.
#pragma once

namespace flashmoe::cuda {

// Shared memory for what a CTA works on.
inline constexpr int kTaskBytes = 128;

struct FwdTile {
  int head_dim;          // D and Dv up to this
  int block_q, block_k;  // rows of queries and of keys in a tile
  int warps;             // each takes block_q / warps rows
  int q_steps;           // of the head_dim / 16 pieces of Q, how many stay in registers
  int stages;            // blocks of K and V in shared memory: one in use, the others on their way;
                         // with one, K arrives while V is used and the other way round
  int ctas;              // that an SM's registers are to hold

  constexpr int threads() const { return warps * 32; }
  // Q, the stages of K and V, and the task. The output leaves through Q's place.
  constexpr int shared_bytes() const {
    return (block_q + 2 * stages * block_k) * head_dim * 2 + kTaskBytes;
  }
};

struct BwdTile {
  int head_dim;
  int block_q, block_k;
  int warps;
  int stages;  // blocks of Q and dO in shared memory
  int ctas;    // that an SM's registers are to hold
  // How many warps share out the rows of a product; the others share out its columns.
  int score_rows;       // S and dP: queries x keys; 0: see own_keys()
  int grad_key_rows;    // dK and dV: keys x D
  int grad_query_rows;  // dQ: queries x D

  constexpr int threads() const { return warps * 32; }
  // Whether each warp has keys of its own, for all queries of the block: P and dS are then in its
  // registers as dV and dK need them, and only dQ needs dS in shared memory. Takes registers for
  // its keys' whole rows of dK and dV, so it is for small head dims.
  constexpr bool own_keys() const { return score_rows == 0; }
  // K and V, the stages of Q and dO, P (not with own keys) and dS, the stages of lse and delta, and
  // the task.
  constexpr int shared_bytes() const {
    const int pairs = (own_keys() ? 1 : 2) * block_q * block_k;
    return ((2 * block_k + 2 * stages * block_q) * head_dim + pairs) * 2 + stages * block_q * 8 +
           kTaskBytes;
  }
};

}  // namespace flashmoe::cuda
