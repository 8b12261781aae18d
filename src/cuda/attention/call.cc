#include "cuda/attention/call.h"

#include <algorithm>
#include <cmath>

#include "core/text.h"
#include "cuda/attention/bias_plan.h"
#include "cuda/attention/families.h"
#include "cuda/attention/lay_out.h"
#include "cuda/attention/paged_plan.h"
#include "cuda/attention/planner.h"
#include "cuda/attention/second/params.h"
#include "cuda/attention/second_plan.h"
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

// Size of the problem's leading dimension i in the bias: 1 where the bias has none.
int64_t bias_batch_size(const TensorSpec& bias, const Geometry& g, int i) {
  const int at = i - (g.num_lead - (bias.rank - 3));
  return at >= 0 ? bias.shape[at] : 1;
}

// The bias as kernels read it: where it lies, or its copy in aligned rows at `aligned`.
void fill_bias(AttentionParams& p, const Call& call, size_t aligned) {
  const AttentionPlan& plan = call.plan;
  if (!plan.problem.bias) return;
  const TensorSpec& bias = *plan.problem.bias;
  const Geometry& g = call.geometry;
  p.bias = call.tensors.bias;
  p.bias_strides = bias_strides(bias, g, p.bias_column);
  p.bias_is_fp32 = bias.dtype == DType::kFloat32;
  p.bias_is_mask = bias.dtype == DType::kBool;
  // What divides by the scale must not overflow: 0 says that it is not done.
  p.bias_scale = g.scale > 1e-6 ? static_cast<float>(1 / g.scale) : 0.f;
  if (!aligns_bias(plan)) return;
  // A dimension that the bias does not have is not copied for.
  p.bias = call.workspace + aligned;
  p.bias_column = 1;
  p.bias_padded = 1;
  const int64_t heads = bias.rank > 2 ? bias.size(-3) : 1;
  int64_t stride = aligned_bias_pitch(plan) * plan.len_q;
  p.bias_strides.row = aligned_bias_pitch(plan);
  p.bias_strides.head = heads > 1 ? stride : 0;
  stride *= heads;
  for (int i = g.num_lead - 1; i >= 0; --i) {
    const int64_t size = bias_batch_size(bias, g, i);
    p.bias_strides.batch[i] = size > 1 ? stride : 0;
    stride *= size;
  }
}

BiasAlignParams bias_align(const Call& call, void* rows) {
  const AttentionPlan& plan = call.plan;
  const TensorSpec& bias = *plan.problem.bias;
  BiasAlignParams p{};
  p.bias = call.tensors.bias;
  p.rows = rows;
  p.strides = bias_strides(bias, call.geometry, p.column);
  p.len_q = static_cast<int32_t>(plan.len_q);
  p.len_k = static_cast<int32_t>(plan.len_k);
  p.pitch = static_cast<int32_t>(aligned_bias_pitch(plan));
  p.batch_dims = call.geometry.num_lead;
  for (int i = 0; i < p.batch_dims; ++i) {
    p.batch_sizes[i] = static_cast<int32_t>(bias_batch_size(bias, call.geometry, i));
  }
  return p;
}

void fill_dropout(AttentionParams& p, const Call& call) {
  const Geometry& g = call.geometry;
  if (g.dropped == 0) return;
  p.seed = static_cast<const uint64_t*>(call.tensors.seed);
  // Wraps around where all are dropped: no word is above it then.
  p.drop_limit = static_cast<uint32_t>(uint64_t{g.dropped} << 16) - 1;
  p.kept_scale = static_cast<float>(g.kept_scale);
}

// The problem, as every kernel of it sees it.
void fill_problem(AttentionParams& p, const Call& call, size_t aligned_bias) {
  const AttentionPlan& plan = call.plan;
  const AttentionTensors& t = call.tensors;
  const AttentionProblem& problem = plan.problem;
  const Geometry& g = call.geometry;
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
  fill_bias(p, call, aligned_bias);
  fill_sinks(p, call);
  fill_dropout(p, call);
  p.group = static_cast<int32_t>(plan.heads_q / plan.heads_k);
  p.len_q = static_cast<int32_t>(plan.len_q);
  p.len_k = static_cast<int32_t>(plan.len_k);
  p.head_dim = static_cast<int32_t>(plan.head_dim);
  p.head_dim_v = static_cast<int32_t>(plan.head_dim_v);
  fill_scores(p, g);
}

