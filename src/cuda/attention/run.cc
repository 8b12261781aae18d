// From a plan and its tensors to launches.
#include "cuda/attention/run.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "attention/problem.h"
#include "core/text.h"
#include "cuda/attention/backend.h"
#include "cuda/attention/catalogue.h"
#include "cuda/attention/hopper.h"
#include "cuda/attention/params.h"
#include "cuda/attention/sm90/params.h"
#include "cuda/attention/tiles.h"
#include "cuda/runtime/driver.h"

namespace flashmoe::cuda {
namespace {

// A tensor's batch strides as the problem's leading dimensions have them; 0 where it is broadcast.
void lead_strides(const TensorSpec& spec, int trailing, const Geometry& g, int64_t* strides) {
  const int own = spec.rank - trailing;
  for (int i = 0; i < g.num_lead; ++i) {
    const int at = i - (g.num_lead - own);
    strides[i] = at >= 0 && spec.shape[at] > 1 ? spec.stride[at] : 0;
  }
}

Strides strides_of(const TensorSpec& spec, bool has_col, const Geometry& g) {
  Strides s{};
  const int row = spec.rank - (has_col ? 2 : 1);
  if (g.ragged) {  // (tokens, heads, D)
    s.row = spec.stride[row - 1];
    s.head = spec.stride[row];
    return s;
  }
  s.row = spec.stride[row];
  s.head = spec.stride[row - 1];
  lead_strides(spec, has_col ? 3 : 2, g, s.batch);
  return s;
}

}  // namespace

void merge_batch(AttentionParams& p, std::initializer_list<int64_t*> tensors) {
  int kept = 0;
  for (int i = 0; i < p.batch_dims; ++i) {
    bool joins = kept > 0;
    for (int64_t* strides : tensors) {
      joins = joins && strides[kept - 1] == strides[i] * p.batch_sizes[i];
    }
    if (p.batch_sizes[i] == 1) continue;
    kept += joins ? 0 : 1;
    p.batch_sizes[kept - 1] = (joins ? p.batch_sizes[kept - 1] : 1) * p.batch_sizes[i];
    for (int64_t* strides : tensors) strides[kept - 1] = strides[i];
  }
  p.batch_dims = std::max(kept, 1);
  if (kept == 0) p.batch_sizes[0] = 1;
}

namespace {

// The strides of a bias, 0 where it is broadcast, and that of its keys.
Strides bias_strides(const TensorSpec& spec, const Geometry& g, int64_t& column) {
  const auto stride = [&](int from_last) {
    const int dim = spec.rank - from_last;
    return dim >= 0 && spec.shape[dim] > 1 ? spec.stride[dim] : 0;
  };
  Strides s{};
  if (g.ragged) {  // (pairs, heads)
    column = spec.stride[0];
    s.head = stride(1);
    return s;
  }
  column = stride(1);
  s.row = stride(2);
  s.head = stride(3);
  lead_strides(spec, 3, g, s.batch);
  return s;
}

}  // namespace

void fill_problem(AttentionParams& p, const AttentionPlan& plan, const AttentionTensors& t,
                  const Geometry& g) {
  const AttentionProblem& problem = plan.problem;
  p.query = t.query;
  p.key = t.key;
  p.value = t.value;
  p.out = t.out;
  p.lse = static_cast<float*>(t.lse);
  p.query_strides = strides_of(problem.query, true, g);
  p.key_strides = strides_of(problem.key, true, g);
  p.value_strides = strides_of(problem.value, true, g);
  p.out_strides = strides_of(problem.out, true, g);
  if (problem.lse) p.lse_strides = strides_of(*problem.lse, false, g);
  p.batch = static_cast<int32_t>(plan.batch);
  p.batch_dims = g.num_lead;
  for (int i = 0; i < g.num_lead; ++i) p.batch_sizes[i] = static_cast<int32_t>(g.lead[i]);
  if (problem.key_lengths) {
    p.key_lengths = t.key_lengths;
    lead_strides(*problem.key_lengths, 0, g, p.key_lengths_strides);
    p.lengths_are_int64 = problem.key_lengths->dtype == DType::kInt64;
  }
  if (problem.bias) {
    p.bias = t.bias;
    p.bias_strides = bias_strides(*problem.bias, g, p.bias_column);
    p.bias_is_fp32 = problem.bias->dtype == DType::kFloat32;
    // What divides by the scale must not overflow: 0 says that it is not done.
    p.bias_scale = g.scale > 1e-6 ? static_cast<float>(1 / g.scale) : 0.f;
  }
  p.group = static_cast<int32_t>(plan.heads_q / plan.heads_k);
  p.len_q = static_cast<int32_t>(plan.len_q);
  p.len_k = static_cast<int32_t>(plan.len_k);
  p.head_dim = static_cast<int32_t>(plan.head_dim);
  p.head_dim_v = static_cast<int32_t>(plan.head_dim_v);
  const auto limit = [](int64_t side) {
    return side < 0 || side > kNoLimit ? kNoLimit : static_cast<int32_t>(side);
  };
  p.left = limit(g.left);
  p.right = limit(g.right);
  p.scale = static_cast<float>(g.scale);
  // With a scale of 0 all scores are 0, capped or not; a softcap_scale of 0 says that there is
  // none.
  const bool capped = g.softcap > 0 && g.scale != 0;
  p.softcap_scale = capped ? static_cast<float>(g.scale / g.softcap) : 0.f;
  p.scale_log2 = static_cast<float>((capped ? g.softcap : g.scale) * M_LOG2E);
}

void fill_sign(AttentionFwdParams& p, const Geometry& g) {
  p.sign = 1;
  if (p.softcap_scale == 0 && g.scale <= 0) {
    p.sign = g.scale < 0 ? -1.f : 0.f;
    p.scale_log2 = g.scale < 0 ? -p.scale_log2 : 1.f;
  }
}

Status launch_ragged(const AttentionPlan& plan, const AttentionTensors& t, const Launch& launch,
                     const std::vector<RaggedList>& lists, int32_t* tile_counter) {
  const AttentionProblem& problem = plan.problem;
  const Ragged& ragged = *problem.ragged;
  const auto side = [](const void* cu_seqlens, const TensorSpec& spec, const TensorSpec& rows,
                       int64_t longest) {
    return RaggedSide{cu_seqlens, spec.stride[0], rows.shape[0], static_cast<int32_t>(longest)};
  };
  RaggedParams p{};
  p.query = side(t.cu_seqlens_q, ragged.cu_seqlens_q, problem.query, plan.len_q);
  p.key = side(t.cu_seqlens_k, ragged.cu_seqlens_k, problem.key, plan.len_k);
  p.pairs = problem.bias ? problem.bias->shape[0] : INT64_MAX;
  p.batch = static_cast<int32_t>(plan.batch);
  p.lengths_are_int64 = ragged.cu_seqlens_q.dtype == DType::kInt64;
  std::copy(lists.begin(), lists.end(), p.lists);
  p.tile_counter = tile_counter;
  // Each goes over all sequences; more than a few have too little to write.
  constexpr int32_t kSlotsOfOne = 256, kMost = 64;
  int32_t ctas = 1;
  for (const RaggedList& list : lists) ctas = std::max(ctas, list.slots / kSlotsOfOne);
  return launch_part(
      plan.before[0],
      {static_cast<uint32_t>(std::min(ctas, kMost)), static_cast<uint32_t>(lists.size()), 1}, plan,
      launch, p);
}

namespace {

Status check_aligned(const char* name, const void* data) {
  if (reinterpret_cast<uintptr_t>(data) % 16 == 0) return {};
  return invalid(name,
                 " begins at an address that is not a multiple of 16 bytes; call .clone() on it");
}

// A grid's third dimension is 16-bit; a larger batch takes several rounds. `round` launches the
// kernels of one. Ragged, the grid has no such dimension.
template <class Params, class Round>
Status in_rounds(const AttentionPlan& plan, Params& p, const Round& round) {
  const int64_t batch = plan.problem.ragged ? 1 : plan.batch;
  const int64_t most = plan.problem.ragged ? 1 : std::min(round_batch(plan), kMaxGridYZ);
  for (int64_t first = 0; first < batch; first += most) {
    p.first_batch = static_cast<int32_t>(first);
    Status status = round(static_cast<uint32_t>(std::min(batch - first, most)));
    if (!status.ok()) return status;
  }
  return {};
}

// Copies a bias to rows of whole chunks, where the plan says so, and lets the problem have those.
Status copy_bias(const AttentionPlan& plan, AttentionParams& p, void* rows, const Launch& launch) {
  if (!copies_bias(plan)) return {};
  const TensorSpec& bias = *plan.problem.bias;
  BiasAlignParams copy{};
  copy.bias = p.bias;
  copy.rows = rows;
  copy.strides = p.bias_strides;
  copy.column = p.bias_column;
  copy.len_k = p.len_k;
  copy.pitch = static_cast<int32_t>(bias_pitch(plan));
  copy.batch_dims = p.batch_dims;
  // What the bias does not have it is not copied for.
  int64_t stride = bias_pitch(plan) * plan.len_q;
  p.bias_strides.row = bias_pitch(plan);
  const int64_t heads = bias.rank > 2 ? bias.size(-3) : 1;
  p.bias_strides.head = heads > 1 ? stride : 0;
  stride *= heads;
  int64_t batches = 1;
  for (int i = p.batch_dims - 1; i >= 0; --i) {
    const int at = i - (p.batch_dims - (bias.rank - 3));
    const int64_t size = at >= 0 ? bias.shape[at] : 1;
    copy.batch_sizes[i] = static_cast<int32_t>(size);
    p.bias_strides.batch[i] = size > 1 ? stride : 0;
    stride *= size;
    batches *= size;
  }
  p.bias = rows;
  p.bias_column = 1;
  p.bias_padded = 1;
  const uint32_t grid[3] = {static_cast<uint32_t>(plan.len_q), static_cast<uint32_t>(heads),
                            static_cast<uint32_t>(batches)};
  return launch_part(find_kernel(Role::kBiasAlign, plan.family, plan.problem.query.dtype)->id.name,
                     grid, plan, launch, copy);
}

// The bias of a ragged batch, a round's heads of it at a time, with its pairs side by side. Kernels
// read the copy; where they write a gradient, it takes the copy's place, and is copied back.
class PairsCopy {
 public:
  PairsCopy(const AttentionPlan& plan, const Launch& launch, void* copy)
      : plan_(plan), launch_(launch), copy_(copy), heads_(plan.heads_q / plan.rounds) {
    wanted_ = copies_pairs(plan);
  }

