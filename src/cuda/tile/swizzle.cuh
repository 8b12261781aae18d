// Tiles in shared memory: rows of kCols elements, cut into chunks of 16 bytes, the chunk's place in
// its row mixed with the row's number. Eight rows of one column of chunks then lie in eight
// different groups of banks, which is what ldmatrix and 16-byte accesses read at once.
#pragma once

#include <cstdint>

namespace flashmoe::cuda {

template <int kCols, int kElementBytes_ = 2>
struct Swizzled {
  static constexpr int kElementBytes = kElementBytes_;
  static constexpr int kRowBytes = kCols * kElementBytes;
  static constexpr int kChunks = kRowBytes / 16;             // in a row
  static constexpr int kChunkElements = 16 / kElementBytes;  // in a chunk
  static_assert(kChunks % 2 == 0, "columns come in fragments of two chunks");
  // Chunks are mixed within runs of 8, 4 or 2, whatever divides the row. Where 128 bytes hold
  // several rows, those differ in their banks by themselves, and the mix changes after them.
  static constexpr int kSwizzle = kChunks % 8 == 0 ? 8 : kChunks % 4 == 0 ? 4 : 2;
  static constexpr int kRowShift = kSwizzle == 8 ? 0 : kSwizzle == 4 ? 1 : 2;

  // Byte offset of chunk `chunk` of row `row`.
  static __device__ __forceinline__ uint32_t at(int row, int chunk) {
    return static_cast<uint32_t>(row * kRowBytes +
                                 (chunk ^ (row >> kRowShift & (kSwizzle - 1))) * 16);
  }
  // Byte offset of one element.
  static __device__ __forceinline__ uint32_t at_element(int row, int col) {
    return at(row, col / kChunkElements) + col % kChunkElements * kElementBytes;
  }

  // From a lane's address, that of the same row `chunks` chunks on, if the two chunk numbers have
  // no bit in common. For a constant, the mixed bits cost one instruction and the rest is an
  // immediate offset, where computing each address apart costs a register for each. Needs tiles
  // that begin at a multiple of 128 bytes.
  static __device__ __forceinline__ uint32_t along(uint32_t address, int chunks) {
    return (address ^ (chunks % kSwizzle * 16)) + chunks / kSwizzle * (kSwizzle * 16);
  }
};

}  // namespace flashmoe::cuda
