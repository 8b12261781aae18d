#include "cuda/moe/workspace.h"

#include <algorithm>

#include "core/numbers.h"
#include "cuda/moe/params.h"
#include "cuda/moe/tiles.h"
#include "cuda/runtime/families.h"

namespace flashmoe::cuda::moe {
namespace {

// Gives out the workspace piece by piece.
class Pieces {
 public:
  size_t take(int64_t elems, int64_t elem_bytes) {
    const size_t begin = bytes_;
    bytes_ += round_up(elems * elem_bytes, 256);
    return begin;
  }
  size_t bytes() const { return bytes_; }

 private:
  size_t bytes_ = 0;
};

constexpr int64_t kInt = 4, kFloat = 4, kElement = 2;

}  // namespace

SortChunks sort_chunks(const MoePlan& plan) {
  // A chunk is a warp's, in rounds of 32 pairs. One CTA adds up the counts of all chunks: with many
  // experts there are fewer.
  constexpr int64_t kSmallest = 256, kMostCounts = 1 << 18, kWarps = kScanThreads / 32;
  if (plan.rows <= kSortPairs &&
      sort_shared_bytes(static_cast<int>(plan.experts)) <= kSortSharedBytes) {
    return {std::max<int64_t>(round_up(ceil_div(plan.rows, kWarps), 32), 32), kWarps, true};
  }
  const int64_t most =
      std::clamp<int64_t>(kMostCounts / std::max<int64_t>(plan.experts, 1), 1, kMaxChunks);
  const int64_t chunk = round_up(std::max(kSmallest, ceil_div(plan.rows, most)), 32);
  return {chunk, ceil_div(plan.rows, chunk), false};
}

int64_t up_columns(const MoePlan& plan, const GemmTile& tile) {
  return ceil_div(plan.inner, tile.block_n / halves(plan));
}

int64_t tile_slots(const MoePlan& plan, int64_t block) {
  return plan.rows / block + std::min(plan.experts, plan.rows);
}

WeightTiles weight_tiles(const MoePlan& plan, const GemmTile& tile) {
  const MoeProblem& p = plan.problem;
  // Rows of dh in two halves where they have no whole chunks: a tile has columns of one of them.
  const int64_t parts = plan.inner % 8 ? halves(plan) : 1;
  const int64_t inner = halves(plan) * plan.inner / parts;
  // `inner_first`: whether inner columns are the gradient's rows. On Hopper the kernel's rows are
  // always the gathered operand's, those of the width; elsewhere they are the gradient's.
  const auto count = [&](bool inner_first, int64_t inner, int64_t parts) {
    const bool turned = is_persistent(plan) && inner_first;
    const int rows = turned ? tile.block_n : tile.block_m;
    const int columns = turned ? tile.block_m : tile.block_n;
    return inner_first ? WeightTiles::Gradient{parts * ceil_div(inner, rows),
                                               ceil_div(plan.width, columns), rows, columns}
                       : WeightTiles::Gradient{ceil_div(plan.width, rows),
                                               parts * ceil_div(inner, columns), rows, columns};
  };
  WeightTiles tiles{};
  if (p.grad_gate_up) {
    tiles.gate_up = count(order_of(*p.grad_gate_up) == Order::kRows, inner, parts);
  }
  if (p.grad_down) tiles.down = count(order_of(*p.grad_down) != Order::kRows, plan.inner, 1);
  return tiles;
}

Slices slices_of(const MoePlan& plan, const GemmTile& tile) {
  // Half of what each of the chip's CTAs gets, so that the last ones have little to wait for; sums
  // of slices are then at most 8 tiles in fp32 for each SM, whatever the problem. A slice of fewer
  // rows than kSmallest would cost more to add up than to multiply.
  constexpr int64_t kSmallest = 1024;
  const int64_t ctas = 2 * gpu_of(plan.problem.device).multiprocessors;
  const int64_t fair = ceil_div(plan.rows * weight_tiles(plan, tile).all(), 2 * ctas);
  Slices slices;
  slices.rows = std::min<int64_t>(round_up(std::max(kSmallest, fair), tile.depth), INT32_MAX);
  slices.slots = plan.rows / slices.rows + plan.experts;
  slices.sliced_slots = plan.rows / slices.rows;
  if (slices.rows >= plan.rows) slices.sliced_slots = 0;
  slices.sums = slices.sliced_slots > 0 ? 2 * plan.rows / slices.rows : 0;
  return slices;
}

Wanted wanted(const MoePlan& plan) {
  const MoeProblem& p = plan.problem;
  Wanted w{};
  w.grad_pre = p.grad_x || p.grad_gate_up || p.grad_up_bias;
  w.weighted_act = p.grad_down.has_value();
  w.row_sums = p.grad_weights.has_value();
  const bool empty = plan.experts == 0 || plan.width == 0 || plan.inner == 0;
  w.weights = !empty && (p.grad_gate_up || p.grad_down);
  w.biases = p.grad_up_bias || p.grad_down_bias;
  return w;
}

Order order_of(const TensorSpec& spec) {
  const auto whole = [&](int dim) {  // steps over that dimension keep 16-byte alignment
    const int64_t bytes = spec.step(dim) * dtype_bytes(spec.dtype);
    return spec.size(dim) <= 1 || (bytes % 16 == 0 && (dim == -3 || bytes <= INT32_MAX));
  };
  const auto unit = [&](int dim) { return spec.size(dim) <= 1 || spec.step(dim) == 1; };
  if (spec.rank == 3 && !whole(-3)) return Order::kNone;
  if (unit(-1) && whole(-2)) return Order::kRows;
  // The columns of up begin in the middle of those of gate_up.
  if (spec.rank == 3 && unit(-2) && whole(-1) && spec.size(-2) % 16 == 0) return Order::kColumns;
  return Order::kNone;
}

ForwardWorkspace forward_workspace(const MoePlan& plan, const GemmTile& rows) {
  Pieces pieces;
  ForwardWorkspace w{};
  const MoeProblem& p = plan.problem;
  if (!p.routing) {
    w.routing = pieces.take(routing_elems(plan.tokens, plan.top_k, plan.experts), kInt);
  }
  if (const SortChunks chunks = sort_chunks(plan); !chunks.one_cta) {
    w.counts = pieces.take(plan.experts * chunks.pitch(), kInt);
    w.bases = pieces.take(plan.experts * chunks.pitch(), kInt);
  }
  w.row_of = pieces.take(plan.rows, kInt);
  w.tiles = pieces.take(tile_slots(plan, rows.block_m), sizeof(ExpertTile));
  if (is_persistent(plan)) w.first_tile = pieces.take(plan.experts + 1, kInt);
  w.act = pieces.take(plan.rows * pitch(plan.inner), kElement);
  if (plan.top_k > 1 && !is_few(plan)) {
    w.y = pieces.take(plan.rows * pitch(plan.width), kElement);
  }
  w.bytes = pieces.bytes();
  return w;
}

BackwardWorkspace backward_workspace(const MoePlan& plan, const GemmTile& rows,
                                     const GemmTile& tokens) {
  Pieces pieces;
  BackwardWorkspace w{};
  const MoeProblem& p = plan.problem;
  const Wanted want = wanted(plan);
  const int64_t slots = tile_slots(plan, rows.block_m);
  w.row_of = pieces.take(plan.rows, kInt);
  w.tiles = pieces.take(slots, sizeof(ExpertTile));
  w.first_tile = pieces.take(plan.experts + 1, kInt);
  if (want.weights) {
    const Slices slices = slices_of(plan, tokens);
    w.slices = pieces.take(slices.slots, sizeof(ExpertTile));
    w.sliced = pieces.take(slices.sliced_slots, sizeof(SlicedExpert));
    w.first_sum = pieces.take(plan.experts + 1, kInt);
    w.slice_sums = pieces.take(slices.sums * weight_tiles(plan, tokens).all() * tokens.block_m,
                               tokens.block_n * kFloat);
  }
  if (!p.grad_out) w.zero_row = pieces.take(pitch(plan.width), kElement);
  if (want.grad_pre) {
    w.grad_pre = pieces.take(plan.rows * halves(plan) * pitch(plan.inner), kElement);
  }
  if (want.weighted_act) w.weighted_act = pieces.take(plan.rows * pitch(plan.inner), kElement);
  if (p.grad_x && plan.top_k > 1) w.dx = pieces.take(plan.rows * pitch(plan.width), kElement);
  if (want.row_sums) {
    w.row_sums = pieces.take(plan.rows * ceil_div(plan.inner, rows.block_n), kFloat);
  }
  if (p.grad_up_bias) {
    w.bias_parts[0] = pieces.take(slots * halves(plan) * plan.inner, kFloat);
  }
  if (p.grad_down_bias) w.bias_parts[1] = pieces.take(slots * plan.width, kFloat);
  w.bytes = pieces.bytes();
  return w;
}

}  // namespace flashmoe::cuda::moe
