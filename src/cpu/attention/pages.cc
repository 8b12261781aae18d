#include "cpu/attention/pages.h"

#include <cmath>

#include "attention/lengths.h"
#include "core/numbers.h"
#include "core/text.h"
#include "cpu/attention/kernels.h"
#include "cpu/attention/operands.h"
#include "cpu/targets.h"
#include "cpu/threads.h"

namespace flashmoe::cpu {
namespace {

// Work items to aim for in one sequence, so that a machine's threads are busy with a batch of one.
constexpr int64_t kItems = 64;
// A part of the keys is worth an item of its own from here on: 256 keys of head dim 128 in bf16 are
// 128 kB, some 10 microseconds of memory traffic.
constexpr int64_t kPartKeys = 256;
constexpr int64_t kPadding = 16;  // of columns and of partial_ld: whole vectors of any target

const Kernels& kernels(const AttentionProblem& problem) {
  return kernels_for(problem.query.dtype, *target().attention);
}

int64_t accumulator_bytes(const AttentionProblem& problem) {
  return problem.query.dtype == DType::kFloat64 ? sizeof(double) : sizeof(float);
}

// (blocks, page, H, D)
Operand cache_operand(const TensorSpec& spec, const void* data) {
  Operand op;
  op.data = const_cast<void*>(data);
  op.dtype = spec.dtype;
  const auto step = [&](int i) { return spec.shape[i] != 1 ? spec.stride[i] : 0; };
  op.lead[0] = step(0);
  op.row = step(1);
  op.head = step(2);
  op.col = step(3);
  return op;
}

Params make_params(const AttentionPlan& plan, const AttentionTensors& t) {
  const AttentionProblem& problem = plan.problem;
  const Paged& paged = *problem.paged;
  Params p;
  p.geometry = geometry(problem);
  const Geometry& g = p.geometry;
  p.query = operand(problem.query, t.query, g, true);
  p.key = cache_operand(problem.key, t.key);
  p.value = cache_operand(problem.value, t.value);
  p.sinks = per_head(problem.sinks, t.sinks);
  p.out = operand(problem.out, t.out, g, true);
  p.lse = operand(problem.lse, t.lse, g, false);
  p.block_table.data = const_cast<void*>(t.block_table);
  p.block_table.dtype = paged.block_table.dtype;
  p.block_table.row = paged.block_table.stride[0];
  p.block_table.col = paged.block_table.stride[1];
  p.k_scale = per_head(paged.k_scale, t.k_scale);
  p.v_scale = per_head(paged.v_scale, t.v_scale);
  p.partial_ld = round_up(g.head_dim_v, kPadding);
  p.block_q = plan.block_q;
  p.block_k = plan.block_k;
  return p;
}

// Parts of the keys of each tile.
int64_t parts_of(int64_t tasks, int64_t keys) {
  if (tasks == 0) return 1;
  return std::max<int64_t>(1, std::min(ceil_div(kItems, tasks), keys / kPartKeys));
}

// Elements of a column of a part: its sums, its maximum and the sum of its exponentials.
int64_t column_elems(const Params& p) { return p.partial_ld + 2; }

PagedSequence cut_sequence(const Params& p, int64_t block, int64_t rows, int64_t keys) {
  const Geometry& g = p.geometry;
  PagedSequence s;
  s.rows = rows;
  s.keys = keys;
  if (rows == 0) return s;
  const int64_t all = rows * g.group;
  s.columns = std::min(all, even_block(all, block, kPadding));
  s.tiles = ceil_div(all, s.columns);
  const int64_t seen = allowed_keys(rows - 1, rows, keys, g.left, g.right).end -
                       allowed_keys(0, rows, keys, g.left, g.right).begin;
  if (s.columns == all && all <= kColumnsOfAllHeads) s.heads = g.heads_k;
  s.parts = parts_of(s.tiles * (g.heads_k / s.heads), seen);
  return s;
}

int64_t partial_elems(const Params& p, const PagedSequence& s) {
  const int64_t parts = s.parts > 1 ? s.parts : 0;
  return s.tiles * p.geometry.heads_k * parts * s.columns * column_elems(p);
}

// Where things are in the workspace.
struct Workspace {
  size_t scratch = 0;  // workers x scratch_bytes
  size_t sequences = 0, partial = 0, bytes = 0;
  int64_t partial_elems = 0;

