// Tensors of a problem as kernels see them.
#pragma once

#include <optional>

#include "cpu/attention/kernels.h"

namespace flashmoe::cpu {

// Strides of `spec`, whose last dimensions are (head, row, col) or, for a per-row number, (head,
// row).
Operand operand(const TensorSpec& spec, const void* data, const Geometry& g, bool has_col);
Operand operand(const std::optional<TensorSpec>& spec, const void* data, const Geometry& g,
                bool has_col);

// One number for each head, (H), or for all, ().
Operand per_head(const std::optional<TensorSpec>& spec, const void* data);

// Rows of a (T, H, ...) result that belong to no sequence.
void fill_rest(const Operand& op, int64_t heads, int64_t cols, int64_t first, int64_t last,
               double value);

}  // namespace flashmoe::cpu
