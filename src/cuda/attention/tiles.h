// Tile configurations: what distinguishes one compiled kernel from another besides its dtype. Read
// by nvcc and by the host compiler.
#pragma once

namespace flashmoe::cuda {

// How a kernel reads its bias, where that is said of it.
enum BiasInput : int {
  kNoBias,        // there is none; mma.sync kernels find out for themselves
  kBiasByPairs,   // 16 bits, of a ragged batch: see fwd_packed.cuh
  kBiasByTma,     // 16 bits, rows of whole chunks of 16 bytes
  kBiasByRows,    // 16 bits, rows of neighbouring keys that begin anywhere
  kFloatsByRows,  // the same in fp32
  kBytesByRows,   // the same of a mask: a byte for each pair
};
constexpr bool is_by_rows(BiasInput input) { return input > kBiasByTma; }
constexpr int bias_bytes(BiasInput input) {
  return input == kFloatsByRows ? 4 : input == kBytesByRows ? 1 : 2;
}

// Shared memory for what a CTA works on.
inline constexpr int kTaskBytes = 256;

// The kernel that lists the blocks of a ragged batch: threads, and shared memory for their sums.
inline constexpr int kRaggedThreads = 1024, kRaggedSharedBytes = 1024;

// Kernels that go row by row, bound by memory: preprocess, combine and the copies of a bias.
inline constexpr int kRowThreads = 128;
// Rows of a bias that a CTA copies to aligned rows.
inline constexpr int kAlignedRows = 16;

// The kernel that copies the bias of a ragged batch between (pairs, heads) and (heads, pairs): its
// tile in shared memory, a row for each head.
inline constexpr int kBiasTilePairs = 256, kBiasTileHeads = 16;
inline constexpr int kBiasTilePitch = kBiasTilePairs + 8;
inline constexpr int kBiasTransposeSharedBytes = kBiasTileHeads * kBiasTilePitch * 2;

// Tiles for thousands of sequences of a few dozen tokens.
constexpr bool is_for_short(int head_dim, int block_q, int block_k) {
  return head_dim <= 64 && block_q <= 32 && block_k <= 32;
}

// How many CTAs of the kernel that makes dQ an SM is to hold: that for short sequences takes fewer
// registers than the one before it. (Turing has shared memory for four.)
constexpr int dq_ctas(int head_dim, int block_q, int block_k, int ctas) {
  return is_for_short(head_dim, block_q, block_k) && ctas > 4 && ctas < 8 ? 8 : ctas;
}

struct FwdTile {
  int head_dim;          // D and Dv up to this
  int block_q, block_k;  // rows of queries and of keys in a tile
  int warps;             // each takes block_q / warps rows
  int q_steps;           // of the head_dim / 16 pieces of Q, how many stay in registers
  int stages;            // blocks of K and V in shared memory: one in use, the others on their way;
                         // with one, K arrives while V is used and the other way round
  int ctas;              // that an SM's registers are to hold

  constexpr int threads() const { return warps * 32; }
  constexpr bool for_short() const { return is_for_short(head_dim, block_q, block_k); }
  // Q (and what else has as many rows), the stages of K and V, two of the bias if there is one, and
  // the task. The output leaves through Q's place.
  constexpr int shared_bytes(bool bias = false, int row_tensors = 1) const {
    return (row_tensors * block_q + 2 * stages * block_k) * head_dim * 2 +
           (bias ? 2 * block_q * block_k * 2 : 0) + kTaskBytes;
  }
};

struct BwdTile {
  int head_dim;
  int block_q, block_k;
  int warps;
  int stages;  // blocks of Q and dO in shared memory
  int ctas;    // that an SM's registers are to hold
  // How many warps share out the rows of a product; the others share out its columns.
  int score_rows;       // S and dP: queries x keys; 0: see transposed()
  int grad_key_rows;    // dK and dV: keys x D
  int grad_query_rows;  // dQ: queries x D

  constexpr int threads() const { return warps * 32; }
  constexpr bool for_short() const { return is_for_short(head_dim, block_q, block_k); }
  // Whether each warp has keys of its own, for all queries of the block: P and dS are then in its
  // registers as dV and dK need them, and only dQ needs dS in shared memory. Takes registers for
  // its keys' whole rows of dK and dV, so it is for small head dims.
  constexpr bool transposed() const { return score_rows == 0; }
  // The kernel that makes dQ: from sums, through shared memory, or for short sequences from the
  // keys once more, as a forward pass.
  constexpr FwdTile query_tile() const {
    const int held = dq_ctas(head_dim, block_q, block_k, ctas);
    return {head_dim, block_q, block_k, warps, 0, 2, held};
  }
  constexpr int dq_shared_bytes(bool bias) const {
    return for_short() ? query_tile().shared_bytes(bias, 2) : block_q * head_dim * 2;
  }
  // K and V, the stages of Q and dO, P (not with own keys) and dS, the stages of lse and delta, the
  // bias if there is one, and the task.
  constexpr int shared_bytes(bool bias = false) const {
    const int pairs = (transposed() ? 1 : 2) * block_q * block_k;
    return ((2 * block_k + 2 * stages * block_q) * head_dim + pairs) * 2 + stages * block_q * 8 +
           (bias ? bias_stages() * block_q * block_k * 2 : 0) + kTaskBytes;
  }
  // Two where that takes no CTA from an SM of Hopper; one is on its way for half a block only.
  constexpr int bias_stages() const {
    if (for_short()) return stages;
    constexpr int kSharedOfSm = 228 * 1024, kReserved = 1024;
    const int two = shared_bytes() + 2 * block_q * block_k * 2 + kReserved;
    return stages > 1 && ctas * two <= kSharedOfSm ? 2 : 1;
  }
};

// The sum of the gradient of a bias that was broadcast: what it knows of the steps ahead.
inline constexpr int kKnownSteps = 32, kStepBytes = 128;

struct BiasSumTile {
  int head_dim;
  int block_q, block_k;
  int warps, cols;  // of which so many share out the keys, and as many times the others the queries
  int stages;       // of Q, dO, K and V in shared memory
  int ctas;         // that an SM's registers are to hold

  constexpr int threads() const { return warps * 32; }
  // The stages, with lse and delta, the bias, and what is known of the steps; at the end the tile
  // in fp32 takes the place of these. Then the task.
  constexpr int shared_bytes() const {
    const int loop = stages * (2 * (block_q + block_k) * head_dim * 2 + block_q * 8) +
                     block_q * block_k * 2 + kKnownSteps * kStepBytes;
    const int tile = block_q * (block_k * 4 + 16);
    return (loop > tile ? loop : tile) + kTaskBytes;
  }
};

}  // namespace flashmoe::cuda
