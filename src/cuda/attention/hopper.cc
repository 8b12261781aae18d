#include "cuda/attention/hopper.h"

#include <algorithm>
#include <numeric>

#include "attention/problem.h"
#include "core/text.h"
#include "cuda/attention/backend.h"
#include "cuda/attention/run.h"
#include "cuda/attention/sm90/params.h"
#include "cuda/runtime/tensor_map.h"

namespace flashmoe::cuda {
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
  const Result<CUtensorMap> encoded = encode_tensor_map(tensor, data, box);
  if (!encoded.ok()) return encoded.status();
  std::copy(std::begin(encoded.value().opaque), std::end(encoded.value().opaque), map.opaque);
  return {};
}
// The map of a tensor, copied `rows` rows of one head at a time.
Status encode_keys(TensorMap& map, const TensorSpec& spec, const void* data, int64_t rows,
                   bool ragged) {
  TensorSpec four;
  if (!four_dimensions(spec, ragged, four)) return invalid("a tensor that no tensor map describes");
  const int box[] = {1, 1, static_cast<int>(rows), 64};
  return encode(map, four, data, box);
}
// The same as (batch, heads, length, 2^pack, D): see Sm90FwdParams.
Status encode_queries(TensorMap& map, const TensorSpec& spec, const void* data, int64_t rows,
                      int pack, bool ragged) {
  TensorSpec four;
  if (!four_dimensions(spec, ragged, four)) return invalid("a tensor that no tensor map describes");
  TensorSpec five;
  five.dtype = four.dtype;
  five.rank = 5;
  const int64_t heads = int64_t{1} << pack;
  five.shape = {four.shape[0], four.shape[1] / heads, four.shape[2], heads, four.shape[3]};
  five.stride = {four.stride[0], four.stride[1] * heads, four.stride[2], four.stride[1],
                 four.stride[3]};
  const int box[] = {1, 1, static_cast<int>(rows / heads), static_cast<int>(heads), 64};
  return encode(map, five, data, box);
}

// What is to stay in the second-level cache, which has room for the rest as well.
constexpr int64_t kCachedBytes = 32 << 20;

// Heads whose blocks are mixed. Where all blocks see as many keys, none: those of a head follow
// each other and share its keys. Else each CTA goes forth and back through the blocks, the longest
// first, and has as much as the others after `unit` heads. These are mixed, or a multiple of them,
// as far as the second-level cache holds their keys and values and has room for the rest; if it
// does not, none are, and longer and shorter blocks come out even over all heads. But where these
// are no multiple of `unit`, nearly, all are mixed: that comes out even, and where there are few
// heads many CTAs read the same keys at the same time.
int64_t heads_per_wave(const AttentionPlan& plan, const Sm90FwdParams& p) {
  if (p.right >= kNoLimit) return 1;
  const int64_t bytes = 2 * plan.len_k * (plan.head_dim + plan.head_dim_v);
  const int64_t cached = std::max<int64_t>(kCachedBytes / bytes, 1) * p.group;
  const int64_t both_ways = 2 * int64_t{plan.grid[0]};
  const int64_t unit = both_ways / std::gcd(both_ways, int64_t{p.query_blocks});
  const int64_t heads = int64_t{p.heads} * p.batch;
  const int64_t odd = std::min(heads % unit, unit - heads % unit);
  if (8 * odd > heads) return std::max<int64_t>(heads, 1);
  return unit > cached ? 1 : cached / unit * unit;
}

// Heads whose blocks of keys are mixed: as far as the second-level cache holds Q, dO and sums of dQ
// of them, for each block of keys reads and adds to all of these; and as all CTAs are busy with at
// once. Where sums are deterministic no fewer, or blocks of a head would wait for each other. Else
// as many as the CTAs are busy with twice (nearly, or each would get the same blocks of every
// head); or once, so that the kernel that rounds dQ itself can soon begin.
int64_t key_heads_per_wave(const AttentionPlan& plan, const Sm90BwdParams& p) {
  const int64_t bytes =
      p.group * plan.len_q * (2 * plan.head_dim + 2 * plan.head_dim_v + 4 * p.dim);
  const int64_t cached = kCachedBytes / std::max<int64_t>(bytes, 1);
  const int64_t clusters = plan.grid[0] / find_kernel(plan.kernel)->cluster;
  const int64_t busy = ceil_div(clusters, p.key_blocks);
  const bool early = p.dq_accum && !has_dq_kernel(plan);
  const int64_t twice = ceil_div(2 * clusters * 31 / 32, p.key_blocks);
  const int64_t most = early ? busy : p.deterministic ? cached : std::min(cached, twice);
  return std::min(std::max(most, busy), plan.heads_k * plan.batch);
}

