// A tensor map as kernels are given it. Read by nvcc and by the host compiler.
#pragma once

#include <cstdint>

namespace flashmoe::cuda {

// The description of a tensor that TMA reads, encoded by runtime/tensor_map.h. Kernels are given it
// by value, in constant memory.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

}  // namespace flashmoe::cuda
