// The planner's CUDA half: which family and tiles a checked problem gets, and which limits it
// meets.
#include "cuda/moe/planner.h"

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "core/numbers.h"
#include "core/text.h"
#include "cuda/moe/catalogue.h"
#include "cuda/moe/sm90.h"
#include "cuda/moe/tiles.h"
#include "cuda/moe/workspace.h"
#include "cuda/runtime/families.h"

namespace flashmoe::cuda::moe {
namespace {

constexpr int64_t kMaxGridYZ = 65535;  // the second dimension of a grid is 16-bit

// What no kernel of any family can do of the problem; empty when there is nothing.
std::string missing_everywhere(const MoePlan& plan) {
  const MoeProblem& p = plan.problem;
  if (p.x.dtype != DType::kFloat16 && p.x.dtype != DType::kBFloat16) {
    return text("x is ", dtype_name(p.x.dtype), "; CUDA kernels take float16 and bfloat16");
  }
  if (plan.experts > kMaxExperts) {
    return text("there are ", plan.experts, " experts; CUDA kernels take at most ", kMaxExperts);
  }
  if (plan.width > INT32_MAX / 4 || plan.inner > INT32_MAX / 8) {
    return text("widths are larger than ", INT32_MAX / 8);
  }
  const auto maybe = [](const std::optional<TensorSpec>& spec) { return spec ? &*spec : nullptr; };
  const bool forward = p.pass == Pass::kForward;
  const std::pair<const char*, const TensorSpec*> tensors[] = {
      {"x", &p.x},
      {"gate_up", &p.gate_up},
      {"down", &p.down},
      {"out", forward ? &p.out : nullptr},
      {"pre", maybe(p.pre)},
      {"grad_out", maybe(p.grad_out)},
      {"grad_x", maybe(p.grad_x)},
      {"grad_gate_up", maybe(p.grad_gate_up)},
      {"grad_down", maybe(p.grad_down)},
  };
  for (const auto& [name, spec] : tensors) {
    if (!spec || in_place(*spec)) continue;
    return text(name,
                " cannot be addressed where it lies (its last dimension must have stride 1, its "
                "rows must be 16-byte aligned); copy it to such rows");
  }
  if (p.pre && order_of(*p.pre) != Order::kRows) {
    return "pre cannot be addressed where it lies; its last dimension must have stride 1";
  }
  return {};
}

std::string missing_everywhere(const RoutePlan& plan) {
  const DType dtype = plan.problem.logits.dtype;
  if (dtype == DType::kFloat64) {
    return "logits is float64; CUDA kernels take float32, float16 and bfloat16";
  }
  if (plan.experts > kMaxExperts) {
    return text("there are ", plan.experts, " experts; CUDA kernels take at most ", kMaxExperts);
  }
  if (plan.tokens > INT32_MAX) return text("there are more than ", INT32_MAX, " tokens");
  return {};
}

// The dtype of the kernels that a call gets: a router's logits of fp32 are read by those of fp16.
DType kernel_dtype(const MoePlan& plan) { return plan.problem.x.dtype; }
DType kernel_dtype(const RoutePlan& plan) {
  const DType dtype = plan.problem.logits.dtype;
  return dtype == DType::kFloat32 ? DType::kFloat16 : dtype;
}

std::string lacks(const ChipFamily& family, DType dtype) {
  const auto& dtypes = family.dtypes;
  if (std::find(dtypes.begin(), dtypes.end(), dtype) != dtypes.end()) return {};
  return text("has no ", dtype_name(dtype));
}

// Goes through the families, best first; take(family, gpu, is_forced, why) plans with one, or says
// why not.
template <class Plan, class Take>
Status choose_family(Plan& plan, const char* argument, const Take& take) {
  const ChipFamily* forced = nullptr;
  if (Status status = read_forced_family(argument, forced); !status.ok()) return status;
  const Gpu gpu = gpu_of(plan.problem.device);
  const std::string missing = missing_everywhere(plan);
  std::string reasons;
  for (const ChipFamily& family : chip_families()) {
    std::string why;
    if (forced && forced != &family) {
      why = text("FLASHMOE_FAMILY asks for ", forced->name);
    } else if (!has_kernels(family.name)) {
      why = "this build has no kernels of it";
    } else if (why = other_chip(family, gpu); why.empty()) {
      why = missing.empty() ? lacks(family, kernel_dtype(plan)) : missing;
      if (why.empty()) {
        plan.family = family.name;
        Status status = take(family, gpu, forced != nullptr, why);
        if (!status.ok() || why.empty()) return status;
      }
    }
    plan.candidates.push_back({family.name, "passed over: " + why});
    reasons += text(reasons.empty() ? "" : "; ", family.name, ": ", why);
  }
  return unsupported("no CUDA kernel of this build can run this call on ",
                     chip_name(gpu.compute_capability), " (", reasons,
                     "). The CPU backend runs it: move the tensors with .cpu()");
}

// Why the chip cannot run a kernel; empty: it can.
std::string does_not_fit(const Kernel& kernel, const Gpu& gpu) {
  if (static_cast<size_t>(kernel.shared_bytes) <= gpu.chip.shared_bytes) return {};
  return text("needs ", kernel.shared_bytes, " bytes of shared memory, ",
              chip_name(gpu.compute_capability), " has ", gpu.chip.shared_bytes);
}

// Why a smaller tile of rows is faster; empty: none is.
std::string too_large(const MoePlan& plan, const GemmTile& tile, const Gpu& gpu) {
  const int64_t experts = std::clamp<int64_t>(plan.rows, 1, std::max<int64_t>(plan.experts, 1));
  const int64_t rows = plan.rows / experts;  // of an expert, on average
  if (rows <= (tile.block_m > 64 ? tile.block_m / 2 : tile.block_m / 4)) {
    return text(rows, rows == 1 ? " row" : " rows",
                " an expert would leave most of the tile empty");
  }
  if (tile.ctas < 2) return "leaves one CTA on an SM, whose epilogue nobody overlaps";
  const int64_t columns = std::min(plan.width, halves(plan) * plan.inner);
  const int64_t tiles = ceil_div(rows, tile.block_m) * experts * ceil_div(columns, tile.block_n);
  if (tiles < gpu.multiprocessors) {
    return text(tiles, " tiles would leave some of ", gpu.multiprocessors, " SMs idle");
  }
  return {};
}

bool is(const ForcedTile& forced, const GemmTile& tile) {
  return tile.block_m == forced.rows && tile.block_n == forced.columns;
}

// Whether a product's weights lie along its depth. Up and down multiply along the rows of their
// weights, dA and dX across them.
bool lies_along(const MoePlan& plan, const TensorSpec& weights) {
  return (order_of(weights) == Order::kRows) == (plan.problem.pass == Pass::kForward);
}

// Whether the sm80 family of this build can run a forward pass on the chip.
bool runs_on_sm80(const MoePlan& plan, const Gpu& gpu) {
  if (!other_chip(*find_chip_family("sm80"), gpu).empty()) return false;
  const bool along = lies_along(plan, plan.problem.gate_up);
  return std::any_of(kernels().begin(), kernels().end(), [&](const Kernel& k) {
    return k.family == std::string_view("sm80") && k.dtype == plan.problem.x.dtype &&
           k.role == Role::kUp && k.along == along && does_not_fit(k, gpu).empty();
  });
}

// The kernel that stands for the plan, up or dA, with the best tile that the family has for the
// problem; or null and why there is none.
const Kernel* choose_tile(MoePlan& plan, const ChipFamily& family, const Gpu& gpu,
                          const std::optional<ForcedTile>& forced, std::string& why) {
  const bool forward = plan.problem.pass == Pass::kForward;
  const bool along = lies_along(plan, forward ? plan.problem.gate_up : plan.problem.down);
  if (is_persistent(plan)) {
    if (const Kernel* few = sm90::choose_few(plan, forced)) return few;
    return sm90::choose_product(plan, forward ? Role::kUp : Role::kBwdAct, along, plan.width,
                                forward ? halves(plan) * plan.inner : plan.inner, forced, why);
  }
  std::vector<const Kernel*> tiles;
  std::string names;
  for (const Kernel& k : kernels()) {
    if (k.family != std::string_view(family.name) || k.dtype != plan.problem.x.dtype ||
        k.role != (forward ? Role::kUp : Role::kBwdAct) || k.along != along) {
      continue;
    }
    names += text(names.empty() ? "" : ", ", k.tile.block_m, "x", k.tile.block_n);
    if (!forced || is(*forced, k.tile)) tiles.push_back(&k);
  }
  if (forced && tiles.empty()) {
    why =
        text("FLASHMOE_TILE asks for ", forced->rows, "x", forced->columns, "; there are ", names);
    return nullptr;
  }
  for (const Kernel* kernel : tiles) {
    why = does_not_fit(*kernel, gpu);
    // The smallest serves whatever the larger ones do not.
    if (why.empty() && !forced && kernel != tiles.back()) why = too_large(plan, kernel->tile, gpu);
    if (why.empty()) return kernel;
    plan.candidates.push_back({kernel->id.name, "passed over: " + why});
  }
  return nullptr;
}

// The kernel of the plan's second product, down or dX, `depth` deep.
const Kernel& second_product(const MoePlan& plan, const Kernel& first, const TensorSpec& weights,
                             int64_t depth, const std::optional<ForcedTile>& forced) {
  const bool along = lies_along(plan, weights);
  std::string why;
  return is_persistent(plan)
             ? *sm90::choose_product(plan, Role::kDown, along, depth, plan.width, forced, why)
             : *find_kernel(Role::kDown, plan.family, plan.problem.x.dtype, first.tile, along);
}

// The tile of the gradients of weights: the one that is forced where there is such a tile, else the
// largest that fits chip and widths.
const Kernel* choose_token_tile(const MoePlan& plan, const Gpu& gpu,
                                const std::optional<ForcedTile>& forced) {
  const int64_t narrow = std::min(plan.width, plan.inner);
  const Kernel *smallest = nullptr, *chosen = nullptr;
  for (const Kernel& k : kernels()) {
    if (k.family != plan.family || k.dtype != plan.problem.x.dtype || k.role != Role::kBwdWeights ||
        !does_not_fit(k, gpu).empty()) {
      continue;
    }
    if (forced && is(*forced, k.tile)) return &k;
    const int64_t least = std::max(k.tile.block_m, k.tile.block_n) / 2;
    if (!chosen && narrow > least) chosen = &k;
    smallest = &k;
  }
  return chosen ? chosen : smallest;
}

// Collects the launches of a plan.
class Launches {
 public:
  Launches(MoePlan& plan, const Gpu& gpu) : plan_(plan), gpu_(gpu) {}

