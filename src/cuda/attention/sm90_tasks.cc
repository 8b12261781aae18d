#include "cuda/attention/sm90_tasks.h"

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <vector>

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

// When the last cluster is done, if each takes the next task as soon as it is done with one, in the
// time that a tile of queries takes of a tile of keys. The last `split_tiles` tiles of keys come in
// splits. Clusters are not equally fast, so the end is a tenth of the longest task later. The
// constants fit eleven shapes on an H200, of each up to sixteen splits of all tiles measured: eight
// of head dim 128 and three of 64. What is chosen is within 2% of the fastest of those, and for one
// of 256 that was not fitted (docs/log/sm90.md); of other head dims nothing was measured.
class TaskTimes {
 public:
  TaskTimes(const AttentionPlan& plan, int64_t split_tiles, int64_t clusters)
      : plan_(plan), done_(clusters, 0.) {
    const AttentionProblem& p = plan.problem;
    const Geometry g = geometry(p);
    shift_ = plan.len_k - plan.len_q;
    left_ = window_limit(g.left);
    right_ = window_limit(g.right);
    group_ = plan.heads_q / plan.heads_k;
    // As if all sequences of a ragged batch were as long as the longest.
    heads_ = plan.heads_k * (p.ragged ? ceil_div(p.key.shape[0], plan.len_k) : plan.batch);
    tiles_ = heads_ * ceil_div(plan.len_k, plan.block_k);
    first_split_ = p.ragged && split_tiles > 0 ? 0 : tiles_ - split_tiles;
    for (int64_t tile = 0; tile < first_split_; ++tile) add(tile, 0, plan.len_q, 0);
  }
  double without_splits() const { return last(); }
  // If all clusters had as much to do, and splitting cost nothing but a launch.
  double at_best() const { return sum_ / static_cast<double>(done_.size()) + kLaunch; }
  double with_splits(int64_t splits) const {
    constexpr double kPart = 0.5, kPartSummed = 0.015;
    TaskTimes times = *this;
    const int64_t rows = split_rows(plan_, splits);
    for (int64_t tile = first_split_; tile < tiles_; ++tile) {
      for (int64_t split = 0; split < splits; ++split) times.add(tile, split, rows, kPart);
    }
    return times.last() + kLaunch + kPartSummed * static_cast<double>(times.tasks_ - tasks_);
  }

 private:
  static constexpr double kLaunch = 2;

  // The tiles of queries of one head that a split of a tile of keys has.
  int64_t query_tiles(int64_t block, int64_t split, int64_t rows) const {
    const int64_t first_key = block * plan_.block_k;
    const int64_t last_key = std::min(first_key + plan_.block_k, plan_.len_k) - 1;
    const int64_t first = std::max(first_key - shift_ - right_, split * rows);
    const int64_t last =
        std::min({last_key - shift_ + left_, plan_.len_q - 1, (split + 1) * rows - 1});
    return first <= last ? last / plan_.block_q - first / plan_.block_q + 1 : 0;
  }
  void add(int64_t tile, int64_t split, int64_t rows, double part) {
    constexpr double kTask = 2.5;
    const auto steps = static_cast<double>(query_tiles(tile / heads_, split, rows) * group_);
    if (steps == 0) return;
    const double time = steps + kTask + part;
    ++tasks_;
    sum_ += time;
    longest_ = std::max(longest_, steps);
    std::pop_heap(done_.begin(), done_.end(), std::greater<>());
    done_.back() += time;
    std::push_heap(done_.begin(), done_.end(), std::greater<>());
  }
  double last() const { return *std::max_element(done_.begin(), done_.end()) + 0.1 * longest_; }

  const AttentionPlan& plan_;
  std::vector<double> done_;  // a heap, whose first is done first
  int64_t shift_, left_, right_, group_, heads_, tiles_, first_split_;
  int64_t tasks_ = 0;
  double sum_ = 0, longest_ = 0;
};

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
  if (causal && plan.splits == 1 && p.group > kFewHeads && keys >= kManyKeys / 2)
    pair_heads(p, plan);
}

int64_t split_rows(const AttentionPlan& plan, int64_t splits) {
  return ceil_div(ceil_div(plan.len_q, plan.block_q), splits) * plan.block_q;
}

void choose_splits(AttentionPlan& plan, int64_t clusters) {
  constexpr int64_t kMost = 16, kTasksOfCluster = 6, kRounds = 8;
  constexpr double kLeastGain = 4, kLeastShare = 0.03;  // a choice: the model is no better
  const AttentionProblem& p = plan.problem;
  if (p.bias || plan.slices > 1 || stores_dq(plan) || !(p.grad_key || p.grad_value)) return;
  const int64_t tiles = key_tiles(plan);
  if (tiles > kRounds * clusters) return;
  const TaskTimes whole(plan, 0, clusters);
  double least =
      whole.without_splits() - std::max(kLeastGain, kLeastShare * whole.without_splits());
  if (whole.at_best() >= least) return;
  const auto consider = [&](int64_t split_tiles) {
    if (split_tiles == 0 || split_tiles > tiles) return;
    const int64_t most = std::min(kTasksOfCluster * clusters / split_tiles, kMost);
    if (most < 2) return;
    const TaskTimes times(plan, split_tiles, clusters);
    for (int64_t splits = 2; splits <= most; ++splits) {
      if (ceil_div(plan.len_q, split_rows(plan, splits)) < splits) continue;  // one would be empty
      const double time = times.with_splits(splits);
      if (time >= least) continue;
      least = time;
      plan.splits = splits;
      plan.split_tiles = split_tiles;
    }
  };
  consider(tiles);
  // Under a mask the last tasks are short as it is (and no gain was seen).
  const Geometry g = geometry(p);
  if (p.ragged || g.left >= 0 || g.right >= 0 || tiles < clusters) return;
  const int64_t rest = tiles % clusters;
  consider(rest);
  consider(rest + clusters);
}

int64_t preprocess_rows(const AttentionPlan& plan, int64_t ctas) {
  constexpr int64_t kLeast = 16;  // a warp's rows at a time, of up to 8 heads
  int64_t rows = plan.block_q;
  const auto launched = [&](int64_t rows) {
    return ceil_div(plan.len_q, rows) * plan.heads_q * plan.batch;
  };
  while (rows < 4 * plan.block_q && launched(2 * rows) >= 4 * ctas) rows *= 2;
  while (rows % (2 * kLeast) == 0 && launched(rows) < 2 * ctas) rows /= 2;
  return rows;
}

int64_t key_blocks(const AttentionPlan& plan) {
  const AttentionProblem& p = plan.problem;
  return p.ragged ? ragged_slots(p.key.shape[0], plan.block_k, plan.batch)
                  : ceil_div(plan.len_k, plan.block_k);
}

int64_t key_tiles(const AttentionPlan& plan) {
  return key_blocks(plan) * (plan.problem.ragged ? 1 : plan.batch) * plan.heads_k;
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
