// Tile configurations of the sm90 family: see cuda/attention/tiles.h.
#pragma once

#include "cuda/attention/tiles.h"

namespace flashmoe::cuda {

// Shared memory that a CTA may have on an SM of Hopper, and what a forward kernel keeps of it for
// its tasks and mbarriers; one whose bias stays (beside its teams' kTeamControlBytes), or the sum
// of a bias's gradient.
inline constexpr int kSm90SharedBytes = 227 * 1024, kFwdControlBytes = 768, kBarrierBytes = 512;

// Registers that each thread of a CTA has when it begins, before setmaxnreg moves them between
// warpgroups. A warpgroup that asks for more than the others gave away waits for ever.
constexpr int registers_at_first(int warpgroups, int ctas = 1) {
  return 65536 / (ctas * warpgroups * 128) / 8 * 8;
}

// Bytes of a row of Q, K, V, O or dO in shared memory: whole blocks of 64 columns, but up to D = 32
// one block of 32 (tma/operand.cuh).
constexpr int tile_row_bytes(int head_dim) {
  return head_dim <= 32 ? 64 : (head_dim + 63) / 64 * 128;
}

// What a team of a forward kernel keeps for its tasks and mbarriers, in whole multiples of what
// tiles begin at.
inline constexpr int kTeamControlBytes = 1024;

// A tile of bias in shared memory. By TMA it has whole blocks; by rows each row has a chunk more,
// of `chunk_bytes`, since it begins within one.
constexpr int bias_tile_bytes(BiasInput input, int rows, int keys, int chunk_bytes) {
  if (input == kNoBias) return 0;
  const int row_bytes = keys * bias_bytes(input);
  return rows * (row_bytes + (input == kBiasByTma ? 0 : chunk_bytes));
}

struct Sm90FwdTile {
  int head_dim;
  int block_q, block_k;  // a consumer warpgroup for each 64 rows, and the producer's warpgroup
  int stages;            // of K and V in shared memory
  bool general_score;    // whether there may be a softcap, or a scale that is not positive
  BiasInput bias = kNoBias;
  int ctas = 1;              // per SM, of which each has its share of shared memory and registers
  int bias_tiles = 0;        // tiles of keys whose bias stays in shared memory: see fwd.cuh
  int more_key_stages = 0;   // of K: it is needed before V, and for as long
  bool whole_rows = false;   // of K and V: see tma/operand.cuh
  bool joins_tasks = false;  // see FwdConsumer::run_joined()
  static constexpr bool kCountsTasks = true;

  constexpr int threads() const { return (block_q / 64 + 1) * 128; }
  // Where a bias stays, two teams of consumers have a task each, of half of block_q.
  constexpr int teams() const { return bias_tiles > 0 ? 2 : 1; }
  // O leaves from the place of its Q where the next Q has another.
  constexpr int q_stages() const { return joins_tasks ? 2 : 1; }
  // O leaves through one or two blocks of columns.
  constexpr int out_stages() const { return head_dim > 64 ? 2 : 1; }
  constexpr int bias_chunk_bytes() const { return bias == kBytesByRows ? 8 : 16; }
  constexpr int shared_bytes() const {
    const int team_q = block_q / teams();
    const int rows = q_stages() * team_q + (2 * stages + more_key_stages) * block_k;
    const int out_bytes = joins_tasks ? 0 : out_stages() * team_q * (head_dim <= 32 ? 64 : 128);
    const int tiles = rows * tile_row_bytes(head_dim) + out_bytes;
    const int bias_bytes = (bias_tiles > 0 ? bias_tiles : stages) *
                           bias_tile_bytes(bias, team_q, block_k, bias_chunk_bytes());
    if (bias_tiles == 0) return tiles + bias_bytes + kFwdControlBytes;
    return teams() * (tiles + kTeamControlBytes) + bias_bytes + kBarrierBytes;
  }
};

// A row of the tables whose tasks are joined.
constexpr Sm90FwdTile joined(Sm90FwdTile tile) {
  tile.joins_tasks = true;
  return tile;
}

// Tiles of tokens, whatever sequences these are of. TMA copies chunks of kPackedChunk: sequences of
// a dense batch begin with one.
inline constexpr int kPackedChunk = 32;
inline constexpr int kPairRowBytes = 8;  // sizeof(PairRow)
struct Sm90PackedTile {
  int head_dim;
  int block_q, block_k;
  int stages;                  // of K and V in shared memory
  int ctas;                    // per SM
  bool general_score = false;  // whether there may be a softcap, or a scale that is not positive
  BiasInput bias = kNoBias;
  static constexpr bool kCountsTasks = true, kPacked = true;

