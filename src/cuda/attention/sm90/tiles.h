// Tile configurations of the sm90 family: see cuda/attention/tiles.h.
#pragma once

#include "cuda/attention/tiles.h"

namespace flashmoe::cuda {

// Shared memory that a CTA may have on an SM of Hopper, and what a forward kernel, or the sum of a
// bias's gradient, keeps of it for its tasks and mbarriers.
inline constexpr int kSm90SharedBytes = 227 * 1024, kBarrierBytes = 512;

// Registers that each thread of a CTA has when it begins, before setmaxnreg moves them between
// warpgroups. A warpgroup that asks for more than the others gave away waits for ever.
constexpr int registers_at_first(int warpgroups, int ctas = 1) {
  return 65536 / (ctas * warpgroups * 128) / 8 * 8;
}

// A tile of bias in shared memory. By TMA it has whole blocks; by rows each row has a chunk more,
// of `chunk_bytes`, since it begins within one.
constexpr int bias_tile_bytes(BiasInput input, int rows, int keys, int chunk_bytes) {
  if (input == kNoBias) return 0;
  const int row_bytes = keys * (input == kFloatsByRows ? 4 : 2);
  return rows * (row_bytes + (input == kBiasByTma ? 0 : chunk_bytes));
}

struct Sm90FwdTile {
  int head_dim;
  int block_q, block_k;  // a consumer warpgroup for each 64 rows, and the producer's warpgroup
  int stages;            // of K and V in shared memory
  bool general_score;    // whether there may be a softcap, or a scale that is not positive
  BiasInput bias = kNoBias;
  int ctas = 1;  // per SM, of which each has its share of shared memory and registers
  static constexpr bool kCountsTasks = true;

  constexpr int threads() const { return (block_q / 64 + 1) * 128; }
  // Tiles lie in blocks of 64 columns; O leaves through one or two such blocks.
  constexpr int blocks() const { return (head_dim + 63) / 64; }
  constexpr int out_stages() const { return blocks() > 1 ? 2 : 1; }
  static constexpr int kBiasChunkBytes = 16;
  constexpr int shared_bytes() const {
    const int tiles = block_q + 2 * stages * block_k;
    const int bias_tiles = stages * bias_tile_bytes(bias, block_q, block_k, kBiasChunkBytes);
    return (tiles * blocks() + out_stages() * block_q) * 128 + bias_tiles + kBarrierBytes;
  }
};

// Tiles of tokens, whatever sequences these are of.
struct Sm90PackedTile {
  int head_dim;
  int block_q, block_k;
  int stages;                  // of K and V in shared memory
  int ctas;                    // per SM
  bool general_score = false;  // whether there may be a softcap, or a scale that is not positive
  static constexpr bool kCountsTasks = true, kPacked = true;

  constexpr bool for_short() const { return true; }
  // Heads that lie side by side in a box of 64 columns.
  constexpr int heads() const { return head_dim <= 32 ? 64 / head_dim : 1; }
  constexpr int warps() const { return block_q / 16; }          // consumers
  constexpr int threads() const { return (warps() + 1) * 32; }  // and the producer
  // Two stages of Q, which O leaves through, with the bounds of its rows; the stages of K and V.
  constexpr int shared_bytes() const {
    return 2 * block_q * (128 + 8) + 2 * stages * block_k * 128 + kBarrierBytes;
  }
};

// The backward pass over tiles of tokens: block_q of them, queries or keys, and the other side in
// stages of block_k.
struct Sm90PackedBwdTile {
  int head_dim;
  int block_q, block_k;
  int stages;                  // of the other side in shared memory
  int ctas;                    // per SM
  bool general_score = false;  // whether there may be a softcap, or a scale that is not positive
  static constexpr bool kCountsTasks = true, kPacked = true;

