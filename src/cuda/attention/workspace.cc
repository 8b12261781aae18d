#include "cuda/attention/workspace.h"

#include <algorithm>

#include "core/numbers.h"
#include "cuda/attention/bias_plan.h"
#include "cuda/attention/params.h"
#include "cuda/attention/sm90/tiles.h"

namespace flashmoe::cuda {
namespace {

constexpr int64_t kAlignment = 256;

}  // namespace

int64_t ragged_grid(const AttentionPlan& plan) {
  const AttentionProblem& p = plan.problem;
  if (!p.ragged) return 0;
  const int64_t queries = ragged_slots(p.query.shape[0], plan.block_q, plan.batch);
  const int64_t keys = ragged_slots(p.key.shape[0], plan.block_k, plan.batch);
  const int64_t parts = main_kernel(plan).key_parts;
  return std::max(queries, p.pass == Pass::kForward ? 0 : keys * parts) * plan.heads_q;
}

bool one_query(const AttentionPlan& plan) {
  const AttentionProblem& p = plan.problem;
  // Dropout goes by heads and rows: they keep their numbers.
  return p.pass == Pass::kForward && !p.ragged && p.options.dropout_p == 0 && plan.len_q == 1 &&
         plan.heads_q > plan.heads_k;
}

int64_t forward_rows(const AttentionPlan& plan) {
  const AttentionProblem& p = plan.problem;
  if (p.ragged) return p.query.shape[0] / std::max<int64_t>(plan.batch, 1);  // of most sequences
  return one_query(plan) ? plan.heads_q / plan.heads_k : plan.len_q;
}

int64_t forward_heads(const AttentionPlan& plan) {
  return one_query(plan) ? plan.heads_k : plan.heads_q;
}

int64_t slice_batch(const AttentionPlan& plan) { return ceil_div(plan.batch, plan.slices); }

Slice slice_of(const AttentionPlan& plan, int64_t index) {
  const int64_t heads = plan.problem.pass == Pass::kForward ? plan.heads_q : plan.heads_k;
  if (plan.problem.ragged) {
    const int64_t of_slice = heads / plan.slices;
    return {index * of_slice, of_slice, 0, 1};
  }
  const int64_t of_slice = slice_batch(plan), first = index * of_slice;
  return {0, heads, first, std::min(of_slice, plan.batch - first)};
}

int64_t sink_rows(const AttentionPlan& plan) {
  const AttentionProblem& p = plan.problem;
  return p.ragged ? p.query.shape[0] : plan.batch * plan.len_q;
}

int64_t sink_parts(const AttentionPlan& plan) {
  constexpr int64_t kRowsOfPart = 512, kCtas = 1024;
  const int64_t most = std::max<int64_t>(kCtas / plan.heads_q, 1);
  return std::clamp<int64_t>(ceil_div(sink_rows(plan), kRowsOfPart), 1, most);
}

int64_t packed_pitch(const AttentionPlan& plan, bool keys) {
  return plan.problem.ragged ? 0 : round_up(keys ? plan.len_k : plan.len_q, kPackedChunk);
}
int64_t packed_tokens(const AttentionPlan& plan, bool keys) {
  const AttentionProblem& p = plan.problem;
  return p.ragged ? (keys ? p.key : p.query).shape[0] : plan.batch * packed_pitch(plan, keys);
}

bool counts_tasks(const AttentionPlan& plan) {
  if (!main_kernel(plan).counts_tasks) return false;
  return plan.problem.ragged || main_kernel(plan).packed ||
         kernel_of(plan.launches.front()).role == Role::kTaskCounter;
}

ForwardWorkspace forward_workspace(const AttentionPlan& plan) {
  const AttentionProblem& p = plan.problem;
  ForwardWorkspace w;
  const auto place = [&](int64_t bytes) {
    const size_t at = static_cast<size_t>(round_up(static_cast<int64_t>(w.bytes), kAlignment));
    w.bytes = at + static_cast<size_t>(bytes);
    return at;
  };
  const bool packed = main_kernel(plan).packed;
  const int64_t slots =
      p.ragged && !packed ? ragged_slots(p.query.shape[0], plan.block_q, plan.batch) : int64_t{0};
  w.aligned_bias = place(aligned_bias_bytes(plan));
  w.blocks = place(slots * static_cast<int64_t>(sizeof(RaggedBlock)));
  w.row_bounds =
      place(packed ? round_up(packed_tokens(plan, false), plan.block_q) * 2 * sizeof(int32_t) : 0);
  w.row_pairs = place(
      packed && p.bias ? round_up(packed_tokens(plan, false), plan.block_q) * kPairRowBytes : 0);
  w.transposed_bias = place(transposed_bias_bytes(plan));
  w.tile_counter = place(counts_tasks(plan) ? kAlignment : 0);
  const int64_t rows =
      plan.splits > 1 ? plan.splits * plan.batch * forward_heads(plan) * forward_rows(plan) : 0;
  const int64_t out_bytes = rows * main_kernel(plan).head_dim * static_cast<int64_t>(sizeof(float));
  w.partial_out = place(out_bytes + rows * static_cast<int64_t>(sizeof(float)));
  w.partial_lse = w.partial_out + static_cast<size_t>(out_bytes);
  return w;
}

BackwardWorkspace backward_workspace(const AttentionPlan& plan, const Kernel* bias_sum) {
  const AttentionProblem& p = plan.problem;
  const Kernel& kernel = main_kernel(plan);
  const int64_t block = plan.block_q;
  const int64_t heads = p.ragged ? plan.heads_q / plan.slices : plan.heads_q;  // of a slice
  BackwardWorkspace w;
  const auto place = [&](int64_t bytes) {
    const size_t at = w.bytes;
    w.bytes += static_cast<size_t>(round_up(bytes, kAlignment));
    return at;
  };
  const bool sums_sinks = p.grad_sinks && sink_parts(plan) > 1;
  w.sink_sums = place(sums_sinks ? plan.heads_q * sink_parts(plan) * sizeof(float) : 0);
  if (kernel.packed) {
    // A stage of queries may begin with the last one.
    const int64_t rows_q = round_up(packed_tokens(plan, false), block);
    w.rows = rows_q + plan.block_k;
    w.lse_delta = place(round_up(heads, kernel.heads_of_box) * w.rows * 2 * sizeof(float));
    w.query_bounds = place(rows_q * 2 * sizeof(int32_t));
    const int64_t rows_k = round_up(packed_tokens(plan, true), block);
    w.key_bounds = place(rows_k * 2 * sizeof(int32_t));
    w.tile_counter = place(sizeof(int32_t));
    w.query_pairs = place(p.bias ? rows_q * kPairRowBytes : 0);
    w.key_pairs = place(p.bias ? rows_k * kPairRowBytes : 0);
    return w;
  }
  if (kernel.whole) return w;
  if (p.ragged) {
    w.query_slots = ragged_slots(p.query.shape[0], block, plan.batch);
    w.key_slots = ragged_slots(p.key.shape[0], plan.block_k, plan.batch);
    if (bias_sum) w.sum_slots = ragged_slots(p.key.shape[0], bias_sum->block_k, plan.batch);
  }
  const int64_t sequence = round_up(plan.len_q, block);
  w.rows = p.ragged ? w.query_slots * block : plan.batch * sequence;
  w.dq_accum_rows = p.ragged ? w.rows : slice_batch(plan) * sequence;
  int64_t bias_sums = 0;
  if (bias_sum && plan.bias_splits > 1) {
    const BiasSumGrid grid = bias_sum_grid(plan, bias_sum->block_q, bias_sum->block_k);
    bias_sums = grid.tiles * grid.heads * grid.batches * plan.bias_splits * bias_sum->block_q *
                bias_sum->block_k;
  }
  const bool accumulates = accumulates_dq(plan);
  const int64_t dq_accum = accumulates ? heads * w.dq_accum_rows * kernel.dq_accum_dim : 0;
  // The sum of a bias's gradient needs LSE and delta of all heads.
  w.lse_delta = place((bias_sum ? plan.heads_q : heads) * w.rows * 2 * sizeof(float));
  w.dq_accum = w.bias_sums = place(std::max(dq_accum, bias_sums) * sizeof(float));
  const int64_t part = plan.block_k * kernel.dq_accum_dim * sizeof(float);
  w.grad_parts = place(2 * plan.splits * plan.split_tiles * part);
  w.dq_semaphore = place(accumulates ? heads * w.dq_accum_rows / block * sizeof(int32_t) : 0);
  w.tile_counter = place(2 * sizeof(int32_t));
  // One more sequence stands for what comes after those of a ragged batch.
  w.done = place(kernel.counts_tasks ? (plan.batch + 1) * plan.heads_k * sizeof(int32_t) : 0);
  w.key_blocks = place(w.key_slots * sizeof(RaggedBlock));
  w.query_blocks = place(w.query_slots * sizeof(RaggedBlock));
  w.sum_blocks = place(w.sum_slots * sizeof(RaggedBlock));
  w.aligned_bias = place(aligned_bias_bytes(plan));
  w.transposed_bias = place(transposed_bias_bytes(plan));
  return w;
}

}  // namespace flashmoe::cuda
