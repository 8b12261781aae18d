#include "cuda/attention/sm90.h"

#include <algorithm>
#include <numeric>

#include "core/numbers.h"
#include "core/text.h"
#include "cuda/attention/bias_plan.h"
#include "cuda/attention/call.h"
#include "cuda/attention/lay_out.h"
#include "cuda/attention/planner.h"
#include "cuda/attention/sm90/paged.h"
#include "cuda/attention/sm90/params.h"
#include "cuda/attention/tile_choice.h"
#include "cuda/attention/workspace.h"
#include "cuda/runtime/tensor_map.h"

namespace flashmoe::cuda {

void enter_slice(Sm90BwdParams& p, const Call& call, const Slice& slice);

namespace sm90 {
namespace {

// The tensor as (batch, heads, length, D), as a tensor map wants it: its leading dimensions as one.
// False where no map describes it, because they lie otherwise or something is broadcast. Ragged, it
// is (tokens, heads, D).
bool four_dimensions(const TensorSpec& spec, bool ragged, TensorSpec& four) {
  if (spec.rank < 3) return false;
  four = TensorSpec{};
  four.dtype = spec.dtype;
  four.rank = 4;
  for (int i = 1; i < 4; ++i) {
    const int from = ragged && i < 3 ? 2 - i : spec.rank + i - 4;
    four.shape[i] = spec.shape[from];
    four.stride[i] = spec.stride[from];
  }
  int64_t count = 1, stride = 0;  // of the leading dimensions, innermost first
  for (int i = spec.rank - 4; i >= 0; --i) {
    if (spec.shape[i] == 1) continue;
    if (count == 1) stride = spec.stride[i];
    if (spec.stride[i] != stride * count) return false;
    count *= spec.shape[i];
  }
  four.shape[0] = count;
  four.stride[0] = stride;
  for (int i = 0; i < 3; ++i) {
    if (four.shape[i] == 0 || (four.shape[i] > 1 && four.stride[i] <= 0)) return false;
  }
  return four.shape[3] > 0;
}

Status encode(TensorMap& map, const TensorSpec& tensor, const void* data,
              std::span<const int> box) {
  const Swizzle swizzle =
      box.back() * dtype_bytes(tensor.dtype) <= 64 ? Swizzle::k64 : Swizzle::k128;
  const Result<CUtensorMap> encoded = encode_tensor_map(tensor, data, box, swizzle);
  if (!encoded.ok()) return encoded.status();
  std::copy(std::begin(encoded.value().opaque), std::end(encoded.value().opaque), map.opaque);
  return {};
}
// Columns of a box: those of a block of a tma::Tile as wide as the kernel's head dim.
int box_columns(const Kernel& kernel) { return kernel.head_dim <= 32 ? 32 : 64; }

// The map of a tensor, copied `rows` rows and `columns` columns of one head at a time.
Status encode_keys(TensorMap& map, const TensorSpec& spec, const void* data, int64_t rows,
                   int columns, bool ragged) {
  TensorSpec four;
  if (!four_dimensions(spec, ragged, four)) return invalid("a tensor that no tensor map describes");
  const int box[] = {1, 1, static_cast<int>(rows), columns};
  return encode(map, four, data, box);
}
// The same as (batch, heads, length, 2^pack, D): see Sm90FwdParams.
Status encode_queries(TensorMap& map, const TensorSpec& spec, const void* data, int64_t rows,
                      int columns, int pack, bool ragged) {
  TensorSpec four;
  if (!four_dimensions(spec, ragged, four)) return invalid("a tensor that no tensor map describes");
  TensorSpec five;
  five.dtype = four.dtype;
  five.rank = 5;
  const int64_t heads = int64_t{1} << pack;
  five.shape = {four.shape[0], four.shape[1] / heads, four.shape[2], heads, four.shape[3]};
  five.stride = {four.stride[0], four.stride[1] * heads, four.stride[2], four.stride[1],
                 four.stride[3]};
  const int box[] = {1, 1, static_cast<int>(rows / heads), static_cast<int>(heads), columns};
  return encode(map, five, data, box);
}

// The map of a bias: see Sm90FwdParams. Boxes have `rows` rows.
Status encode_bias(TensorMap& map, const Call& call, const AttentionParams& p, int64_t rows) {
  const AttentionPlan& plan = call.plan;
  // Where it lies, or a copy in the workspace.
  if (Status status = check_aligned("bias", p.bias); !status.ok()) return status;
  TensorSpec matrix;
  matrix.dtype = plan.problem.bias->dtype;
  matrix.rank = 2;
  matrix.stride = {p.bias_strides.row, 1};
  int64_t last = p.bias_strides.head > 0 ? (plan.heads_q - 1) * p.bias_strides.head : 0;
  for (int i = 0; i < p.batch_dims; ++i) last += (p.batch_sizes[i] - 1) * p.bias_strides.batch[i];
  matrix.shape = {last / p.bias_strides.row + plan.len_q, plan.len_k};
  const int box[] = {static_cast<int>(rows), 64};
  return encode(map, matrix, p.bias, box);
}

// The map of the gradient of a bias that is not shared, as (batch, heads, len_q, len_k), so that
// rows past a head's last one are not stored. Returns whether there is one: for that the batch is
// one dimension, and rows are whole chunks of 16 bytes from each other.
bool encode_grad_bias(TensorMap& map, const AttentionPlan& plan, const AttentionBwdParams& p) {
  constexpr int kStoredRows = 64;
  const Strides& strides = p.grad_bias_strides;
  if (p.grad_bias_column != 1) return false;
  for (int i = 1; i < p.batch_dims; ++i) {
    if (strides.batch[i - 1] != strides.batch[i] * p.batch_sizes[i]) return false;
  }
  TensorSpec four;
  four.dtype = plan.problem.grad_bias->dtype;
  four.rank = 4;
  four.shape = {plan.batch, plan.heads_q, plan.len_q, plan.len_k};
  four.stride = {strides.batch[p.batch_dims - 1], strides.head, strides.row, 1};
  const int box[] = {1, 1, kStoredRows, 64};
  return encode(map, four, p.grad_bias, box).ok();
}

// The map of a tensor (tokens, heads, D), copied `rows` tokens and 64 columns at a time; with
// `side_by_side`, columns are those of all heads.
Status encode_packed(TensorMap& map, const TensorSpec& spec, const void* data, int rows,
                     bool side_by_side) {
  TensorSpec all = spec;
  if (side_by_side) {
    all.shape[1] = 1;
    all.shape[2] = spec.shape[1] * spec.shape[2];
  }
  return encode_keys(map, all, data, rows, 64, true);
}

// Bytes that are to stay in L2, which has room for the rest as well.
constexpr int64_t kCachedBytes = 32 << 20;

// The CTAs of the main launch, all of which are on the chip at once.
int64_t persistent_ctas(const AttentionPlan& plan) {
  for (const AttentionLaunch& step : plan.launches) {
    if (step.handle == plan.handle) return step.grid[0];
  }
  return 0;
}

// Rows of a task of a forward pass.
int64_t rows_of_task(const AttentionPlan& plan) { return plan.block_q / main_kernel(plan).teams; }

// Heads that share their keys, of which 2^this share a tile: see Sm90FwdParams.
int log2_packed_heads(const AttentionPlan& plan, int64_t block_q) {
  if (plan.problem.ragged || plan.problem.bias) return 0;
  const int64_t group = plan.heads_q / std::max<int64_t>(plan.heads_k, 1);
  const auto tasks = [&](int pack) {
    return ceil_div(plan.len_q << pack, block_q) * (plan.heads_q >> pack);
  };
  int best = 0;
  for (int pack = 1; (1 << pack) <= 64 && group % (1 << pack) == 0; ++pack) {
    if (tasks(pack) < tasks(best)) best = pack;
  }
  return best;
}

// Heads whose tasks are mixed. Where all tasks see as many keys, none: those of a head follow each
// other and share its keys. Else each CTA goes forth and back through the tasks, the longest first,
// and has as much as the others after `unit` heads. These are mixed, or a multiple of them, as far
// as L2 holds their keys and values and has room for the rest; if it does not, none are, and longer
// and shorter tasks come out even over all heads. But where these are no multiple of `unit`,
// nearly, all are mixed: that comes out even, and where there are few heads many CTAs read the same
// keys at the same time.
//
// With a counter any wave comes out even. The more heads the better then, as long as L2 holds their
// keys or enough CTAs read the same ones at the same time.
int64_t forward_heads_per_wave(const AttentionPlan& plan, const Sm90FwdParams& p) {
  constexpr int64_t kHeadsAtOnce = 16;
  if (p.right >= kNoLimit) return 1;
  const int64_t bytes =
      dtype_bytes(plan.problem.key.dtype) * plan.len_k * (plan.head_dim + plan.head_dim_v);
  const int64_t cached = std::max<int64_t>(kCachedBytes / bytes, 1) * p.group;
  if (counts_tasks(plan)) return std::max(cached, kHeadsAtOnce * p.group);
  const int64_t both_ways = 2 * persistent_ctas(plan);
  const int64_t unit = both_ways / std::gcd(both_ways, int64_t{p.query_blocks});
  const int64_t heads = int64_t{p.heads} * p.batch;
  const int64_t odd = std::min(heads % unit, unit - heads % unit);
  if (8 * odd > heads) return std::max<int64_t>(heads, 1);
  return unit > cached ? 1 : cached / unit * unit;
}

// Key heads whose tiles of keys are mixed: as far as L2 holds Q, dO and the accumulator of dQ of
// them, for each tile of keys reads and adds to all of these, of one head of the group after the
// other; and as all CTAs are busy with at once. Where sums are deterministic no fewer, or tiles of
// a head would wait for each other. Else as many as the CTAs are busy with twice (nearly, or each
// would get the same tiles of every head); or once, so that a kernel that converts dQ itself can
// soon begin. No wave is smaller than that: the last would end with the long tasks of few heads.
int64_t backward_heads_per_wave(const AttentionPlan& plan, const Sm90BwdParams& p) {
  const Kernel& kernel = main_kernel(plan);
  const int64_t bytes = plan.len_q * (2 * plan.head_dim + 2 * plan.head_dim_v + 4 * p.dim);
  const int64_t cached = kCachedBytes / std::max<int64_t>(bytes, 1);
  const int64_t clusters = persistent_ctas(plan) / kernel.cluster;
  const int64_t busy = ceil_div(clusters, p.key_blocks);
  const bool early = p.dq_accum && kernel.converts_dq;
  const int64_t twice = ceil_div(2 * clusters * 31 / 32, p.key_blocks);
  const int64_t most = early ? busy : p.deterministic ? cached : std::min(cached, twice);
  const int64_t heads = plan.heads_k * plan.batch;
  const int64_t waves = std::max<int64_t>(heads / std::max(most, busy), 1);
  return ceil_div(heads, waves);
}

// Rows that a CTA of the preprocess kernel has: as many as leave enough CTAs, since finding out
// where the rows are takes a while.
int64_t preprocess_rows(const AttentionPlan& plan, int64_t ctas) {
  int64_t rows = plan.block_q;
  const auto launched = [&](int64_t rows) {
    return ceil_div(plan.len_q, rows) * plan.heads_q * plan.batch;
  };
  while (rows < 4 * plan.block_q && launched(2 * rows) >= 4 * ctas) rows *= 2;
  return rows;
}

int64_t key_blocks(const AttentionPlan& plan) {
  const AttentionProblem& p = plan.problem;
  return p.ragged ? ragged_slots(p.key.shape[0], plan.block_k, plan.batch)
                  : ceil_div(plan.len_k, plan.block_k);
}

// Tasks of a forward pass over packed tokens: tiles of these times boxes of heads.
int64_t packed_boxes(const AttentionPlan& plan) {
  return ceil_div(plan.heads_q, main_kernel(plan).heads_of_box);
}
// The launch of a kernel that goes through plan.work_items tasks, after the one before it.
void add_packed_launch(AttentionPlan& plan, const Kernel& kernel, const Gpu& gpu) {
  const int64_t held = gpu.multiprocessors * resident_ctas(kernel, gpu.chip);
  const int64_t ctas = std::clamp<int64_t>(plan.work_items, 1, held);
  AttentionLaunch main = once(kernel, grid_of(ctas), Given::kCall);
  main.overlaps = true;
  plan.launches.push_back(main);
}
void lay_out_packed(AttentionPlan& plan, const Kernel& kernel, const Gpu& gpu) {
  // Each CTA of the kernel that finds the bounds looks at all sequences before its own.
  constexpr int64_t kSequencesOfOne = 64, kMost = 256;
  const AttentionProblem& p = plan.problem;
  plan.work_items = ceil_div(p.query.shape[0], plan.block_q) * packed_boxes(plan);
  const int64_t shares = std::clamp<int64_t>(ceil_div(plan.batch + 1, kSequencesOfOne), 1, kMost);
  const Kernel* bounds = find_kernel(Role::kRowBounds, plan.family, p.query.dtype);
  plan.launches.push_back(once(*bounds, grid_of(shares), Given::kCall));
  add_packed_launch(plan, kernel, gpu);
  plan.workspace_bytes = forward_workspace(plan).bytes;
}

// The two sides of a packed backward pass, whose tiles are both of block_q tokens. Where no
// gradient of a side is wanted, there are no tasks of it.
Sm90PackedBwdParams::Side packed_side(const AttentionPlan& plan, bool keys) {
  const AttentionProblem& p = plan.problem;
  const int64_t tiles = ceil_div((keys ? p.key : p.query).shape[0], plan.block_q);
  const int64_t boxes =
      ceil_div(keys ? plan.heads_k : plan.heads_q, main_kernel(plan).heads_of_box);
  const bool wanted = keys ? p.grad_key || p.grad_value : p.grad_query.has_value();
  return {.rows = static_cast<int32_t>(tiles * plan.block_q),
          .tiles = static_cast<int32_t>(tiles),
          .boxes = static_cast<int32_t>(wanted ? boxes : 0)};
}
int64_t packed_bounds_ctas(const AttentionPlan& plan) {
  constexpr int64_t kSequencesOfOne = 128, kMost = 64;
  return std::clamp<int64_t>(ceil_div(plan.batch + 1, kSequencesOfOne), 1, kMost);
}
void lay_out_packed_backward(AttentionPlan& plan, const Kernel& kernel, const Gpu& gpu) {
  // CTAs of the kernel before that find LSE and delta: rows that each has at least, and how many
  // there are on an SM, one after the other, so that those that end early leave room for more.
  constexpr int64_t kRowsOfOne = 2048, kOfAnSm = 4;
  const AttentionProblem& p = plan.problem;
  const auto q = packed_side(plan, false), k = packed_side(plan, true);
  plan.work_items = int64_t{q.tiles} * q.boxes + int64_t{k.tiles} * k.boxes;
  const int64_t of_rows = std::clamp<int64_t>(ceil_div(p.query.shape[0] * plan.heads_q, kRowsOfOne),
                                              1, kOfAnSm * gpu.multiprocessors);
  const Kernel* preprocess = find_kernel(Role::kPackedPreprocess, plan.family, p.query.dtype);
  plan.launches.push_back(
      once(*preprocess, grid_of(2 * packed_bounds_ctas(plan) + of_rows), Given::kCall));
  add_packed_launch(plan, kernel, gpu);
  add_sink_sum(plan);
  plan.workspace_bytes = backward_workspace(plan, nullptr).bytes;
}

// Whether a dense pass counts its tasks: where a mask makes long ones and short ones. Of short
// sequences, and above head dim 128, a list that CTAs go forth and back through is as even and
// shares more of the keys (docs/log/sm90.md).
bool counts_dense_tasks(const AttentionPlan& plan, const Kernel& kernel) {
  constexpr int64_t kLeastLength = 1024;
  const AttentionProblem& p = plan.problem;
  return !p.ragged && !p.bias && geometry(p).right >= 0 && plan.len_q >= kLeastLength &&
         kernel.head_dim >= 64 && kernel.head_dim <= 128;
}

void lay_out_forward(AttentionPlan& plan, const Kernel& kernel, const Gpu& gpu) {
  if (kernel.packed) return lay_out_packed(plan, kernel, gpu);
  const AttentionProblem& p = plan.problem;
  const int64_t rows = rows_of_task(plan);
  const int pack = log2_packed_heads(plan, rows);
  plan.work_items = p.ragged
                        ? ragged_slots(p.query.shape[0], rows, plan.batch) * plan.heads_q
                        : ceil_div(plan.len_q << pack, rows) * (plan.heads_q >> pack) * plan.batch;
  add_first_launches(plan);
  const int64_t ctas = ceil_div(plan.work_items, kernel.teams);
  AttentionLaunch main =
      once(kernel, grid_of(std::min(ctas, gpu.multiprocessors * kernel.ctas)), Given::kCall);
  if (counts_dense_tasks(plan, kernel)) {
    const Kernel* counter = find_kernel(Role::kTaskCounter, plan.family, p.query.dtype);
    plan.launches.push_back(once(*counter, grid_of(1), Given::kCall));
    main.overlaps = true;
  }
  plan.launches.push_back(main);
  plan.workspace_bytes = forward_workspace(plan).bytes;
}

void lay_out_backward(AttentionPlan& plan, const Kernel& kernel, const Gpu& gpu) {
  const AttentionProblem& p = plan.problem;
  if (kernel.packed) return lay_out_packed_backward(plan, kernel, gpu);
  const Kernel* bias_sum = find_bias_sum(plan);
  cuda::lay_out_backward(plan, gpu, bias_sum);
  plan.work_items = key_blocks(plan) * (p.ragged ? 1 : plan.batch) * plan.heads_k;
  const int64_t clusters = std::max<int64_t>(gpu.multiprocessors / kernel.cluster, 1);
  const int64_t ctas = kernel.cluster * std::min(plan.work_items, clusters);

  add_first_launches(plan, bias_sum);
  Grid rows = query_grid(plan);
  if (!p.ragged) {
    rows = grid_of(ceil_div(plan.len_q, preprocess_rows(plan, ctas)) * plan.heads_q, 1,
                   slice_batch(plan));
  }
  const DType dtype = p.query.dtype;
  plan.launches.push_back(per_slice(*find_kernel(Role::kPreprocess, plan.family, dtype), rows));
  AttentionLaunch main = per_slice(kernel, grid_of(ctas));
  main.overlaps = true;
  plan.launches.push_back(main);
  if (has_dq_kernel(plan)) {
    AttentionLaunch dq =
        per_slice(*find_kernel(Role::kBackwardDq, plan.family, dtype), query_grid(plan));
    dq.overlaps = true;
    plan.launches.push_back(dq);
  }
  if (bias_sum) add_bias_sum(plan, *bias_sum);
  add_sink_sum(plan);
}

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
  p.heads_per_wave = static_cast<int32_t>(forward_heads_per_wave(plan, p));
  const SideParams side = fill_side_params(call, p, true);
  if (counts_tasks(plan)) {
    p.tile_counter = reinterpret_cast<int32_t*>(call.workspace + call.forward.tile_counter);
  }
  if (Status status = fill_maps(p, call); !status.ok()) return status;
  return run_launches(call, p, side);
}

Status fill_maps(Sm90PackedParams& p, const Call& call) {
  constexpr int kRowsOfWarp = 16;  // which O leaves by
  const AttentionPlan& plan = call.plan;
  const AttentionProblem& problem = plan.problem;
  const AttentionTensors& t = call.tensors;
  const bool several = main_kernel(plan).heads_of_box > 1;
  const int rows = static_cast<int>(plan.block_q), keys = static_cast<int>(plan.block_k);
  Status status = encode_packed(p.query_map, problem.query, t.query, rows, several);
  if (status.ok()) status = encode_packed(p.key_map, problem.key, t.key, keys, several);
  if (status.ok()) status = encode_packed(p.value_map, problem.value, t.value, keys, several);
  if (status.ok()) status = encode_packed(p.out_map, problem.out, t.out, kRowsOfWarp, several);
  return status;
}

Status run_packed(const Call& call) {
  const AttentionPlan& plan = call.plan;
  Sm90PackedParams p{};
  fill_forward(p, call);
  p.heads = static_cast<int32_t>(plan.heads_q);
  p.boxes = static_cast<int32_t>(packed_boxes(plan));
  p.num_tasks = static_cast<int32_t>(plan.work_items);
  p.bounds = reinterpret_cast<RowBounds*>(call.workspace + call.forward.row_bounds);
  p.rows = static_cast<int32_t>(round_up(plan.problem.query.shape[0], plan.block_q));
  const SideParams side = fill_side_params(call, p, false);
  p.ragged = side.ragged;
  if (Status status = fill_maps(p, call); !status.ok()) return status;
  return run_launches(call, p, side);
}

Status fill_maps(Sm90PackedBwdParams& p, const Call& call) {
  constexpr int kRowsOfWarp = 16;  // which gradients leave by
  const AttentionPlan& plan = call.plan;
  const AttentionProblem& problem = plan.problem;
  const AttentionTensors& t = call.tensors;
  const bool several = main_kernel(plan).heads_of_box > 1;
  const int rows = static_cast<int>(plan.block_k);
  Status status = encode_packed(p.query_map, problem.query, t.query, rows, several);
  if (status.ok()) status = encode_packed(p.key_map, problem.key, t.key, rows, several);
  if (status.ok()) status = encode_packed(p.value_map, problem.value, t.value, rows, several);
  p.grad_out_map = p.query_map;
  if (status.ok() && p.grad_out) {
    status = encode_packed(p.grad_out_map, *problem.grad_out, t.grad_out, rows, several);
  }
  const auto gradient = [&](TensorMap& map, const std::optional<TensorSpec>& spec, void* data) {
    if (status.ok() && data) status = encode_packed(map, *spec, data, kRowsOfWarp, several);
  };
  gradient(p.grad_query_map, problem.grad_query, p.grad_query);
  gradient(p.grad_key_map, problem.grad_key, p.grad_key);
  gradient(p.grad_value_map, problem.grad_value, p.grad_value);
  return status;
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
  p.query_side = packed_side(plan, false);
  p.key_side = packed_side(plan, true);
  p.stored_heads = static_cast<int32_t>(round_up(plan.heads_q, main_kernel(plan).heads_of_box));
  p.bounds_ctas = static_cast<int32_t>(packed_bounds_ctas(plan));
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
  p.heads_per_wave = static_cast<int32_t>(backward_heads_per_wave(plan, p));
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

// What no kernel with a bias can do; the mma.sync kernels can.
std::string lacks_for_bias(const AttentionPlan& plan) {
  constexpr int64_t kMostDim = 128, kMostFloatDim = 64;
  const AttentionProblem& p = plan.problem;
  const Geometry g = geometry(p);
  if (p.ragged) return "takes no packed bias";
  if (plan.len_q == 1) return "takes no bias of one query";
  // A mask may be the same for all queries: rows that come one by one may have a stride of 0.
  const TensorSpec& bias = *p.bias;
  const bool of_keys = bias.dtype == DType::kBool && bias.rank > 0 && bias.size(-1) == plan.len_k;
  if (!has_bias_of_pairs(plan) && !of_keys) return "takes a bias of all queries and keys alone";
  if (g.softcap > 0 || !(g.scale > 1e-6)) return "adds a bias before softcap and scale";
  const int64_t dim = std::max(plan.head_dim, plan.head_dim_v);
  if (dim > kMostDim) return text("takes a bias up to head dim ", kMostDim);
  const bool sums = p.grad_bias && shares_bias(plan);
  const BiasInput input = bias_input(plan);
  if (input == kFloatsByRows) {
    if (dim > kMostFloatDim) return text("takes an fp32 bias up to head dim ", kMostFloatDim);
    if (!has_neighbouring_keys(plan)) return "takes an fp32 bias of neighbouring keys alone";
    if (sums) return "does not sum the gradient of a shared fp32 bias";
  }
  if (input == kBytesByRows && !has_neighbouring_keys(plan)) {
    return "takes a mask of neighbouring keys alone";
  }
  if (input != kBiasByTma && p.grad_bias && !sums) {
    const TensorSpec& grad = *p.grad_bias;
    if ((grad.size(-1) > 1 && grad.step(-1) != 1) || grad.step(-2) > INT32_MAX) {
      return "stores the gradient of such a bias to rows of neighbouring keys alone";
    }
  }
  if (input == kBiasByTma) {
    if (copies_much_bias(plan)) return "would copy a large bias to aligned rows";
    if (bias_matrices(plan) > kMaxGridYZ) return "cannot copy so many matrices of a bias";
    if (bias_matrices(plan) > INT32_MAX / plan.len_q) return "cannot count the rows of the bias";
  }
  if (sums && !find_kernel(Role::kBiasSum, "sm90", p.query.dtype)) {
    return "has no sum of a shared bias's gradient";
  }
  return {};
}

}  // namespace

std::string lacks(const AttentionPlan& plan) {
  const AttentionProblem& p = plan.problem;
  if (p.options.dropout_p > 0) return "has no dropout";
  if (p.bias) {
    if (std::string why = lacks_for_bias(plan); !why.empty()) return why;
  }
  if (plan.len_k == 0 || plan.len_q == 0 || plan.batch == 0 || plan.heads_q == 0) {
    return "there is nothing to attend to";
  }
  const bool backward = p.pass == Pass::kBackward;
  const int64_t length = backward ? std::max(plan.len_q, plan.len_k) : plan.len_q;
  // Blocks of queries or keys; of a backward pass also of the rows that a warp rounds.
  const int64_t block = backward ? 16 : 64;
  if (!p.ragged && ceil_div(length, block) * plan.heads_q > kNoLimit / plan.batch) {
    return text("more than ", kNoLimit, " blocks cannot be counted");
  }
  const auto maybe = [](const std::optional<TensorSpec>& spec) { return spec ? &*spec : nullptr; };
  const std::pair<const char*, const TensorSpec*> tensors[] = {{"query", &p.query},
                                                               {"key", &p.key},
                                                               {"value", &p.value},
                                                               {"out", backward ? nullptr : &p.out},
                                                               {"grad_out", maybe(p.grad_out)},
                                                               {"grad_key", maybe(p.grad_key)},
                                                               {"grad_value", maybe(p.grad_value)}};
  for (const auto& [name, spec] : tensors) {
    TensorSpec four;
    if (!spec) continue;
    if (p.ragged && spec->shape[0] > INT32_MAX) return text(name, " has more than 2^31 - 1 tokens");
    const int64_t batch = p.ragged ? 1 : plan.batch;
    if (!four_dimensions(*spec, p.ragged.has_value(), four) || four.shape[0] != batch) {
      return text(name,
                  " is broadcast, or its leading dimensions do not lie densely behind each "
                  "other");
    }
  }
  return {};
}

std::string cannot_pack(const AttentionPlan& plan, const Kernel& kernel) {
  constexpr int64_t kMostTokens = kNoLimit;  // so that those of a whole tile can be counted
  constexpr int64_t kShared = 32;            // up to this head dim, heads share a box of 64 columns
  const AttentionProblem& p = plan.problem;
  if (std::max(p.query.shape[0], p.key.shape[0]) > kMostTokens) {
    return text("takes at most ", kMostTokens, " tokens");
  }
  const bool backward = p.pass == Pass::kBackward;
  const auto maybe = [](const std::optional<TensorSpec>& spec) { return spec ? &*spec : nullptr; };
  const std::pair<const char*, const TensorSpec*> tensors[] = {{"query", &p.query},
                                                               {"key", &p.key},
                                                               {"value", &p.value},
                                                               {"out", backward ? nullptr : &p.out},
                                                               {"grad_out", maybe(p.grad_out)},
                                                               {"grad_query", maybe(p.grad_query)},
                                                               {"grad_key", maybe(p.grad_key)},
                                                               {"grad_value", maybe(p.grad_value)}};
  // Of the others lacks() knows that a tensor map describes them.
  TensorSpec four;
  if (p.grad_query && !four_dimensions(*p.grad_query, true, four)) return "grad_query is broadcast";
  const int64_t dim = std::max(plan.head_dim, plan.head_dim_v);
  if (kernel.heads_of_box == 1) {
    return dim > kShared ? "" : text("made for head dims above ", kShared);
  }
  if (std::min(plan.head_dim, plan.head_dim_v) != kernel.head_dim || dim != kernel.head_dim) {
    return text("takes head dim ", kernel.head_dim, " alone");
  }
  if (plan.heads_q != plan.heads_k) return "takes no heads that share their keys";
  for (const auto& [name, spec] : tensors) {
    if (spec && spec->shape[1] > 1 && spec->stride[1] != dim) {
      return text("the heads of ", name, " do not lie side by side");
    }
  }
  return {};
}

// Whether a kernel for packed tokens can run the problem.
static bool can_pack(const AttentionPlan& plan) {
  const AttentionProblem& p = plan.problem;
  const Geometry g = geometry(p);
  if (!p.ragged || p.bias || g.softcap > 0 || !(g.scale > 0)) return false;
  const Role role = p.pass == Pass::kBackward ? Role::kBackward : Role::kForward;
  return std::any_of(kernels().begin(), kernels().end(), [&](const Kernel& k) {
    return k.packed && k.role == role && k.dtype == p.query.dtype &&
           k.head_dim >= std::max(plan.head_dim, plan.head_dim_v) && cannot_pack(plan, k).empty();
  });
}

std::string slower(const AttentionPlan& plan, const Gpu& gpu) {
  constexpr int64_t kDim = 16, kDimShort = 256, kShort = 64, kLong = 1024, kRows = 128;
  constexpr int64_t kRaggedDim = 64, kRaggedShort = 200;  // backward
  const int64_t dim = std::max(plan.head_dim, plan.head_dim_v);
  const bool ragged = plan.problem.ragged.has_value();
  const bool backward = plan.problem.pass == Pass::kBackward;
  if (many_short_sequences(plan, gpu) && can_pack(plan)) return {};
  if (dim <= kDim && !plan.problem.bias && (backward || mean_length(plan) > kDimShort)) {
    return text("head dims up to ", kDim, " have tiles of their own in sm80");
  }
  if (mean_length(plan) <= kShort) {
    return text("sequences of at most ", kShort, " tokens have smaller tiles in sm80");
  }
  if (ragged && backward && dim <= kRaggedDim && mean_length(plan) <= kRaggedShort) {
    return text("packed sequences of at most ", kRaggedShort, " tokens fill sm80's tiles better");
  }
  if (ragged || backward) return {};
  if (plan.len_q == 1) return "one query: sm80 splits its keys over SMs";
  const int pack = log2_packed_heads(plan, kRows);
  const int64_t blocks = ceil_div(plan.len_q << pack, kRows) * (plan.heads_q >> pack) * plan.batch;
  if (4 * blocks < gpu.multiprocessors && plan.len_k >= kLong) {
    return text(blocks, " blocks would leave most of ", gpu.multiprocessors,
                " SMs idle; sm80 splits the keys");
  }
  return {};
}

// A bias that stays in shared memory is to stay for several tasks. Each CTA has as many of these,
// so a mask would leave some with less to do.
static std::string cannot_keep_bias(const AttentionPlan& plan, const Kernel& k, const Gpu& gpu) {
  constexpr int64_t kFew = 8;
  const Geometry g = geometry(plan.problem);
  const int64_t rows = k.block_q / k.teams;
  const int64_t tasks = ceil_div(plan.len_q, rows) * plan.heads_q * plan.batch;
  if (std::min(bias_batches(plan), tasks / gpu.multiprocessors) < kFew) {
    return text("keeps a bias for at least ", kFew, " batches");
  }
  if (g.left >= 0 || g.right >= 0) return "a mask would leave some of its CTAs idle";
  return {};
}

// Backward, tiles of 256 keys have a smaller one beside them, for lengths that leave much of the
// last tile empty.
static std::string too_many_keys(const AttentionPlan& plan, const Kernel& k) {
  constexpr int64_t kLarge = 256, kSmaller = 192;
  const auto keys = [&](int64_t block) { return ceil_div(plan.len_k, block) * block; };
  if (k.block_k < kLarge || keys(kLarge) <= keys(kSmaller)) return {};
  return text("tiles of ", kSmaller, " keys leave less empty");
}

// Three warpgroups have 1.2 times the speed of two, on rows that fill both, once there are enough
// tiles of keys: more of these at D = 96, and where a causal mask leaves half of them.
std::string too_large(const AttentionPlan& plan, const Kernel& k, const Gpu& gpu) {
  constexpr int64_t kSmaller = 128, kShort = 1024, kMany = 8;
  if (plan.problem.pass == Pass::kBackward) return too_many_keys(plan, k);
  if (k.bias_keys > 0) return cannot_keep_bias(plan, k, gpu);
  if (k.block_q <= kSmaller) return {};
  if (k.bias_input != kNoBias && plan.batch * plan.heads_q < kMany * bias_matrices(plan)) {
    return text("tiles of ", kSmaller, " rows are faster where fewer than ", kMany,
                " share a bias");
  }
  const bool causal = geometry(plan.problem).right >= 0;
  if (mean_length(plan) <= kShort && (causal || k.head_dim > 64)) {
    return text("tiles of ", kSmaller, " rows are faster for up to ", kShort, " tokens");
  }
  const auto tokens = [&](int64_t block) {
    const int pack = log2_packed_heads(plan, block);
    const AttentionProblem& p = plan.problem;
    const int64_t mean = p.query.shape[0] / std::max<int64_t>(plan.batch, 1);
    const int64_t rows = p.ragged ? mean : plan.len_q << pack;
    return static_cast<double>(ceil_div(rows, block) * block * (plan.heads_q >> pack));
  };
  if (tokens(k.block_q) <= 1.2 * tokens(kSmaller)) return {};
  return text("tiles of ", kSmaller, " rows leave less empty");
}

void lay_out(AttentionPlan& plan, const Kernel& kernel, const Gpu& gpu) {
  if (plan.problem.pass == Pass::kForward) {
    lay_out_forward(plan, kernel, gpu);
  } else {
    lay_out_backward(plan, kernel, gpu);
  }
}

Status run(const Call& call) {
  const bool packed = main_kernel(call.plan).packed;
  if (call.plan.problem.pass == Pass::kBackward) {
    return packed ? run_packed_backward(call) : run_backward(call);
  }
  return packed ? run_packed(call) : run_forward(call);
}

const Kernel* find_chunk_kernel(const AttentionPlan& plan) {
  const AttentionProblem& p = plan.problem;
  const Geometry g = geometry(p);
  TensorSpec four;
  if (p.key.dtype != p.query.dtype || g.softcap > 0 || !(g.scale > 0) || p.key.size(0) == 0 ||
      !four_dimensions(p.query, true, four) || !four_dimensions(p.out, true, four)) {
    return nullptr;
  }
  for (const Kernel& k : kernels()) {
    if (k.role == Role::kPagedChunk && k.dtype == p.query.dtype &&
        k.head_dim >= std::max(plan.head_dim, plan.head_dim_v)) {
      return &k;
    }
  }
  return nullptr;
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
  if (p.box_keys < kLeastBoxKeys) p.box_keys = 0;
  const int columns = box_columns(kernel);
  const auto queries = [&](TensorMap& map, const TensorSpec& spec, const void* data, int64_t rows) {
    return encode_queries(map, spec, data, rows, columns, 0, true);
  };
  const auto keys = [&](TensorMap& map, const TensorSpec& spec, const void* data) {
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

// Number of tasks of a slice, and of tiles of dQ that the kernel writes itself.
void enter_slice(Sm90BwdParams& p, const Call& call, const Slice& slice) {
  const AttentionPlan& plan = call.plan;
  enter_slice(static_cast<AttentionBwdParams&>(p), call, slice);
  p.num_tasks = p.key_blocks * p.heads * static_cast<int32_t>(slice.batch);
  if (p.stores_dq || (p.dq_accum && main_kernel(plan).converts_dq)) {
    const Grid rows = query_grid(plan);
    p.converted_tiles = static_cast<int32_t>(rows[0] * rows[1] * slice.batch);
  }
}

}  // namespace flashmoe::cuda
