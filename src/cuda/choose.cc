// The planner's CUDA half: which kernel a checked problem gets, and how it is cut.
#include <cstdlib>
#include <cstring>
#include <optional>

#include "attention/problem.h"
#include "attention/text.h"
#include "cuda/backend.h"
#include "cuda/catalogue.h"
#include "cuda/chips.h"
#include "cuda/params.h"

namespace flashmoe::cuda {
namespace {

constexpr int64_t kMaxLength = kNoLimit - 1;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

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
  if (p.bias) return "bias has no CUDA kernel yet";
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
  return one_query(plan) ? plan.heads_q / plan.heads_k : plan.len_q;
}
int64_t heads(const AttentionPlan& plan) { return one_query(plan) ? plan.heads_k : plan.heads_q; }

class Chooser {
 public:
  explicit Chooser(AttentionPlan& plan)
      : plan_(plan), chip_(chip(plan.problem.device.compute_capability)) {
    multiprocessors_ = plan.problem.device.multiprocessors > 0 ? plan.problem.device.multiprocessors
                                                               : chip_.multiprocessors;
  }

  // The best tile of the family for the problem, or null and why there is none.
  const Kernel* find(const char* family, const std::optional<ForcedTile>& forced,
                     std::string& why) {
    const AttentionProblem& p = plan_.problem;
    const Role role = p.pass == Pass::kForward ? Role::kForward : Role::kBackward;
    const int64_t dim = std::max(plan_.head_dim, plan_.head_dim_v);
    int bucket = 0;
    std::string tiles;
    const Kernel *chosen = nullptr, *roomy = nullptr;
    std::string too_roomy;
    for (const Kernel& k : kernels()) {
      if (k.family != std::string_view(family) || k.role != role || k.dtype != p.query.dtype ||
          k.head_dim < dim || (bucket && k.head_dim != bucket)) {
        continue;
      }
      bucket = k.head_dim;
      tiles += text(tiles.empty() ? "" : ", ", k.block_q, "x", k.block_k);
      if (chosen) continue;
      if (forced) {
        if (k.block_q == forced->block_q && k.block_k == forced->block_k) chosen = &k;
        continue;
      }
      if (static_cast<size_t>(k.shared_bytes) > chip_.shared_bytes) {
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
    // Ragged batches have one more entry, for tokens after the last sequence.
    const int64_t batch = plan_.batch + (p.ragged ? 1 : 0);
    plan_.grid[2] = static_cast<uint32_t>(std::min(batch, kMaxGridYZ));
    if (p.pass == Pass::kForward) {
      cut_forward(k);
    } else {
      cut_backward(k);
    }
    plan_.work_items = int64_t{plan_.grid[0]} * plan_.grid[1] * batch;
  }

 private:
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
    const int64_t n = rows(plan_);
    if (n <= 64) return text(n, n == 1 ? " row" : " rows", " would leave half of the tile empty");
    const int64_t blocks = ceil_div(n, k.block_q) * heads(plan_) * plan_.batch;
    if (blocks < multiprocessors_) {
      return text(blocks, " blocks would leave some of ", multiprocessors_, " SMs idle");
    }
    return {};
  }

  void cut_forward(const Kernel& k) {
    const int64_t blocks = std::max<int64_t>(ceil_div(rows(plan_), k.block_q), 1);
    plan_.splits = splits(k, blocks);
    plan_.grid[0] = static_cast<uint32_t>(blocks * plan_.splits);
    plan_.grid[1] = static_cast<uint32_t>(heads(plan_));
    if (plan_.splits == 1) return;
    const int64_t partial = plan_.splits * plan_.batch * heads(plan_) * rows(plan_);
    plan_.workspace_bytes = partial * (k.head_dim + 1) * sizeof(float);
    plan_.after.push_back(
        find_kernel(Role::kCombine, k.family, plan_.problem.query.dtype)->id.name);
  }

  // Over how many blocks the keys of one block of queries are split: as many as fill the chip once,
  // where one each would fill less than half of it. A split should have a few blocks of keys, or
  // adding up costs more than it saves.
  int64_t splits(const Kernel& k, int64_t blocks) const {
    constexpr int64_t kFewBlocks = 4;
    if (plan_.problem.ragged) return 1;
    const int64_t work = blocks * heads(plan_) * plan_.batch;
    const int64_t slots = multiprocessors_ * resident(k, chip_);
    if (work == 0 || work > slots / 2) return 1;
    const int64_t key_blocks = ceil_div(plan_.len_k, k.block_k);
    return std::max<int64_t>(std::min(slots / work, key_blocks / kFewBlocks), 1);
  }

  void cut_backward(const Kernel& k) {
    const AttentionProblem& p = plan_.problem;
    plan_.grid[0] = static_cast<uint32_t>(
        std::max<int64_t>(ceil_div(plan_.len_k, k.block_k), p.ragged ? 1 : 0));
    plan_.grid[1] = static_cast<uint32_t>(plan_.heads_k);
    plan_.workspace_bytes = backward_workspace(plan_).bytes;
    plan_.before.push_back(find_kernel(Role::kPrepare, k.family, p.query.dtype)->id.name);
    if (p.grad_query) {
      std::string finish = k.id.name;
      finish.insert(finish.find("_attention_bwd_") + std::strlen("_attention_bwd_"), "finish_");
      plan_.after.push_back(finish);
    }
  }

  AttentionPlan& plan_;
  Chip chip_;
  int64_t multiprocessors_;
};

}  // namespace

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

BackwardWorkspace backward_workspace(const AttentionPlan& plan) {
  const AttentionProblem& p = plan.problem;
  const Kernel* kernel = find_kernel(plan.kernel);
  const int64_t block = plan.block_q;
  BackwardWorkspace w;
  w.rows = p.ragged ? (p.query.shape[0] / block + plan.batch + 1) * block
                    : plan.batch * ceil_div(plan.len_q, block) * block;
  const auto place = [&](int64_t bytes) {
    const size_t at = w.bytes;
    w.bytes += static_cast<size_t>(ceil_div(bytes, 256) * 256);
    return at;
  };
  w.row_terms = place(plan.heads_q * w.rows * 2 * sizeof(float));
  w.grad_query_sums =
      place(p.grad_query ? plan.heads_q * w.rows * kernel->head_dim * sizeof(float) : 0);
  w.turns = place(plan.heads_q * w.rows / block * sizeof(int32_t));
  w.tickets = place(sizeof(int32_t));
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
      chosen = chooser.find(family.name, forced_tile, why);
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
  if (p.pass == Pass::kBackward && p.deterministic && plan.work_items > INT32_MAX) {
    return unsupported("a deterministic backward pass of ", plan.work_items,
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
