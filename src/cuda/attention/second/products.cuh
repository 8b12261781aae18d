// How a warp multiplies 16 rows of its own side with 16 of the other, and what a tile is in shared
// memory for it. A Product has
//
//   Tile                rows of 64 columns
//   Left, Right         16 columns of the warp's own rows, of the other rows
//   left(), right()     from a tile, whose first row is the warp's first, and a step's number
//   multiply()          adds to pairs
//   add_rows()          adds pairs, times rows of the other side, to sums (FMAs: add_seen_rows())
//   read_two()          two neighbouring columns of a row
//
// Pairs are accumulators of m16n8, and the left operand of add_rows() as they lie in registers.
#pragma once

#include "cuda/attention/second/params.h"
#include "cuda/tile/dtype.cuh"
#include "cuda/tile/float_product.cuh"
#include "cuda/tile/float_tile.cuh"

namespace flashmoe::cuda::second {

inline constexpr int kRows = kSecondRows, kColumns = kSecondColumns, kThreads = kSecondThreads;
inline constexpr int kWarpRows = 16;  // of either side

// What a warp holds of its own rows: a number for each of its other rows, or for each column.
using Pairs = float[kWarpRows / 8][4];
using Sums = float[kColumns / 8][4];
using HalfSums = float[kColumns / 16][4];  // of half of the columns

// Pairs as left operands, one for each fragment: elements in the order of the instruction.
template <class Left>
__device__ __forceinline__ void load_left(Left (&a)[kWarpRows / 8], const Pairs& pairs) {
#pragma unroll
  for (int i = 0; i < kWarpRows / 8; ++i) {
    const float x[4] = {pairs[i][0], pairs[i][2], pairs[i][1], pairs[i][3]};
    a[i] = Left(x);
  }
}

// fp32's accuracy of tiles in fp32: three TF32 products for each.
struct FloatProduct {
  using Tile = FloatTile<kColumns>;
  using Tf32 = ThreeTf32;
  struct Left {
    Tf32::Left half[2];
  };
  struct Right {
    Tf32::Right half[kWarpRows / 8][2];
  };

  static __device__ __forceinline__ Left left(uint32_t tile, uint32_t step) {
    const Along<Tile> rows(tile);
    Left x;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float a[4];
      rows.load_left(a, 0, 2 * step + i);
      x.half[i] = Tf32::left<true>(a);
    }
    return x;
  }
  static __device__ __forceinline__ Right right(uint32_t tile, uint32_t step) {
    const Along<Tile> rows(tile);
    Right x;
#pragma unroll
    for (int i = 0; i < kWarpRows / 4; ++i) {
      float b[2];
      rows.load_right(b, i / 2, 2 * step + i % 2);
      x.half[i / 2][i % 2] = Tf32::right(b);
    }
    return x;
  }
  static __device__ __forceinline__ void multiply(Pairs& pairs, const Left& a, const Right& b) {
#pragma unroll
    for (int n = 0; n < kWarpRows / 8; ++n) Tf32::multiply(pairs[n], a.half, b.half[n]);
  }
  static __device__ __forceinline__ void add_rows(Sums& sums, const Pairs& pairs, uint32_t tile,
                                                  int columns) {
    const Across<Tile> rows(tile);
    Tf32::Left a[kWarpRows / 8];
    load_left(a, pairs);
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
      if (8 * n >= columns) continue;
      Tf32::Right b[kWarpRows / 8];
#pragma unroll
      for (int i = 0; i < kWarpRows / 8; ++i) {
        float x[2];
        rows.load_right(x, n, i);
        b[i] = Tf32::Right(x);
      }
      Tf32::multiply(sums[n], a, b);
    }
  }
  static __device__ __forceinline__ float2 read_two(uint32_t tile, int row, int column) {
    return ptx::ld_shared_v2_f32(tile + Tile::at_element(row, column));
  }
};

