// The tasks of Hopper's forward kernels without a GPU (hopper_tasks.h):
//
// - Every row of every head is somebody's, once.
// - What is left out of a task's tiles of keys is seen by nobody, what goes without a mask by all.
#include <algorithm>
#include <cstdio>
#include <set>
#include <tuple>

#include "hopper_tasks.h"
//
#include "cuda/attention/kernels/sm90.h"
#include "cuda/attention/sm90/fwd.cuh"

fake::Cuda fake_cuda;

namespace {

using namespace flashmoe;
using namespace flashmoe::cuda;
using namespace flashmoe::cuda::sm90;
using namespace testing;

// What is left out of a task's tiles of keys, or goes without a mask, is seen by nobody, or by all.
template <class C>
void check_keys(const FwdTask& task, const Sm90FwdParams& p) {
  const Sequence& seq = task.seq;
  const auto row_of = [&](int i) { return (task.first_row + i) >> p.pack; };
  CHECK(task.key_begin >= 0 && task.key_end > task.key_begin);
  const int last = row_of(C::kBlockQ - 1);
  CHECK(!sees(seq, row_of(0), last, 0, task.key_begin * C::kBlockK, p));
  CHECK(!sees(seq, row_of(0), last, task.key_end * C::kBlockK, seq.len_k, p));
  for (int i = 0; i < C::kWarpgroups; ++i) {
    const int first_row = row_of(64 * i), last_row = row_of(64 * i + 63);
    const int end = task.warpgroup_end[i];
    CHECK(end > task.key_begin && end <= task.key_end);
    CHECK(!sees(seq, first_row, last_row, end * C::kBlockK, seq.len_k, p));
    if constexpr (C::kHalfSoftmax) {
      const int half = (end - 1) * C::kBlockK + C::kBlockK / 2;
      CHECK(!task.half_first[i] || !sees(seq, first_row, last_row, half, seq.len_k, p));
    }
    for (int tile = task.unmasked_begin[i]; tile < std::min(task.unmasked_end[i], end); ++tile) {
      CHECK(sees_all(seq, first_row, last_row, tile * C::kBlockK, (tile + 1) * C::kBlockK, p));
    }
  }
}

// The tasks of a forward kernel, CTA by CTA.
template <class C>
void check_forward(Problem& problem) {
  const std::string symbol = find(problem.plan.kernel)->symbol;
  const auto main = std::find_if(launched.begin(), launched.end(),
                                 [&](const Launched& one) { return one.symbol == symbol; });
  const Sm90FwdParams p = main->forward;
  if (p.tile_counter) {
    CHECK(problem.contains(p.tile_counter, 4));
    *p.tile_counter = 0;
  }
  std::set<std::tuple<int64_t, int, int>> rows_seen;  // batch or token, head, row
  const FwdScheduler<C> scheduler{p};
  gridDim.x = main->config.gridDimX;
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
    int number = blockIdx.x;
    for (uint32_t count = 0;; ++count) {
      FwdTask task;
      scheduler.find_task(number, task);
      if (!task.more) break;
      number = scheduler.next(number, count);
      const Sequence& seq = task.seq;
      for (int row = task.first_row; row < task.first_row + C::kBlockQ; ++row) {
        if (row >> p.pack >= seq.len_q) break;
        const int64_t where = p.blocks ? seq.token_q + row : task.batch;
        CHECK(rows_seen.insert({where, task.head, p.blocks ? 0 : row}).second);
      }
      if (seq.valid) check_keys<C>(task, p);
    }
  }
  blockIdx.x = 0;
  const auto rows =
      p.blocks ? problem.problem.query.shape[0] : int64_t{p.batch} * p.len_q << p.pack;
  CHECK_EQ(rows_seen.size(), static_cast<size_t>(rows * p.heads));
}

}  // namespace

TEST(tasks_of_a_forward_pass) {
  if (!has_family("sm90")) return;
  prepare();
  std::mt19937 random(26);
  int checked = 0, counted = 0, late = 0, packed = 0, ragged = 0;
  for (int i = 0; i < 3000; ++i) {
    Problem made = random_problem(random, Pass::kForward);
    made.launch();
    if (!is_hopper(made.plan)) continue;
    const Note note("problem ", i, ": ", words(made));
    CHECK(for_tile<kFwd>(made.plan,
                         [&](auto at) { check_forward<FwdConfig<Bf16, kFwd[at]>>(made); }));
    const Sm90FwdParams& p = launched.back().forward;
    ++checked;
    counted += p.tile_counter != nullptr;
    late += p.late_blocks > 0;
    packed += p.pack > 0;
    ragged += p.blocks != nullptr;
  }
  std::printf("%d checked: %d count tasks, %d with late tiles, %d pack heads, %d ragged\n", checked,
              counted, late, packed, ragged);
  for (int of_a_kind : {counted, late, packed, ragged}) CHECK(of_a_kind > 50);
}