  // The heads of `round` to the copy, which `p` is then given. (Heads keep their numbers.)
  Status read(AttentionParams& p, const void* bias, int64_t round) const {
    if (!wanted_) return {};
    const TensorSpec& spec = *plan_.problem.bias;
    const int64_t first = round * heads_;
    p.packed_bias = bias;
    p.packed_pair = spec.stride[0];
    p.packed_head = spec.stride[1];
    p.bias = static_cast<const uint16_t*>(copy_) - first * pairs_pitch(plan_);
    p.bias_column = 1;
    p.bias_strides.head = pairs_pitch(plan_);
    return run(bias, spec, round, false);
  }
  // Where their gradient is to be written instead of where it belongs.
  void redirect(AttentionBwdParams& p) const {
    if (!wanted_ || !p.grad_bias) return;
    p.grad_bias = const_cast<void*>(p.bias);
    p.grad_bias_column = p.bias_column;
    p.grad_bias_strides = p.bias_strides;
  }
  // And to where it belongs.
  Status write(const AttentionBwdParams& p, void* grad_bias, int64_t round) const {
    if (!wanted_ || !p.grad_bias) return {};
    return run(grad_bias, *plan_.problem.grad_bias, round, true);
  }

 private:
  Status run(const void* packed, const TensorSpec& spec, int64_t round, bool back) const {
    BiasTransposeParams p{};
    p.packed_pair = spec.stride[0];
    p.packed_head = spec.stride[1];
    p.packed = static_cast<uint16_t*>(const_cast<void*>(packed)) + round * heads_ * p.packed_head;
    p.by_head = copy_;
    p.by_head_stride = pairs_pitch(plan_);
    p.pairs = spec.shape[0];
    p.heads = static_cast<int32_t>(heads_);
    p.back = back;
    const auto blocks = [](int64_t n, int64_t of) {
      return static_cast<uint32_t>((n + of - 1) / of);
    };
    const Kernel* kernel =
        find_kernel(Role::kBiasTranspose, plan_.family, plan_.problem.query.dtype);
    return launch_part(kernel->id.name,
                       {blocks(p.pairs, kBiasTilePairs), blocks(heads_, kBiasTileHeads), 1}, plan_,
                       launch_, p);
  }

