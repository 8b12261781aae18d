// What every operator asks of its tensors: of their specs before a plan, of their pointers before a
// run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>

#include "flashmoe/status.h"
#include "flashmoe/tensor.h"

namespace flashmoe {

#define FLASHMOE_RETURN_IF_ERROR(expression)                       \
  do {                                                             \
    if (Status status = (expression); !status.ok()) return status; \
  } while (0)

bool is_float(DType dtype);
bool is_int(DType dtype);

// 0 where a size is 0, whatever the others are.
int64_t element_count(const TensorSpec& spec);

// Sizes are not negative, and the last element's offset in bytes fits 63 bits.
Status check_extent(const char* name, const TensorSpec& spec);

// A result must not have two elements at one address. An empty one has none, whatever its strides.
Status check_writable(const char* name, const TensorSpec& spec);

// `spec` has the shape of `like` (first `rank` dimensions), then the sizes in `tail`.
Status check_shape(const char* name, const TensorSpec& spec, const TensorSpec& like, int rank,
                   std::initializer_list<int64_t> tail);

// `why` ends the message: "like query".
Status check_dtype(const char* name, const TensorSpec& spec, DType want, const char* why);

// A gradient or tangent, which may be absent, against the tensor it belongs to; `like` is null
// where the problem has no such tensor.
struct Gradient {
  const char* name;
  const std::optional<TensorSpec>* grad;
  const TensorSpec* like;
  bool written = true;
};
Status check_gradients(std::initializer_list<Gradient> gradients);

inline const TensorSpec* if_any(const std::optional<TensorSpec>& spec) {
  return spec ? &*spec : nullptr;
}

// A tensor of a problem, null where it has none, and its memory.
struct TensorAt {
  const char* name;
  const TensorSpec* spec;
  const void* data;
};
// Every tensor that has elements has memory, and so does the workspace.
Status check_pointers(std::initializer_list<TensorAt> tensors, size_t workspace_bytes,
                      const void* workspace);

}  // namespace flashmoe
