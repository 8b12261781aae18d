// What the sm90 family's kernels are given, and their launches.
#include <algorithm>
#include <numeric>

#include "core/numbers.h"
#include "cuda/attention/bias_plan.h"
#include "cuda/attention/call.h"
#include "cuda/attention/lay_out.h"
#include "cuda/attention/sm90.h"
#include "cuda/attention/sm90/paged.h"
#include "cuda/attention/sm90/tiles.h"
#include "cuda/attention/sm90/whole.h"
#include "cuda/attention/sm90_maps.h"
#include "cuda/attention/sm90_tasks.h"
#include "cuda/attention/workspace.h"

namespace flashmoe::cuda {

// Number of tasks of a slice, and of tiles of dQ that the kernel writes itself.
void enter_slice(Sm90BwdParams& p, const Call& call, const Slice& slice) {
  const AttentionPlan& plan = call.plan;
  enter_slice(static_cast<AttentionBwdParams&>(p), call, slice);
  p.key_tiles = p.key_blocks * p.heads * static_cast<int32_t>(slice.batch);
  p.num_tasks = p.key_tiles + p.split_tiles * (p.splits - 1);
  if (p.stores_dq || (p.dq_accum && main_kernel(plan).converts_dq)) {
    const Grid rows = query_grid(plan);
    p.converted_tiles = static_cast<int32_t>(rows[0] * rows[1] * slice.batch);
  }
}

namespace sm90 {
namespace {

Status fill_maps(Sm90FwdParams& p, const Call& call) {
  const AttentionPlan& plan = call.plan;
  const AttentionProblem& problem = plan.problem;
  const AttentionTensors& t = call.tensors;
  const bool ragged = problem.ragged.has_value();
  const int columns = box_columns(main_kernel(plan));
  const auto rows = [&](TensorMap& map, const TensorSpec& spec, const void* data, int64_t count) {
    return encode_queries(map, spec, data, count, columns, p.pack, ragged);
  };
  const auto keys = [&](TensorMap& map, const TensorSpec& spec, const void* data) {
    return encode_keys(map, spec, data, plan.block_k, columns, ragged);
  };
  Status status = rows(p.query_map, problem.query, t.query, rows_of_task(plan));
  if (status.ok()) status = rows(p.out_map, problem.out, t.out, 64);
  if (status.ok()) status = keys(p.key_map, problem.key, t.key);
  if (status.ok()) status = keys(p.value_map, problem.value, t.value);
  if (status.ok() && main_kernel(plan).bias_input == kBiasByTma) {
    status = encode_bias(p.bias_map, call, p, rows_of_task(plan));
  }
  return status;
}

Status fill_maps(Sm90BwdParams& p, const Call& call) {
  const AttentionPlan& plan = call.plan;
  const AttentionProblem& problem = plan.problem;
  const AttentionTensors& t = call.tensors;
  const auto map = [&](TensorMap& map, const TensorSpec& spec, const void* data, int64_t rows) {
    return encode_keys(map, spec, data, rows, box_columns(main_kernel(plan)),
                       problem.ragged.has_value());
  };
  // Each CTA of a cluster has its share copied.
  const Kernel& kernel = main_kernel(plan);
  const int64_t rows = plan.block_q / kernel.cluster, keys = kernel.key_box;
  Status status = map(p.query_map, problem.query, t.query, rows);
  if (status.ok()) status = map(p.key_map, problem.key, t.key, keys);
  if (status.ok()) status = map(p.value_map, problem.value, t.value, keys);
  p.grad_out_map = p.query_map;
  if (status.ok() && p.grad_out) {
    status = map(p.grad_out_map, *problem.grad_out, t.grad_out, rows);
  }
  const BiasInput input = main_kernel(plan).bias_input;
  p.bias_by_rows = input != kNoBias && input != kBiasByTma;
  if (status.ok() && input == kBiasByTma) status = encode_bias(p.bias_map, call, p, rows);
  if (status.ok() && p.grad_bias && input == kBiasByTma) {
    p.stores_grad_bias = encode_grad_bias(p.grad_bias_map, plan, p);
  }
  // Gradients leave by warpgroups, 64 rows each.
  if (status.ok() && p.grad_key) {
    status = map(p.grad_key_map, *problem.grad_key, t.grad_key, 64);
  }
  if (status.ok() && p.grad_value) {
    status = map(p.grad_value_map, *problem.grad_value, t.grad_value, 64);
  }
  return status;
}

Status run_forward(const Call& call) {
  const AttentionPlan& plan = call.plan;
  Sm90FwdParams p{};
  fill_forward(p, call);
  const int64_t rows = rows_of_task(plan);
  p.pack = log2_packed_heads(plan, rows);
  p.heads = static_cast<int32_t>(plan.heads_q >> p.pack);
  p.group >>= p.pack;
  p.query_blocks = static_cast<int32_t>(ceil_div(plan.len_q << p.pack, rows));
  if (plan.problem.bias) p.bias_batches = static_cast<int32_t>(bias_batches(plan));
  p.num_tasks = static_cast<int32_t>(plan.work_items);
  order_tiles(p, plan);
  const SideParams side = fill_side_params(call, p, true);
  if (counts_tasks(plan)) {
    p.tile_counter = reinterpret_cast<int32_t*>(call.workspace + call.forward.tile_counter);
  }
  if (Status status = fill_maps(p, call); !status.ok()) return status;
  return run_launches(call, p, side);
}

// encode_packed() for the tensors of a call, unless one before has failed or there is none.
class PackedMaps {
 public:
  static constexpr int kRowsOfWarp = 16;  // which results leave by
  explicit PackedMaps(const AttentionPlan& plan)
      : side_by_side_(main_kernel(plan).heads_of_box > 1),
        ragged_(plan.problem.ragged.has_value()) {}
  void add(TensorMap& map, const TensorSpec& spec, const void* data, int rows = kPackedChunk) {
    if (status_.ok() && data)
      status_ = encode_packed(map, spec, data, rows, side_by_side_, ragged_);
  }
  const Status& status() const { return status_; }

