// A matrix in a tensor of any dtype and strides, as the backends give it to kernels.
#pragma once

#include <cstdint>

#include "flashmoe/tensor.h"

namespace flashmoe::cpu {

// Element (i, j) is at data + i * row + j * col elements.
struct Matrix {
  char* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t row = 0, col = 0;

  explicit operator bool() const { return data != nullptr; }
};

}  // namespace flashmoe::cpu
