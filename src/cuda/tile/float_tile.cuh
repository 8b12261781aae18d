// Tiles of fp32 in shared memory, and their way there: from fp32 as it is, from fp16 and bf16
// converted.
//
// Rows of kCols floats are cut into chunks of four, and a chunk's place in its row is mixed with
// the row's number so that no access of a warp has a bank conflict (r = lane / 4, c = lane % 4):
//   floats 2c, 2c + 1 of row r             fragments along the rows, and accumulators
//   float r of row 2c, or of row 2c + 1    fragments across the rows
//   16 bytes of a row                      copies
#pragma once

#include "cuda/ptx/math.cuh"
#include "cuda/tile/copy.cuh"

namespace flashmoe::cuda {

// fp32 as kernels see it that are written for several dtypes: see dtype.cuh.
struct Fp32 {
  using Storage = float;
  static constexpr int kBytes = sizeof(Storage);
  static __device__ __forceinline__ float unpack(Storage x) { return x; }
  // Two 16-bit numbers in a register: nobody asks that of fp32, but code for all dtypes names it.
  static __device__ __forceinline__ uint32_t pack(float, float) { return 0; }
};

template <int kCols_>
struct FloatTile {
  static constexpr int kCols = kCols_;
  static constexpr int kElementBytes = 4;
  static constexpr int kRowBytes = kCols * kElementBytes;
  static constexpr int kChunks = kCols / 4;
  static_assert(kCols % 32 == 0, "chunks are mixed within runs of 8");

  // What the chunk numbers of a row are mixed with: 0, 4, 2, 6, 4, 0, 6, 2 for rows 0 to 7. Of rows
  // 2c, and of rows 2c + 1, no two are the same, nor of four rows that follow each other.
  static __device__ __forceinline__ uint32_t mix(uint32_t row) {
    return (row & 6) ^ ((row & 1) << 2);
  }
  // Byte offset of chunk `chunk` of row `row`.
  static __device__ __forceinline__ uint32_t at(int row, int chunk) {
    return row * kRowBytes + (static_cast<uint32_t>(chunk) ^ mix(row)) * 16;
  }
  static __device__ __forceinline__ uint32_t at_element(int row, int col) {
    return at(row, col / 4) + col % 4 * 4;
  }
  // From a lane's address within the first two chunks of its row, that of the same place
  // `chunks` chunks on, an even number. Needs tiles that begin at a multiple of 128 bytes.
  static __device__ __forceinline__ uint32_t along(uint32_t address, uint32_t chunks) {
    return (address ^ (chunks % 8 * 16)) + chunks / 8 * 128;
  }