 private:
  const bool side_by_side_, ragged_;
  Status status_;
};

// Whether what a pair has for the heads of a box is one aligned word of the bias.
bool is_of_box(const AttentionPlan& plan, const TensorSpec& bias, const void* data) {
  const int heads = main_kernel(plan).heads_of_box;
  return bias.stride[1] == 1 && bias.shape[1] % heads == 0 && bias.stride[0] % heads == 0 &&
         reinterpret_cast<uintptr_t>(data) % (heads * dtype_bytes(bias.dtype)) == 0;
}

Status fill_maps(Sm90PackedParams& p, const Call& call) {
  const AttentionProblem& problem = call.plan.problem;
  const AttentionTensors& t = call.tensors;
  PackedMaps maps(call.plan);
  maps.add(p.query_map, problem.query, t.query);
  maps.add(p.key_map, problem.key, t.key);
  maps.add(p.value_map, problem.value, t.value);
  maps.add(p.out_map, problem.out, t.out, PackedMaps::kRowsOfWarp);
  return maps.status();
}

Status run_packed(const Call& call) {
  const AttentionPlan& plan = call.plan;
  Sm90PackedParams p{};
  fill_forward(p, call);
  p.heads = static_cast<int32_t>(plan.heads_q);
  p.boxes = static_cast<int32_t>(packed_boxes(plan));
  p.num_tasks = static_cast<int32_t>(plan.work_items);
  p.bounds = reinterpret_cast<RowBounds*>(call.workspace + call.forward.row_bounds);
  if (p.bias) {
    p.pairs = reinterpret_cast<PairRow*>(call.workspace + call.forward.row_pairs);
    p.bias_of_box = is_of_box(plan, *plan.problem.bias, p.bias);
  }
  p.rows = static_cast<int32_t>(round_up(packed_tokens(plan, false), plan.block_q));
  p.pitch_q = static_cast<int32_t>(packed_pitch(plan, false));
  p.pitch_k = static_cast<int32_t>(packed_pitch(plan, true));
  const SideParams side = fill_side_params(call, p, false);
  p.ragged = side.ragged;
  p.ragged.tile_counter = reinterpret_cast<int32_t*>(call.workspace + call.forward.tile_counter);
  if (Status status = fill_maps(p, call); !status.ok()) return status;
  return run_launches(call, p, side);
}

Status fill_maps(Sm90PackedBwdParams& p, const Call& call) {
  const AttentionProblem& problem = call.plan.problem;
  const AttentionTensors& t = call.tensors;
  PackedMaps maps(call.plan);
  maps.add(p.query_map, problem.query, t.query);
  maps.add(p.key_map, problem.key, t.key);
  maps.add(p.value_map, problem.value, t.value);
  p.grad_out_map = p.query_map;
  if (p.grad_out) maps.add(p.grad_out_map, *problem.grad_out, t.grad_out);
  const auto gradient = [&](TensorMap& map, const std::optional<TensorSpec>& spec, void* data) {
    if (data) maps.add(map, *spec, data, PackedMaps::kRowsOfWarp);
  };
  gradient(p.grad_query_map, problem.grad_query, p.grad_query);
  gradient(p.grad_key_map, problem.grad_key, p.grad_key);
  gradient(p.grad_value_map, problem.grad_value, p.grad_value);
  return maps.status();
}

Status run_packed_backward(const Call& call) {
  const AttentionPlan& plan = call.plan;
  Sm90PackedBwdParams p{};
  fill_backward(p, call, 1);
  const auto bounds = [&](size_t offset) {
    return reinterpret_cast<RowBounds*>(call.workspace + offset);
  };
  p.lse_delta = reinterpret_cast<float*>(call.workspace + call.backward.lse_delta);
  p.query_bounds = bounds(call.backward.query_bounds);
  p.key_bounds = bounds(call.backward.key_bounds);
  if (p.bias) {
    p.query_pairs = reinterpret_cast<PairRow*>(call.workspace + call.backward.query_pairs);
    p.key_pairs = reinterpret_cast<PairRow*>(call.workspace + call.backward.key_pairs);
    p.bias_of_box = is_of_box(plan, *plan.problem.bias, p.bias);
  }
  if (p.grad_bias) p.grad_bias_of_box = is_of_box(plan, *plan.problem.grad_bias, p.grad_bias);
  p.query_side = packed_side(plan, false);
  p.key_side = packed_side(plan, true);
  p.stored_heads = static_cast<int32_t>(round_up(plan.heads_q, main_kernel(plan).heads_of_box));
  p.bounds_ctas = static_cast<int32_t>(packed_bounds_ctas(plan));
  p.pitch_q = static_cast<int32_t>(packed_pitch(plan, false));
  p.pitch_k = static_cast<int32_t>(packed_pitch(plan, true));
  p.num_tasks = static_cast<int32_t>(plan.work_items);
  const SideParams side = fill_side_params(call, p, false);
  p.ragged = side.ragged;
  if (Status status = fill_maps(p, call); !status.ok()) return status;
  return run_launches(call, p, side);
}

Status run_backward(const Call& call) {
  const AttentionPlan& plan = call.plan;
  Sm90BwdParams p{};
  fill_backward(p, call, 1);
  p.done = reinterpret_cast<int32_t*>(call.workspace + call.backward.done);
  p.heads = static_cast<int32_t>(slice_of(plan, 0).heads);
  p.key_blocks = static_cast<int32_t>(key_blocks(plan));
  p.stores_dq = stores_dq(plan);
  p.splits = static_cast<int32_t>(plan.splits);
  p.split_rows = static_cast<int32_t>(split_rows(plan, plan.splits));
  p.grad_parts = reinterpret_cast<float*>(call.workspace + call.backward.grad_parts);
  p.split_tiles = static_cast<int32_t>(plan.split_tiles);
  order_heads(p, plan);
  const auto adjacent = [](const Strides& strides) { return strides.head < strides.row; };
  const bool all = adjacent(p.out_strides) && adjacent(p.query_strides) &&
                   (!p.grad_out || adjacent(p.grad_out_strides));
  while (all && p.log2_adjacent_heads < 3 &&
         p.heads * p.group % (2 << p.log2_adjacent_heads) == 0) {
    ++p.log2_adjacent_heads;
  }
  p.preprocess_rows = static_cast<int32_t>(preprocess_rows(plan, persistent_ctas(plan)));
  p.tokens_q = plan.problem.query.shape[0];
  if (Status status = fill_maps(p, call); !status.ok()) return status;
  return run_launches(call, p, fill_side_params(call, p, false));
}

Status run_whole_backward(const Call& call) {
  const AttentionPlan& plan = call.plan;
  const Kernel& kernel = main_kernel(plan);
  Sm90WholeBwdParams p{};
  fill_backward(p, call, 1);
  p.heads = static_cast<int32_t>(plan.heads_k);
  p.key_blocks = static_cast<int32_t>(ceil_div(plan.len_k, kernel.key_box));
  if (Status status = fill_maps(p, call); !status.ok()) return status;
  // The kernel prefetches every map, those of gradients that nobody wants as well.
  if (!p.grad_key) p.grad_key_map = p.key_map;
  if (!p.grad_value) p.grad_value_map = p.value_map;
  Status status = encode_keys(p.out_map, plan.problem.out, call.tensors.out, plan.block_q,
                              box_columns(kernel), false);
  if (!status.ok()) return status;
  return run_launches(call, p, fill_side_params(call, p, false));
}

}  // namespace

Status run(const Call& call) {
  const bool packed = main_kernel(call.plan).packed;
  if (call.plan.problem.pass == Pass::kBackward) {
    if (main_kernel(call.plan).whole) return run_whole_backward(call);
    return packed ? run_packed_backward(call) : run_backward(call);
  }
  return packed ? run_packed(call) : run_forward(call);
}

const Kernel* find_chunk_kernel(const AttentionPlan& plan) {
  const AttentionProblem& p = plan.problem;
  const Geometry g = geometry(p);
  TensorSpec four;
  if (g.softcap > 0 || !(g.scale > 0) || p.key.size(0) == 0 ||
      !four_dimensions(p.query, true, four) || !four_dimensions(p.out, true, four)) {
    return nullptr;
  }
  const bool whole_rows = block_heads(p.key) > 0 && block_heads(p.value) > 0;
  const Kernel* best = nullptr;
  for (const Kernel& k : kernels()) {
    if (k.role == Role::kPagedChunk && k.dtype == p.query.dtype &&
        k.cache_bytes == dtype_bytes(p.key.dtype) &&
        k.head_dim >= std::max(plan.head_dim, plan.head_dim_v) && (whole_rows || !k.whole_rows) &&
        (!best || k.head_dim < best->head_dim)) {
      best = &k;
    }
  }
  return best;
}

Status run_chunk(const Call& call, const AttentionLaunch& step, const PagedParams& pages) {
  const AttentionProblem& problem = call.plan.problem;
  const AttentionTensors& t = call.tensors;
  const Kernel& kernel = kernel_of(step);
  Sm90PagedParams p{};
  static_cast<AttentionFwdParams&>(p) = pages;
  p.pages = pages;
  p.blocks = reinterpret_cast<const RaggedBlock*>(pages.sequences);
  p.heads = pages.heads_q;
  p.box_keys = std::gcd(pages.page, kernel.block_k);
  if (p.box_keys < kLeastBoxKeys || kernel.cache_bytes == 1 || !steps_forward(problem.key) ||
      !steps_forward(problem.value)) {
    p.box_keys = 0;
  }
  p.key_block_heads = static_cast<int32_t>(block_heads(problem.key));
  p.value_block_heads = static_cast<int32_t>(block_heads(problem.value));
  const int columns = box_columns(kernel);
  const auto queries = [&](TensorMap& map, const TensorSpec& spec, const void* data, int64_t rows) {
    return encode_queries(map, spec, data, rows, columns, 0, true);
  };
  const auto keys = [&](TensorMap& map, const TensorSpec& spec, const void* data) {
    if (kernel.whole_rows) {
      return encode_whole_rows(map, spec, data, p.box_keys, kernel.head_dim);
    }
    const int box[] = {1, p.box_keys, 1, columns};
    return encode(map, spec, data, box);
  };
  Status status = queries(p.query_map, problem.query, t.query, kernel.block_q);
  if (status.ok()) status = queries(p.out_map, problem.out, t.out, 64);
  if (status.ok() && p.box_keys) status = keys(p.key_map, problem.key, t.key);
  if (status.ok() && p.box_keys) status = keys(p.value_map, problem.value, t.value);
  if (!status.ok()) return status;
  return launch_step(call, step, call.plan.batch, &p, sizeof(p));
}

}  // namespace sm90
}  // namespace flashmoe::cuda
