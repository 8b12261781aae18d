#include "cuda/attention/second_plan.h"

#include <algorithm>

#include "attention/problem.h"
#include "core/numbers.h"
#include "core/text.h"
#include "cuda/attention/bias_plan.h"
#include "cuda/attention/lay_out.h"
#include "cuda/attention/second/params.h"

namespace flashmoe::cuda {
namespace {

bool sums_bias(const AttentionPlan& plan) {
  return plan.problem.pass == Pass::kSecond && plan.problem.grad_bias && shares_bias(plan);
}

// Whether the kernel by keys has something to do.
bool goes_by_keys(const AttentionPlan& plan) {
  const AttentionProblem& p = plan.problem;
  return p.grad_key || p.grad_value || (p.grad_bias && !shares_bias(plan));
}

Role main_role(const AttentionPlan& plan) {
  if (plan.problem.pass == Pass::kTangent) return Role::kTangent;
  if (goes_by_keys(plan)) return Role::kSecondKeys;
  return plan.problem.grad_query || !sums_bias(plan) ? Role::kSecondQueries : Role::kSecondBiasSum;
}

const Kernel& kernel_of(const AttentionPlan& plan, Role role) {
  return *find_kernel(role, plan.family, plan.problem.query.dtype);
}

// Rows of one head in all sequences.
int64_t rows_of_head(const AttentionPlan& plan) {
  const AttentionProblem& p = plan.problem;
  return p.ragged ? p.query.shape[0] : plan.batch * plan.len_q;
}

BackwardWorkspace workspace_of(const AttentionPlan& plan) {
  constexpr int64_t kAlignment = 256;
  const AttentionProblem& p = plan.problem;
  BackwardWorkspace w;
  const auto place = [&](int64_t bytes) {
    const size_t at = w.bytes;
    w.bytes += static_cast<size_t>(round_up(bytes, kAlignment));
    return at;
  };
  const auto slots = [&](const TensorSpec& spec) {
    return ragged_slots(spec.shape[0], kSecondRows, plan.batch);
  };
  const bool second = p.pass == Pass::kSecond;
  if (p.ragged) {
    w.query_slots = slots(p.query);
    if (second) w.key_slots = slots(p.key);
    if (sums_bias(plan)) w.sum_slots = w.key_slots;
  }
  int64_t bias_sums = 0;
  if (plan.bias_splits > 1) {
    const BiasSumGrid grid = bias_sum_grid(plan, kSecondRows, kSecondRows);
    bias_sums =
        grid.tiles * grid.heads * grid.batches * plan.bias_splits * kSecondRows * kSecondRows;
  }
  w.row_numbers = place(second ? plan.heads_q * rows_of_head(plan) * 4 * sizeof(float) : 0);
  w.bias_sums = place(bias_sums * sizeof(float));
  w.key_blocks = place(w.key_slots * sizeof(RaggedBlock));
  w.query_blocks = place(w.query_slots * sizeof(RaggedBlock));
  w.sum_blocks = place(w.sum_slots * sizeof(RaggedBlock));
  return w;
}

// The CTAs of a kernel that goes by tiles of queries or keys, of which each has `chunks` chunks of
// columns.
Grid tile_grid(const AttentionPlan& plan, bool by_keys, int64_t chunks) {
  const AttentionProblem& p = plan.problem;
  const int64_t heads = by_keys ? plan.heads_k : plan.heads_q;
  if (p.ragged) {
    const TensorSpec& rows = by_keys ? p.key : p.query;
    return grid_of(ragged_slots(rows.shape[0], kSecondRows, plan.batch) * heads, chunks);
  }
  const int64_t tiles = ceil_div(by_keys ? plan.len_k : plan.len_q, kSecondRows);
  return grid_of(tiles * chunks, heads, slice_batch(plan));
}

int64_t chunks_of(int64_t head_dim) { return second_chunks(static_cast<int>(head_dim)); }

}  // namespace

const Kernel* choose_second_kernel(const AttentionPlan& plan, const Family& family,
                                   std::string& why) {
  const Kernel* kernel = find_kernel(main_role(plan), family.name, plan.problem.query.dtype);
  if (!kernel) {
    const char* what = plan.problem.pass == Pass::kTangent ? "forward mode" : "second derivatives";
    why = text("has no kernels of ", what, " for ", dtype_name(plan.problem.query.dtype));
  }
  return kernel;
}

void lay_out_second(AttentionPlan& plan, const Kernel& kernel, const Gpu& gpu) {
  const AttentionProblem& p = plan.problem;
  const Kernel* bias_sum = sums_bias(plan) ? &kernel_of(plan, Role::kSecondBiasSum) : nullptr;
  if (bias_sum) plan.bias_splits = choose_bias_splits(plan, gpu, *bias_sum);
  limit_slices(plan);
  if (p.ragged) add_ragged_lists(plan, bias_sum);
  if (p.pass == Pass::kTangent) {
    const Grid grid = tile_grid(plan, false, chunks_of(plan.head_dim_v));
    plan.launches.push_back(per_slice(kernel, grid));
  } else {
    const int64_t rows = plan.heads_q * rows_of_head(plan);
    plan.launches.push_back(once(kernel_of(plan, Role::kSecondRows),
                                 grid_of(ceil_div(rows, kSecondRowsOfCta)), Given::kCall));
    if (p.grad_sinks) {
      plan.launches.push_back(
          once(kernel_of(plan, Role::kSecondSinks), grid_of(plan.heads_q), Given::kCall));
    }
    if (p.grad_query) {
      plan.launches.push_back(per_slice(kernel_of(plan, Role::kSecondQueries),
                                        tile_grid(plan, false, chunks_of(plan.head_dim))));
    }
    if (goes_by_keys(plan)) {
      const int64_t chunks = std::max(chunks_of(plan.head_dim), chunks_of(plan.head_dim_v));
      plan.launches.push_back(
          per_slice(kernel_of(plan, Role::kSecondKeys), tile_grid(plan, true, chunks)));
      // Beside the kernel by queries, of which it needs nothing. What is before that one has ended.
      plan.launches.back().overlaps = p.grad_query && gpu.compute_capability >= 90;
    }
    if (bias_sum) add_bias_sum(plan, *bias_sum);
  }
  const Grid& grid = plan.launches.back().grid;
  plan.work_items = int64_t{grid[0]} * grid[1] * grid[2];
  plan.workspace_bytes = workspace_of(plan).bytes;
}

Status run_second(Call& call) {
  const AttentionPlan& plan = call.plan;
  call.backward = workspace_of(plan);
  AttentionSecondParams p{};
  fill_second(p, call);
  p.rows_of_head = rows_of_head(plan);
  p.row_numbers = reinterpret_cast<float*>(call.workspace + call.backward.row_numbers);
  return run_launches(call, p, fill_side_params(call, p, true));
}

}  // namespace flashmoe::cuda