  constexpr bool for_short() const { return true; }
  constexpr int heads() const { return head_dim <= 32 ? 64 / head_dim : 1; }
  constexpr int warps() const { return block_q / 16; }          // consumers
  constexpr int threads() const { return warps() * 32 + 128; }  // and the producer's warpgroup
  // Two stages of a task: two tiles, which gradients leave through, the bounds of their rows, and
  // LSE and delta of these. The stages of the other side, with LSE and delta as well.
  constexpr int shared_bytes() const {
    const int rows = 2 * block_q + stages * block_k;
    return rows * (2 * 128 + heads() * 8) + 2 * block_q * 8 + kBarrierBytes;
  }
};

// The kernel that finds the bounds of rows: shared memory for kRaggedThreads sequences, and for the
// sums that it shares with the kernel that lists blocks.
inline constexpr int kRowBoundsSharedBytes = 1024 * (16 + 1);

// Shared memory of the kernel that converts dQ after a backward pass: 64 rows x 64 columns.
inline constexpr int kConvertDqSharedBytes = 64 * 64 * 2;

// Shared memory that a backward kernel keeps for its tasks and mbarriers.
inline constexpr int kBwdControlBytes = 512;

struct Sm90BwdTile {
  int head_dim;
  int block_q, block_k;
  bool general_score = false;  // whether there may be a softcap
  BiasInput bias = kNoBias;    // of a bias with a gradient
  int ctas = 1;                // per SM: one takes all shared memory and registers

  static constexpr bool kCountsTasks = true;
  static constexpr int kStages = 2;                  // of Q and dO
  constexpr int threads() const { return 3 * 128; }  // the producer's warpgroup and two consumers
  // Whether dK and dV of 64 keys are too many accumulators for one warpgroup: one warpgroup has dV
  // then and the other dK, and a cluster of two CTAs shares a tile of keys.
  constexpr bool two_cta() const { return head_dim > 128; }
  // Whether the kernel itself converts dQ, by a warp beside the consumers that has registers left.
  constexpr bool converts_dq() const { return two_cta(); }
  // CTAs that share a tile of keys: with two_cta() each has 64 of its 128.
  constexpr int cluster() const { return two_cta() ? 2 : 1; }
  // Columns of tiles in shared memory: whole blocks of 64.
  constexpr int columns() const { return (head_dim + 63) / 64 * 64; }
  // Columns of the dQ accumulator.
  constexpr int dq_accum_dim() const { return head_dim <= 32 ? 32 : columns(); }
  // Whether dV and dK have shared memory of their own on their way out, which leaves none for a
  // bias above D = 64: they leave through that of dS then.
  constexpr bool own_grads() const { return !bias || columns() == 64; }
  // By rows: above D = 64 there is no room for chunks of 16 bytes.
  constexpr int bias_chunk_bytes() const { return columns() > 64 ? 8 : 16; }
  // A stage of the bias; by rows with the shift of its first row.
  constexpr int bias_stage_bytes() const {
    return bias_tile_bytes(bias, block_q, block_k, bias_chunk_bytes()) +
           (bias == kBiasByRows || bias == kFloatsByRows ? 16 : 0);
  }
  // K and V, the stages of Q and dO with lse and delta; then one CTA: two stages of dS and of the
  // bias, dQ on its way out, and dV or dK on its way out; two CTAs: dS, and what dQ takes of the
  // other CTA's K.
  constexpr int shared_bytes() const {
    const int tiles = (2 * block_k / cluster() + 2 * kStages * block_q) * columns() * 2;
    const int ds = block_q * block_k * 2;
    const int bias_tiles = kStages * bias_stage_bytes();
    const int leaving = block_q * dq_accum_dim() * 4 + (own_grads() ? block_k * columns() * 2 : 0);
    const int rest = two_cta() ? ds + 64 * 128 * 2 : 2 * ds + bias_tiles + leaving;
    return tiles + rest + kStages * block_q * 8 + kBwdControlBytes;
  }
};

// The sum of the gradient of a bias that was broadcast.
struct Sm90BiasSumTile {
  int head_dim;
  int block_q, block_k;
  int slots;     // of shared memory: each has Q and K of a step, or dO and V
  int ctas = 1;  // per SM: one takes all shared memory and registers
  // Rows that TMA loads at once of Q, dO and the bias: the tensor maps are those of the backward
  // kernel with a bias, whose block_q this is. Its block_k is this kernel's.
  static constexpr int kBoxRows = 64;

  constexpr int threads() const { return 3 * 128; }  // the producer's warpgroup and two consumers
  // The slots, each with lse and delta. At the end the tile in fp32 takes their place.
  constexpr int shared_bytes() const {
    const int operands = (block_q + block_k) * ((head_dim + 63) / 64) * 128;
    return slots * (operands + block_q * 8) + kBarrierBytes;
  }
};

}  // namespace flashmoe::cuda
