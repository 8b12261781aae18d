// The planner's CUDA half: which kernel a checked problem gets, and how it is cut.
#include <cstdlib>
#include <cstring>
#include <optional>

#include "attention/problem.h"
#include "core/text.h"
#include "cuda/attention/backend.h"
#include "cuda/attention/catalogue.h"
#include "cuda/attention/hopper.h"
#include "cuda/attention/params.h"
#include "cuda/attention/sm90/tiles.h"
#include "cuda/runtime/chips.h"

namespace flashmoe::cuda {
namespace {

constexpr int64_t kMaxLength = kNoLimit - 1;

const char* environment(const char* name) {
  const char* value = std::getenv(name);
  return value && *value ? value : nullptr;
}

std::string chip_name(int compute_capability) { return text("sm_", compute_capability); }

struct Family {
  const char* name;
  int from;  // compute capability
};
// Best first.
constexpr Family kFamilies[] = {{"sm90", 90}, {"sm80", 80}, {"sm75", 75}};

// What no kernel of this build can do of the problem; empty when there is nothing.
std::string missing_option(const AttentionPlan& plan) {
  const AttentionProblem& p = plan.problem;
  if (p.query.dtype != DType::kFloat16 && p.query.dtype != DType::kBFloat16) {
    return text("query is ", dtype_name(p.query.dtype), "; CUDA kernels take float16 and bfloat16");
  }
  if (plan.len_q > kMaxLength || plan.len_k > kMaxLength) {
    return text("sequences are longer than ", kMaxLength);
  }
  if (plan.batch > INT32_MAX - 1) return text("the batch is larger than ", INT32_MAX - 1);
  const auto maybe = [](const std::optional<TensorSpec>& spec) { return spec ? &*spec : nullptr; };
  const std::pair<const char*, const TensorSpec*> rows[] = {
      {"query", &p.query},
      {"key", &p.key},
      {"value", &p.value},
      {"out", &p.out},
      {"grad_out", maybe(p.grad_out)},
      {"grad_query", maybe(p.grad_query)},
      {"grad_key", maybe(p.grad_key)},
      {"grad_value", maybe(p.grad_value)},
  };
  for (const auto& [name, spec] : rows) {
    if (!spec || in_place(*spec)) continue;
    return text(name,
                " cannot be addressed where it lies (its last dimension must have stride 1, "
                "its rows must be 16-byte aligned); call .contiguous() on it");
  }
  return {};
}

// FLASHMOE_TILE=128x64: queries x keys.
struct ForcedTile {
  int block_q = 0, block_k = 0;
};
Status read_forced_tile(std::optional<ForcedTile>& tile) {
  const char* value = environment("FLASHMOE_TILE");
  if (!value) return {};
  ForcedTile read;
  int end = 0;
  if (std::sscanf(value, "%dx%d%n", &read.block_q, &read.block_k, &end) != 2 || value[end]) {
    return invalid("FLASHMOE_TILE is ", value, "; it must be QUERIESxKEYS, like 128x64");
  }
  tile = read;
  return {};
}

// How many blocks an SM of the chip holds at once.
int64_t resident(const Kernel& kernel, const Chip& on) {
  const int64_t by_shared = on.shared_bytes_of_sm / (kernel.shared_bytes + 1024);
  return std::max<int64_t>(std::min<int64_t>(by_shared, kernel.ctas), 1);
}

// Queries as the forward kernel counts them: the heads of a group are rows where each has one.
bool one_query(const AttentionPlan& plan) {
  return plan.problem.pass == Pass::kForward && !plan.problem.ragged && plan.len_q == 1 &&
         plan.heads_q > plan.heads_k;
}
int64_t rows(const AttentionPlan& plan) {
  const AttentionProblem& p = plan.problem;
  if (p.ragged) return p.query.shape[0] / std::max<int64_t>(plan.batch, 1);  // of most sequences
  return one_query(plan) ? plan.heads_q / plan.heads_k : plan.len_q;
}
int64_t heads(const AttentionPlan& plan) { return one_query(plan) ? plan.heads_k : plan.heads_q; }

// Of all tensors of a backward pass that are as large as its inputs.
double tensor_bytes(const AttentionProblem& p) {
  double bytes = 0;
  const auto add = [&](const TensorSpec& spec) {
    double count = dtype_bytes(spec.dtype);
    for (int i = 0; i < spec.rank; ++i) count *= static_cast<double>(spec.shape[i]);
    bytes += count;
  };
  for (const TensorSpec* spec : {&p.query, &p.key, &p.value, &p.out}) add(*spec);
  for (const std::optional<TensorSpec>* spec :
       {&p.grad_out, &p.grad_query, &p.grad_key, &p.grad_value, &p.bias, &p.grad_bias}) {
    if (*spec) add(**spec);
  }
  return bytes;
}

// The largest head dim that has tiles for short sequences.
constexpr int64_t kShortDim = 64;

class Chooser {
 public:
  explicit Chooser(AttentionPlan& plan)
      : plan_(plan), chip_(chip(plan.problem.device.compute_capability)) {
    multiprocessors_ = plan.problem.device.multiprocessors > 0 ? plan.problem.device.multiprocessors
                                                               : chip_.multiprocessors;
  }