// Leading dimensions that every tensor walks with one stride become one: dividing is dear on a GPU.
void merge_batch(AttentionParams& p, const std::vector<int64_t*>& tensors) {
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

RaggedParams ragged_params(const Call& call) {
  const AttentionPlan& plan = call.plan;
  const AttentionProblem& problem = plan.problem;
  const Ragged& ragged = *problem.ragged;
  const auto side = [](const void* cu_seqlens, const TensorSpec& spec, const TensorSpec& rows,
                       int64_t longest) {
    return RaggedSide{cu_seqlens, spec.stride[0], rows.shape[0], static_cast<int32_t>(longest)};
  };
  RaggedParams p{};
  p.query = side(call.tensors.cu_seqlens_q, ragged.cu_seqlens_q, problem.query, plan.len_q);
  p.key = side(call.tensors.cu_seqlens_k, ragged.cu_seqlens_k, problem.key, plan.len_k);
  p.pairs = problem.bias ? problem.bias->shape[0] : INT64_MAX;
  p.batch = static_cast<int32_t>(plan.batch);
  p.lengths_are_int64 = ragged.cu_seqlens_q.dtype == DType::kInt64;
  return p;
}

RaggedList ragged_list(const RaggedBlock* blocks, int64_t slots, int64_t block, bool of_keys,
                       bool descending) {
  return {.blocks = const_cast<RaggedBlock*>(blocks),
          .slots = static_cast<int32_t>(slots),
          .block = static_cast<int32_t>(block),
          .of_keys = of_keys,
          .descending = descending};
}

// The bias of a slice is its copy, head by head. (Heads keep their numbers.)
void enter_bias_slice(AttentionParams& p, const Call& call, int64_t first_head, size_t copy) {
  if (!transposes_bias(call.plan)) return;
  const TensorSpec& bias = *call.plan.problem.bias;
  const int64_t pitch = transposed_bias_pitch(call.plan);
  p.packed_bias = call.tensors.bias;
  p.packed_pair = bias.stride[0];
  p.packed_head = bias.stride[1];
  p.bias = call.workspace + copy - first_head * pitch * dtype_bytes(bias.dtype);
  p.bias_column = 1;
  p.bias_strides.head = pitch;
}

template <class T>
T* at(const Call& call, size_t offset) {
  return reinterpret_cast<T*>(call.workspace + offset);
}

const Kernel* planned_bias_sum(const AttentionPlan& plan) {
  for (const AttentionLaunch& step : plan.launches) {
    if (step.given == Given::kBiasSum) return &kernel_of(step);
  }
  return nullptr;
}

}  // namespace

void fill_sinks(AttentionParams& p, const Call& call) {
  const std::optional<TensorSpec>& sinks = call.plan.problem.sinks;
  if (!sinks) return;
  p.sinks = call.tensors.sinks;
  p.sink_head = sinks->stride[0];
  p.sinks_are_fp32 = sinks->dtype == DType::kFloat32;
}

