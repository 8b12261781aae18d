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
  static_assert(kChunks % 2 == 0, "columns come in fragments of 16");
  // Chunks are mixed within groups of 8, 4 or 2, whatever divides the row. Where 128 bytes hold
  // several rows, those differ in their group of banks by themselves, and the mix changes after
  // them.
  static constexpr int kGroup = kChunks % 8 == 0 ? 8 : kChunks % 4 == 0 ? 4 : 2;
  static constexpr int kRowShift = kGroup == 8 ? 0 : kGroup == 4 ? 1 : 2;

  // Byte offset of chunk `chunk` of row `row`.
  static __device__ __forceinline__ uint32_t at(int row, int chunk) {
    return static_cast<uint32_t>(row * kRowBytes +
                                 (chunk ^ (row >> kRowShift & (kGroup - 1))) * 16);
  }

  // From a lane's address, that of the same row `chunks` chunks on, if the two chunk numbers have
  // no bit in common. Of a constant, the mixed bits cost one instruction and the rest is an
  // immediate offset, where computing each address apart costs a register for each. Loop tiles
  // that begin at a multiple of 128 bytes.
  static __device__ __forceinline__ uint32_t along(uint32_t address, int chunks) {
    return (address ^ (chunks % kGroup * 16)) + chunks / kGroup * (kGroup * 16);
  }
};

}  // namespace flashmoe::cuda
