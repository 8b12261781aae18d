#include "cuda/attention/sm90_tasks.h"

#include <algorithm>
#include <numeric>

#include "core/numbers.h"
#include "cuda/attention/call.h"
#include "cuda/attention/lay_out.h"
#include "cuda/attention/workspace.h"

namespace flashmoe::cuda::sm90 {

// Bytes that are to stay in L2, which has room for the rest as well.
constexpr int64_t kCachedBytes = 32 << 20;

int64_t persistent_ctas(const AttentionPlan& plan) {
  for (const AttentionLaunch& step : plan.launches) {
    if (step.handle == plan.handle) return step.grid[0];
  }
  return 0;
}

int64_t rows_of_task(const AttentionPlan& plan) { return plan.block_q / main_kernel(plan).teams; }

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

bool zeroes_dq(const AttentionPlan& plan, const Sm90BwdParams& p) {
  const Kernel& kernel = main_kernel(plan);
  const bool has_warp = !kernel.converts_dq && !plan.problem.bias;  // BwdConfig::kZeroesDq
  const bool masked = p.left < kNoLimit || p.right < kNoLimit;
  return has_warp && masked && p.dq_accum && !p.deterministic && !plan.problem.ragged &&
         plan.len_k * p.dim >= 4096 * 96;
}

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

int64_t packed_boxes(const AttentionPlan& plan) {
  return ceil_div(plan.heads_q, main_kernel(plan).heads_of_box);
}
Sm90PackedBwdParams::Side packed_side(const AttentionPlan& plan, bool keys) {
  const AttentionProblem& p = plan.problem;
  const int64_t tiles = ceil_div(packed_tokens(plan, keys), plan.block_q);
  const int64_t boxes =
      ceil_div(keys ? plan.heads_k : plan.heads_q, main_kernel(plan).heads_of_box);
  const bool wanted = keys ? p.grad_key || p.grad_value : p.grad_query || p.grad_bias;
  return {.rows = static_cast<int32_t>(tiles * plan.block_q),
          .tiles = static_cast<int32_t>(tiles),
          .boxes = static_cast<int32_t>(wanted ? boxes : 0)};
}
int64_t packed_bounds_ctas(const AttentionPlan& plan) {
  constexpr int64_t kSequencesOfOne = 128, kMost = 64;
  return std::clamp<int64_t>(ceil_div(plan.batch + 1, kSequencesOfOne), 1, kMost);
}
}  // namespace flashmoe::cuda::sm90