  int64_t multiprocessors() const { return multiprocessors_; }

  // The best tile of the family for the problem, or null and why there is none.
  const Kernel* find(const char* family, const std::optional<ForcedTile>& forced,
                     std::string& why) {
    const AttentionProblem& p = plan_.problem;
    const Role role = p.pass == Pass::kForward ? (p.bias ? Role::kForwardBias : Role::kForward)
                                               : (p.bias ? Role::kBackwardBias : Role::kBackward);
    const int64_t dim = std::max(plan_.head_dim, plan_.head_dim_v);
    const bool short_sequences = !forced && many_short_sequences() && dim <= kShortDim;
    const Geometry g = geometry(p);
    const bool general_score = g.softcap > 0 || !(g.scale > 0);
    int bucket = 0;
    bool plain = false;  // there is a kernel that does not take such scores
    std::string tiles;
    const Kernel *chosen = nullptr, *roomy = nullptr;
    std::string too_roomy;
    for (const Kernel& k : kernels()) {
      if (k.family != std::string_view(family) || k.role != role || k.dtype != p.query.dtype ||
          k.head_dim < dim || (bucket && k.head_dim != bucket)) {
        continue;
      }
      if (general_score && !k.general_score) {
        if (!plain) pass_over(k.id.name, "takes no softcap, and no scale of 0 or less");
        plain = true;
        continue;
      }
      bucket = k.head_dim;
      tiles += text(tiles.empty() ? "" : ", ", k.block_q, "x", k.block_k);
      if (chosen) continue;
      if (forced) {
        if (k.block_q == forced->block_q && k.block_k == forced->block_k) chosen = &k;
        continue;
      }
      if (k.for_short != short_sequences) {
        pass_over(k.id.name, short_sequences
                                 ? "made for longer sequences"
                                 : "made for many sequences of at most a few dozen tokens");
      } else if (static_cast<size_t>(k.shared_bytes) > chip_.shared_bytes) {
        pass_over(k.id.name,
                  text("needs ", k.shared_bytes, " bytes of shared memory, ",
                       chip_name(p.device.compute_capability), " has ", chip_.shared_bytes));
      } else if (std::string reason = too_large(k); !roomy && !reason.empty()) {
        roomy = &k;
        too_roomy = reason;
      } else {
        chosen = &k;
      }
    }
    if (chosen && roomy) pass_over(roomy->id.name, too_roomy);
    if (!chosen) chosen = roomy;  // there is no smaller one
    if (chosen && static_cast<size_t>(chosen->shared_bytes) <= chip_.shared_bytes) return chosen;
    if (chosen) {
      why = text(chosen->id.name, " needs ", chosen->shared_bytes, " bytes of shared memory, ",
                 chip_name(p.device.compute_capability), " has ", chip_.shared_bytes);
    } else if (!bucket) {
      why = text("has no kernels for ", dtype_name(p.query.dtype));
    } else if (forced) {
      why = text("FLASHMOE_TILE asks for ", forced->block_q, "x", forced->block_k,
                 "; for head dim ", dim, " there are ", tiles);
    } else {
      why = text("no tile for head dim ", dim, " fits ", chip_name(p.device.compute_capability));
    }
    return nullptr;
  }

