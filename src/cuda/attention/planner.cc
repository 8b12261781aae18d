// The planner's CUDA half: which family and tile a checked problem gets, and which limits it meets.
#include "cuda/attention/planner.h"

#include <optional>

#include "attention/problem.h"
#include "core/text.h"
#include "cuda/attention/bias_plan.h"
#include "cuda/attention/families.h"
#include "cuda/attention/paged_plan.h"
#include "cuda/attention/params.h"
#include "cuda/attention/second_plan.h"
#include "cuda/attention/tile_choice.h"
#include "cuda/attention/workspace.h"

namespace flashmoe::cuda {
namespace {

constexpr int64_t kMaxLength = kNoLimit - 1;

// What no kernel of any family can do of the problem; empty when there is nothing.
std::string missing_everywhere(const AttentionPlan& plan) {
  const AttentionProblem& p = plan.problem;
  if (p.query.dtype == DType::kFloat64 || (p.paged && p.query.dtype == DType::kFloat32)) {
    return text(
        "query is ", dtype_name(p.query.dtype), "; CUDA kernels ",
        p.paged ? "over pages take float16 and bfloat16" : "take float32, float16 and bfloat16");
  }
  if (p.options.dropout_p > 0 && has_tangents(p.pass)) {
    return text("dropout_p is ", p.options.dropout_p,
                "; CUDA kernels have no dropout in forward mode and second derivatives yet");
  }
  if (p.paged) {
    if (std::string missing = missing_over_pages(plan); !missing.empty()) return missing;
  } else if (plan.len_q > kMaxLength || plan.len_k > kMaxLength) {
    return text("sequences are longer than ", kMaxLength);
  }
  if (plan.batch > INT32_MAX - 1) return text("the batch is larger than ", INT32_MAX - 1);
  const auto maybe = [](const std::optional<TensorSpec>& spec) { return spec ? &*spec : nullptr; };
  const std::pair<const char*, const TensorSpec*> rows[] = {
      {"query", &p.query},
      {"key", p.paged ? nullptr : &p.key},  // pages are read wherever they lie
      {"value", p.paged ? nullptr : &p.value},
      {"out", &p.out},
      {"grad_out", maybe(p.grad_out)},
      {"grad_query", maybe(p.grad_query)},
      {"grad_key", maybe(p.grad_key)},
      {"grad_value", maybe(p.grad_value)},
      {"tangent_query", maybe(p.tangent_query)},
      {"tangent_key", maybe(p.tangent_key)},
      {"tangent_value", maybe(p.tangent_value)},
      {"tangent_out", maybe(p.tangent_out)},
  };
  for (const auto& [name, spec] : rows) {
    if (!spec || in_place(*spec)) continue;
    return text(name,
                " cannot be addressed where it lies (its last dimension must have stride 1, "
                "its rows must be 16-byte aligned); call .contiguous() on it");
  }
  return {};
}

// Whether a family after this one could take the problem instead.
bool has_alternative(const Family& family, const Gpu& gpu) {
  bool after = false;
  for (const Family& other : families()) {
    if (after && has_kernels(other) && other_chip(other.chips(), gpu).empty()) return true;
    after = after || &other == &family;
  }
  return false;
}

// What a plan cannot count.
Status check_counts(const AttentionPlan& plan) {
  const AttentionProblem& p = plan.problem;
  if (const int64_t blocks = ragged_grid(plan); p.ragged && blocks > INT32_MAX) {
    return unsupported("a ragged batch of up to ", blocks, " blocks, all heads counted; a grid ",
                       "holds at most 2^31 - 1. Call it for a part of the heads at a time");
  }
  if (p.grad_bias && shares_bias(plan) && !p.ragged &&
      bias_sum_grid(plan, 16, 16).steps > INT32_MAX) {
    return unsupported("the gradient of a bias that is shared by more than 2^31 - 1 blocks");
  }
  if (p.pass == Pass::kBackward && p.options.deterministic && plan.work_items > INT32_MAX) {
    return unsupported("a backward pass of ", plan.work_items,
                       " blocks; at most 2^31 - 1 can be put in order");
  }
  return {};
}

}  // namespace

int32_t window_limit(int64_t side) {
  return side < 0 || side > kNoLimit ? kNoLimit : static_cast<int32_t>(side);
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

Status plan_call(AttentionPlan& plan) {
  const ChipFamily* forced = nullptr;
  if (Status status = read_forced_family("query", forced); !status.ok()) return status;
  std::optional<ForcedTile> forced_tile;
  if (Status status = read_forced_tile(plan.problem.pass, forced_tile); !status.ok()) return status;
  if (plan.heads_q > kMaxGridYZ) {
    return unsupported("query has ", plan.heads_q, " heads; CUDA kernels take at most ", kMaxGridYZ,
                       "; move some heads into the batch, or the tensors to the CPU");
  }
  const Gpu gpu = gpu_of(plan.problem.device);
  const std::string missing = missing_everywhere(plan);
  std::string reasons;
  for (const Family& family : families()) {
    std::string why;
    const Kernel* kernel = nullptr;
    if (forced && forced != &family.chips()) {
      why = text("FLASHMOE_FAMILY asks for ", forced->name);
    } else if (!has_kernels(family)) {
      why = "this build has no kernels of it";
    } else if (why = other_chip(family.chips(), gpu); why.empty()) {
      why = missing;
      if (plan.problem.paged) {
        if (why.empty()) kernel = choose_paged_tile(plan, family, gpu, forced_tile, why);
      } else if (has_tangents(plan.problem.pass)) {
        if (why.empty()) kernel = choose_second_kernel(plan, family, why);
      } else {
        const DType dtype = plan.problem.query.dtype;
        if (why.empty() && !has_kernels(family, dtype)) {
          why = text("has no kernels for ", dtype_name(dtype));
        }
        if (why.empty()) why = family.lacks(plan);
        if (why.empty() && !forced && has_alternative(family, gpu)) why = family.slower(plan, gpu);
        if (why.empty()) kernel = choose_tile(plan, family, gpu, forced_tile, why);
      }
    }
    if (!kernel) {
      plan.candidates.push_back({family.name, "passed over: " + why});
      reasons += text(reasons.empty() ? "" : "; ", family.name, ": ", why);
      continue;
    }
    plan.kernel = kernel->id.name;
    plan.handle = kernel;
    plan.family = family.name;
    plan.block_q = kernel->block_q;
    plan.block_k = kernel->block_k;
    const auto lay_out = plan.problem.paged                ? lay_out_paged
                         : has_tangents(plan.problem.pass) ? lay_out_second
                                                           : family.lay_out;
    lay_out(plan, *kernel, gpu);
    if (Status status = check_counts(plan); !status.ok()) return status;
    std::string verdict = text("chosen: the ", family.name, " family's tile for ");
    verdict += kernel->head_dim ? text("head dims up to ", kernel->head_dim) : "every head dim";
    if (plan.splits > 1) {
      const bool backward = plan.problem.pass == Pass::kBackward;
      verdict += text(", the ", backward ? "queries" : "keys", " split in ",
                      plan.problem.paged ? "up to " : "", plan.splits, " to fill the chip");
    }
    plan.candidates.push_back({kernel->id.name, verdict});
    return {};
  }
  return unsupported("no CUDA kernel of this build can run this call on ",
                     chip_name(gpu.compute_capability), " (", reasons,
                     "). The CPU backend runs it: move the tensors with .cpu()");
}

}  // namespace flashmoe::cuda
