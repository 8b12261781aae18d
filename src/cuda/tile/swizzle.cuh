// Tiles in shared memory: rows of kCols 16-bit elements, cut into chunks of 16 bytes, the chunk's
// place in its row mixed with the row's number. Eight rows of one column of chunks then lie in
// eight different groups of banks, which is what ldmatrix and 16-byte accesses read at once.
#pragma once

#include <cstdint>

namespace flashmoe::cuda {

template <int kCols>
struct Swizzled {
  static constexpr int kChunks = kCols / 8;  // in a row
  static constexpr int kRowBytes = kCols * 2;
  static_assert(kChunks % 8 == 0, "a row is a multiple of 128 bytes");

  // Byte offset of chunk `chunk` of row `row`.
  static __device__ __forceinline__ uint32_t at(int row, int chunk) {
    return static_cast<uint32_t>(row * kRowBytes + (chunk ^ (row & 7)) * 16);
  }

  // From a lane's address, that of the same row `chunks` chunks on, an even number below kChunks,
  // if the lane's own chunk is 0 or 1. Only three bits of the chunk are mixed: of a constant, those
  // cost one instruction and the rest is an immediate offset, where computing each address apart
  // costs a register for each. Needs tiles that begin at a multiple of kRowBytes.
  static __device__ __forceinline__ uint32_t along(uint32_t address, int chunks) {
    return (address ^ (chunks % 8 * 16)) + chunks / 8 * 128;
  }
};

}  // namespace flashmoe::cuda