  Workspace(const AttentionPlan& plan, const Params& p) {
    const Geometry& g = p.geometry;
    sequences = scratch + plan.workers * plan.scratch_bytes;
    partial = sequences + aligned(g.batch * sizeof(PagedSequence));
    // Room for the parts of any one sequence: kItems of all heads, or less than 2 * kItems of one
    // each, since as many tiles have one part. Sequences that do not fit together come one after
    // the other.
    if (g.batch > 0 && parts_of(1, g.len_k) > 1) {
      const int64_t all_heads = g.heads_k * std::min(p.block_q, kColumnsOfAllHeads);
      partial_elems = kItems * std::max(2 * p.block_q, all_heads) * column_elems(p);
    }
    bytes = partial + aligned(partial_elems * accumulator_bytes(plan.problem));
    if (bytes) bytes += kWorkspaceAlign;  // room to align whatever memory we are given
  }
};

// Tokens that belong to no sequence.
void fill_unused_tokens(const AttentionProblem& problem, const AttentionTensors& t,
                        const Params& p) {
  const Geometry& g = p.geometry;
  if (!problem.paged->cu_seqlens_q) return;
  const int64_t used = read_int(*problem.paged->cu_seqlens_q, t.cu_seqlens_q, g.batch);
  fill_rest(p.out, g.heads_q, g.head_dim_v, used, problem.query.shape[0], 0);
  fill_rest(p.lse, g.heads_q, 1, used, problem.query.shape[0], -HUGE_VAL);
}

}  // namespace

void cut_pages(AttentionPlan& plan) {
  const AttentionProblem& problem = plan.problem;
  const Kernels& k = kernels(problem);
  plan.kernel = text("cpu_", target().name, "_attention_fwd_paged");
  const int64_t group = plan.heads_q / plan.heads_k;
  // Tiles are not made to fit the maxima, which say nothing of a sequence: only scratch is.
  plan.block_q = k.block;
  if (plan.len_q <= k.block && group <= k.block) {
    plan.block_q = std::min(k.block, std::max(round_up(plan.len_q * group, kPadding), kPadding));
  }
  plan.block_k =
      std::min(k.block, std::max(round_up(std::min(plan.len_k, k.block), k.key_step), k.key_step));
  const Params p = make_params(plan, {});
  // At most: how many there are is known when the lengths are. Even tiles are more than half full.
  const int64_t tokens = problem.query.size(0);
  const int64_t tiles = std::min(plan.batch, tokens) + 2 * (tokens / ceil_div(k.block, group));
  const int64_t heads = plan.len_q <= kColumnsOfAllHeads / group ? 1 : plan.heads_k;
  plan.work_items = tiles * heads * parts_of(heads, plan.len_k);
  plan.workers = workers_for(problem.device, plan.work_items);
  plan.scratch_bytes = aligned(k.paged_scratch(p));
  plan.workspace_bytes = Workspace(plan, p).bytes;
}

void run_pages(const AttentionPlan& plan, const AttentionTensors& tensors, void* memory,
               const Launch& launch) {
  const AttentionProblem& problem = plan.problem;
  const Paged& paged = *problem.paged;
  Params p = make_params(plan, tensors);
  const Geometry& g = p.geometry;
  const Kernels& k = kernels(problem);
  const Workspace workspace(plan, p);
  char* base = reinterpret_cast<char*>(aligned(reinterpret_cast<size_t>(memory)));
  fill_unused_tokens(problem, tensors, p);

  auto* sequences = reinterpret_cast<PagedSequence*>(base + workspace.sequences);
  p.sequences = sequences;
  p.partial = base + workspace.partial;
  const auto phase = [&](int64_t first, int64_t last,
                         void (*kernel)(const Params&, int64_t, void*)) {
    run_items(last - first, plan.workers, launch, [&](int64_t item, int worker) {
      kernel(p, first + item, base + workspace.scratch + worker * plan.scratch_bytes);
    });
  };
  int64_t task = 0, item = 0, partial = 0;  // of the sequences so far
  int64_t first_task = 0, first_item = 0;   // of those that have not run
  const auto run_so_far = [&](int64_t sequence_count) {
    p.sequence_count = sequence_count;
    phase(first_item, item, k.paged);
    if (partial > 0) phase(first_task, task, k.combine);
    first_task = task;
    first_item = item;
    partial = 0;
  };
  for (int64_t b = 0; b < g.batch; ++b) {
    PagedSequence s = cut_sequence(p, k.block, paged_rows(paged, tensors.cu_seqlens_q, b),
                                   read_int(paged.seq_lens, tensors.seq_lens, b));
    s.first_row = paged.cu_seqlens_q ? read_int(*paged.cu_seqlens_q, tensors.cu_seqlens_q, b) : b;
    if (partial + partial_elems(p, s) > workspace.partial_elems) run_so_far(b);
    s.first_task = task;
    s.first_item = item;
    s.first_partial = partial;
    sequences[b] = s;
    task += s.tiles * g.heads_k;
    item += s.tiles * (g.heads_k / s.heads) * s.parts;
    partial += partial_elems(p, s);
  }
  run_so_far(g.batch);
}

}  // namespace flashmoe::cpu
