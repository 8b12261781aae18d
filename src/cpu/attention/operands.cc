#include "cpu/attention/operands.h"

namespace flashmoe::cpu {

Operand operand(const TensorSpec& spec, const void* data, const Geometry& g, bool has_col) {
  Operand op;
  op.data = const_cast<void*>(data);
  op.dtype = spec.dtype;
  int at = spec.rank;
  const auto next = [&](int64_t& stride) {
    --at;
    stride = at >= 0 && spec.shape[at] != 1 ? spec.stride[at] : 0;
  };
  if (has_col) next(op.col);
  if (g.packed()) {  // (T, H, D)
    next(op.head);
    next(op.row);
    return op;
  }
  next(op.row);
  next(op.head);
  for (int i = g.num_lead - 1; i >= 0; --i) next(op.lead[i]);
  return op;
}

Operand operand(const std::optional<TensorSpec>& spec, const void* data, const Geometry& g,
                bool has_col) {
  return spec ? operand(*spec, data, g, has_col) : Operand{};
}

Operand per_head(const std::optional<TensorSpec>& spec, const void* data) {
  Operand op;
  if (!spec) return op;
  op.data = const_cast<void*>(data);
  op.dtype = spec->dtype;
  op.head = spec->rank ? spec->stride[0] : 0;
  return op;
}

void fill_rest(const Operand& op, int64_t heads, int64_t cols, int64_t first, int64_t last,
               double value) {
  if (!op) return;
  for (int64_t row = first; row < last; ++row) {
    for (int64_t head = 0; head < heads; ++head) {
      for (int64_t col = 0; col < cols; ++col) {
        const int64_t at = row * op.row + head * op.head + col * op.col;
        if (op.dtype == DType::kFloat64) {
          static_cast<double*>(op.data)[at] = value;
        } else if (op.dtype == DType::kFloat32) {
          static_cast<float*>(op.data)[at] = static_cast<float>(value);
        } else {
          static_cast<uint16_t*>(op.data)[at] = 0;  // only zeros are asked of the half types
        }
      }
    }
  }
}

}  // namespace flashmoe::cpu
