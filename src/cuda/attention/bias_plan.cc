#include "cuda/attention/bias_plan.h"

#include <algorithm>

#include "attention/problem.h"
#include "core/numbers.h"
#include "cuda/attention/planner.h"
#include "cuda/attention/workspace.h"

namespace flashmoe::cuda {

bool shares_bias(const AttentionPlan& plan) {
  const TensorSpec& query = plan.problem.query;
  const TensorSpec& bias = *plan.problem.bias;
  if (plan.problem.ragged) return plan.heads_q > 1 && bias.size(-1) == 1;  // (pairs, heads)
  for (int i = 1; i <= query.rank; ++i) {
    const int64_t size = i == 1 ? plan.len_k : query.size(-i);
    // Also where there is nothing to sum: the gradient is 0 then.
    if (size != 1 && (i > bias.rank || bias.size(-i) == 1)) return true;
  }
  return false;
}

int64_t bias_matrices(const AttentionPlan& plan) {
  const TensorSpec& bias = *plan.problem.bias;
  int64_t matrices = 1;
  for (int i = 0; i < bias.rank - 2; ++i) matrices *= bias.shape[i];
  return std::max<int64_t>(matrices, 1);
}

int64_t bias_batches(const AttentionPlan& plan) {
  const TensorSpec& query = plan.problem.query;
  const TensorSpec& bias = *plan.problem.bias;
  int64_t batches = 1;
  for (int i = 4; i <= query.rank && (i > bias.rank || bias.size(-i) == 1); ++i) {
    batches *= query.size(-i);
  }
  return std::max<int64_t>(batches, 1);
}

bool has_bias_of_pairs(const AttentionPlan& plan) {
  if (!plan.problem.bias || plan.problem.ragged) return false;
  const TensorSpec& bias = *plan.problem.bias;
  return bias.rank >= 2 && bias.size(-1) == plan.len_k && bias.size(-2) == plan.len_q &&
         bias.size(-1) * bias.size(-2) > 1;
}

bool has_whole_bias(const AttentionPlan& plan) {
  return has_bias_of_pairs(plan) && dtype_bytes(plan.problem.bias->dtype) == 2;
}

bool has_neighbouring_keys(const AttentionPlan& plan) {
  const TensorSpec& bias = *plan.problem.bias;
  return bias.size(-1) == 1 || bias.step(-1) == 1;
}

namespace {

// Whether rows of the bias are whole 16-byte chunks, and its matrices a multiple of `apart` from
// each other; 0: of a row.
bool has_bias_chunks(const AttentionPlan& plan, int64_t apart) {
  const TensorSpec& bias = *plan.problem.bias;
  if (bias.step(-1) != 1 || bias.step(-2) % 8 != 0 || plan.len_k % 8 != 0) return false;
  if (apart == 0) apart = bias.step(-2);
  if (apart <= 0) return false;
  for (int i = 0; i < bias.rank - 2; ++i) {
    if (bias.shape[i] > 1 && bias.stride[i] % apart != 0) return false;
  }
  return true;
}

}  // namespace

// Whether a copy of the bias is small beside what is computed with it.
static bool many_share_bias(const AttentionPlan& plan) {
  constexpr int64_t kMany = 8;
  return plan.batch * plan.heads_q >= kMany * bias_matrices(plan);
}

BiasInput bias_input(const AttentionPlan& plan) {
  if (!plan.problem.bias) return kNoBias;
  if (plan.problem.ragged) return kBiasByPairs;
  if (plan.problem.bias->dtype == DType::kFloat32) return kFloatsByRows;
  if (plan.problem.bias->dtype == DType::kBool) return kBytesByRows;
  const bool in_place = !has_bias_chunks(plan, 0) && has_neighbouring_keys(plan);
  return in_place && !many_share_bias(plan) ? kBiasByRows : kBiasByTma;
}

bool copies_much_bias(const AttentionPlan& plan) {
  constexpr int64_t kMuch = int64_t{256} << 20;
  if (many_share_bias(plan) || has_bias_chunks(plan, 0) || bias_input(plan) != kBiasByTma) {
    return false;
  }
  const int64_t row_bytes = aligned_bias_pitch(plan) * dtype_bytes(plan.problem.bias->dtype);
  return bias_matrices(plan) * plan.len_q > kMuch / row_bytes;
}

bool aligns_bias(const AttentionPlan& plan) {
  if (has_tangents(plan.problem.pass)) return false;  // its kernels read a bias where it lies
  if (!has_whole_bias(plan) || bias_matrices(plan) > kMaxGridYZ) return false;
  const bool many = many_share_bias(plan);
  // TMA takes the rows of all matrices for those of one.
  const BiasInput input = main_kernel(plan).bias_input;
  if (input != kNoBias) return input == kBiasByTma && !has_bias_chunks(plan, 0);
  return many && !has_bias_chunks(plan, 8);
}

int64_t aligned_bias_bytes(const AttentionPlan& plan) {
  if (!aligns_bias(plan)) return 0;
  const TensorSpec& bias = *plan.problem.bias;
  int64_t rows = 1;
  for (int i = 0; i < bias.rank - 1; ++i) rows *= bias.shape[i];
  return round_up(rows * aligned_bias_pitch(plan) * dtype_bytes(bias.dtype), 256);
}

bool transposes_bias(const AttentionPlan& plan) {
  if (!plan.problem.bias || !plan.problem.ragged || has_tangents(plan.problem.pass)) return false;
  if (main_kernel(plan).packed) return false;   // reads it where it is
  const TensorSpec& bias = *plan.problem.bias;  // (pairs, heads)
  return dtype_bytes(bias.dtype) == 2 && bias.shape[0] > 1 && bias.shape[1] > 1 &&
         bias.stride[0] != 1;
}

int64_t transposed_bias_bytes(const AttentionPlan& plan) {
  if (!transposes_bias(plan)) return 0;
  const int64_t elems = plan.heads_q / plan.slices * transposed_bias_pitch(plan);
  return round_up(elems * dtype_bytes(plan.problem.bias->dtype), 256);
}

BiasSumGrid bias_sum_grid(const AttentionPlan& plan, int64_t block_q, int64_t block_k) {
  const TensorSpec& bias = *plan.problem.bias;
  const auto size = [&](int from_last) {
    return from_last <= bias.rank ? bias.size(-from_last) : int64_t{1};
  };
  // A dimension of one is as good as one that is shared.
  const bool transposed = size(1) > 1, own_queries = size(2) > 1;
  const int64_t query_blocks = std::max<int64_t>(ceil_div(plan.len_q, block_q), 1);
  const int64_t key_blocks = std::max<int64_t>(ceil_div(plan.len_k, block_k), 1);
  BiasSumGrid grid;
  grid.tiles = (own_queries ? query_blocks : 1) * (transposed ? key_blocks : 1);
  grid.heads = size(3);
  for (int i = 4; i <= bias.rank; ++i) grid.batches *= size(i);
  if (size(1) == 0 || size(2) == 0) grid.tiles = 0;  // it has no elements
  grid.steps = query_blocks * key_blocks / std::max<int64_t>(grid.tiles, 1) *
               (plan.heads_q / std::max<int64_t>(grid.heads, 1)) *
               (plan.batch / std::max<int64_t>(grid.batches, 1));
  return grid;
}

}  // namespace flashmoe::cuda