  void cut(const Kernel& k) {
    const AttentionProblem& p = plan_.problem;
    plan_.kernel = k.id.name;
    plan_.family = k.family;
    plan_.block_q = k.block_q;
    plan_.block_k = k.block_k;
    plan_.threads = k.threads;
    plan_.shared_bytes = k.shared_bytes;
    plan_.grid[1] = plan_.grid[2] = 1;
    if (p.ragged) {
      plan_.before.push_back(find_kernel(Role::kRaggedBlocks, k.family, p.query.dtype)->id.name);
    } else {
      plan_.grid[2] = static_cast<uint32_t>(std::min(plan_.batch, kMaxGridYZ));
    }
    const bool hopper = k.family == std::string_view("sm90");
    if (hopper && p.pass == Pass::kForward) return cut_hopper_forward(plan_, multiprocessors_);
    if (copies_pairs(plan_)) {
      plan_.before.push_back(find_kernel(Role::kBiasTranspose, k.family, p.query.dtype)->id.name);
    }
    if (copies_bias(plan_)) {
      plan_.before.push_back(find_kernel(Role::kBiasAlign, k.family, p.query.dtype)->id.name);
    }
    if (p.pass == Pass::kForward) {
      cut_forward(k);
    } else {
      cut_backward(k);
    }
    if (hopper) return cut_hopper_backward(plan_, multiprocessors_);
    const int64_t batch = p.ragged ? 1 : plan_.batch;
    plan_.work_items =
        int64_t{plan_.grid[0]} * plan_.grid[1] * batch * (p.ragged ? plan_.rounds : 1);
  }

  // The largest grid of a ragged batch, whose heads are not a dimension of their own.
  int64_t ragged_grid() const {
    const AttentionProblem& p = plan_.problem;
    const int64_t queries = ragged_slots(p.query.shape[0], plan_.block_q, plan_.batch);
    const int64_t keys = ragged_slots(p.key.shape[0], plan_.block_k, plan_.batch);
    return std::max(queries, p.pass == Pass::kForward ? 0 : keys) * plan_.heads_q;
  }

 private:
  // So many and so short, on average, that a tile should not be larger than they are.
  bool many_short_sequences() const {
    return mean_length(plan_) <= (plan_.problem.ragged ? 48 : 32) &&
           plan_.batch * plan_.heads_k >= 4 * multiprocessors_;
  }
  void pass_over(const char* name, const std::string& why) {
    plan_.candidates.push_back({name, "passed over: " + why});
  }

  // Why a smaller tile than this would be better.
  std::string too_large(const Kernel& k) const {
    if (const int64_t held = resident(k, chip_); held < k.ctas) {
      return text("made for ", k.ctas, " blocks on an SM, of which ",
                  chip_name(plan_.problem.device.compute_capability), " holds ", held);
    }
    if (plan_.problem.pass == Pass::kBackward || k.block_q <= 64) return {};
    if (k.family == std::string_view("sm90")) return too_large_on_hopper(plan_, k);
    const int64_t n = rows(plan_);
    if (n <= 64) {
      return text(n, n == 1 ? " row" : " rows", plan_.problem.ragged ? " a sequence" : "",
                  " would leave half of the tile empty");
    }
    const int64_t blocks = ceil_div(n, k.block_q) * heads(plan_) * plan_.batch;
    if (blocks < multiprocessors_) {
      return text(blocks, " blocks would leave some of ", multiprocessors_, " SMs idle");
    }
    // The next tile has half the rows and, with a bias, 0.82 of the speed; three of its blocks are
    // on an SM.
    const auto full = [&](int64_t blocks, int64_t of_sm) {
      const int64_t slots = multiprocessors_ * of_sm;
      return static_cast<double>(blocks) / static_cast<double>(ceil_div(blocks, slots) * slots);
    };
    if (plan_.problem.bias && 0.82 * full(2 * blocks, 3) > full(blocks, resident(k, chip_))) {
      return text(blocks, " blocks would leave much of the last round of SMs idle");
    }
    return {};
  }