  // A launch of no CTA is none.
  void add(const Kernel& kernel, int64_t x, int64_t y, int64_t z, uint32_t shared_bytes,
           const char* role = nullptr) {
    if (x <= 0 || y <= 0 || z <= 0) return;
    most_ = std::max(most_, x);
    LaunchStep step;
    step.kernel = kernel.id.name;
    step.role = role ? role : role_name(kernel.role);
    step.grid = {static_cast<uint32_t>(x), static_cast<uint32_t>(y), static_cast<uint32_t>(z)};
    step.threads = kernel.threads;
    step.shared_bytes = shared_bytes;
    step.handle = &kernel;
    plan_.launches.push_back(step);
    if (&kernel == plan_.handle) plan_.work_items = x;
  }
  // A kernel without a tile.
  void add(Role role, int64_t x, uint32_t shared_bytes = 0, int64_t y = 1, int64_t z = 1) {
    add(*find_kernel(role, plan_.family, plan_.problem.x.dtype), x, y, z, shared_bytes);
  }
  // A product of so many tiles, each a CTA's; persistent CTAs go through them.
  void add_tiles(const Kernel& kernel, int64_t tiles, const char* role = nullptr) {
    int64_t ctas = tiles;
    if (is_persistent(plan_)) {
      most_ = std::max(most_, tiles + 2 * gpu_.multiprocessors);  // they count a step ahead
      ctas = std::min(tiles, gpu_.multiprocessors);
    }
    add(kernel, ctas, 1, 1, kernel.shared_bytes, role);
  }
  // A product of rows with so many tiles of columns.
  void add_product(const Kernel& kernel, int64_t columns, const char* role = nullptr) {
    add_tiles(kernel, tile_slots(plan_, kernel.tile.block_m) * columns, role);
  }
  void add_combine() {
    const int64_t lanes = combine_lanes(static_cast<int>(plan_.width));
    if (plan_.width > 0) add(Role::kCombine, ceil_div(plan_.tokens, kRowThreads / lanes));
  }

