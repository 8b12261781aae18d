// What lies where in the workspace. Planning and running use the same functions. Rows of matrices
// have whole chunks of 16 bytes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/numbers.h"
#include "cuda/moe/catalogue.h"
#include "flashmoe/moe.h"

namespace flashmoe::cuda::moe {

// Offsets in bytes; what a call does not need has no room.
struct ForwardWorkspace {
  size_t routing;        // (E + 1 + T k) int32, where the caller keeps none
  size_t counts, bases;  // (E, chunks) int32
  size_t row_of;         // (T k) int32
  size_t tiles;          // (slots) ExpertTile
  size_t first_tile;     // (E + 1) int32, for persistent kernels
  size_t act;            // (T k, n)
  size_t y;              // (T k, d); k = 1, or few rows an expert: none
  size_t bytes;
};
struct BackwardWorkspace {
  size_t row_of;         // (T k) int32
  size_t tiles;          // (slots) ExpertTile
  size_t first_tile;     // (E + 1) int32
  size_t slices;         // (slice_slots) ExpertTile
  size_t sliced;         // (sliced_slots) SlicedExpert
  size_t first_sum;      // (E + 1) int32
  size_t zero_row;       // (d): stands for a grad_out that is absent
  size_t grad_pre;       // dh (T k, G, n)
  size_t weighted_act;   // (T k, n)
  size_t dx;             // (T k, d); k = 1: none
  size_t row_sums;       // (tiles of columns, T k) fp32
  size_t slice_sums;     // (sums of slices, tiles of weights, tile) fp32
  size_t bias_parts[2];  // up, down: (slots, columns) fp32
  size_t bytes;
};

// Elements from one row of `columns` to the next.
constexpr int64_t pitch(int64_t columns) { return (columns + 7) / 8 * 8; }

// Halves of `pre` and of its gradient.
inline int64_t halves(const MoePlan& plan) { return has_gate(plan.problem.activation) ? 2 : 1; }

// Chunks of pairs that are sorted apart.
struct SortChunks {
  int64_t chunk, chunks;  // pairs of one; how many
  bool one_cta;           // sorts them all
  int64_t pitch() const { return round_up(chunks, 4); }
};
SortChunks sort_chunks(const MoePlan& plan);

// Tiles of columns of up: with a gate a tile has half as many columns of the result.
int64_t up_columns(const MoePlan& plan, const GemmTile& tile);

// Whether CTAs go through as many tiles as there are, instead of one slot of the list each.
inline bool is_persistent(const MoePlan& plan) { return plan.family == "sm90"; }

// Whether the plan is that for few rows an expert.
inline bool is_few(const MoePlan& plan) {
  return plan.handle && static_cast<const Kernel*>(plan.handle)->role == Role::kFewUp;
}

// As many tiles of `block` rows as the experts may have, whatever the routing.
int64_t tile_slots(const MoePlan& plan, int64_t block);

// How the rows of an expert are cut for the gradients of weights.
struct Slices {
  int64_t rows;          // of a slice, at most
  int64_t slots;         // slices there may be, one of each expert counted
  int64_t sliced_slots;  // experts that may have several
  int64_t sums;          // slices that these may have
};
// Both gradients: tiles of one matrix of weights.
struct WeightTiles {
  struct Gradient {
    int64_t m, n;        // how many
    int tile_m, tile_n;  // rows and columns of one
  };
  Gradient gate_up, down;
  int64_t all() const { return gate_up.m * gate_up.n + down.m * down.n; }
};
WeightTiles weight_tiles(const MoePlan& plan, const GemmTile& tile);
Slices slices_of(const MoePlan& plan, const GemmTile& tile);

// What the launches of a backward pass are for.
struct Wanted {
  bool grad_pre, weighted_act, row_sums;
  bool act() const { return grad_pre || weighted_act || row_sums; }
  bool weights;  // of gate_up or down
  bool biases;
};
Wanted wanted(const MoePlan& plan);

// Whether a tensor (E, rows, columns) lies with its rows one after the other, or with its columns.
enum class Order { kRows, kColumns, kNone };
Order order_of(const TensorSpec& spec);

ForwardWorkspace forward_workspace(const MoePlan& plan, const GemmTile& rows);
BackwardWorkspace backward_workspace(const MoePlan& plan, const GemmTile& rows,
                                     const GemmTile& tokens);

}  // namespace flashmoe::cuda::moe
