// A tensor map as kernels are given it. Read by nvcc and by the host compiler.
#pragma once

#include <cstdint>

namespace flashmoe::cuda {

// What TMA reads of a tensor: see runtime/tensor_map.h. By value, in constant memory.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

}  // namespace flashmoe::cuda