  constexpr bool for_short() const { return true; }
  // Heads that lie side by side in a box of 64 columns.
  constexpr int heads() const { return head_dim <= 32 ? 64 / head_dim : 1; }
  constexpr int warps() const { return block_q / 16; }          // consumers
  constexpr int threads() const { return (warps() + 1) * 32; }  // and the producer
  // Two stages of Q, which O leaves through, with the bounds of its rows, and with a bias where
  // their pairs are; the stages of K and V.
  constexpr int shared_bytes() const {
    const int row = 128 + 8 + (bias ? kPairRowBytes : 0);
    return 2 * block_q * row + 2 * stages * block_k * 128 + kBarrierBytes;
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
  BiasInput bias = kNoBias;
  static constexpr bool kCountsTasks = true, kPacked = true;

  constexpr bool for_short() const { return true; }
  constexpr int heads() const { return head_dim <= 32 ? 64 / head_dim : 1; }
  constexpr int warps() const { return block_q / 16; }          // consumers
  constexpr int threads() const { return warps() * 32 + 128; }  // and the producer's warpgroup
  // Two stages of a task: two tiles, which gradients leave through, the bounds of their rows, LSE
  // and delta of these, and with a bias where their pairs are. The stages of the other side, with
  // LSE and delta as well.
  constexpr int shared_bytes() const {
    const int rows = 2 * block_q + stages * block_k;
    const int bounds = 8 + (bias ? kPairRowBytes : 0);
    return rows * (2 * 128 + heads() * 8) + 2 * block_q * bounds + kBarrierBytes;
  }
};

// The kernel that finds the bounds of rows: shared memory for kRaggedThreads sequences, and for the
// sums that it shares with the kernel that lists blocks.
inline constexpr int kRowBoundsSharedBytes = 1024 * (32 + 1);

// Shared memory of the kernel that converts dQ after a backward pass: 64 rows x 64 columns.
inline constexpr int kConvertDqSharedBytes = 64 * 64 * 2;

// Shared memory that a backward kernel keeps for its tasks and mbarriers.
inline constexpr int kBwdControlBytes = 512;

// Whether the MMA for dQ has a column for each query: of rows it has 64.
constexpr bool transposes_dq(int block_q) { return block_q % 64 != 0; }

struct Sm90BwdTile {
  int head_dim;
  int block_q, block_k;
  bool general_score = false;  // whether there may be a softcap
  BiasInput bias = kNoBias;    // of a bias with a gradient
  int ctas = 1;                // per SM: one takes all shared memory and registers

