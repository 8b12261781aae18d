#include "layout.h"

#include <algorithm>
#include <array>
#include <span>

namespace flashmoe::ops {
namespace {

using Order = std::array<int, kMaxRank>;  // dimensions, the innermost first

// Gives the dimensions strides in that order, `step` being the first one's. Unsigned: the shape is
// not checked yet, and one past 2^63 elements must only wrap around until the planner refuses it.
void stack_up(TensorSpec& spec, std::span<const int> order, uint64_t step = 1) {
  for (int dim : order) {
    spec.stride[dim] = static_cast<int64_t>(step);
    step *= static_cast<uint64_t>(std::max<int64_t>(spec.shape[dim], 1));
  }
}

Order last_first(int rank) {
  Order order{};
  for (int i = 0; i < rank; ++i) order[i] = rank - 1 - i;
  return order;
}

// Whether every address from the first element to the last belongs to exactly one element.
bool is_dense(const TensorSpec& spec) {
  const std::span sizes(spec.shape.data(), static_cast<size_t>(spec.rank));
  if (std::ranges::count(sizes, 0) > 0) return true;
  int64_t step = 1;  // where the next dimension must continue
  for (auto left = std::ranges::count_if(sizes, [](int64_t n) { return n > 1; }); left > 0;
       --left) {
    int dim = 0;
    while (dim < spec.rank && (spec.shape[dim] <= 1 || spec.stride[dim] != step)) ++dim;
    if (dim == spec.rank) return false;
    step *= spec.shape[dim];
  }
  return true;
}

// torch's order of the dimensions of a tensor with gaps (at::infer_dense_strides). A stride of 0
// says nothing about the order, so this is no total order and needs torch's own insertion sort.
Order memory_order(const TensorSpec& spec) {
  const auto belongs_inside = [&](int a, int b) {
    return spec.stride[a] < spec.stride[b] ||
           (spec.stride[a] == spec.stride[b] && spec.shape[a] < spec.shape[b]);
  };
  Order order = last_first(spec.rank);
  for (int i = 1; i < spec.rank; ++i) {
    int at = i;
    for (int j = i - 1; j >= 0; --j) {
      const int inner = order[j], moving = order[at];
      if (spec.stride[inner] == 0 || spec.stride[moving] == 0) continue;
      if (belongs_inside(moving, inner)) {
        std::swap(order[j], order[at]);
        at = j;
      } else if (spec.stride[inner] < spec.stride[moving]) {
        break;
      }
    }
  }
  return order;
}

std::span<const int> dimensions(const Order& order, const TensorSpec& spec) {
  return {order.data(), static_cast<size_t>(spec.rank)};
}

}  // namespace

TensorSpec packed(TensorSpec spec) {
  const Order order = last_first(spec.rank);
  stack_up(spec, dimensions(order, spec));
  return spec;
}

TensorSpec packed_like(TensorSpec spec) {
  if (is_dense(spec)) return spec;  // strides of dimensions of size 1 and all
  const Order order = memory_order(spec);
  stack_up(spec, dimensions(order, spec));
  return spec;
}

TensorSpec padded(TensorSpec spec) {
  if (spec.rank == 0) return spec;
  const int64_t unit = 16 / dtype_bytes(spec.dtype);
  const Order order = last_first(spec.rank);
  spec.stride[spec.rank - 1] = 1;
  const auto row_elems = static_cast<uint64_t>((spec.size(-1) + unit - 1) / unit * unit);
  stack_up(spec, dimensions(order, spec).subspan(1), row_elems);
  return spec;
}

}  // namespace flashmoe::ops