  const AttentionPlan& plan_;
  const Launch& launch_;
  void* copy_;
  int64_t heads_;  // of a round
  bool wanted_;
};

Status run_forward(const AttentionPlan& plan, const AttentionTensors& t, void* workspace,
                   const Launch& launch) {
  const Geometry g = geometry(plan.problem);
  AttentionFwdParams p{};
  fill_problem(p, plan, t, g);
  if (Status status = copy_bias(plan, p, workspace, launch); !status.ok()) return status;
  workspace = static_cast<char*>(workspace) + bias_copy_bytes(plan);
  fill_sign(p, g);
  const bool ragged = plan.problem.ragged.has_value();
  if (!ragged && plan.grid[1] != plan.heads_q) {  // one query: a group's heads are its rows
    p.one_query = 1;
    p.len_q = p.group;
    for (Strides* s : {&p.query_strides, &p.out_strides, &p.lse_strides, &p.bias_strides}) {
      s->row = s->head;
      s->head *= p.group;
    }
    p.group = 1;
  }
  merge_batch(
      p, {p.query_strides.batch, p.key_strides.batch, p.value_strides.batch, p.out_strides.batch,
          p.lse_strides.batch, p.key_lengths_strides, p.bias_strides.batch});
  p.heads = static_cast<int32_t>(plan.heads_q / plan.rounds);
  const PairsCopy pairs(
      plan, launch, static_cast<char*>(workspace) + plan.workspace_bytes - pairs_copy_bytes(plan));
  if (ragged) {
    auto* blocks = static_cast<RaggedBlock*>(workspace);
    p.blocks = blocks;
    const int64_t slots = ragged_slots(plan.problem.query.shape[0], plan.block_q, plan.batch);
    Status status = launch_ragged(plan, t, launch,
                                  {{.blocks = blocks,
                                    .slots = static_cast<int32_t>(slots),
                                    .block = static_cast<int32_t>(plan.block_q),
                                    .of_keys = 0,
                                    .descending = p.right < kNoLimit}});
    if (!status.ok()) return status;
  }
  p.splits = static_cast<int32_t>(plan.splits);
  if (plan.splits > 1) {
    p.dim = find_kernel(plan.kernel)->head_dim;
    p.partial_out = static_cast<float*>(workspace);
    p.partial_lse = p.partial_out + plan.splits * plan.batch * plan.grid[1] * p.len_q * p.dim;
  }
  const auto launch_part_of_batch = [&](uint32_t count) {
    Status status = launch_part(plan.kernel, {plan.grid[0], plan.grid[1], count}, plan, launch, p);
    if (!status.ok() || plan.splits == 1) return status;
    return launch_part(plan.after[0], {static_cast<uint32_t>(p.len_q), plan.grid[1], count}, plan,
                       launch, p);
  };
  for (int64_t round = 0; round < plan.rounds; ++round) {
    p.first_head = static_cast<int32_t>(round) * p.heads;
    Status status = pairs.read(p, t.bias, round);
    if (status.ok()) status = in_rounds(plan, p, launch_part_of_batch);
    if (!status.ok()) return status;
  }
  return {};
}

// One block for each tile of the gradient; what shares a tile is summed by its block. Where that
// leaves most of the chip idle, by several, and then once more over those.
Status sum_bias_gradient(const AttentionPlan& plan, const Launch& launch, AttentionBwdParams& p,
                         const BackwardWorkspace& w) {
  const std::string& name = plan.after.back();
  p.bias_sum_splits = static_cast<int32_t>(plan.bias_splits);
  if (plan.problem.ragged) {
    return launch_part(name, {static_cast<uint32_t>(w.sum_slots), 1, 1}, plan, launch, p);
  }
  const Kernel* kernel = find_kernel(name);
  const BiasSumGrid grid = bias_sum_grid(plan, kernel->block_q, kernel->block_k);
  for (int64_t first = 0; first < grid.batches; first += kMaxGridYZ) {
    p.first_batch = static_cast<int32_t>(first);
    for (const bool last : {false, true}) {
      if (last && plan.bias_splits == 1) break;
      p.bias_sum_last = last;
      const uint32_t shape[3] = {static_cast<uint32_t>(grid.tiles * (last ? 1 : plan.bias_splits)),
                                 static_cast<uint32_t>(grid.heads),
                                 static_cast<uint32_t>(std::min(grid.batches - first, kMaxGridYZ))};
      Status status = launch_part(name, shape, plan, launch, p);
      if (!status.ok()) return status;
    }
  }
  return {};
}

Status run_backward(const AttentionPlan& plan, const AttentionTensors& t, void* workspace,
                    const Launch& launch) {
  const AttentionProblem& problem = plan.problem;
  const Geometry g = geometry(problem);
  Sm90BwdParams hopper{};
  AttentionBwdParams& p = hopper;  // all that the other families are given
  fill_problem(p, plan, t, g);
  const BackwardWorkspace w = backward_workspace(plan);
  const auto at = [&](size_t offset) { return static_cast<char*>(workspace) + offset; };
  if (Status status = copy_bias(plan, p, at(w.bias_rows), launch); !status.ok()) return status;
  const auto fill = [&](Strides& strides, const std::optional<TensorSpec>& spec, bool has_col) {
    if (spec) strides = strides_of(*spec, has_col, g);
  };
  p.grad_out = t.grad_out;
  p.grad_lse = static_cast<const float*>(t.grad_lse);
  p.grad_query = t.grad_query;
  p.grad_key = t.grad_key;
  p.grad_value = t.grad_value;
  fill(p.grad_out_strides, problem.grad_out, true);
  fill(p.grad_lse_strides, problem.grad_lse, false);
  fill(p.grad_query_strides, problem.grad_query, true);
  fill(p.grad_key_strides, problem.grad_key, true);
  fill(p.grad_value_strides, problem.grad_value, true);
  if (problem.grad_bias) {
    p.grad_bias_strides = bias_strides(*problem.grad_bias, g, p.grad_bias_column);
  }
  merge_batch(
      p, {p.query_strides.batch, p.key_strides.batch, p.value_strides.batch, p.out_strides.batch,
          p.lse_strides.batch, p.key_lengths_strides, p.grad_out_strides.batch,
          p.grad_lse_strides.batch, p.grad_query_strides.batch, p.grad_key_strides.batch,
          p.grad_value_strides.batch, p.bias_strides.batch, p.grad_bias_strides.batch});

  p.heads_q = static_cast<int32_t>(plan.heads_q);
  p.rows = w.rows;
  p.dq_accum_rows = w.dq_accum_rows;
  p.block_q = static_cast<int32_t>(plan.block_q);
  p.dim = static_cast<int32_t>(dq_accum_dim(*find_kernel(plan.kernel)));
  const bool sums = p.grad_query && !find_kernel(plan.kernel)->for_short;
  if (sums) p.dq_accum = reinterpret_cast<float*>(at(w.dq_accum));
  p.dq_semaphore = reinterpret_cast<int32_t*>(at(w.dq_semaphore));
  p.tile_counter = reinterpret_cast<int32_t*>(at(w.tile_counter));
  // Without queries the preparing kernel does not run, and nobody adds.
  p.deterministic = problem.deterministic && sums && plan.len_q > 0;

  const bool on_hopper = plan.family == "sm90";
  hopper.done = reinterpret_cast<int32_t*>(at(w.done));
  p.preprocess_heads = 1;
  const int64_t head_rounds = problem.ragged ? plan.rounds : 1;
  const uint32_t heads_q = static_cast<uint32_t>(plan.heads_q / head_rounds);  // of a round
  p.heads = static_cast<int32_t>(plan.heads_k / head_rounds);
  uint32_t rows_grid[2] = {static_cast<uint32_t>((plan.len_q + plan.block_q - 1) / plan.block_q),
                           heads_q};
  if (problem.ragged) {
    const auto list = [&](size_t offset, int64_t slots, int64_t block, bool of_keys) {
      return RaggedList{.blocks = reinterpret_cast<RaggedBlock*>(at(offset)),
                        .slots = static_cast<int32_t>(slots),
                        .block = static_cast<int32_t>(block),
                        .of_keys = of_keys,
                        .descending = of_keys && p.right < kNoLimit && !on_hopper};
    };
    std::vector<RaggedList> lists = {list(w.key_blocks, w.key_slots, plan.block_k, true),
                                     list(w.query_blocks, w.query_slots, plan.block_q, false)};
    p.blocks = lists[0].blocks;
    p.query_blocks = lists[1].blocks;
    if (w.sum_slots > 0) {
      const int64_t block = find_kernel(plan.after.back())->block_k;
      lists.push_back(list(w.sum_blocks, w.sum_slots, block, true));
      p.sum_blocks = lists[2].blocks;
    }
    Status status = launch_ragged(plan, t, launch, lists);
    if (!status.ok()) return status;
    rows_grid[0] = static_cast<uint32_t>(w.query_slots) * heads_q;
    rows_grid[1] = 1;
    // Heads lie side by side: the preparing kernel takes a few at once.
    const uint32_t most = on_hopper ? 1 : 8;
    while (p.preprocess_heads < most && heads_q % (2 * p.preprocess_heads) == 0)
      p.preprocess_heads *= 2;
  }
  const bool sums_bias = problem.grad_bias && shares_bias(plan);
  if (problem.grad_bias && !sums_bias) p.grad_bias = t.grad_bias;
  const PairsCopy pairs(plan, launch, at(w.bias_pairs));
  if (on_hopper) {
    if (Status status = fill_hopper_backward(hopper, plan, t); !status.ok()) return status;
  }
  uint32_t prepare_grid[2] = {rows_grid[0] / p.preprocess_heads, rows_grid[1]};
  if (on_hopper && !problem.ragged) {
    prepare_grid[0] = static_cast<uint32_t>(ceil_div(plan.len_q, hopper.preprocess_rows)) * heads_q;
    prepare_grid[1] = 1;
  }
  for (int64_t round = 0; round < head_rounds; ++round) {
    p.first_head = static_cast<int32_t>(round) * p.heads;
    if (Status status = pairs.read(p, t.bias, round); !status.ok()) return status;
    pairs.redirect(p);
    // Heads keep their numbers where there is room for those of a round only.
    const int64_t before = sums_bias ? 0 : int64_t{p.first_head} * p.group * w.rows * 2;
    p.lse_delta = reinterpret_cast<float*>(at(w.lse_delta)) - before;
    Status status = in_rounds(plan, p, [&](uint32_t count) {
      const uint32_t rows[3] = {rows_grid[0], rows_grid[1], count};
      const auto launch_all = [&](const auto& params, const uint32_t(&grid)[3]) {
        const uint32_t before[] = {prepare_grid[0], prepare_grid[1], count};
        Status part = launch_part(plan.before.back(), before, plan, launch, params);
        if (part.ok()) part = launch_part(plan.kernel, grid, plan, launch, params, on_hopper);
        if (part.ok() && has_dq_kernel(plan)) {
          part = launch_part(plan.after[0], rows, plan, launch, params, on_hopper);
        }
        return part;
      };
      hopper.num_tasks = hopper.key_blocks * p.heads * static_cast<int32_t>(count);
      hopper.converted_tiles =
          sums && !has_dq_kernel(plan) ? static_cast<int32_t>(rows[0] * rows[1] * count) : 0;
      return on_hopper ? launch_all(hopper, {plan.grid[0], 1, 1})
                       : launch_all(p, {plan.grid[0], plan.grid[1], count});
    });
    if (status.ok()) status = pairs.write(p, t.grad_bias, round);
    if (!status.ok()) return status;
  }
  if (!sums_bias) return {};
  p.grad_bias = t.grad_bias;
  p.bias_sums = reinterpret_cast<float*>(at(w.bias_sums));
  return sum_bias_gradient(plan, launch, p, w);
}

}  // namespace

Status run(const AttentionPlan& plan, const AttentionTensors& t, void* workspace,
           const Launch& launch) {
  const std::pair<const char*, const void*> aligned[] = {
      {"query", t.query},       {"key", t.key},
      {"value", t.value},       {"out", t.out},
      {"grad_out", t.grad_out}, {"grad_query", t.grad_query},
      {"grad_key", t.grad_key}, {"grad_value", t.grad_value},
      {"workspace", workspace},
  };
  for (const auto& [name, data] : aligned) {
    if (Status status = check_aligned(name, data); !status.ok()) return status;
  }
  CurrentContext context;  // tensor maps need one, too
  if (Status status = context.enter(plan.problem.device.ordinal); !status.ok()) return status;
  if (plan.family == "sm90" && plan.problem.pass == Pass::kForward) {
    return run_hopper_forward(plan, t, workspace, launch);
  }
  return plan.problem.pass == Pass::kForward ? run_forward(plan, t, workspace, launch)
                                             : run_backward(plan, t, workspace, launch);
}

}  // namespace flashmoe::cuda

namespace flashmoe {

Result<std::vector<Device>> cuda_devices() {
  const Result<std::vector<cuda::DeviceInfo>> found = cuda::devices();
  if (!found.ok()) return found.status();
  std::vector<Device> list;
  for (const cuda::DeviceInfo& info : found.value()) {
    Device device;
    device.type = DeviceType::kCuda;
    device.ordinal = info.ordinal;
    device.compute_capability = info.compute_capability;
    device.multiprocessors = info.sm_count;
    list.push_back(device);
  }
  return list;
}

}  // namespace flashmoe
