// What a tensor looks like, without the tensor: dtype, shape and strides. No pointers, no device.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>

namespace flashmoe {

enum class DType : uint8_t {
  kFloat64,
  kFloat32,
  kFloat16,
  kBFloat16,
  kInt32,
  kInt64,
  kFloat8E4M3,  // no infinity: 448 is the largest (OCP's E4M3, torch.float8_e4m3fn)
  kBool,        // a byte, 0 = false
};

inline constexpr int kMaxRank = 8;

struct TensorSpec {
  DType dtype = DType::kFloat32;
  int rank = 0;
  std::array<int64_t, kMaxRank> shape{};
  std::array<int64_t, kMaxRank> stride{};  // in elements

  // Dimension i, counted from the end when negative: size(-1) is the last.
  int64_t size(int i) const { return shape[i < 0 ? rank + i : i]; }
  int64_t step(int i) const { return stride[i < 0 ? rank + i : i]; }

  bool operator==(const TensorSpec&) const = default;
};

// A densely packed, row-major tensor.
inline TensorSpec contiguous(DType dtype, std::initializer_list<int64_t> shape) {
  TensorSpec spec;
  spec.dtype = dtype;
  for (int64_t size : shape) spec.shape[spec.rank++] = size;
  int64_t step = 1;
  for (int i = spec.rank - 1; i >= 0; --i) {
    spec.stride[i] = step;
    step *= spec.shape[i];
  }
  return spec;
}

constexpr int64_t dtype_bytes(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
    case DType::kInt64:
      return 8;
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kFloat8E4M3:
    case DType::kBool:
      return 1;
  }
  return 0;
}

constexpr const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return "float64";
    case DType::kFloat32:
      return "float32";
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kInt32:
      return "int32";
    case DType::kInt64:
      return "int64";
    case DType::kFloat8E4M3:
      return "float8_e4m3fn";
    case DType::kBool:
      return "bool";
  }
  return "?";
}

}  // namespace flashmoe