void fill_scores(AttentionParams& p, const Geometry& g) {
  p.left = window_limit(g.left);
  p.right = window_limit(g.right);
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

void fill_forward(AttentionFwdParams& p, const Call& call) {
  const AttentionPlan& plan = call.plan;
  const ForwardWorkspace& w = call.forward;
  fill_problem(p, call, w.aligned_bias);
  fill_sign(p, call.geometry);
  if (one_query(plan) && !main_kernel(plan).counts_tasks) {  // a group's heads are its rows
    p.one_query = 1;
    p.len_q = p.group;
    for (Strides* s : {&p.query_strides, &p.out_strides, &p.lse_strides, &p.bias_strides}) {
      s->row = s->head;
      s->head *= p.group;
    }
    p.sink_row = p.sink_head;
    p.sink_head *= p.group;
    p.group = 1;
  }
  merge_batch(
      p, {p.query_strides.batch, p.key_strides.batch, p.value_strides.batch, p.out_strides.batch,
          p.lse_strides.batch, p.key_lengths_strides, p.bias_strides.batch});
  p.splits = static_cast<int32_t>(plan.splits);
  if (plan.splits > 1) {
    p.dim = main_kernel(plan).head_dim;
    p.partial_out = at<float>(call, w.partial_out);
    p.partial_lse = at<float>(call, w.partial_lse);
  }
  if (plan.problem.ragged) p.blocks = at<RaggedBlock>(call, w.blocks);
}

void fill_backward(AttentionBwdParams& p, const Call& call, uint32_t preprocess_heads,
                   const std::vector<int64_t*>& others) {
  const AttentionPlan& plan = call.plan;
  const AttentionTensors& t = call.tensors;
  const AttentionProblem& problem = plan.problem;
  const Geometry& g = call.geometry;
  const BackwardWorkspace& w = call.backward;
  fill_problem(p, call, w.aligned_bias);
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
    // The sum of a shared bias's gradient has a launch of its own: see enter_bias_sum().
    if (!shares_bias(plan)) p.grad_bias = t.grad_bias;
  }
  std::vector<int64_t*> tensors = {
      p.query_strides.batch,    p.key_strides.batch,        p.value_strides.batch,
      p.out_strides.batch,      p.lse_strides.batch,        p.key_lengths_strides,
      p.grad_out_strides.batch, p.grad_lse_strides.batch,   p.grad_query_strides.batch,
      p.grad_key_strides.batch, p.grad_value_strides.batch, p.bias_strides.batch,
      p.grad_bias_strides.batch};
  tensors.insert(tensors.end(), others.begin(), others.end());
  merge_batch(p, tensors);

  p.heads_q = static_cast<int32_t>(plan.heads_q);
  p.rows = w.rows;
  p.dq_accum_rows = w.dq_accum_rows;
  p.block_q = static_cast<int32_t>(plan.block_q);
  p.dim = main_kernel(plan).dq_accum_dim;
  const bool accumulates = p.grad_query && accumulates_dq(plan);
  if (accumulates) p.dq_accum = at<float>(call, w.dq_accum);
  p.dq_semaphore = at<int32_t>(call, w.dq_semaphore);
  p.tile_counter = at<int32_t>(call, w.tile_counter);
  // Without queries the preprocess kernel does not run, and nobody adds.
  p.deterministic = problem.options.deterministic && accumulates && plan.len_q > 0;
  p.preprocess_heads = preprocess_heads;
  if (!problem.ragged) return;
  p.blocks = at<RaggedBlock>(call, w.key_blocks);
  p.query_blocks = at<RaggedBlock>(call, w.query_blocks);
  if (w.sum_slots > 0) p.sum_blocks = at<RaggedBlock>(call, w.sum_blocks);
}

void fill_second(AttentionSecondParams& p, const Call& call) {
  const AttentionTensors& t = call.tensors;
  const AttentionProblem& problem = call.plan.problem;
  const Geometry& g = call.geometry;
  const auto fill = [&](Strides& strides, const std::optional<TensorSpec>& spec, bool has_col) {
    if (spec) strides = strides_of(*spec, has_col, g);
  };
  p.tangent_query = t.tangent_query;
  p.tangent_key = t.tangent_key;
  p.tangent_value = t.tangent_value;
  p.tangent_bias = t.tangent_bias;
  p.tangent_sinks = t.tangent_sinks;
  p.tangent_out = t.tangent_out;
  p.tangent_lse = static_cast<float*>(t.tangent_lse);
  fill(p.tangent_query_strides, problem.tangent_query, true);
  fill(p.tangent_key_strides, problem.tangent_key, true);
  fill(p.tangent_value_strides, problem.tangent_value, true);
  fill(p.tangent_out_strides, problem.tangent_out, true);
  fill(p.tangent_lse_strides, problem.tangent_lse, false);
  if (problem.tangent_bias) {
    p.tangent_bias_strides = bias_strides(*problem.tangent_bias, g, p.tangent_bias_column);
  }
  if (problem.tangent_sinks) p.tangent_sink_step = problem.tangent_sinks->stride[0];
  fill_backward(
      p, call, 1,
      {p.tangent_query_strides.batch, p.tangent_key_strides.batch, p.tangent_value_strides.batch,
       p.tangent_bias_strides.batch, p.tangent_out_strides.batch, p.tangent_lse_strides.batch});
  p.softcap = static_cast<float>(g.softcap);
  if (problem.grad_sinks) {
    p.grad_sinks = t.grad_sinks;
    p.grad_sink_step = problem.grad_sinks->stride[0];
  }
}