  void cut_forward(const Kernel& k) {
    if (plan_.problem.ragged) {
      const int64_t slots = ragged_slots(plan_.problem.query.shape[0], k.block_q, plan_.batch);
      const auto bytes = [&] {
        return ceil_div(slots * static_cast<int64_t>(sizeof(RaggedBlock)), 256) * 256 +
               pairs_copy_bytes(plan_);
      };
      if (copies_pairs(plan_)) cut_rounds(plan_.heads_q, slots, bytes);
      plan_.grid[0] = static_cast<uint32_t>(slots * (plan_.heads_q / plan_.rounds));
      plan_.workspace_bytes = bytes();
      return;
    }
    const int64_t blocks = std::max<int64_t>(ceil_div(rows(plan_), k.block_q), 1);
    plan_.splits = splits(k, blocks);
    plan_.grid[0] = static_cast<uint32_t>(blocks * plan_.splits);
    plan_.grid[1] = static_cast<uint32_t>(heads(plan_));
    plan_.workspace_bytes = bias_copy_bytes(plan_);
    if (plan_.splits == 1) return;
    const int64_t partial = plan_.splits * plan_.batch * heads(plan_) * rows(plan_);
    plan_.workspace_bytes += partial * (k.head_dim + 1) * sizeof(float);
    plan_.after.push_back(
        find_kernel(Role::kCombine, k.family, plan_.problem.query.dtype)->id.name);
  }

  // Over how many blocks the keys of one block of queries are split: as many as fill the chip once,
  // where one each would fill less than half of it. A split should have a few blocks of keys, or
  // adding up costs more than it saves.
  int64_t splits(const Kernel& k, int64_t blocks) const {
    constexpr int64_t kFewBlocks = 4;
    const int64_t work = blocks * heads(plan_) * plan_.batch;
    const int64_t slots = multiprocessors_ * resident(k, chip_);
    if (work == 0 || work > slots / 2) return 1;
    const int64_t key_blocks = ceil_div(plan_.len_k, k.block_k);
    return std::max<int64_t>(std::min(slots / work, key_blocks / kFewBlocks), 1);
  }

  void cut_backward(const Kernel& k) {
    const AttentionProblem& p = plan_.problem;
    cut_bias_sum(k);
    // The sums of dQ are fp32, and all at once they would be a quarter of all tensors. (Long dense
    // sequences have few and long blocks, and would lose a tenth of their time to the ends of
    // rounds.)
    const bool sums = p.grad_query && !k.for_short && (p.bias || p.ragged);
    if (sums || copies_pairs(plan_)) {
      const auto bytes = [&] { return backward_workspace(plan_).bytes; };
      if (p.ragged) {
        const int64_t slots = ragged_slots(p.key.shape[0], k.block_k, plan_.batch);
        cut_rounds(plan_.heads_k, slots, bytes);
      } else {
        cut_rounds(plan_.batch, ceil_div(plan_.len_k, k.block_k) * plan_.heads_k, bytes);
      }
    }
    plan_.any_order = p.grad_query && !p.deterministic && !k.for_short;
    const BackwardWorkspace workspace = backward_workspace(plan_);
    plan_.workspace_bytes = workspace.bytes;
    if (p.ragged) {
      plan_.grid[0] = static_cast<uint32_t>(workspace.key_slots * (plan_.heads_k / plan_.rounds));
    } else {
      plan_.grid[0] = static_cast<uint32_t>(ceil_div(plan_.len_k, k.block_k));
      plan_.grid[1] = static_cast<uint32_t>(plan_.heads_k);
      plan_.grid[2] = static_cast<uint32_t>(std::min(round_batch(plan_), kMaxGridYZ));
    }
    plan_.before.push_back(find_kernel(Role::kPreprocess, k.family, p.query.dtype)->id.name);
    if (has_dq_kernel(plan_)) {
      const Role role = p.bias ? Role::kBackwardBiasDq : Role::kBackwardDq;
      const Kernel* finish = find_kernel(role, k);
      if (!finish) finish = find_kernel(role, k.family, p.query.dtype);  // one for all tiles
      plan_.after.push_back(finish->id.name);
    }
    if (p.grad_bias && shares_bias(plan_)) {
      plan_.after.push_back(find_kernel(Role::kBiasSum, k)->id.name);
    } else if (p.grad_bias && copies_pairs(plan_)) {
      plan_.after.push_back(find_kernel(Role::kBiasTranspose, k.family, p.query.dtype)->id.name);
    }
  }