// Of a ragged batch: the list of its blocks, and how many were given out.
int64_t list_bytes(const AttentionPlan& plan) {
  const int64_t slots = ragged_slots(plan.problem.query.shape[0], plan.block_q, plan.batch);
  return ceil_div(slots * static_cast<int64_t>(sizeof(RaggedBlock)), 256) * 256;
}

}  // namespace

std::string missing_on_hopper(const AttentionPlan& plan) {
  const AttentionProblem& p = plan.problem;
  if (p.device.compute_capability != 90) {
    return text("is for sm_90 alone, the device is sm_", p.device.compute_capability);
  }
  if (p.bias) return "takes no bias; the sm80 family does";
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

int hopper_pack(const AttentionPlan& plan, int64_t block_q) {
  if (plan.problem.ragged) return 0;
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

std::string slower_on_hopper(const AttentionPlan& plan, int64_t multiprocessors) {
  constexpr int64_t kDim = 32, kShort = 64, kLong = 1024, kRows = 128;
  constexpr int64_t kRaggedDim = 64, kRaggedShort = 200;  // backward
  const int64_t dim = std::max(plan.head_dim, plan.head_dim_v);
  const bool ragged = plan.problem.ragged.has_value();
  const bool backward = plan.problem.pass == Pass::kBackward;
  if (dim <= kDim) {
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
  const int pack = hopper_pack(plan, kRows);
  const int64_t blocks = ceil_div(plan.len_q << pack, kRows) * (plan.heads_q >> pack) * plan.batch;
  if (4 * blocks < multiprocessors && plan.len_k >= kLong) {
    return text(blocks, " blocks would leave most of ", multiprocessors,
                " SMs idle; sm80 splits the keys");
  }
  return {};
}

std::string too_large_on_hopper(const AttentionPlan& plan, const Kernel& k) {
  constexpr int64_t kSmaller = 128, kShort = 1024;
  if (k.block_q <= kSmaller) return {};
  const bool causal = geometry(plan.problem).right >= 0;
  if (mean_length(plan) <= kShort && (causal || k.head_dim > 64)) {
    return text("tiles of ", kSmaller, " rows are faster for up to ", kShort, " tokens");
  }
  const auto tokens = [&](int64_t block) {
    const int pack = hopper_pack(plan, block);
    const AttentionProblem& p = plan.problem;
    const int64_t mean = p.query.shape[0] / std::max<int64_t>(plan.batch, 1);
    const int64_t rows = p.ragged ? mean : plan.len_q << pack;
    return static_cast<double>(ceil_div(rows, block) * block * (plan.heads_q >> pack));
  };
  if (tokens(k.block_q) <= 1.2 * tokens(kSmaller)) return {};
  return text("tiles of ", kSmaller, " rows leave less empty");
}

void cut_hopper_forward(AttentionPlan& plan, int64_t multiprocessors) {
  const AttentionProblem& p = plan.problem;
  const int pack = hopper_pack(plan, plan.block_q);
  plan.work_items =
      ceil_div(plan.len_q << pack, plan.block_q) * (plan.heads_q >> pack) * plan.batch;
  if (p.ragged) {
    plan.work_items = ragged_slots(p.query.shape[0], plan.block_q, plan.batch) * plan.heads_q;
    plan.workspace_bytes = static_cast<size_t>(list_bytes(plan) + 256);
  }
  plan.grid[0] = static_cast<uint32_t>(std::min(plan.work_items, multiprocessors));
  plan.grid[1] = plan.grid[2] = 1;
}

Status run_hopper_forward(const AttentionPlan& plan, const AttentionTensors& t, void* workspace,
                          const Launch& launch) {
  const AttentionProblem& problem = plan.problem;
  const Geometry g = geometry(problem);
  const bool ragged = problem.ragged.has_value();
  Sm90FwdParams p{};
  fill_problem(p, plan, t, g);
  fill_sign(p, g);
  merge_batch(p, {p.query_strides.batch, p.key_strides.batch, p.value_strides.batch,
                  p.out_strides.batch, p.lse_strides.batch, p.key_lengths_strides});
  p.pack = hopper_pack(plan, plan.block_q);
  p.heads = static_cast<int32_t>(plan.heads_q >> p.pack);
  p.group >>= p.pack;
  p.query_blocks = static_cast<int32_t>(ceil_div(plan.len_q << p.pack, plan.block_q));
  p.num_tasks = static_cast<int32_t>(plan.work_items);
  p.heads_per_wave = static_cast<int32_t>(heads_per_wave(plan, p));
  Status status = encode_queries(p.query_map, problem.query, t.query, plan.block_q, p.pack, ragged);
  if (status.ok()) status = encode_queries(p.out_map, problem.out, t.out, 64, p.pack, ragged);
  if (status.ok()) status = encode_keys(p.key_map, problem.key, t.key, plan.block_k, ragged);
  if (status.ok()) status = encode_keys(p.value_map, problem.value, t.value, plan.block_k, ragged);
  if (status.ok() && ragged) {
    auto* blocks = static_cast<RaggedBlock*>(workspace);
    p.blocks = blocks;
    p.tile_counter = reinterpret_cast<int32_t*>(static_cast<char*>(workspace) + list_bytes(plan));
    const int64_t slots = ragged_slots(problem.query.shape[0], plan.block_q, plan.batch);
    status = launch_ragged(plan, t, launch,
                           {{.blocks = blocks,
                             .slots = static_cast<int32_t>(slots),
                             .block = static_cast<int32_t>(plan.block_q),
                             .of_keys = 0,
                             .descending = p.right < kNoLimit}},
                           p.tile_counter);
  }
  if (!status.ok() || plan.work_items == 0) return status;
  return launch_part(plan.kernel, {plan.grid[0], 1, 1}, plan, launch, p);
}

void cut_hopper_backward(AttentionPlan& plan, int64_t multiprocessors) {
  const AttentionProblem& p = plan.problem;
  const int64_t blocks = p.ragged ? ragged_slots(p.key.shape[0], plan.block_k, plan.batch)
                                  : ceil_div(plan.len_k, plan.block_k) * plan.batch;
  plan.work_items = blocks * plan.heads_k;
  const int64_t cluster = find_kernel(plan.kernel)->cluster;
  const int64_t clusters = std::max<int64_t>(multiprocessors / cluster, 1);
  plan.grid[0] = static_cast<uint32_t>(cluster * std::min(plan.work_items, clusters));
  plan.grid[1] = plan.grid[2] = 1;
}

Status fill_hopper_backward(Sm90BwdParams& p, const AttentionPlan& plan,
                            const AttentionTensors& t) {
  const AttentionProblem& problem = plan.problem;
  const bool ragged = problem.ragged.has_value();
  p.key_blocks =
      static_cast<int32_t>(ragged ? ragged_slots(problem.key.shape[0], plan.block_k, plan.batch)
                                  : ceil_div(plan.len_k, plan.block_k));
  p.heads_per_wave = static_cast<int32_t>(key_heads_per_wave(plan, p));
  const auto beside = [](const Strides& strides) { return strides.head < strides.row; };
  const bool all = beside(p.out_strides) && beside(p.query_strides) &&
                   (!p.grad_out || beside(p.grad_out_strides));
  while (all && p.log2_adjacent_heads < 3 &&
         p.heads * p.group % (2 << p.log2_adjacent_heads) == 0) {
    ++p.log2_adjacent_heads;
  }
  // As many rows for a CTA as leave enough of them: finding out where they are takes a while.
  p.preprocess_rows = p.block_q;
  const auto prepares = [&](int64_t rows) {
    return ceil_div(plan.len_q, rows) * plan.heads_q * plan.batch;
  };
  while (p.preprocess_rows < 4 * p.block_q && prepares(2 * p.preprocess_rows) >= 4 * plan.grid[0]) {
    p.preprocess_rows *= 2;
  }
  p.tokens_q = problem.query.shape[0];
  const auto map = [&](TensorMap& map, const TensorSpec& spec, const void* data, int64_t rows) {
    return encode_keys(map, spec, data, rows, ragged);
  };
  // Each CTA of a cluster has its share copied.
  const int64_t cluster = find_kernel(plan.kernel)->cluster;
  const int64_t rows = plan.block_q / cluster, keys = plan.block_k / cluster;
  Status status = map(p.query_map, problem.query, t.query, rows);
  if (status.ok()) status = map(p.key_map, problem.key, t.key, keys);
  if (status.ok()) status = map(p.value_map, problem.value, t.value, keys);
  p.grad_out_map = p.query_map;
  if (status.ok() && p.grad_out) {
    status = map(p.grad_out_map, *problem.grad_out, t.grad_out, rows);
  }
  // Gradients by each warpgroup.
  if (status.ok() && p.grad_key) {
    status = map(p.grad_key_map, *problem.grad_key, t.grad_key, 64);
  }
  if (status.ok() && p.grad_value) {
    status = map(p.grad_value_map, *problem.grad_value, t.grad_value, 64);
  }
  return status;
}

}  // namespace flashmoe::cuda
