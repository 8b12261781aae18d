// Tiles between global and shared memory, 16 bytes at a time. Rows in global memory begin at
// multiples of 16 bytes; their last chunk may be a part of one.
#pragma once

#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/special_registers.cuh"
#include "cuda/tile/rows.cuh"
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
  // How many bytes of the chunk exist in rows of `dim` elements.
  __device__ __forceinline__ int bytes(int dim) const {
    return max(min(Layout::kElementBytes * dim - 16 * chunk, 16), 0);
  }
};

// Whether rows of `dim` elements of type T end within a chunk of 16 bytes.
template <class T>
__device__ __forceinline__ bool has_partial_chunk(int dim) {
  return dim % (16 / T::kBytes) != 0;
}

// Rows [first, first + kRows) of a (len, dim) matrix to shared memory. What is past the end of
// columns or rows becomes zeros, so that nothing is read beyond the tensor and nothing but zeros
// meets a probability of 0. Without kPartialChunks rows end with a whole chunk: a loop without the
// branch.
template <class Chip, class Layout, int kRows, int kThreads, bool kPartialChunks = true, class From>
__device__ __forceinline__ void load_tile(uint32_t shared, const From& rows, int first, int len,
                                          int dim) {
  const RowWalk<Layout, kRows, kThreads> walk(ptx::opaque_thread());
  // Past the end nothing is read, wherever the address leads.
  auto from = rows.walk(first + walk.row, walk.kStep, walk.chunk * 16);
  const int there = len - first, bytes = walk.bytes(dim);
  if (kPartialChunks && dim % (16 / Layout::kElementBytes) != 0) {
#pragma unroll 1
    for (int i = 0; i < walk.kSteps; ++i, from.next()) {
      const int row = walk.row + i * walk.kStep;
      if (walk.has(i)) {
        Chip::copy_part(shared + Layout::at(row, walk.chunk), from.address,
                        row < there ? bytes : 0);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < walk.kSteps; ++i, from.next()) {
      const int row = walk.row + i * walk.kStep;
      if (walk.has(i)) {
        Chip::copy_16(shared + Layout::at(row, walk.chunk), from.address, bytes > 0 && row < there);
      }
    }
  }
}

// Stores rows [first, min(first + kRows, len)) of a tile in shared memory.
template <class Layout, int kRows, int kThreads>
__device__ __forceinline__ void store_tile(uint32_t shared, int thread, char* global, int row_bytes,
                                           int first, int len, int dim) {
  static_assert(Layout::kElementBytes == 2, "parts of a chunk are stored in elements of 16 bits");
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