  // The address of what a lane reads or writes of the fragment that begins at (row, 0), row a
  // multiple of 8: floats 2c and 2c + 1 of row `row` + r.
  static __device__ __forceinline__ uint32_t lane_rows(uint32_t tile, int row) {
    const uint32_t lane = ptx::opaque_thread() % 32, r = lane / 4, c = lane % 4;
    return tile + at(row + r, c / 2) + c % 2 * 8;
  }
  // The same across the rows: float `col` + r of row 2c; col is a multiple of 8. Row 2c + 1 has it
  // at next_row() of that.
  static __device__ __forceinline__ uint32_t lane_cols(uint32_t tile, int col) {
    const uint32_t lane = ptx::opaque_thread() % 32, r = lane / 4, c = lane % 4;
    return along(tile + at(2 * c, r / 4) + r % 4 * 4, col / 4);
  }
  static __device__ __forceinline__ uint32_t next_row(uint32_t address) {
    return (address ^ 64) + kRowBytes;
  }
};

// What the numbers of a tensor are.
enum class Element : int32_t { kFp32, kFp16, kBf16 };

__device__ __forceinline__ int element_bytes(Element element) {
  return element == Element::kFp32 ? 4 : 2;
}
__device__ __forceinline__ float half_to_float(Element element, uint32_t x) {
  return element == Element::kFp16 ? ptx::cvt_f32_f16(static_cast<uint16_t>(x))
                                   : __uint_as_float(x << 16);
}
// One number of a tensor, `index` elements from `data`.
__device__ __forceinline__ float read_element(Element element, const void* data, int64_t index) {
  if (element == Element::kFp32) return static_cast<const float*>(data)[index];
  return half_to_float(element, static_cast<const uint16_t*>(data)[index]);
}
__device__ __forceinline__ void write_element(Element element, void* data, int64_t index, float x) {
  if (element == Element::kFp32) {
    static_cast<float*>(data)[index] = x;
  } else if (element == Element::kFp16) {
    static_cast<uint16_t*>(data)[index] = ptx::cvt_rn_f16(x);
  } else {
    // Round to nearest even by hand: Turing has no bf16.
    const uint32_t bits = __float_as_uint(x);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    static_cast<uint16_t*>(data)[index] = x == x ? rounded : 0x7fc0;
  }
}

// load_tile() for fp32, also where a row has more chunks than there are threads.
template <class Chip, class Tile, int kRows, int kThreads, class From>
__device__ __forceinline__ void load_float_tile(uint32_t shared, const From& rows, int first,
                                                int len, int dim) {
  if constexpr (kThreads >= Tile::kChunks) {
    load_tile<Chip, Tile, kRows, kThreads>(shared, rows, first, len, dim);
  } else {
#pragma unroll 2
    for (int i = ptx::opaque_thread(); i < kRows * Tile::kChunks; i += kThreads) {
      const int row = i / Tile::kChunks, chunk = i % Tile::kChunks;
      const int bytes = first + row < len ? max(min(4 * dim - 16 * chunk, 16), 0) : 0;
      Chip::copy_part(shared + Tile::at(row, chunk), rows.address(first + row) + chunk * 16, bytes);
    }
  }
}

// load_tile() for a matrix whose elements may have 16 bits: rows [first, first + kRows) of (len,
// dim), and zeros past the end of columns or rows. fp32 comes in the background where the chip can
// do that: commit and wait as for load_tile().
template <class Chip, class Tile, int kRows, int kThreads, class From>
__device__ __forceinline__ void load_floats(uint32_t shared, const From& rows, Element element,
                                            int first, int len, int dim) {
  if (element == Element::kFp32) {
    load_float_tile<Chip, Tile, kRows, kThreads>(shared, rows, first, len, dim);
    return;
  }
  const RowWalk<Tile, kRows, kThreads> walk(ptx::opaque_thread());
  auto from = rows.walk(first + walk.row, walk.kStep, walk.chunk * 8);
  const int numbers = dim - 4 * walk.chunk;
#pragma unroll 4
  for (int i = 0; i < walk.kSteps; ++i, from.next()) {
    const int row = walk.row + i * walk.kStep;
    if (!walk.has(i)) continue;
    uint32_t two[2] = {0, 0};
    if (row < len - first && numbers >= 4) {
      const uint2 four = *reinterpret_cast<const uint2*>(from.address);
      two[0] = four.x, two[1] = four.y;
    } else if (row < len - first) {
#pragma unroll
      for (int j = 0; j < 3; ++j) {
        if (j >= numbers) continue;
        const uint32_t x = reinterpret_cast<const uint16_t*>(from.address)[j];
        two[j / 2] |= x << j % 2 * 16;
      }
    }
    uint32_t x[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      x[j] = __float_as_uint(half_to_float(element, two[j / 2] >> j % 2 * 16 & 0xffff));
    }
    ptx::st_shared_v4(shared + Tile::at(row, walk.chunk), {x[0], x[1], x[2], x[3]});
  }
}

// Writes a warp's accumulators to a tile, and reads them back: fragment (m, n) is rows row + 16 m
// and columns col + 8 n.
template <class Tile, int kM, int kN>
__device__ __forceinline__ void store_accumulators(uint32_t tile, const float (&acc)[kM][kN][4],
                                                   int row, int col = 0) {
  const uint32_t lane = Tile::along(Tile::lane_rows(tile, row), col / 4);
#pragma unroll
  for (int i = 0; i < kM * kN; ++i) {
    const float(&x)[4] = acc[i / kN][i % kN];
    const uint32_t at = Tile::along(lane, i % kN * 2) + i / kN * 16 * Tile::kRowBytes;
    ptx::st_shared_v2_f32(at, {x[0], x[1]});
    ptx::st_shared_v2_f32(at + 8 * Tile::kRowBytes, {x[2], x[3]});
  }
}
template <class Tile, int kM, int kN>
__device__ __forceinline__ void load_accumulators(float (&acc)[kM][kN][4], uint32_t tile, int row,
                                                  int col = 0) {
  const uint32_t lane = Tile::along(Tile::lane_rows(tile, row), col / 4);
#pragma unroll
  for (int i = 0; i < kM * kN; ++i) {
    float(&x)[4] = acc[i / kN][i % kN];
    const uint32_t at = Tile::along(lane, i % kN * 2) + i / kN * 16 * Tile::kRowBytes;
    const float2 top = ptx::ld_shared_v2_f32(at);
    const float2 bottom = ptx::ld_shared_v2_f32(at + 8 * Tile::kRowBytes);
    x[0] = top.x, x[1] = top.y, x[2] = bottom.x, x[3] = bottom.y;
  }
}

}  // namespace flashmoe::cuda
