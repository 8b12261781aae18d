#include "cuda/attention/tile_choice.h"

#include <algorithm>

#include "attention/problem.h"
#include "core/text.h"
#include "cuda/attention/bias_plan.h"

namespace flashmoe::cuda {
namespace {

// The largest head dim that has tiles for short sequences.
constexpr int64_t kShortDim = 64;

constexpr const char* kForShort = "made for many sequences of at most a few dozen tokens";

Role main_role(const AttentionProblem& p) {
  const bool forward = p.pass == Pass::kForward;
  // In fp32 every kernel drops where it is asked to.
  if (p.options.dropout_p > 0 && p.query.dtype != DType::kFloat32) {
    return forward ? Role::kForwardDropout : Role::kBackwardDropout;
  }
  if (p.bias) return forward ? Role::kForwardBias : Role::kBackwardBias;
  return forward ? Role::kForward : Role::kBackward;
}

bool has_short_tiles(const Family& family, Role role, DType dtype) {
  return std::any_of(kernels().begin(), kernels().end(), [&](const Kernel& k) {
    return k.for_short && !k.packed && k.role == role && k.dtype == dtype &&
           k.family == std::string_view(family.name);
  });
}

// Whether a call of fp32 is to have one TF32 product for three: it may, and the family has them.
bool takes_tf32(const Family& family, const AttentionProblem& p) {
  return p.options.allow_tf32 &&
         std::any_of(kernels().begin(), kernels().end(), [&](const Kernel& k) {
           return k.tf32 && k.family == std::string_view(family.name);
         });
}

std::string needs_shared(const Kernel& kernel, const Gpu& gpu) {
  return text("needs ", kernel.shared_bytes, " bytes of shared memory, ",
              chip_name(gpu.compute_capability), " has ", gpu.chip.shared_bytes);
}

bool fits(const Kernel& kernel, const Gpu& gpu) {
  return static_cast<size_t>(kernel.shared_bytes) <= gpu.chip.shared_bytes;
}

std::string too_large(const AttentionPlan& plan, const Family& family, const Kernel& kernel,
                      const Gpu& gpu) {
  if (const int64_t held = resident_ctas(kernel, gpu.chip); held < kernel.ctas) {
    return text("made for ", kernel.ctas, " blocks on an SM, of which ",
                chip_name(gpu.compute_capability), " holds ", held);
  }
  if (plan.problem.pass == Pass::kForward && kernel.block_q <= 64) return {};
  return family.too_large(plan, kernel, gpu);
}

}  // namespace

int64_t resident_ctas(const Kernel& kernel, const Chip& chip) {
  const int64_t by_shared = chip.shared_bytes_of_sm / (kernel.shared_bytes + 1024);
  return std::max<int64_t>(std::min<int64_t>(by_shared, kernel.ctas), 1);
}

bool many_short_sequences(const AttentionPlan& plan, const Gpu& gpu) {
  return mean_length(plan) <= (plan.problem.ragged ? 48 : 32) &&
         plan.batch * plan.heads_k >= 4 * gpu.multiprocessors;
}

bool many_packed_sequences(const AttentionPlan& plan, const Gpu& gpu) {
  const int64_t dim = std::max(plan.head_dim, plan.head_dim_v);
  int64_t longest = plan.problem.ragged ? 48 : 64;
  // Several heads that share a box share what it costs to find its pairs: H200, bf16, dense, both
  // passes, tiles of a sequence and packed: (128, 32, 128, 16) 286 and 196 us, (128, 32, 96, 32)
  // 278 and 207, (64, 32, 128, 64) 228 and 267.
  if (!plan.problem.ragged && plan.problem.pass == Pass::kBackward && dim <= 32) {
    longest = dim <= 16 ? 128 : 96;
  }
  return mean_length(plan) <= longest && plan.batch * plan.heads_k >= 4 * gpu.multiprocessors;
}

int64_t mean_length(const AttentionPlan& plan) {
  const AttentionProblem& p = plan.problem;
  if (!p.ragged) return std::max(plan.len_q, plan.len_k);
  return std::max(p.query.shape[0], p.key.shape[0]) / std::max<int64_t>(plan.batch, 1);
}

const Kernel* choose_tile(AttentionPlan& plan, const Family& family, const Gpu& gpu,
                          const std::optional<ForcedTile>& forced, std::string& why) {
  const AttentionProblem& p = plan.problem;
  const Role role = main_role(p);
  const int64_t dim = std::max(plan.head_dim, plan.head_dim_v);
  const bool short_sequences = !forced && many_short_sequences(plan, gpu) && dim <= kShortDim;
  const bool packs = !forced && many_packed_sequences(plan, gpu) && dim <= kShortDim;
  const bool for_short = short_sequences && has_short_tiles(family, role, p.query.dtype);
  const bool tf32 = takes_tf32(family, p);
  const Geometry g = geometry(p);
  const bool general_score = g.softcap > 0 || !(g.scale > 0);
  const auto pass_over = [&](const Kernel& kernel, const std::string& reason) {
    plan.candidates.push_back({kernel.id.name, "passed over: " + reason});
  };
  int bucket = 0;
  bool said_plain = false, said_whole = false;
  std::string tiles;
  // The fallback is the first tile that is only too large: it serves where no smaller one exists.
  const Kernel *chosen = nullptr, *fallback = nullptr;
  std::string fallback_reason;
  for (const Kernel& k : kernels()) {
    if (k.family != std::string_view(family.name) || k.role != role || k.dtype != p.query.dtype ||
        k.tf32 != tf32 || k.head_dim < dim || (bucket && k.head_dim != bucket && !k.packed)) {
      continue;
    }
    // Tiles that take a bias in another way say nothing about this one.
    if (k.bias_input != kNoBias && k.bias_input != bias_input(plan)) continue;
    if (k.packed || k.whole) {  // beside the tiles of a head dim, which serve where these do not
      const bool matches = forced && k.block_q == forced->rows && k.block_k == forced->columns;
      if (general_score || chosen || (forced && !matches)) continue;
      if (k.packed ? !(p.ragged || packs || forced) : said_whole) continue;
      std::string reason = family.cannot_serve(plan, k);
      if (reason.empty() && !forced) {
        // With a bias there are no others: slower() says for whom these are.
        if (k.packed && !packs && k.bias_input == kNoBias) reason = kForShort;
        if (k.whole) reason = fits(k, gpu) ? family.too_large(plan, k, gpu) : needs_shared(k, gpu);
      }
      said_whole |= k.whole;
      if (reason.empty()) {
        chosen = &k;
      } else {
        pass_over(k, reason);
      }
      continue;
    }
    if (general_score && !k.general_score) {
      if (!said_plain) pass_over(k, "takes no softcap, and no scale of 0 or less");
      said_plain = true;
      continue;
    }
    if (k.bias_keys > 0 && plan.len_k > k.bias_keys) {
      pass_over(k, text("keeps the bias of at most ", k.bias_keys, " keys"));
      continue;
    }
    bucket = k.head_dim;
    tiles += text(tiles.empty() ? "" : ", ", k.block_q, "x", k.block_k);
    if (chosen) continue;
    if (forced) {
      if (k.block_q == forced->rows && k.block_k == forced->columns) chosen = &k;
      continue;
    }
    if (k.for_short != for_short) {
      pass_over(k, for_short ? "made for longer sequences" : kForShort);
    } else if (!fits(k, gpu)) {
      pass_over(k, needs_shared(k, gpu));
    } else if (std::string reason = too_large(plan, family, k, gpu); !fallback && !reason.empty()) {
      fallback = &k;
      fallback_reason = reason;
    } else {
      chosen = &k;
    }
  }
  if (chosen && fallback) pass_over(*fallback, fallback_reason);
  if (!chosen) chosen = fallback;
  if (chosen && fits(*chosen, gpu)) return chosen;
  if (chosen) {
    why = text(chosen->id.name, " ", needs_shared(*chosen, gpu));
  } else if (!bucket) {
    why = text("has no kernels for ", dtype_name(p.query.dtype));
  } else if (forced) {
    why = text("FLASHMOE_TILE asks for ", forced->rows, "x", forced->columns, "; for head dim ",
               dim, " there are ", tiles);
  } else {
    why = text("no tile for head dim ", dim, " fits ", chip_name(gpu.compute_capability));
  }
  return nullptr;
}

}  // namespace flashmoe::cuda
