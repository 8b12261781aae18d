#include "core/check.h"

#include <limits>
#include <string>

#include "core/text.h"

namespace flashmoe {

bool is_float(DType dtype) {
  return dtype == DType::kFloat64 || dtype == DType::kFloat32 || dtype == DType::kFloat16 ||
         dtype == DType::kBFloat16;
}

bool is_int(DType dtype) { return dtype == DType::kInt32 || dtype == DType::kInt64; }

int64_t element_count(const TensorSpec& spec) {
  for (int i = 0; i < spec.rank; ++i) {
    if (spec.shape[i] == 0) return 0;  // first: the other sizes may be anything
  }
  int64_t count = 1;
  for (int i = 0; i < spec.rank; ++i) count *= spec.shape[i];
  return count;
}

Status check_extent(const char* name, const TensorSpec& spec) {
  if (spec.rank < 0 || spec.rank > kMaxRank) {
    return invalid(name, " has ", spec.rank, " dimensions; at most ", kMaxRank, " are supported");
  }
  int64_t count = dtype_bytes(spec.dtype);
  int64_t reach = dtype_bytes(spec.dtype);
  bool overflow = false;
  for (int i = 0; i < spec.rank; ++i) {
    const int64_t size = spec.shape[i];
    if (size < 0) return invalid(name, " has shape ", shape_text(spec), ": a size is negative");
    if (size == 0) continue;  // an empty tensor of sizes that overflow is refused all the same
    int64_t span = 0, stride = spec.stride[i];
    if (stride < 0)
      stride = stride == std::numeric_limits<int64_t>::min() ? std::numeric_limits<int64_t>::max()
                                                             : -stride;
    overflow |= __builtin_mul_overflow(count, size, &count);
    overflow |= __builtin_mul_overflow(size - 1, stride, &span);
    overflow |= __builtin_mul_overflow(span, dtype_bytes(spec.dtype), &span);
    overflow |= __builtin_add_overflow(reach, span, &reach);
  }
  if (overflow) {
    return invalid(name, " of shape ", shape_text(spec), " spans more than 2^63 bytes");
  }
  return {};
}

Status check_writable(const char* name, const TensorSpec& spec) {
  if (element_count(spec) == 0) return {};
  for (int i = 0; i < spec.rank; ++i) {
    if (spec.shape[i] > 1 && spec.stride[i] == 0) {
      return invalid(name, " has stride 0 in dimension ", i, " of size ", spec.shape[i],
                     ": its elements share memory, so it cannot be written");
    }
  }
  return {};
}

Status check_shape(const char* name, const TensorSpec& spec, const TensorSpec& like, int rank,
                   std::initializer_list<int64_t> tail) {
  TensorSpec want = like;
  want.rank = rank;
  for (int64_t size : tail) want.shape[want.rank++] = size;
  bool same = spec.rank == want.rank;
  for (int i = 0; same && i < want.rank; ++i) same = spec.shape[i] == want.shape[i];
  if (same) return {};
  return invalid(name, " has shape ", shape_text(spec), ", expected ", shape_text(want));
}

Status check_dtype(const char* name, const TensorSpec& spec, DType want, const char* why) {
  if (spec.dtype == want) return {};
  return invalid(name, " is ", dtype_name(spec.dtype), ", expected ", dtype_name(want), " ", why);
}

Status check_gradients(std::initializer_list<Gradient> gradients) {
  for (const Gradient& g : gradients) {
    if (!*g.grad) continue;
    if (!g.like) {
      const std::string name = g.name, of = name.substr(name.find('_') + 1);
      return invalid(name, g.written ? " is asked for" : " is given", ", but the problem has no ",
                     of);
    }
    const TensorSpec& spec = **g.grad;
    FLASHMOE_RETURN_IF_ERROR(check_extent(g.name, spec));
    FLASHMOE_RETURN_IF_ERROR(
        check_dtype(g.name, spec, g.like->dtype, "like the tensor it belongs to"));
    FLASHMOE_RETURN_IF_ERROR(check_shape(g.name, spec, *g.like, g.like->rank, {}));
    if (g.written) FLASHMOE_RETURN_IF_ERROR(check_writable(g.name, spec));
  }
  return {};
}

Status check_pointers(std::initializer_list<TensorAt> tensors, size_t workspace_bytes,
                      const void* workspace) {
  for (const TensorAt& t : tensors) {
    if (t.spec && !t.data && element_count(*t.spec) > 0) {
      return invalid(t.name, " is null, but the problem has one of ", spec_text(*t.spec));
    }
  }
  if (workspace_bytes > 0 && !workspace) {
    return invalid("workspace is null; the plan needs ", workspace_bytes, " bytes");
  }
  return {};
}

}  // namespace flashmoe