  static constexpr bool kCountsTasks = true;
  static constexpr int kStages = 2;  // of Q and dO
  // Whether a consumer does one thing after the other and others hide its waits (bwd_small_dim.cuh)
  // instead of two consumers in ping-pong.
  constexpr bool small_dim() const { return bias == kBiasByTma && head_dim <= 32; }
  constexpr int consumers() const { return small_dim() ? block_k / 64 : 2; }
  constexpr int threads() const { return (consumers() + 1) * 128; }  // and the producer's warpgroup
  // Whether dK and dV of 64 keys are too many accumulators for one warpgroup: one warpgroup has dV
  // then and the other dK, and a cluster of two CTAs shares a tile of keys.
  constexpr bool two_cta() const { return head_dim > 128; }
  // Rows that TMA loads at once of K and V.
  constexpr int key_box() const { return bias && head_dim <= 32 ? 64 : block_k / cluster(); }
  // Whether the kernel itself converts dQ, by a warp beside the consumers that has registers left.
  constexpr bool converts_dq() const { return two_cta(); }
  // CTAs that share a tile of keys: with two_cta() each has 64 of its 128.
  constexpr int cluster() const { return two_cta() ? 2 : 1; }
  // Columns of tiles in shared memory: whole blocks of 64.
  constexpr int columns() const { return (head_dim + 63) / 64 * 64; }
  // Columns of the dQ accumulator.
  constexpr int dq_accum_dim() const { return head_dim <= 32 ? 32 : columns(); }
  // Whether dV and dK have shared memory of their own on their way out, which leaves none for a
  // bias above D = 64, or beside many keys up to D = 32, nor for 80 queries: they leave through
  // that of dS then.
  constexpr bool own_grads() const {
    return bias ? columns() == 64 && !small_dim() : !transposes_dq(block_q);
  }
  // Of the D / 16 steps of S, how many take K from registers: shared memory is what S is bound by,
  // and at D = 128 these are what is left. (At D = 64 two made no difference.)
  constexpr int key_steps() const {
    if (bias || general_score || head_dim != 128) return 0;
    return transposes_dq(block_q) ? 1 : 4;
  }
  // By rows: above D = 64 there is no room for chunks of 16 bytes.
  constexpr int bias_chunk_bytes() const { return columns() > 64 || bias == kBytesByRows ? 8 : 16; }
  // A stage of the bias; by rows with the shift of its first row.
  constexpr int bias_stage_bytes() const {
    return bias_tile_bytes(bias, block_q, block_k, bias_chunk_bytes()) +
           (is_by_rows(bias) ? 16 : 0);
  }
  // K and V, the stages of Q and dO with lse and delta; then one CTA: two stages of dS and of the
  // bias, dQ on its way out, and dV or dK on its way out; two CTAs: dS, and what dQ takes of the
  // other CTA's K.
  constexpr int shared_bytes() const {
    const int tiles = (2 * block_k / cluster() + 2 * kStages * block_q) * tile_row_bytes(head_dim);
    const int ds = block_q * block_k * 2;
    const int bias_tiles = kStages * bias_stage_bytes();
    // With a bias they have a third tile of dS.
    const int grads = !own_grads() ? 0 : bias ? ds : block_k * tile_row_bytes(head_dim);
    const int leaving = block_q * dq_accum_dim() * 4 + grads;
    const int rest = two_cta() ? ds + 64 * 128 * 2 : 2 * ds + bias_tiles + leaving;
    return tiles + rest + kStages * block_q * 8 + kBwdControlBytes;
  }
};

// The backward pass of heads whose queries and keys a cluster holds, all of them at once: two tiles
// of block_q queries, and block_k / 2 keys for each of two CTAs, or all for one.
struct Sm90WholeBwdTile {
  int head_dim;
  int block_q, block_k;
  bool general_score = false;
  BiasInput bias = kNoBias;
  int ctas = 1;  // per SM
  static constexpr bool kWhole = true;
  static constexpr int kStages = 2;    // of Q and dO: one for each tile of queries
  static constexpr int kMostCtas = 2;  // of a cluster

  constexpr int threads() const { return 2 * 128; }
  constexpr int key_box() const { return block_k / kMostCtas; }  // rows of K and V loaded at once
  // K and V, Q and dO, dS of each tile of queries, the other CTA's part of dQ, lse and delta.
  constexpr int shared_bytes() const {
    const int tiles = (2 * key_box() + 2 * kStages * block_q) * tile_row_bytes(head_dim);
    const int dq = block_q * head_dim * 4;
    return tiles + kStages * block_q * key_box() * 2 + dq + kStages * block_q * 8 +
           kBwdControlBytes;
  }
};

// The sum of the gradient of a bias that was broadcast.
struct Sm90BiasSumTile {
  int head_dim;
  int block_q, block_k;
  int slots;     // of shared memory: each has Q and K of a step, or dO and V
  int ctas = 1;  // per SM: one takes all shared memory and registers
  // Rows that TMA loads at once of Q, dO and the bias, and of K and V: the tensor maps are those of
  // the backward kernel with a bias, whose block_q and key_box() these are.
  static constexpr int kBoxRows = 64;
  constexpr int key_box() const { return head_dim <= 32 ? 64 : block_k; }

  constexpr int threads() const { return 3 * 128; }  // the producer's warpgroup and two consumers
  // The slots, each with lse and delta. At the end the tile in fp32 takes their place.
  constexpr int shared_bytes() const {
    const int operands = (block_q + block_k) * tile_row_bytes(head_dim);
    return slots * (operands + block_q * 8) + kBarrierBytes;
  }
};

}  // namespace flashmoe::cuda
