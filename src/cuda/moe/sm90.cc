#include "cuda/moe/sm90.h"

#include <algorithm>
#include <iterator>
#include <span>

#include "core/numbers.h"
#include "core/text.h"
#include "cuda/moe/tiles.h"
#include "cuda/moe/workspace.h"
#include "cuda/runtime/tensor_map.h"

namespace flashmoe::cuda::moe::sm90 {
namespace {

constexpr int kBox = 64;  // columns of a box, 128 bytes; and rows of those that are rows of tokens

Status encode(TensorMap& map, const TensorSpec& tensor, const void* data,
              std::span<const int> box) {
  const Result<CUtensorMap> encoded = encode_tensor_map(tensor, data, box);
  if (!encoded.ok()) return encoded.status();
  std::copy(std::begin(encoded.value().opaque), std::end(encoded.value().opaque), map.opaque);
  return {};
}

// Weights as they lie, (E, rows, columns) with columns side by side.
TensorSpec as_it_lies(const TensorSpec& weights) {
  TensorSpec spec = weights;
  if (order_of(weights) == Order::kColumns) {
    std::swap(spec.shape[1], spec.shape[2]);
    std::swap(spec.stride[1], spec.stride[2]);
  }
  return spec;
}

// Along the depth a box has the columns of half a tile, across it 64 of the depth.
Status encode_weights(TensorMap& map, const Kernel& kernel, const TensorSpec& weights,
                      const void* data) {
  const int box[] = {1, kernel.along ? kernel.tile.block_n / 2 : kBox, kBox};
  return encode(map, as_it_lies(weights), data, box);
}

// (rows, columns) of the workspace, whose rows are `row_bytes` apart.
Status encode_rows(TensorMap& map, DType dtype, int64_t rows, int64_t columns, int64_t row_bytes,
                   const void* data) {
  TensorSpec spec = contiguous(dtype, {rows, columns});
  spec.stride[0] = row_bytes / dtype_bytes(dtype);
  const int box[] = {kBox, kBox};
  return encode(map, spec, data, box);
}

// Why no tensor map describes the weights; empty: one does.
std::string not_mapped(const char* name, const TensorSpec& weights) {
  const TensorSpec spec = as_it_lies(weights);
  for (int dim = 0; dim < 2; ++dim) {
    const int64_t bytes = spec.stride[dim] * dtype_bytes(spec.dtype);
    if (spec.shape[dim] > 1 && (bytes <= 0 || bytes >= int64_t{1} << 40)) {
      return text("TMA cannot read ", name, ", whose stride ", dim, " is ", spec.stride[dim]);
    }
  }
  return {};
}

}  // namespace

std::string missing(const MoePlan& plan) {
  const MoeProblem& p = plan.problem;
  if (plan.rows == 0 || plan.experts == 0 || plan.width == 0 || plan.inner == 0) {
    return "has nothing to do for a call without tokens, experts or widths";
  }
  if (plan.width % 8 || plan.inner % 8) {
    return text("takes widths that are multiples of 8, these are ", plan.width, " and ",
                plan.inner);
  }
  const std::string up = not_mapped("gate_up", p.gate_up);
  return up.empty() ? not_mapped("down", p.down) : up;
}

std::string slower(const MoePlan& plan) {
  // Times of sm80 over ours, forward on an H200, by rows an expert: 0.92 to 1.02 below one, 0.84 to
  // 0.97 from 1 to 12, 1.00 to 1.08 at 16, 1.2 and more from 24 on.
  constexpr int64_t kMany = 16;
  const int64_t rows = plan.rows / plan.experts;  // of an expert
  if (plan.problem.pass != Pass::kForward || rows < 1 || rows >= kMany) return {};
  return text("sm80's tiles of few rows stream the weights faster for ", rows,
              rows == 1 ? " row" : " rows", " an expert");
}

const Kernel* choose_few(const MoePlan& plan, const std::optional<ForcedTile>& forced) {
  const MoeProblem& p = plan.problem;
  if (p.pass != Pass::kForward || plan.rows > kFewPairs || order_of(p.gate_up) != Order::kRows ||
      order_of(p.down) != Order::kRows) {
    return nullptr;
  }
  // A tile of 16 rows is half empty at 8 an expert, but one of 8 would read the weights twice where
  // an expert has a few more.
  const int64_t rows = ceil_div(plan.rows, std::min(plan.experts, plan.rows));  // of an expert
  const int64_t tokens = rows <= 4 ? 8 : rows <= 8 ? 16 : 0;
  for (const Kernel& k : kernels()) {
    const bool suits = forced ? k.tile.block_m == forced->rows && k.tile.block_n == forced->columns
                              : k.tile.block_m == tokens;
    if (k.role == Role::kFewUp && k.dtype == p.x.dtype && suits) return &k;
  }
  return nullptr;
}

const Kernel* choose_product(const MoePlan& plan, Role role, bool along, int64_t depth,
                             int64_t columns, const std::optional<ForcedTile>& forced,
                             std::string& why) {
  // 128 x 256 reads three quarters of the bytes that 128 x 128 reads from L2. Its epilogue is not
  // hidden: that of 128 x 128 is, by the other consumer's MMAs, which pays where these are few.
  constexpr int64_t kDeep = 1024;
  const int64_t wide = columns > 128 && depth >= kDeep ? 256 : 128;
  std::string names;
  const Kernel* chosen = nullptr;
  for (const Kernel& k : kernels()) {
    if (k.family != std::string_view("sm90") || k.role != role || k.along != along ||
        k.dtype != plan.problem.x.dtype) {
      continue;
    }
    names += text(names.empty() ? "" : ", ", k.tile.block_m, "x", k.tile.block_n);
    const bool suits = forced ? k.tile.block_m == forced->rows && k.tile.block_n == forced->columns
                              : k.tile.block_n == wide;
    if (suits) chosen = &k;
  }
  if (!chosen) {
    why =
        text("FLASHMOE_TILE asks for ", forced->rows, "x", forced->columns, "; there are ", names);
  }
  return chosen;
}

Status add_maps(Sm90UpParams& p, const Kernel& kernel, const TensorSpec& weights) {
  return encode_weights(p.weights_map, kernel, weights, p.weights.data);
}

Status add_maps(Sm90DownParams& p, const Kernel& kernel, const TensorSpec& weights, int64_t rows) {
  const int64_t depth = int64_t{p.halves} * p.depth;
  Status status = encode_rows(p.rows_map, weights.dtype, rows, depth, p.row_bytes, p.rows);
  return status.ok() ? encode_weights(p.weights_map, kernel, weights, p.weights.data) : status;
}

Status add_maps(Sm90BwdActParams& p, const Kernel& kernel, const TensorSpec& weights) {
  return encode_weights(p.weights_map, kernel, weights, p.weights.data);
}

Status add_maps(Sm90BwdWeightsParams& p, DType dtype, int64_t rows) {
  for (int i = 0; i < 2; ++i) {
    const WeightProduct& product = p.products[i];
    if (product.tiles_m == 0) continue;
    const RowOperand& sorted = product.left.gathered ? product.right : product.left;
    Status status =
        encode_rows(p.rows_maps[i], dtype, rows, sorted.columns, sorted.row_bytes, sorted.data);
    if (!status.ok()) return status;
  }
  return {};
}

}  // namespace flashmoe::cuda::moe::sm90
