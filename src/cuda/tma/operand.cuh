// Tiles in shared memory as TMA writes them and wgmma reads them.
//
//   block 0                 block 1               ...
//   kRows x 128 bytes       kRows x 128 bytes          64 columns each, where elements have 16 bits
//
// A row of a block is eight chunks of 16 bytes. Chunk c of row r lies at chunk c ^ (r % 8), the
// 128-byte swizzle of both TMA and wgmma. Tiles begin at multiples of 1024 bytes.
//
// Tiles of at most 64 bytes a row (32 columns) have rows of 64 bytes, four chunks, and the 64-byte
// swizzle: chunk c of row r lies at chunk c ^ (r / 2 % 4).
//
// With whole rows, eight of them lie together, block by block, before the next eight:
//
//   rows 0 to 7             rows 0 to 7                rows 8 to 15            ...
//   of block 0              of block 1, ...            of block 0
//
// so that one box of TMA, whose blocks are a dimension of their own, has all columns of its rows.
#pragma once

#include <cstdint>

namespace flashmoe::cuda::tma {

// A tile: the type of a member of a kernel's `struct Smem`, and the addresses
// and descriptors of what lies in it.
template <int kRows, int kCols, int kElementBytes = 2, bool kWholeRows = false>
struct Tile {
  static constexpr uint32_t kRowBytes = kCols * kElementBytes <= 64 ? 64 : 128;  // of a block
  static constexpr int kBlockCols = kRowBytes / kElementBytes, kChunkCols = 16 / kElementBytes;
  static constexpr int kBlocks = (kCols + kBlockCols - 1) / kBlockCols;
  static constexpr int kChunks = kRowBytes / 16;  // of a row of a block
  static constexpr int kSteps = kRowBytes / 32;   // of the depth, see along()
  static constexpr uint32_t kBytes = kBlocks * kRows * kRowBytes;
  // From a block to the next, and from eight rows to the next.
  static constexpr uint32_t kBlockBytes = (kWholeRows ? 8 : kRows) * kRowBytes;
  static constexpr uint32_t kEightBytes = (kWholeRows ? kBlocks : 1) * 8 * kRowBytes;
  static_assert(kBytes % 1024 == 0);

  char bytes[kBytes];

  // The offset of an element from the tile's beginning.
  static __device__ __forceinline__ uint32_t at(int row, int column) {
    const int pattern = kRowBytes == 64 ? row / 2 : row;
    return column / kBlockCols * kBlockBytes + (kWholeRows ? row / 8 * kEightBytes : 0) +
           (kWholeRows ? row % 8 : row) * kRowBytes +
           ((column / kChunkCols ^ pattern) % kChunks) * 16 + column % kChunkCols * kElementBytes;
  }
  // From an element to the one `rows` below it, of the same eight rows, by its address. No bit of
  // `rows` is one of the number of the row that it is in.
  static __device__ __forceinline__ uint32_t below(uint32_t element, int rows) {
    return (element ^ (kRowBytes == 64 ? rows / 2 : rows) * 16) + rows * kRowBytes;
  }

  // PTX ISA, "matrix descriptor", lower half: the start address and the distance from one block of
  // columns to the next, in units of 16 bytes.
  static __device__ __forceinline__ uint32_t descriptor(uint32_t shared) {
    return shared / 16 | kBlockBytes / 16 << 16;
  }
  // The descriptor of 32 bytes of each row (16 columns of 16 bits), the depth of one wgmma: the
  // depth runs along the rows.
  static __device__ __forceinline__ uint64_t along(uint32_t tile, int step) {
    return whole(tile + (step / kSteps * kBlockBytes + step % kSteps * 32) / 16);
  }
  // The descriptor of rows [16 step, 16 step + 16): transposed, a row for each step of the depth.
  // wgmma transposes 16-bit elements alone.
  static __device__ __forceinline__ uint64_t across(uint32_t tile, int step) {
    static_assert(kElementBytes == 2);
    return whole(tile + step * (2 * kEightBytes / 16));
  }

 private:
  // The upper half: the swizzle, and the distance of eight rows.
  static __device__ __forceinline__ uint64_t whole(uint32_t descriptor) {
    constexpr uint64_t kSwizzle = uint64_t{kRowBytes == 64 ? 2u : 1u} << 62;
    constexpr uint64_t kNextRows = uint64_t{kEightBytes / 16} << 32;
    return kSwizzle | kNextRows | descriptor;
  }
};

}  // namespace flashmoe::cuda::tma
