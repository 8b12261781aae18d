// Tiles of 16-bit rows between global and shared memory, 16 bytes at a time. Rows in global memory
// begin at multiples of 16 bytes; their last chunk may be a part of one.
#pragma once

#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/special_registers.cuh"
#include "cuda/tile/swizzle.cuh"

namespace flashmoe::cuda {

constexpr int power_of_two_from(int n) {
  int power = 1;
  while (power < n) power *= 2;
  return power;
}

// How kThreads threads go over kRows rows: each keeps its place in the row. A row that is no power
// of two leaves some threads idle, which is cheaper than dividing by 3.
template <class Layout, int kRows, int kThreads>
struct RowWalk {
  static constexpr int kLanes = power_of_two_from(Layout::kChunks);  // threads of a row
  static constexpr int kStep = kThreads / kLanes;                    // rows at once
  static constexpr int kSteps = (kRows + kStep - 1) / kStep;
  static_assert(kStep > 0);

  int row, chunk;
  __device__ __forceinline__ explicit RowWalk(int thread)
      : row(thread / kLanes), chunk(thread % kLanes) {}
  // Whether this thread has a chunk of row `row` + i * kStep.
  __device__ __forceinline__ bool has(int i) const {
    return chunk < Layout::kChunks && (kRows % kStep == 0 || row + i * kStep < kRows);
  }
  // How much of the chunk there is in rows of `dim` elements.
  __device__ __forceinline__ int bytes(int dim) const {
    return max(min(2 * dim - 16 * chunk, 16), 0);
  }
};

// Whether rows of `dim` elements end within a chunk.
__device__ __forceinline__ bool odd_rows(int dim) { return dim % 8 != 0; }

// Rows [first, first + kRows) of a (len, dim) matrix to shared memory. What is past the end of
// columns or rows becomes zeros, so that nothing is read beyond the tensor and nothing but zeros
// meets a probability of 0. Without kMaybeOdd rows must not be odd: a loop without the branch.
template <class Chip, class Layout, int kRows, int kThreads, bool kMaybeOdd = true>
__device__ __forceinline__ void load_tile(uint32_t shared, const char* global, int row_bytes,
                                          int first, int len, int dim) {
  const RowWalk<Layout, kRows, kThreads> walk(ptx::opaque_thread());
  const char* from = global + int64_t{first + walk.row} * row_bytes + walk.chunk * 16;
  // Past the end nothing is read, wherever the address leads.
  const int rows = len - first, bytes = walk.bytes(dim);
  if (kMaybeOdd && odd_rows(dim)) {
#pragma unroll 1
    for (int i = 0; i < walk.kSteps; ++i) {
      const int row = walk.row + i * walk.kStep;
      if (walk.has(i)) {
        Chip::copy_part(shared + Layout::at(row, walk.chunk), from, row < rows ? bytes : 0);
      }
      from += int64_t{walk.kStep} * row_bytes;
    }
  } else {
#pragma unroll
    for (int i = 0; i < walk.kSteps; ++i) {
      const int row = walk.row + i * walk.kStep;
      if (walk.has(i)) {
        Chip::copy_16(shared + Layout::at(row, walk.chunk), from, bytes > 0 && row < rows);
      }
      from += int64_t{walk.kStep} * row_bytes;
    }
  }
}

// And back, those of kRows rows that lie before `len`.
template <class Layout, int kRows, int kThreads>
__device__ __forceinline__ void store_tile(uint32_t shared, int thread, char* global, int row_bytes,
                                           int first, int len, int dim) {
  const RowWalk<Layout, kRows, kThreads> walk(thread);
  const int bytes = walk.bytes(dim);
#pragma unroll
  for (int i = 0; i < walk.kSteps; ++i) {
    const int row = walk.row + i * walk.kStep;
    if (!walk.has(i) || first + row >= len || bytes == 0) continue;
    const uint4 chunk = ptx::ld_shared_v4(shared + Layout::at(row, walk.chunk));
    char* to = global + int64_t{first + row} * row_bytes + walk.chunk * 16;
    if (bytes == 16) {
      *reinterpret_cast<uint4*>(to) = chunk;
    } else {
      const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (2 * e < bytes) reinterpret_cast<uint16_t*>(to)[e] = words[e / 2] >> (e % 2 * 16);
      }
    }
  }
}

}  // namespace flashmoe::cuda