  Status check() const {
    if (most_ <= INT32_MAX) return {};
    return unsupported("a launch of ", most_,
                       " tiles; a grid holds at most 2^31 - 1. Call it for a part of the tokens at "
                       "a time");
  }

 private:
  MoePlan& plan_;
  const Gpu& gpu_;
  int64_t most_ = 0;  // CTAs or tiles of a launch
};

Status lay_out_forward(MoePlan& plan, const Kernel& up, const Gpu& gpu,
                       const std::optional<ForcedTile>& forced) {
  const MoeProblem& p = plan.problem;
  const int experts = static_cast<int>(plan.experts);
  const SortChunks chunks = sort_chunks(plan);
  Launches launches(plan, gpu);
  if (chunks.one_cta) {
    launches.add(Role::kSort, 1, sort_shared_bytes(experts));
  } else {
    launches.add(Role::kCount, chunks.chunks, experts * 4);
    launches.add(Role::kScan, 1, scan_shared_bytes(experts));
    launches.add(Role::kPlace, chunks.chunks, experts * 4);
  }
  if (is_few(plan)) {
    const Kernel& down = *find_kernel(Role::kFewDown, plan.family, p.x.dtype, up.tile);
    const int64_t slots = tile_slots(plan, up.tile.block_m);
    launches.add(up, slots * ceil_div(plan.inner, kFewColumns), 1, 1, up.shared_bytes);
    plan.launches.back().overlaps = true;
    launches.add(down, ceil_div(plan.width, kFewColumns), 1, 1,
                 few_down_shared_bytes(static_cast<int>(plan.rows)));
    plan.launches.back().overlaps = true;
  } else {
    const Kernel& down = second_product(plan, up, p.down, plan.inner, forced);
    launches.add_product(up, up_columns(plan, up.tile));
    launches.add_product(down, ceil_div(plan.width, down.tile.block_n));
    launches.add_combine();
  }
  plan.workspace_bytes = forward_workspace(plan, up.tile).bytes;
  return launches.check();
}

Status lay_out_backward(MoePlan& plan, const Kernel& act, const Kernel& weights, const Gpu& gpu,
                        const std::optional<ForcedTile>& forced) {
  const MoeProblem& p = plan.problem;
  const Wanted want = wanted(plan);
  Launches launches(plan, gpu);
  launches.add(Role::kPrepare, 1 + ceil_div(plan.rows, kScanThreads),
               scan_shared_bytes(static_cast<int>(plan.experts)));
  if (want.act()) launches.add_product(act, ceil_div(plan.inner, act.tile.block_n));
  if (p.grad_x) {
    const Kernel& dx = second_product(plan, act, p.gate_up, halves(plan) * plan.inner, forced);
    launches.add_product(dx, ceil_div(plan.width, dx.tile.block_n), "moe_bwd_x");
    launches.add_combine();
  }
  if (want.weights) {
    const Slices slices = slices_of(plan, weights.tile);
    const int64_t tiles = weight_tiles(plan, weights.tile).all();
    launches.add_tiles(weights, slices.slots * tiles);
    launches.add(*find_kernel(Role::kBwdWeightsSum, plan.family, p.x.dtype, weights.tile),
                 slices.sliced_slots * tiles, 1, 1, 0);
  }
  if (want.biases) {
    const int64_t columns =
        std::max(p.grad_up_bias ? halves(plan) * plan.inner : 0, p.grad_down_bias ? plan.width : 0);
    const int64_t blocks = ceil_div(columns, kBiasThreads);
    if (blocks > kMaxGridYZ) {
      return unsupported("a bias of ", columns, " columns; at most ", kMaxGridYZ * kBiasThreads,
                         " have a gradient on a GPU");
    }
    launches.add(Role::kBwdBias, tile_slots(plan, act.tile.block_m), 0, blocks, 2);
    launches.add(Role::kBwdBiasSum, plan.experts, 0, blocks, 2);
  }
  if (want.row_sums) launches.add(Role::kBwdScale, ceil_div(plan.rows, kRowThreads / 32));
  plan.workspace_bytes = backward_workspace(plan, act.tile, weights.tile).bytes;
  return launches.check();
}

}  // namespace

bool in_place(const TensorSpec& spec) {
  return (spec.rank == 2 || spec.rank == 3) && order_of(spec) != Order::kNone;
}

Status plan_call(MoePlan& plan) {
  std::optional<ForcedTile> forced;
  if (Status status = read_forced_tile(plan.problem.pass, forced); !status.ok()) return status;
  const auto take = [&](const ChipFamily& family, const Gpu& gpu, bool is_forced,
                        std::string& why) {
    if (is_persistent(plan)) {
      why = sm90::missing(plan);
      const bool may_leave = !is_forced && !forced && runs_on_sm80(plan, gpu);
      if (why.empty() && may_leave) why = sm90::slower(plan);
    }
    const Kernel* kernel = why.empty() ? choose_tile(plan, family, gpu, forced, why) : nullptr;
    if (!kernel) return Status();
    plan.kernel = kernel->id.name;
    plan.handle = kernel;
    plan.block_m = kernel->tile.block_m;
    plan.block_n = kernel->tile.block_n;
    plan.candidates.push_back(
        {kernel->id.name, text("chosen: the ", family.name, " family's tile for ", plan.rows,
                               " rows of ", plan.experts, " experts")});
    return plan.problem.pass == Pass::kForward
               ? lay_out_forward(plan, *kernel, gpu, forced)
               : lay_out_backward(plan, *kernel, *choose_token_tile(plan, gpu, forced), gpu,
                                  forced);
  };
  return choose_family(plan, "x", take);
}

Status plan_call(RoutePlan& plan) {
  const auto take = [&](const ChipFamily& family, const Gpu&, bool, std::string&) {
    const bool forward = plan.problem.pass == Pass::kForward;
    const Kernel& kernel =
        *find_kernel(forward ? Role::kRoute : Role::kRouteBwd, family.name, kernel_dtype(plan));
    const int experts = static_cast<int>(plan.experts), warps = route_warps(experts);
    LaunchStep step;
    step.kernel = plan.kernel = kernel.id.name;
    step.role = role_name(kernel.role);
    step.grid[0] = static_cast<uint32_t>(ceil_div(plan.tokens, warps));
    step.threads = 32 * warps;
    step.shared_bytes = warps * experts * 4;
    step.handle = &kernel;
    if (plan.tokens > 0 && (forward || plan.experts > 0)) plan.launches.push_back(step);
    plan.work_items = step.grid[0];
    plan.candidates.push_back({kernel.id.name, "chosen: a warp for each token"});
    return Status();
  };
  return choose_family(plan, "logits", take);
}

}  // namespace flashmoe::cuda::moe