  // Over how many blocks the steps of a tile of a shared bias's gradient are split.
  void cut_bias_sum(const Kernel& k) {
    constexpr int64_t kFewSteps = 4;
    const AttentionProblem& p = plan_.problem;
    if (!p.grad_bias || !shares_bias(plan_) || p.ragged) return;
    const Kernel* sum = find_kernel(Role::kBiasSum, k);
    const BiasSumGrid grid = bias_sum_grid(plan_, sum->block_q, sum->block_k);
    const int64_t work = grid.tiles * grid.heads * grid.batches;
    const int64_t slots = multiprocessors_ * resident(*sum, chip_);
    // The fewest that leave little of the chip idle.
    for (int64_t splits = 1; work > 0 && splits * kFewSteps <= grid.steps; ++splits) {
      plan_.bias_splits = splits;
      if (splits * work >= 0.9 * ceil_div(splits * work, slots) * slots) break;
    }
  }

  // In how many rounds of launches a call goes, each with its share of `parts`: as few as make the
  // workspace small beside the tensors, with work left for the whole chip. A part of a dense batch
  // is a sequence; of a ragged one a head, since only the device knows which tokens a sequence has.
  template <class Bytes>
  void cut_rounds(int64_t parts, int64_t blocks_of_part, const Bytes& workspace_bytes) {
    constexpr double kSmall = 0.099;
    constexpr int64_t kBlocksOfAnSm = 2, kMost = 16;
    const AttentionProblem& p = plan_.problem;
    const double small = kSmall * tensor_bytes(p);
    for (int64_t rounds = 1; rounds <= std::min(parts, kMost); ++rounds) {
      // Equal parts of the heads; of the batch, as many as there really are.
      const bool whole =
          p.ragged ? parts % rounds == 0 : ceil_div(parts, ceil_div(parts, rounds)) == rounds;
      if (!whole) continue;
      if (parts / rounds * blocks_of_part < kBlocksOfAnSm * multiprocessors_) break;
      plan_.rounds = rounds;
      if (static_cast<double>(workspace_bytes()) <= small) return;
    }
    plan_.rounds = 1;  // no number of them does
  }

