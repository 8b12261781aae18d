// Tile configurations of the sm90 family: see cuda/tiles.h.
#pragma once

namespace flashmoe::cuda {

// Shared memory of an SM of Hopper that a CTA may have, and for barriers and what is worked on.
inline constexpr int kSm90SharedBytes = 227 * 1024, kBarrierBytes = 512;

// Registers that each thread of a CTA has when it begins, which warpgroups then share out anew: who
// asks for more than the others gave away waits for ever.
constexpr int registers_at_first(int warpgroups) { return 65536 / (warpgroups * 128) / 8 * 8; }

struct Sm90FwdTile {
  int head_dim;
  int block_q, block_k;  // a warpgroup for each 64 rows, and one more
  int stages;            // blocks of K and V in shared memory
  bool general_score;    // whether there may be a softcap, or a scale that is not positive
  int ctas = 1;          // on an SM: it takes all there is
  static constexpr bool kCountsTasks = true;

  constexpr int threads() const { return (block_q / 64 + 1) * 128; }
  // Tiles lie in blocks of 64 columns; the output leaves through one or two such blocks.
  constexpr int blocks() const { return (head_dim + 63) / 64; }
  constexpr int out_stages() const { return blocks() > 1 ? 2 : 1; }
  constexpr int shared_bytes() const {
    const int tiles = block_q + 2 * stages * block_k;
    return (tiles * blocks() + out_stages() * block_q) * 128 + kBarrierBytes;
  }
};

// The kernel after a backward pass: 64 rows x 64 columns.
inline constexpr int kConvertDqSharedBytes = 64 * 64 * 2;

// A backward pass. Shared memory for its barriers, and for what it works on.
inline constexpr int kBwdControlBytes = 512;

struct Sm90BwdTile {
  int head_dim;
  int block_q, block_k;
  bool general_score = false;  // whether there may be a softcap
  int ctas = 1;                // on an SM: it takes all there is

  static constexpr bool kCountsTasks = true;
  static constexpr int kStages = 2;                  // of Q and dO
  constexpr int threads() const { return 3 * 128; }  // two warpgroups compute
  // Whether the sums of 64 keys are too many for a warpgroup: one has dV then, the other dK.
  constexpr bool two_cta() const { return head_dim > 128; }
  // Whether dQ is rounded by the kernel itself, which takes registers beside those that compute.
  constexpr bool converts_dq() const { return two_cta(); }
  // CTAs that share a block of keys: wide, each has 64 of 128.
  constexpr int cluster() const { return two_cta() ? 2 : 1; }
  // Columns of the sums of dQ: whole blocks of 64.
  constexpr int dq_accum_dim() const { return (head_dim + 63) / 64 * 64; }
  // K and V, the stages of Q and dO with lse and delta; then dS twice, and on their way out dQ and
  // one of dV and dK; or of wide tiles dS once, and what is needed of the other CTA's K.
  constexpr int shared_bytes() const {
    const int tiles = (2 * block_k / cluster() + 2 * kStages * block_q) * dq_accum_dim() * 2;
    const int pairs = block_q * block_k * 2;
    const int leaving = (block_q * 4 + block_k * 2) * dq_accum_dim();
    const int rest = two_cta() ? pairs + 64 * 128 * 2 : 2 * pairs + leaving;
    return tiles + rest + kStages * block_q * 8 + kBwdControlBytes;
  }
};

}  // namespace flashmoe::cuda
