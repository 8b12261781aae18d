// Rows of a matrix in global memory, reached by their number. Copies of tiles take any type with
// these two functions, so that rows which do not lie at equal distances (pages of a cache) need no
// other code.
#pragma once

#include <cstdint>

namespace flashmoe::cuda {

struct Rows {
  const char* data;  // row 0
  int row_bytes;     // from one row to the next

  __device__ __forceinline__ const char* address(int row) const {
    return data + int64_t{row} * row_bytes;
  }

  // A thread's way over every `step`-th row: an addition each, where address() multiplies.
  struct Walk {
    const char* address;
    int64_t step_bytes;
    __device__ __forceinline__ void next() { address += step_bytes; }
  };
  __device__ __forceinline__ Walk walk(int row, int step, int column_bytes) const {
    return {address(row) + column_bytes, int64_t{step} * row_bytes};
  }
};

}  // namespace flashmoe::cuda
