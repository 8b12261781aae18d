#include "cuda/attention/sm90_maps.h"

#include <algorithm>

#include "core/numbers.h"
#include "core/text.h"
#include "cuda/attention/bias_plan.h"
#include "cuda/attention/planner.h"
#include "cuda/runtime/tensor_map.h"

namespace flashmoe::cuda::sm90 {

bool four_dimensions(const TensorSpec& spec, bool ragged, TensorSpec& four) {
  if (spec.rank < 3) return false;
  four = TensorSpec{};
  four.dtype = spec.dtype;
  four.rank = 4;
  for (int i = 1; i < 4; ++i) {
    const int from = ragged && i < 3 ? 2 - i : spec.rank + i - 4;
    four.shape[i] = spec.shape[from];
    four.stride[i] = spec.stride[from];
  }
  int64_t count = 1, stride = 0;  // of the leading dimensions, innermost first
  for (int i = spec.rank - 4; i >= 0; --i) {
    if (spec.shape[i] == 1) continue;
    if (count == 1) stride = spec.stride[i];
    if (spec.stride[i] != stride * count) return false;
    count *= spec.shape[i];
  }
  four.shape[0] = count;
  four.stride[0] = stride;
  for (int i = 0; i < 3; ++i) {
    if (four.shape[i] == 0 || (four.shape[i] > 1 && four.stride[i] <= 0)) return false;
  }
  return four.shape[3] > 0;
}

Status encode(TensorMap& map, const TensorSpec& tensor, const void* data,
              std::span<const int> box) {
  const Swizzle swizzle =
      box.back() * dtype_bytes(tensor.dtype) <= 64 ? Swizzle::k64 : Swizzle::k128;
  const Result<CUtensorMap> encoded = encode_tensor_map(tensor, data, box, swizzle);
  if (!encoded.ok()) return encoded.status();
  std::copy(std::begin(encoded.value().opaque), std::end(encoded.value().opaque), map.opaque);
  return {};
}
int box_columns(const Kernel& kernel) { return kernel.head_dim <= 32 ? 32 : 64; }

Status encode_keys(TensorMap& map, const TensorSpec& spec, const void* data, int64_t rows,
                   int columns, bool ragged) {
  TensorSpec four;
  if (!four_dimensions(spec, ragged, four)) return invalid("a tensor that no tensor map describes");
  const int box[] = {1, 1, static_cast<int>(rows), columns};
  return encode(map, four, data, box);
}
Status encode_queries(TensorMap& map, const TensorSpec& spec, const void* data, int64_t rows,
                      int columns, int pack, bool ragged) {
  TensorSpec four;
  if (!four_dimensions(spec, ragged, four)) return invalid("a tensor that no tensor map describes");
  TensorSpec five;
  five.dtype = four.dtype;
  five.rank = 5;
  const int64_t heads = int64_t{1} << pack;
  five.shape = {four.shape[0], four.shape[1] / heads, four.shape[2], heads, four.shape[3]};
  five.stride = {four.stride[0], four.stride[1] * heads, four.stride[2], four.stride[1],
                 four.stride[3]};
  const int box[] = {1, 1, static_cast<int>(rows / heads), static_cast<int>(heads), columns};
  return encode(map, five, data, box);
}

Status encode_bias(TensorMap& map, const Call& call, const AttentionParams& p, int64_t rows) {
  const AttentionPlan& plan = call.plan;
  // Where it lies, or a copy in the workspace.
  if (Status status = check_aligned("bias", p.bias); !status.ok()) return status;
  TensorSpec matrix;
  matrix.dtype = plan.problem.bias->dtype;
  matrix.rank = 2;
  matrix.stride = {p.bias_strides.row, 1};
  int64_t last = p.bias_strides.head > 0 ? (plan.heads_q - 1) * p.bias_strides.head : 0;
  for (int i = 0; i < p.batch_dims; ++i) last += (p.batch_sizes[i] - 1) * p.bias_strides.batch[i];
  matrix.shape = {last / p.bias_strides.row + plan.len_q, plan.len_k};
  const int box[] = {static_cast<int>(rows), 64};
  return encode(map, matrix, p.bias, box);
}

int64_t block_heads(const TensorSpec& cache) {
  const int64_t blocks = cache.size(0), heads = cache.size(2), step = cache.stride[2];
  if (cache.size(3) % 64) return 0;
  if (heads == 1) return 1;
  if (step <= 0) return 0;
  if (blocks == 1) return heads;
  if (cache.stride[0] % step) return 0;
  const int64_t found = cache.stride[0] / step;
  return found >= heads && found <= INT32_MAX / blocks ? found : 0;
}
Status encode_whole_rows(TensorMap& map, const TensorSpec& cache, const void* data, int rows,
                         int columns) {
  const int64_t row = cache.stride[1];
  TensorSpec five;
  five.dtype = cache.dtype;
  five.rank = 5;
  five.shape = {cache.size(0) * block_heads(cache), cache.size(1) / 8, cache.size(3) / 64, 8, 64};
  five.stride = {cache.stride[cache.size(2) == 1 ? 0 : 2], 8 * row, 64, row, 1};
  const int box[] = {1, rows / 8, columns / 64, 8, 64};
  return encode(map, five, data, box);
}

bool steps_forward(const TensorSpec& cache) {
  for (int i = 0; i < cache.rank; ++i) {
    if (cache.shape[i] > 1 && cache.stride[i] <= 0) return false;
  }
  return true;
}

bool encode_grad_bias(TensorMap& map, const AttentionPlan& plan, const AttentionBwdParams& p) {
  constexpr int kStoredRows = 64;
  const Strides& strides = p.grad_bias_strides;
  if (p.grad_bias_column != 1) return false;
  for (int i = 1; i < p.batch_dims; ++i) {
    if (strides.batch[i - 1] != strides.batch[i] * p.batch_sizes[i]) return false;
  }
  TensorSpec four;
  four.dtype = plan.problem.grad_bias->dtype;
  four.rank = 4;
  four.shape = {plan.batch, plan.heads_q, plan.len_q, plan.len_k};
  four.stride = {strides.batch[p.batch_dims - 1], strides.head, strides.row, 1};
  const int box[] = {1, 1, kStoredRows, 64};
  return encode(map, four, p.grad_bias, box).ok();
}

Status encode_packed(TensorMap& map, const TensorSpec& spec, const void* data, int rows,
                     bool side_by_side, bool ragged) {
  TensorSpec all = spec;
  if (side_by_side) {
    const int heads = ragged ? 1 : spec.rank - 3, columns = spec.rank - 1;
    all.shape[columns] *= all.shape[heads];
    all.shape[heads] = 1;
  }
  return encode_keys(map, all, data, rows, 64, ragged);
}

}  // namespace flashmoe::cuda::sm90