SideParams fill_side_params(const Call& call, const AttentionFwdParams& p, bool longest_first) {
  SideParams side;
  if (aligns_bias(call.plan)) {
    side.bias_align = bias_align(call, call.workspace + call.forward.aligned_bias);
  }
  if (!call.plan.problem.ragged) return side;
  side.ragged = ragged_params(call);
  const int64_t slots =
      ragged_slots(call.plan.problem.query.shape[0], call.plan.block_q, call.plan.batch);
  const bool descending = longest_first && p.right < kNoLimit;
  side.ragged.lists[0] = ragged_list(p.blocks, slots, call.plan.block_q, false, descending);
  if (counts_tasks(call.plan)) {
    side.ragged.tile_counter = at<int32_t>(call, call.forward.tile_counter);
  }
  return side;
}

SideParams fill_side_params(const Call& call, const AttentionBwdParams& p, bool longest_first) {
  const AttentionPlan& plan = call.plan;
  const BackwardWorkspace& w = call.backward;
  SideParams side;
  if (aligns_bias(plan)) side.bias_align = bias_align(call, call.workspace + w.aligned_bias);
  if (!plan.problem.ragged) return side;
  side.ragged = ragged_params(call);
  const bool descending = longest_first && p.right < kNoLimit;
  RaggedList* lists = side.ragged.lists;
  lists[0] = ragged_list(p.blocks, w.key_slots, plan.block_k, true, descending);
  lists[1] = ragged_list(p.query_blocks, w.query_slots, plan.block_q, false, false);
  if (const Kernel* bias_sum = planned_bias_sum(plan)) {
    lists[2] = ragged_list(p.sum_blocks, w.sum_slots, bias_sum->block_k, true, descending);
  }
  return side;
}

void enter_slice(AttentionFwdParams& p, const Call& call, const Slice& slice) {
  p.first_head = static_cast<int32_t>(slice.first_head);
  p.heads = static_cast<int32_t>(slice.heads);
  p.first_batch = static_cast<int32_t>(slice.first_batch);
  enter_bias_slice(p, call, slice.first_head, call.forward.transposed_bias);
}

void enter_slice(AttentionBwdParams& p, const Call& call, const Slice& slice) {
  const BackwardWorkspace& w = call.backward;
  p.first_head = static_cast<int32_t>(slice.first_head);
  p.heads = static_cast<int32_t>(slice.heads);
  p.first_batch = static_cast<int32_t>(slice.first_batch);
  const int64_t first_query_head = slice.first_head * p.group;
  enter_bias_slice(p, call, first_query_head, w.transposed_bias);
  // A slice's gradient of the bias takes the place of its copy.
  if (transposes_bias(call.plan) && p.grad_bias) {
    p.grad_bias = const_cast<void*>(p.bias);
    p.grad_bias_column = p.bias_column;
    p.grad_bias_strides = p.bias_strides;
  }
  // Heads keep their numbers where there is room for those of a slice only.
  const bool all_heads = call.plan.problem.grad_bias && shares_bias(call.plan);
  p.lse_delta = at<float>(call, w.lse_delta) - (all_heads ? 0 : first_query_head * w.rows * 2);
}

void enter_bias_sum(AttentionBwdParams& p, const Call& call, const AttentionLaunch& step) {
  p.grad_bias = call.tensors.grad_bias;
  p.bias_sums = at<float>(call, call.backward.bias_sums);
  p.bias_sum_splits = static_cast<int32_t>(call.plan.bias_splits);
  p.bias_sum_last = step.given == Given::kBiasSumLast;
  p.first_batch = static_cast<int32_t>(step.first_batch);
}