// Tiles of 16 bits as they come. Scores are products of these; what is computed from scores is
// rounded to TF32's 11 bits, which hold every number of 16 bits.
template <class T>
struct HalfProduct {
  using Tile = Swizzled<kColumns>;
  struct Left {
    uint32_t x[4];
  };
  using Right = Left;

  static __device__ __forceinline__ Left left(uint32_t tile, uint32_t step) {
    Left a;
    AlongA<Tile>{lane_rows<Tile>(tile, 0, 0)}.load(a.x, 0, step);
    return a;
  }
  static __device__ __forceinline__ Right right(uint32_t tile, uint32_t step) {
    Right b;
    AlongB<Tile>{lane_cols<Tile>(tile, 0, 0)}.load(b.x, 0, step);
    return b;
  }
  static __device__ __forceinline__ void multiply(Pairs& pairs, const Left& a, const Right& b) {
#pragma unroll
    for (int n = 0; n < kWarpRows / 8; ++n) {
      T::mma(pairs[n], a.x, b.x[2 * n], b.x[2 * n + 1], pairs[n]);
    }
  }
  static __device__ __forceinline__ void add_rows(Sums& sums, const Pairs& pairs, uint32_t tile,
                                                  int columns) {
    const AcrossB<Tile> rows{lane_rows<Tile>(tile, 0, 0)};
    OneTf32::Left a[kWarpRows / 8];
    load_left(a, pairs);
#pragma unroll
    for (int n = 0; n < kColumns / 8; n += 2) {
      if (8 * n >= columns) continue;
      uint32_t b[4];  // rows 2c and 2c + 1 of a column; 16 rows of it, then of that 8 columns on
      rows.load(b, n / 2, 0);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 two = unpack_two(b[i]);
        const uint32_t x[2] = {__float_as_uint(two.x), __float_as_uint(two.y)};
        ptx::mma_m16n8k8_tf32(sums[n + i / 2], a[i % 2].x, x, sums[n + i / 2]);
      }
    }
  }
  static __device__ __forceinline__ float2 read_two(uint32_t tile, int row, int column) {
    return unpack_two(ptx::ld_shared_u32(tile + Tile::at_element(row, column)));
  }

 private:
  static __device__ __forceinline__ float2 unpack_two(uint32_t two) {
    return {T::unpack(static_cast<uint16_t>(two)), T::unpack(static_cast<uint16_t>(two >> 16))};
  }
};

// FMAs, for chips without TF32: each lane reads the rows that its pairs are of, four columns at a
// time. What a lane reads no other product of the step needs, so an operand is where it lies.
struct FmaProduct {
  using Tile = FloatTile<kColumns>;
  struct Left {
    uint32_t tile, step;
  };
  using Right = Left;

  static __device__ __forceinline__ Left left(uint32_t tile, uint32_t step) { return {tile, step}; }
  static __device__ __forceinline__ Right right(uint32_t tile, uint32_t step) {
    return {tile, step};
  }
  static __device__ __forceinline__ void multiply(Pairs& pairs, const Left& left,
                                                  const Right& right) {
    const int lane = ptx::opaque_thread() % 32;
#pragma unroll 1
    for (uint32_t chunk = 4 * left.step; chunk < 4 * left.step + 4; ++chunk) {
      const auto read = [&](uint32_t tile, int row) {
        return ptx::ld_shared_v4_f32(tile + Tile::at(row, chunk));
      };
      float4 a[2];  // rows r and r + 8
#pragma unroll
      for (int half = 0; half < 2; ++half) a[half] = read(left.tile, lane / 4 + 8 * half);
#pragma unroll
      for (int i = 0; i < kWarpRows / 4; ++i) {
        const float4 b = read(right.tile, i / 2 * 8 + lane % 4 * 2 + i % 2);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          pairs[i / 2][2 * half + i % 2] +=
              a[half].x * b.x + a[half].y * b.y + a[half].z * b.z + a[half].w * b.w;
        }
      }
    }
  }
  static __device__ __forceinline__ float2 read_two(uint32_t tile, int row, int column) {
    return FloatProduct::read_two(tile, row, column);
  }
};

}  // namespace flashmoe::cuda::second
