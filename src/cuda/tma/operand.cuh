// Tiles in shared memory as wgmma reads them and the copy engine writes them: blocks of 64 columns,
// rows of 128 bytes, whose eight chunks of 16 bytes are mixed with the row's number (the 128-byte
// swizzle of both). Tiles begin at multiples of 1024 bytes.
#pragma once

#include <cstdint>

namespace flashmoe::cuda::sm90 {

template <int kRows, int kCols>
struct Tile {
  static constexpr int kBlocks = (kCols + 63) / 64;
  static constexpr uint32_t kBlockBytes = kRows * 128;
  static constexpr uint32_t kBytes = kBlocks * kBlockBytes;

  static __device__ __forceinline__ uint32_t at(int row, int column) {
    return column / 64 * kBlockBytes + row * 128 + ((column / 8 ^ row) % 8) * 16 + column % 8 * 2;
  }

  // PTX ISA, "matrix descriptor": in units of 16 bytes where it begins, from one block of columns
  // to the next, and from eight rows to the next eight; and the swizzle. The second half is the
  // same for all.
  static __device__ __forceinline__ uint32_t descriptor(uint32_t shared) {
    return shared / 16 | kBlockBytes / 16 << 16;
  }
  // Columns [16 step, 16 step + 16) of the rows: the depth along the rows.
  static __device__ __forceinline__ uint64_t along(uint32_t tile, int step) {
    return whole(tile + (step / 4 * kBlockBytes + step % 4 * 32) / 16);
  }
  // Rows [16 step, 16 step + 16) of all columns: a row for each of the depth.
  static __device__ __forceinline__ uint64_t across(uint32_t tile, int step) {
    return whole(tile + step * 16 * 128 / 16);
  }

 private:
  static __device__ __forceinline__ uint64_t whole(uint32_t descriptor) {
    constexpr uint64_t kSwizzle128 = uint64_t{1} << 62, kNextRows = uint64_t{8 * 128 / 16} << 32;
    return kSwizzle128 | kNextRows | descriptor;
  }
};

}  // namespace flashmoe::cuda::sm90