AttentionBwdParams sink_sum(AttentionBwdParams p, const Call& call, const AttentionLaunch& step) {
  p.grad_sinks = call.tensors.grad_sinks;
  p.grad_sink_step = call.plan.problem.grad_sinks->stride[0];
  p.sink_sums = at<float>(call, call.backward.sink_sums);
  p.sink_rows = sink_rows(call.plan);
  p.sink_parts = static_cast<int32_t>(sink_parts(call.plan));
  p.sink_sum_last = step.given == Given::kSinkSumLast;
  return p;
}

BiasTransposeParams bias_transpose(const Call& call, const Slice& slice, bool gradient) {
  const AttentionPlan& plan = call.plan;
  const bool forward = plan.problem.pass == Pass::kForward;
  const TensorSpec& spec = gradient ? *plan.problem.grad_bias : *plan.problem.bias;
  const int64_t group = forward ? 1 : plan.heads_q / plan.heads_k;
  const size_t copy = forward ? call.forward.transposed_bias : call.backward.transposed_bias;
  char* packed = gradient ? static_cast<char*>(call.tensors.grad_bias)
                          : static_cast<char*>(const_cast<void*>(call.tensors.bias));
  BiasTransposeParams p{};
  p.packed_pair = spec.stride[0];
  p.packed_head = spec.stride[1];
  p.packed = packed + slice.first_head * group * p.packed_head * dtype_bytes(spec.dtype);
  p.by_head = call.workspace + copy;
  p.by_head_stride = transposed_bias_pitch(plan);
  p.pairs = spec.shape[0];
  p.heads = static_cast<int32_t>(slice.heads * group);
  p.back = gradient;
  return p;
}

Status launch_step(const Call& call, const AttentionLaunch& step, int64_t batch, const void* params,
                   size_t params_bytes) {
  LaunchShape shape;
  std::copy(step.grid.begin(), step.grid.end(), shape.grid);
  // The last slice of a dense batch may be smaller than the others.
  if (step.per_slice) shape.grid[2] = std::min(shape.grid[2], static_cast<uint32_t>(batch));
  shape.threads = step.threads;
  shape.shared_bytes = step.shared_bytes;
  shape.cluster = step.cluster;
  shape.programmatic = step.overlaps;
  return cuda::launch(kernel_of(step).id, shape, call.plan.problem.device.ordinal,
                      call.launch.stream, params, params_bytes);
}

Status run(const AttentionPlan& plan, const AttentionTensors& t, void* workspace,
           const Launch& launch) {
  const std::pair<const char*, const void*> aligned[] = {
      {"query", t.query},
      {"key", plan.problem.paged ? nullptr : t.key},
      {"out", t.out},
      {"value", plan.problem.paged ? nullptr : t.value},
      {"grad_out", t.grad_out},
      {"grad_query", t.grad_query},
      {"grad_key", t.grad_key},
      {"grad_value", t.grad_value},
      {"tangent_query", t.tangent_query},
      {"tangent_key", t.tangent_key},
      {"tangent_value", t.tangent_value},
      {"tangent_out", t.tangent_out},
      {"workspace", workspace},
  };
  for (const auto& [name, data] : aligned) {
    if (Status status = check_aligned(name, data); !status.ok()) return status;
  }
  const Family* family = find_family(plan.family);
  if (!family || !plan.handle) return invalid("the plan is not one that plan() made for a GPU");
  CurrentContext context;  // tensor maps need one, too
  if (Status status = context.enter(plan.problem.device.ordinal); !status.ok()) return status;
  Call call{plan, t, static_cast<char*>(workspace), launch, geometry(plan.problem), {}, {}};
  if (plan.problem.paged) return run_paged(call);
  if (has_tangents(plan.problem.pass)) return run_second(call);
  if (plan.problem.pass == Pass::kForward) {
    call.forward = forward_workspace(plan);
  } else {
    call.backward = backward_workspace(plan, planned_bias_sum(plan));
  }
  return family->run(call);
}

}  // namespace flashmoe::cuda
