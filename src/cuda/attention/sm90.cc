#include "cuda/attention/sm90.h"

#include <algorithm>

#include "core/numbers.h"
#include "core/text.h"
#include "cuda/attention/bias_plan.h"
#include "cuda/attention/lay_out.h"
#include "cuda/attention/planner.h"
#include "cuda/attention/sm90/tiles.h"
#include "cuda/attention/sm90_maps.h"
#include "cuda/attention/sm90_tasks.h"
#include "cuda/attention/tile_choice.h"
#include "cuda/attention/workspace.h"

namespace flashmoe::cuda::sm90 {

namespace {

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
  plan.work_items = ceil_div(packed_tokens(plan, false), plan.block_q) * packed_boxes(plan);
  const int64_t shares = std::clamp<int64_t>(ceil_div(plan.batch + 1, kSequencesOfOne), 1, kMost);
  const Kernel* bounds = find_kernel(Role::kRowBounds, plan.family, p.query.dtype);
  plan.launches.push_back(once(*bounds, grid_of(shares), Given::kCall));
  add_packed_launch(plan, kernel, gpu);
  plan.workspace_bytes = forward_workspace(plan).bytes;
}

void lay_out_packed_backward(AttentionPlan& plan, const Kernel& kernel, const Gpu& gpu) {
  // CTAs of the kernel before that find LSE and delta: rows that each has at least, and how many
  // there are on an SM, one after the other, so that those that end early leave room for more.
  constexpr int64_t kRowsOfOne = 2048, kOfAnSm = 4;
  const AttentionProblem& p = plan.problem;
  const auto q = packed_side(plan, false), k = packed_side(plan, true);
  plan.work_items = int64_t{q.tiles} * q.boxes + int64_t{k.tiles} * k.boxes;
  const int64_t of_rows =
      std::clamp<int64_t>(ceil_div(packed_tokens(plan, false) * plan.heads_q, kRowsOfOne), 1,
                          kOfAnSm * gpu.multiprocessors);
  const Kernel* preprocess = find_kernel(Role::kPackedPreprocess, plan.family, p.query.dtype);
  plan.launches.push_back(
      once(*preprocess, grid_of(2 * packed_bounds_ctas(plan) + of_rows), Given::kCall));
  add_packed_launch(plan, kernel, gpu);
  add_sink_sum(plan);
  plan.workspace_bytes = backward_workspace(plan, nullptr).bytes;
}

// A cluster for each head.
void lay_out_whole_backward(AttentionPlan& plan, const Kernel& kernel) {
  const int64_t ctas = ceil_div(plan.len_k, kernel.key_box);
  plan.work_items = ctas * plan.heads_k * plan.batch;
  AttentionLaunch main = once(kernel, grid_of(plan.work_items), Given::kCall);
  main.cluster = static_cast<uint32_t>(ctas);
  main.overlaps = true;
  plan.launches.push_back(main);
  plan.workspace_bytes = backward_workspace(plan, nullptr).bytes;
}

// Whether a dense pass counts its tasks: where a mask makes long ones and short ones. Of short
// sequences, and above head dim 128, a list that CTAs go forth and back through is as even and
// shares more of the keys (docs/log/sm90.md). Of few tasks it is more even: with a counter a CTA
// takes two ahead, whatever others are at. (H200: beside the peers calls of few tasks, causal, went
// from 0.88 to 0.96 with a counter to 0.99 to 1.14. How few is a model's word: with 8 a CTA, 32
// heads at 4,096, 1.08 of the mean with a counter and 1.03 without; from 15 on at most 1.03.)
bool counts_dense_tasks(const AttentionPlan& plan, const Kernel& kernel, const Gpu& gpu) {
  constexpr int64_t kLeastTasks = 12;  // of a CTA
  const int64_t least_length = kernel.head_dim <= 64 ? 512 : 1024;
  const AttentionProblem& p = plan.problem;
  return !p.ragged && !p.bias && geometry(p).right >= 0 && plan.len_q >= least_length &&
         kernel.head_dim >= 64 && kernel.head_dim <= 128 &&
         plan.work_items >= kLeastTasks * gpu.multiprocessors;
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
  main.overlaps = true;  // at least launching it takes place while the kernel ahead runs
  if (counts_dense_tasks(plan, kernel, gpu)) {
    const Kernel* counter = find_kernel(Role::kTaskCounter, plan.family, p.query.dtype);
    plan.launches.push_back(once(*counter, grid_of(1), Given::kCall));
    plan.launches.back().overlaps = true;
  }
  plan.launches.push_back(main);
  plan.workspace_bytes = forward_workspace(plan).bytes;
}

void lay_out_backward(AttentionPlan& plan, const Kernel& kernel, const Gpu& gpu) {
  const AttentionProblem& p = plan.problem;
  if (kernel.packed) return lay_out_packed_backward(plan, kernel, gpu);
  if (kernel.whole) return lay_out_whole_backward(plan, kernel);
  const Kernel* bias_sum = find_bias_sum(plan);
  cuda::lay_out_backward(plan, gpu, bias_sum);
  const int64_t clusters = std::max<int64_t>(gpu.multiprocessors / kernel.cluster, 1);
  choose_splits(plan, clusters);
  plan.work_items = key_tiles(plan) + plan.split_tiles * (plan.splits - 1);
  plan.workspace_bytes = backward_workspace(plan, bias_sum).bytes;
  const int64_t ctas = kernel.cluster * std::min(plan.work_items, clusters);

  add_first_launches(plan, bias_sum);
  Grid rows = query_grid(plan);
  if (!p.ragged) {
    const int64_t whole = round_up(plan.len_q, plan.block_q);
    rows =
        grid_of(ceil_div(whole, preprocess_rows(plan, ctas)) * plan.heads_q, 1, slice_batch(plan));
  }
  const DType dtype = p.query.dtype;
  AttentionLaunch preprocess = per_slice(*find_kernel(Role::kPreprocess, plan.family, dtype), rows);
  preprocess.overlaps = true;
  plan.launches.push_back(preprocess);
  AttentionLaunch main = per_slice(kernel, grid_of(ctas));
  main.overlaps = true;
  plan.launches.push_back(main);
  if (has_dq_kernel(plan)) {
    AttentionLaunch dq =
        per_slice(*find_kernel(Role::kBackwardDq, plan.family, dtype), query_grid(plan));
    dq.overlaps = true;
    const auto parts = static_cast<uint32_t>(ceil_div(plan.block_q, 64));  // see convert_dq_tile()
    dq.threads *= parts;
    dq.shared_bytes *= parts;
    plan.launches.push_back(dq);
  }
  if (plan.splits > 1) {
    const int64_t columns = ceil_div(plan.head_dim, 64) + ceil_div(plan.head_dim_v, 64);
    const Grid parts = grid_of(columns * 2 * plan.split_tiles);
    AttentionLaunch sum =
        once(*find_kernel(Role::kKeySum, plan.family, dtype), parts, Given::kCall);
    sum.overlaps = true;
    plan.launches.push_back(sum);
  }
  if (bias_sum) add_bias_sum(plan, *bias_sum);
  add_sink_sum(plan);
}

// What the kernels for packed tokens, the only ones with a packed bias, cannot do.
std::string lacks_for_packed_bias(const AttentionPlan& plan) {
  constexpr int64_t kMostDim = 64;
  const AttentionProblem& p = plan.problem;
  const Geometry g = geometry(p);
  const TensorSpec& bias = *p.bias;  // (pairs, heads)
  if (bias.dtype != p.query.dtype) return "takes a packed bias in the dtype of the query alone";
  if (shares_bias(plan)) return "takes a packed bias with numbers of its own for each head";
  if (g.left >= 0 || g.right >= 0) return "takes a packed bias without a mask";
  if (g.softcap > 0 || !(g.scale > 1e-6)) return "adds a bias before softcap and scale";
  if (plan.heads_q != plan.heads_k) return "takes a packed bias of heads with keys of their own";
  if (std::max(plan.head_dim, plan.head_dim_v) > kMostDim) {
    return text("takes a packed bias up to head dim ", kMostDim);
  }
  if (bias.shape[0] > INT32_MAX || bias.stride[0] > INT32_MAX) {
    return "takes a packed bias of less than 2^31 pairs, less than 2^31 numbers apart";
  }
  return {};
}

// What no kernel with a bias can do; the mma.sync kernels can.
std::string lacks_for_bias(const AttentionPlan& plan) {
  constexpr int64_t kMostDim = 128, kMostFloatDim = 64;
  const AttentionProblem& p = plan.problem;
  const Geometry g = geometry(p);
  if (p.ragged) return lacks_for_packed_bias(plan);
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

// What a kernel cannot run in which a cluster has all of a head.
static std::string lacks_for_whole(const AttentionPlan& plan, const Kernel& kernel) {
  const AttentionProblem& p = plan.problem;
  const int64_t most_queries = Sm90WholeBwdTile::kStages * kernel.block_q;
  if (p.ragged) return "takes dense batches alone";
  if (plan.heads_q != plan.heads_k) return "takes no heads that share their keys";
  if (plan.len_q > most_queries || plan.len_k > kernel.block_k) {
    return text("takes at most ", most_queries, " queries and ", kernel.block_k, " keys");
  }
  TensorSpec four;
  if (!four_dimensions(p.out, false, four)) return "out is broadcast";
  // Which is found from lse and delta of every row, and they never leave the kernel.
  if (p.grad_sinks) return "gives no gradient of the sinks";
  return {};
}

std::string cannot_serve(const AttentionPlan& plan, const Kernel& kernel) {
  if (kernel.whole) return lacks_for_whole(plan, kernel);
  constexpr int64_t kMostTokens = kNoLimit;  // so that those of a whole tile can be counted
  constexpr int64_t kShared = 32;            // up to this head dim, heads share a box of 64 columns
  const AttentionProblem& p = plan.problem;
  if (std::max(packed_tokens(plan, false), packed_tokens(plan, true)) > kMostTokens) {
    return text("takes at most ", kMostTokens, " tokens");
  }
  if (p.key_lengths) return "takes no key lengths";
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
  if (p.grad_query && !four_dimensions(*p.grad_query, p.ragged.has_value(), four)) {
    return "grad_query is broadcast";
  }
  const int64_t dim = std::max(plan.head_dim, plan.head_dim_v);
  if (kernel.heads_of_box == 1) {
    return dim > kShared ? "" : text("made for head dims above ", kShared);
  }
  if (std::min(plan.head_dim, plan.head_dim_v) != kernel.head_dim || dim != kernel.head_dim) {
    return text("takes head dim ", kernel.head_dim, " alone");
  }
  if (plan.heads_q != plan.heads_k) return "takes no heads that share their keys";
  for (const auto& [name, spec] : tensors) {
    const int heads = p.ragged ? 1 : spec ? spec->rank - 3 : 0;
    if (spec && spec->shape[heads] > 1 && spec->stride[heads] != dim) {
      return text("the heads of ", name, " do not lie side by side");
    }
  }
  return {};
}

// Why tiles that have a part of a head each, one after the other on an SM, are faster than CTAs
// that come with all of it. H200, bf16, graphs of the backward pass, us of whole heads and in tiles
// of 128 x 128: 64 heads of 64 at 256 tokens 12.8 and 27, 1,056 195 and 209, at 128 tokens 8.4
// and 19.0, 70 and 106; of 32 at 256 tokens 64 heads 9.9 and 22.6, 520 79.6 and 86.8, 1,056 156 and
// 152; of 16 10.2 and 22.1, 75.8 and 80.7, 153.9 and 146.2.
static std::string too_many_heads(const AttentionPlan& plan, const Kernel& kernel, const Gpu& gpu) {
  constexpr int64_t kSmallDim = 32, kRounds = 8;
  const int64_t ctas = ceil_div(plan.len_k, kernel.key_box);
  const int64_t all = ctas * plan.heads_k * plan.batch;
  if (kernel.head_dim > kSmallDim || ctas == 1 || all <= kRounds * gpu.multiprocessors) return {};
  return text("tiles of a part of a head are faster for more than ", kRounds,
              " blocks an SM at head dims up to ", kSmallDim);
}
// Whether such a kernel runs the problem.
static bool runs_whole(const AttentionPlan& plan, const Gpu& gpu) {
  const AttentionProblem& p = plan.problem;
  const Geometry g = geometry(p);
  if (p.pass != Pass::kBackward || p.bias || g.softcap > 0 || !(g.scale > 0)) return false;
  const auto found = std::find_if(kernels().begin(), kernels().end(), [&](const Kernel& k) {
    return k.whole && k.dtype == p.query.dtype &&
           k.head_dim >= std::max(plan.head_dim, plan.head_dim_v);
  });
  return found != kernels().end() && lacks_for_whole(plan, *found).empty() &&
         too_many_heads(plan, *found, gpu).empty();
}

// Whether a kernel for packed tokens can run the problem.
static bool can_pack(const AttentionPlan& plan) {
  const AttentionProblem& p = plan.problem;
  const Geometry g = geometry(p);
  if ((p.bias && !p.ragged) || g.softcap > 0 || !(g.scale > 0)) return false;
  const bool backward = p.pass == Pass::kBackward;
  const Role role = p.bias ? (backward ? Role::kBackwardBias : Role::kForwardBias)
                           : (backward ? Role::kBackward : Role::kForward);
  return std::any_of(kernels().begin(), kernels().end(), [&](const Kernel& k) {
    return k.packed && k.role == role && k.dtype == p.query.dtype &&
           k.head_dim >= std::max(plan.head_dim, plan.head_dim_v) && cannot_serve(plan, k).empty();
  });
}

std::string slower(const AttentionPlan& plan, const Gpu& gpu) {
  constexpr int64_t kDim = 16, kDimShort = 256, kShort = 64, kLong = 1024, kRows = 128;
  constexpr int64_t kRaggedDim = 64, kRaggedShort = 200;  // backward
  const int64_t dim = std::max(plan.head_dim, plan.head_dim_v);
  const bool ragged = plan.problem.ragged.has_value();
  const bool backward = plan.problem.pass == Pass::kBackward;
  if (many_packed_sequences(plan, gpu) && can_pack(plan)) return {};
  if (runs_whole(plan, gpu)) return {};
  if (ragged && plan.problem.bias) return "its kernels with a packed bias are for short sequences";
  if (dim <= kDim && !plan.problem.bias && (backward || mean_length(plan) > kDimShort)) {
    return text("head dims up to ", kDim, " have tiles of their own in sm80");
  }
  // A few sequences, or large heads, are faster one tile each: us on an H200, bf16, of sm80 and
  // here: (2, 8, 64, 64) 18.5 and 13.5, (2, 8, 64, 32) 15.0 and 12.3, (16, 8, 64, 32) 17.2
  // and 17.7, (32, 8, 64, 64) 24.5 and 26.3, (32, 8, 64, 128) 44 and 30. (More sequences of large
  // heads were not measured.)
  const bool few = 2 * plan.batch * plan.heads_k < gpu.multiprocessors;
  const bool one_tile = backward && !ragged && !plan.problem.bias && (few || dim > kRaggedDim);
  if (mean_length(plan) <= kShort && !one_tile) {
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

// Rows that a backward pass computes of one head: those that see any of a tile's keys, in whole
// tiles, of all tiles of keys. Of a ragged batch, as if sequences were equal.
static int64_t computed_rows(const AttentionPlan& plan, const Kernel& k, int64_t block_q) {
  const AttentionProblem& p = plan.problem;
  const Geometry g = geometry(p);
  const int64_t sequences = std::max<int64_t>(plan.batch, 1);
  const int64_t len_q = p.ragged ? ceil_div(p.query.shape[0], sequences) : plan.len_q;
  const int64_t len_k = p.ragged ? ceil_div(p.key.shape[0], sequences) : plan.len_k;
  const int64_t left = window_limit(g.left), right = window_limit(g.right);
  if (left == kNoLimit && right == kNoLimit) {
    return ceil_div(len_k, k.block_k) * ceil_div(len_q, block_q) * block_q;
  }
  int64_t rows = 0;
  for (int64_t key = 0; key < len_k; key += k.block_k) {
    const int64_t first_query = key - (len_k - len_q);
    const int64_t last_query = std::min(first_query + k.block_k, len_q) - 1;
    const int64_t begin = std::max<int64_t>(first_query - right, 0);
    const int64_t last = std::min(last_query + left, len_q - 1);
    if (begin <= last) rows += (last / block_q - begin / block_q + 1) * block_q;
  }
  return rows;
}

// Backward, tiles of 80 queries take 0.98 of the time of those of 64 for a row, at D = 96 0.95.
static std::string too_many_queries(const AttentionPlan& plan, const Kernel& k) {
  constexpr int64_t kSmaller = 64;
  const int64_t rows = computed_rows(plan, k, k.block_q), fewer = computed_rows(plan, k, kSmaller);
  if (rows <= 1.02 * fewer) return {};
  return text("computes ", rows, " rows of queries of a head, tiles of ", kSmaller, " compute ",
              fewer);
}

// Rows that the busiest CTA of a forward pass computes with such tiles. With a bias or of a ragged
// batch, as if tasks were shared out evenly.
static double busiest_rows(const AttentionPlan& plan, int64_t block, const Gpu& gpu) {
  const AttentionProblem& p = plan.problem;
  const int pack = log2_packed_heads(plan, block);
  const int64_t mean = p.query.shape[0] / std::max<int64_t>(plan.batch, 1);
  const int64_t rows = p.ragged ? mean : plan.len_q << pack;
  const int64_t tasks = ceil_div(rows, block) * (plan.heads_q >> pack) * plan.batch;
  if (p.ragged || p.bias) return static_cast<double>(tasks * block);
  return static_cast<double>(ceil_div(tasks, gpu.multiprocessors) * block);
}

// Three warpgroups have 1.2 times the speed of two, on rows that fill both, once there are enough
// tiles of keys: more of these at D = 96. Under a causal mask 1.15 times, having more that is
// hidden in their tiles: a choice, for there the two are near each other. (H200, bf16, D = 64, us
// with 192 and 128 rows: 12 heads at 512, batch 4, 17.1 and 14.6, 16 heads at 1,024, batch 4 39 and
// 42; causal 12 heads at 512, batch 4, 11.3 and 10.7; and by the rule with 192, 32 heads at 512,
// batch 32 140 and 144, at 1,024, batch 16 202 both, 16 heads there 108 and 100, at 2,048 and 4,096
// 153 and 160, 277 and 282, at 4,096 alone 73 and 70.)
std::string too_large(const AttentionPlan& plan, const Kernel& k, const Gpu& gpu) {
  constexpr int64_t kSmaller = 128, kShort = 1024, kMany = 8;
  if (plan.problem.pass == Pass::kBackward) {
    if (k.whole) return too_many_heads(plan, k, gpu);
    return transposes_dq(k.block_q) ? too_many_queries(plan, k) : too_many_keys(plan, k);
  }
  if (k.bias_keys > 0) return cannot_keep_bias(plan, k, gpu);
  if (k.block_q <= kSmaller) return {};
  if (k.bias_input != kNoBias && plan.batch * plan.heads_q < kMany * bias_matrices(plan)) {
    return text("tiles of ", kSmaller, " rows are faster where fewer than ", kMany,
                " share a bias");
  }
  if (mean_length(plan) <= kShort && k.head_dim > 64) {
    return text("tiles of ", kSmaller, " rows are faster for up to ", kShort, " tokens");
  }
  const AttentionProblem& p = plan.problem;
  const bool causal = !p.bias && !p.ragged && geometry(p).right >= 0;
  const double gain = causal ? 1.15 : 1.2;
  if (busiest_rows(plan, k.block_q, gpu) <= gain * busiest_rows(plan, kSmaller, gpu)) return {};
  return text("tiles of ", kSmaller, " rows leave less empty, or fewer SMs without work");
}

void lay_out(AttentionPlan& plan, const Kernel& kernel, const Gpu& gpu) {
  if (plan.problem.pass == Pass::kForward) {
    lay_out_forward(plan, kernel, gpu);
  } else {
    lay_out_backward(plan, kernel, gpu);
  }
}

}  // namespace flashmoe::cuda::sm90