  AttentionPlan& plan_;
  Chip chip_;
  int64_t multiprocessors_;
};

}  // namespace

int64_t mean_length(const AttentionPlan& plan) {
  const AttentionProblem& p = plan.problem;
  if (!p.ragged) return std::max(plan.len_q, plan.len_k);
  return std::max(p.query.shape[0], p.key.shape[0]) / std::max<int64_t>(plan.batch, 1);
}

bool in_place(const TensorSpec& spec) {
  if (spec.rank < 2) return false;
  if (spec.size(-1) > 1 && spec.step(-1) != 1) return false;
  const int64_t per_chunk = 16 / dtype_bytes(spec.dtype);
  for (int i = 0; i < spec.rank - 1; ++i) {
    if (spec.shape[i] > 1 && spec.stride[i] % per_chunk != 0) return false;
  }
  // Kernels count the bytes from one row to the next in 32 bits.
  const int rows[] = {spec.rank - 2, spec.rank - 3};  // dense; ragged, where heads come after
  for (int i : rows) {
    if (i >= 0 && spec.shape[i] > 1 && spec.stride[i] * dtype_bytes(spec.dtype) > INT32_MAX) {
      return false;
    }
  }
  return true;
}

static Sm90BwdTile hopper_tile(const Kernel& k) { return {k.head_dim, k.block_q, k.block_k}; }

bool has_dq_kernel(const AttentionPlan& plan) {
  const AttentionProblem& p = plan.problem;
  if (plan.family == "sm90" && hopper_tile(*find_kernel(plan.kernel)).converts_dq()) return false;
  const bool own_bias = p.grad_bias && !shares_bias(plan);
  return p.grad_query || (own_bias && find_kernel(plan.kernel)->for_short);
}

int64_t dq_accum_dim(const Kernel& kernel) {
  if (kernel.family != std::string_view("sm90")) return kernel.head_dim;
  return hopper_tile(kernel).dq_accum_dim();
}

BackwardWorkspace backward_workspace(const AttentionPlan& plan) {
  const AttentionProblem& p = plan.problem;
  const Kernel* kernel = find_kernel(plan.kernel);
  const int64_t block = plan.block_q;
  const int64_t heads = p.ragged ? plan.heads_q / plan.rounds : plan.heads_q;  // of a round
  BackwardWorkspace w;
  if (p.ragged) {
    w.query_slots = ragged_slots(p.query.shape[0], block, plan.batch);
    w.key_slots = ragged_slots(p.key.shape[0], plan.block_k, plan.batch);
  }
  const int64_t sequence = ceil_div(plan.len_q, block) * block;
  w.rows = p.ragged ? w.query_slots * block : plan.batch * sequence;
  w.dq_accum_rows = p.ragged ? w.rows : round_batch(plan) * sequence;
  const auto place = [&](int64_t bytes) {
    const size_t at = w.bytes;
    w.bytes += static_cast<size_t>(ceil_div(bytes, 256) * 256);
    return at;
  };
  const bool sums_bias = p.grad_bias && shares_bias(plan);
  int64_t bias_sums = 0;
  if (sums_bias) {
    const Kernel* sum = find_kernel(Role::kBiasSum, *kernel);
    if (p.ragged) w.sum_slots = ragged_slots(p.key.shape[0], sum->block_k, plan.batch);
    const BiasSumGrid grid = bias_sum_grid(plan, sum->block_q, sum->block_k);
    if (plan.bias_splits > 1) {
      bias_sums =
          grid.tiles * grid.heads * grid.batches * plan.bias_splits * sum->block_q * sum->block_k;
    }
  }
  const bool sums = p.grad_query && !kernel->for_short;
  const int64_t query_sums = sums ? heads * w.dq_accum_rows * dq_accum_dim(*kernel) : 0;
  // The sum of a bias's gradient needs those of all heads.
  w.lse_delta = place((sums_bias ? plan.heads_q : heads) * w.rows * 2 * sizeof(float));
  w.dq_accum = w.bias_sums = place(std::max(query_sums, bias_sums) * sizeof(float));
  w.dq_semaphore = place(sums ? heads * w.dq_accum_rows / block * sizeof(int32_t) : 0);
  w.tile_counter = place(2 * sizeof(int32_t));
  // And for what comes after the sequences of a ragged batch.
  w.done = place(plan.family == "sm90" ? (plan.batch + 1) * plan.heads_k * sizeof(int32_t) : 0);
  w.key_blocks = place(w.key_slots * sizeof(RaggedBlock));
  w.query_blocks = place(w.query_slots * sizeof(RaggedBlock));
  w.sum_blocks = place(w.sum_slots * sizeof(RaggedBlock));
  w.bias_rows = place(bias_copy_bytes(plan));
  w.bias_pairs = place(pairs_copy_bytes(plan));
  return w;
}

Status choose(AttentionPlan& plan) {
  const AttentionProblem& p = plan.problem;
  const char* forced = environment("FLASHMOE_FAMILY");
  if (forced && std::strcmp(forced, "sm75") && std::strcmp(forced, "sm80") &&
      std::strcmp(forced, "sm90") && std::strcmp(forced, "cpu")) {
    return invalid("FLASHMOE_FAMILY is ", forced, "; it must be sm75, sm80, sm90 or cpu");
  }
  if (forced && !std::strcmp(forced, "cpu")) {
    return unsupported(
        "FLASHMOE_FAMILY is cpu, and query is on a CUDA device; move the tensors with .cpu()");
  }
  std::optional<ForcedTile> forced_tile;
  if (Status status = read_forced_tile(forced_tile); !status.ok()) return status;
  if (plan.heads_q > kMaxGridYZ) {
    return unsupported("query has ", plan.heads_q, " heads; CUDA kernels take at most ", kMaxGridYZ,
                       "; move some heads into the batch, or the tensors to the CPU");
  }

  const std::string missing = missing_option(plan);
  Chooser chooser(plan);
  std::string reasons;
  const Kernel* chosen = nullptr;
  for (const Family& family : kFamilies) {
    std::string why;
    if (forced && std::strcmp(forced, family.name)) {
      why = text("FLASHMOE_FAMILY asks for ", forced);
    } else if (!has_family(family.name)) {
      why = "this build has no kernels of it";
    } else if (p.device.compute_capability < family.from) {
      why = text("needs ", chip_name(family.from), " or newer, the device is ",
                 chip_name(p.device.compute_capability));
    } else if (!missing.empty()) {
      why = missing;
    } else {
      if (!std::strcmp(family.name, "sm90")) {
        why = missing_on_hopper(plan);
        if (why.empty() && !forced && has_family("sm80")) {
          why = slower_on_hopper(plan, chooser.multiprocessors());
        }
      }
      if (why.empty()) chosen = chooser.find(family.name, forced_tile, why);
    }
    if (chosen) break;
    plan.candidates.push_back({family.name, "passed over: " + why});
    reasons += text(reasons.empty() ? "" : "; ", family.name, ": ", why);
  }
  if (!chosen) {
    return unsupported("no CUDA kernel of this build can run this call on ",
                       chip_name(p.device.compute_capability), " (", reasons,
                       "). The CPU backend runs it: move the tensors with .cpu()");
  }
  chooser.cut(*chosen);
  if (const int64_t blocks = chooser.ragged_grid(); p.ragged && blocks > INT32_MAX) {
    return unsupported("a ragged batch of up to ", blocks, " blocks, all heads counted; a grid ",
                       "holds at most 2^31 - 1. Call it for a part of the heads at a time");
  }
  if (p.grad_bias && shares_bias(plan) && !p.ragged &&
      bias_sum_grid(plan, 16, 16).steps > INT32_MAX) {
    return unsupported("the gradient of a bias that is shared by more than 2^31 - 1 blocks");
  }
  const bool counted = p.deterministic || chosen->family == std::string_view("sm90");
  if (p.pass == Pass::kBackward && counted && plan.work_items > INT32_MAX) {
    return unsupported("a backward pass of ", plan.work_items,
                       " blocks; at most 2^31 - 1 can be put in order");
  }
  std::string verdict =
      text("chosen: the ", chosen->family, " family's tile for head dims up to ", chosen->head_dim);
  if (plan.splits > 1) verdict += text(", the keys split in ", plan.splits, " to fill the chip");
  plan.candidates.push_back({chosen->id.name, verdict});
  return {};
}

bool has_family(std::string_view family) {
  for (const Kernel& k : kernels()) {
    if (k.family == family) return true;
  }
  return false;
}

}  // namespace flashmoe::cuda

namespace flashmoe {

bool needs_copy(const TensorSpec& spec, const Device& device) {
  return device.type == DeviceType::kCuda && !cuda::in_place(spec);
}

std::vector<CudaKernel> cuda_kernels() {
  std::vector<CudaKernel> list;
  for (const cuda::Kernel& k : cuda::kernels()) {
    list.push_back({k.id.name, k.family, k.id.image->name, cuda::role_name(k.role), k.dtype,
                    k.head_dim, k.block_q, k.block_k, k.threads, k.shared_bytes});
  }
  return list;
}

}  // namespace flashmoe
