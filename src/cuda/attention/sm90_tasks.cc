#include "cuda/attention/sm90_tasks.h"

#include <algorithm>
#include <cstdlib>
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

namespace {

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

// Under a causal mask a quarter of the tiles. Below 2,048 keys nothing was gained by it.
int64_t late_blocks(const AttentionPlan& plan, const Sm90FwdParams& p) {
  constexpr int64_t kLeastKeys = 2048;
  const bool causal = p.left >= kNoLimit && p.right < kNoLimit;
  return causal && counts_tasks(plan) && plan.len_k >= kLeastKeys ? p.query_blocks / 4 : 0;
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

// Whether there is a warp that can zero what tiles of keys will add to.
bool can_zero_dq(const AttentionPlan& plan, const Sm90BwdParams& p) {
  const bool has_warp = !main_kernel(plan).converts_dq && !plan.problem.bias;  // kZeroesDq
  return has_warp && p.dq_accum && !p.deterministic && !plan.problem.ragged;
}

// Pairs of heads, as many as all CTAs are busy with once, where these come out nearly even. If the
// last wave would be short, its heads and those of the wave before have the order of other heads.
void pair_heads(Sm90BwdParams& p, const AttentionPlan& plan) {
  const int64_t ctas = persistent_ctas(plan), key_blocks = p.key_blocks;
  // A CTA for each tile of keys of a pair's first head, and for those of the second that the first
  // queries see.
  const int64_t blocks = ceil_div(key_blocks, ceil_div(key_blocks, ctas - 1));
  const int64_t seen_at_once = std::max<int64_t>(plan.len_k - plan.len_q + p.right, 0);
  const int64_t of_pair = blocks + std::min(seen_at_once / plan.block_k + 1, blocks);
  const int64_t pairs = std::max<int64_t>((ctas + of_pair / 2) / of_pair, 1);
  if (8 * std::abs(pairs * of_pair - ctas) > ctas) return;
  const int64_t heads = plan.heads_k * plan.batch, wave = 2 * pairs;
  const int64_t rest = heads % wave == 0 ? 0 : wave + heads % wave;
  if (rest >= heads || plan.slices > 1) return;
  p.paired_heads = static_cast<int32_t>(heads - rest);
  p.pairs = static_cast<int32_t>(pairs);
  p.blocks_of_pass = static_cast<int32_t>(blocks);
  p.heads_per_wave = static_cast<int32_t>(std::max<int64_t>(rest, 1));
  p.zeroed_ahead = static_cast<int32_t>(std::max(rest, wave));
  p.zeroes_dq = true;
}

}  // namespace

void order_tiles(Sm90FwdParams& p, const AttentionPlan& plan) {
  p.heads_per_wave = static_cast<int32_t>(forward_heads_per_wave(plan, p));
  p.late_blocks = static_cast<int32_t>(late_blocks(plan, p));
}

void order_heads(Sm90BwdParams& p, const AttentionPlan& plan) {
  constexpr int64_t kManyKeys = 4096 * 96, kFewHeads = 4;
  p.heads_per_wave = static_cast<int32_t>(backward_heads_per_wave(plan, p));
  p.zeroed_ahead = p.heads_per_wave;
  if (!can_zero_dq(plan, p)) return;
  const int64_t keys = plan.len_k * p.dim;
  p.zeroes_dq = (p.left < kNoLimit || p.right < kNoLimit) && keys >= kManyKeys;
  const bool causal = p.left >= kNoLimit && p.right < kNoLimit;
  if (causal && p.group > kFewHeads && keys >= kManyKeys / 2) pair_heads(p, plan);
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
