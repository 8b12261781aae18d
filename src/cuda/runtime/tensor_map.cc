#include "cuda/runtime/tensor_map.h"

#include "core/text.h"
#include "cuda/runtime/driver.h"

namespace flashmoe::cuda {
namespace {

// Limits of cuTensorMapEncodeTiled, from its manual page. The driver answers a broken rule with
// "invalid value" and no more, so we look first.
constexpr int64_t kAlignBytes = 16;               // of the address, of strides, of a box's rows
constexpr int64_t kMaxSize = int64_t{1} << 32;    // of a dimension
constexpr int64_t kMaxStride = int64_t{1} << 40;  // in bytes, exclusive
constexpr int kMaxBox = 256;                      // along each dimension

Status check_layout(const TensorSpec& tensor) {
  if (tensor.dtype != DType::kFloat16 && tensor.dtype != DType::kBFloat16) {
    return unsupported("a tensor map of ", dtype_name(tensor.dtype),
                       "; only float16 and bfloat16 are supported");
  }
  if (tensor.rank < 1 || tensor.rank > kMaxTensorMapRank) {
    return invalid("a tensor map of rank ", tensor.rank, "; the rank must be 1 to ",
                   kMaxTensorMapRank, ". Fold dimensions that lie densely behind each other");
  }
  for (int i = 0; i < tensor.rank; ++i) {
    if (tensor.shape[i] < 1 || tensor.shape[i] > kMaxSize) {
      return invalid("a tensor map of shape ", shape_text(tensor), ": dimension ", i,
                     " must be 1 to 2^32");
    }
  }
  return Status();
}

// The stride of a dimension of size 1 is never used and may be anything.
Status check_strides(const TensorSpec& tensor) {
  if (tensor.size(-1) > 1 && tensor.step(-1) != 1) {
    return invalid("a tensor map needs unit stride in the last dimension; it is ", tensor.step(-1));
  }
  for (int i = 0; i < tensor.rank - 1; ++i) {
    const int64_t elems = tensor.stride[i];
    const int64_t limit = kMaxStride / dtype_bytes(tensor.dtype);
    if (tensor.shape[i] == 1) continue;
    if (elems <= 0 || elems >= limit || elems * dtype_bytes(tensor.dtype) % kAlignBytes) {
      return invalid("stride ", i, " of the tensor map is ", elems, " elements of ",
                     dtype_bytes(tensor.dtype), " bytes; it must be a positive multiple of ",
                     kAlignBytes, " bytes below 2^40");
    }
  }
  return Status();
}

Status check_box(const TensorSpec& tensor, std::span<const int> box, Swizzle swizzle) {
  if (box.size() != static_cast<size_t>(tensor.rank)) {
    return invalid("the box has ", box.size(), " dimensions, the tensor ", tensor.rank);
  }
  for (size_t i = 0; i < box.size(); ++i) {
    if (box[i] < 1 || box[i] > kMaxBox) {
      return invalid("dimension ", i, " of the box is ", box[i], "; it must be 1 to ", kMaxBox);
    }
  }
  const int64_t row_bytes = box.back() * dtype_bytes(tensor.dtype);
  if (row_bytes % kAlignBytes) {
    return invalid("a row of the box has ", row_bytes, " bytes; it must be a multiple of ",
                   kAlignBytes);
  }
  const int64_t span = static_cast<int64_t>(swizzle);
  if (swizzle != Swizzle::kNone && row_bytes > span) {
    return invalid("a row of the box has ", row_bytes, " bytes, more than the ", span,
                   " of the swizzle: cut the box in several");
  }
  return Status();
}

Status check(const TensorSpec& tensor, const void* data, std::span<const int> box,
             Swizzle swizzle) {
  if (Status status = check_layout(tensor); !status.ok()) return status;
  if (Status status = check_strides(tensor); !status.ok()) return status;
  if (Status status = check_box(tensor, box, swizzle); !status.ok()) return status;
  if (!data || reinterpret_cast<uintptr_t>(data) % kAlignBytes) {
    return invalid("the address of a tensor map is ", data, "; it must be a multiple of ",
                   kAlignBytes, " and not null");
  }
  return Status();
}

CUtensorMapSwizzle swizzle_mode(Swizzle swizzle) {
  switch (swizzle) {
    case Swizzle::kNone:
      return CU_TENSOR_MAP_SWIZZLE_NONE;
    case Swizzle::k32:
      return CU_TENSOR_MAP_SWIZZLE_32B;
    case Swizzle::k64:
      return CU_TENSOR_MAP_SWIZZLE_64B;
    case Swizzle::k128:
      return CU_TENSOR_MAP_SWIZZLE_128B;
  }
  return CU_TENSOR_MAP_SWIZZLE_NONE;
}

// The tensor as the driver wants it: innermost dimension first, strides in bytes and without the
// innermost, which is always dense.
struct Reversed {
  uint64_t size[kMaxTensorMapRank] = {};
  uint64_t stride[kMaxTensorMapRank] = {};  // [i]: of dimension i + 1
  uint32_t box[kMaxTensorMapRank] = {};
  uint32_t step[kMaxTensorMapRank] = {1, 1, 1, 1, 1};  // every element, none skipped
};

Reversed reverse(const TensorSpec& tensor, std::span<const int> box) {
  Reversed result;
  for (int i = 0; i < tensor.rank; ++i) {
    result.size[i] = static_cast<uint64_t>(tensor.size(-1 - i));
    result.box[i] = static_cast<uint32_t>(box[tensor.rank - 1 - i]);
    if (i == 0) continue;
    // An unused stride gets a value that the driver accepts.
    const int64_t bytes = tensor.step(-1 - i) * dtype_bytes(tensor.dtype);
    result.stride[i - 1] = static_cast<uint64_t>(tensor.size(-1 - i) == 1 ? kAlignBytes : bytes);
  }
  return result;
}

}  // namespace

Result<CUtensorMap> encode_tensor_map(const TensorSpec& tensor, const void* data,
                                      std::span<const int> box, Swizzle swizzle) {
  if (Status status = check(tensor, data, box, swizzle); !status.ok()) return status;
  const Result<const Driver*> driver = cuda::driver();
  if (!driver.ok()) return driver.status();
  if (!driver.value()->cuTensorMapEncodeTiled) {
    return unsupported("the CUDA driver (", describe_version(driver.value()->version),
                       ") has no tensor maps: update it");
  }
  const Reversed r = reverse(tensor, box);
  CUtensorMap map = {};
  // 256 bytes from DRAM at a time: neighbouring boxes are read soon after.
  const CUresult result = driver.value()->cuTensorMapEncodeTiled(
      &map,
      tensor.dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                      : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
      static_cast<uint32_t>(tensor.rank), const_cast<void*>(data), r.size, r.stride, r.box, r.step,
      CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle_mode(swizzle), CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    return invalid("the driver refuses a tensor map of ", spec_text(tensor), ": ",
                   describe_error(result));
  }
  return map;
}

}  // namespace flashmoe::cuda
