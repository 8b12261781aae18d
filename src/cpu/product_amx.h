// C = A B or C += A B with bf16 operands and fp32 sums, on the CPU's matrix unit: a tile register
// holds 16 rows of 64 bytes, and TDPBF16PS multiplies 16 x 32 by 32 x 16 in 16 cycles, where FMAs
// of fp32 do a sixteenth of that.
//
// Operands are packed in tiles of 1 KB, zeros beyond the edges:
//
//   A   [rows / 16][depth / 32] x [16 rows][32 deep]
//   B   [cols / 16][depth / 32] x [16 pairs of the depth][16 columns][2]
//
// Rows of fp32 or bf16 that lie along the depth give B two by two. The other ways round, a tile is
// transposed: 16 x 16 pairs of bf16.
#pragma once

#include "cpu/tile.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define FLASHMOE_CPU_HAS_BF16_PRODUCT 1

namespace flashmoe::cpu {
namespace {

// See Kernels. Operands are packed anew for every tile of scores, and the more it takes of each the
// better: 80 x 80 has half of this one's speed at head dim 128, 128 x 128 three quarters.
constexpr int64_t kBf16Block = 256, kBf16KeyStep = 32;

constexpr int64_t kTileRows = 16, kTileDepth = 32, kTileElems = kTileRows * kTileDepth;

// Packed memory for this many rows or columns, whichever of the two is the depth.
constexpr int64_t packed_elems(int64_t rows, int64_t depth) {
  return round_up(rows, kTileDepth) * round_up(depth, kTileDepth);
}

// A tile on its way: a register for each row, of 32 bf16.
using Tile = __m512i[kTileRows];

inline void store_tile(uint16_t* to, const Tile& tile) {
  for (int64_t i = 0; i < kTileRows; ++i) _mm512_storeu_si512(to + i * kTileDepth, tile[i]);
}

// The transpose of 16 x 16 numbers of 32 bits: within blocks of 4 x 4, then of the blocks.
inline void transpose(Tile& t) {
  Tile u;
  for (int i = 0; i < 16; i += 2) {
    u[i] = _mm512_unpacklo_epi32(t[i], t[i + 1]);
    u[i + 1] = _mm512_unpackhi_epi32(t[i], t[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    t[i] = _mm512_unpacklo_epi64(u[i], u[i + 2]);
    t[i + 1] = _mm512_unpackhi_epi64(u[i], u[i + 2]);
    t[i + 2] = _mm512_unpacklo_epi64(u[i + 1], u[i + 3]);
    t[i + 3] = _mm512_unpackhi_epi64(u[i + 1], u[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    u[i] = _mm512_shuffle_i32x4(t[i], t[i + 4], 0x88);
    u[i + 4] = _mm512_shuffle_i32x4(t[i], t[i + 4], 0xdd);
    u[i + 8] = _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0x88);
    u[i + 12] = _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0xdd);
  }
  for (int i = 0; i < 8; ++i) {
    t[i] = _mm512_shuffle_i32x4(u[i], u[i + 8], 0x88);
    t[i + 8] = _mm512_shuffle_i32x4(u[i], u[i + 8], 0xdd);
  }
}

// Masks for the first `count` of 16 or 32.
inline __mmask16 first_16(int64_t count) {
  return static_cast<__mmask16>((1u << smaller(larger(count, 0), 16)) - 1);
}
inline __mmask32 first_32(int64_t count) {
  return static_cast<__mmask32>((uint64_t{1} << smaller(larger(count, 0), 32)) - 1);
}

// Up to 32 elements of a row of a bf16 tensor.
inline __m512i load_32(const Matrix& m, int64_t row, int64_t col, int64_t count) {
  const auto* from = reinterpret_cast<const uint16_t*>(element(m, row, col));
  if (m.col == 1) return _mm512_maskz_loadu_epi16(first_32(count), from);
  uint16_t line[32] = {};
  for (int64_t i = 0; i < smaller(count, 32); ++i) line[i] = from[i * m.col];
  return _mm512_loadu_si512(line);
}
// Up to 32 floats, rounded.
inline __m512i narrow_32(const float* from, int64_t count) {
  const __m512 low = _mm512_maskz_loadu_ps(first_16(count), from);
  const __m512 high = _mm512_maskz_loadu_ps(first_16(count - 16), from + 16);
  return bits_as<__m512i>(_mm512_cvtne2ps_pbh(high, low));
}
// Two rows of 16 elements, one after the other in a register, as 16 pairs.
inline __m512i pair_up(__m512i rows) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24,
                                         8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, rows);
}

// Packs an operand whose tiles `load(tile, row, depth)` fills with 16 rows (or columns of B) from
// `row` on, 32 deep.
template <class Load>
inline void pack_tiles(int64_t rows, int64_t depth, uint16_t* packed, const Load& load) {
  for (int64_t i = 0; i < rows; i += kTileRows) {
    for (int64_t k = 0; k < depth; k += kTileDepth, packed += kTileElems) {
      Tile tile;
      load(tile, i, k);
      store_tile(packed, tile);
    }
  }
}

// Packs the rows of a bf16 tensor.
template <Side kSide>
inline void pack_rows(const Matrix& m, int64_t first, int64_t rows, int64_t depth,
                      uint16_t* packed) {
  pack_tiles(rows, depth, packed, [&](Tile& tile, int64_t i, int64_t k) {
    for (int64_t r = 0; r < kTileRows; ++r) {
      tile[r] = i + r < rows ? load_32(m, first + i + r, k, depth - k) : __m512i{};
    }
    if (kSide == Side::kRight) transpose(tile);
  });
}

// Packs the columns of a bf16 tensor: `depth` rows of it lie along the depth.
template <Side kSide>
inline void pack_cols(const Matrix& m, int64_t first, int64_t depth, int64_t cols,
                      uint16_t* packed) {
  pack_tiles(cols, depth, packed, [&](Tile& tile, int64_t j, int64_t k) {
    const auto row = [&](int64_t at) {
      const int64_t count = at < depth ? smaller(cols - j, kTileRows) : 0;
      return _mm512_castsi512_si256(load_32(m, first + at, j, count));
    };
    for (int64_t r = 0; r < kTileRows; ++r) {
      const __m512i low = _mm512_castsi256_si512(row(k + 2 * r));
      tile[r] = pair_up(_mm512_inserti64x4(low, row(k + 2 * r + 1), 1));
    }
    if (kSide == Side::kLeft) transpose(tile);
  });
}

// Packs the rows of a tile of fp32, rounding. What lies past `depth` in the tile is not looked at.
inline void pack_rows(const float* from, int64_t ld, int64_t rows, int64_t depth,
                      uint16_t* packed) {
  pack_tiles(rows, depth, packed, [&](Tile& tile, int64_t i, int64_t k) {
    for (int64_t r = 0; r < kTileRows; ++r) {
      tile[r] = i + r < rows ? narrow_32(from + (i + r) * ld + k, depth - k) : __m512i{};
    }
  });
}

// Packs the columns of a tile of fp32, whose rows lie along the depth and have room for whole
// vectors.
template <Side kSide>
inline void pack_cols(const float* from, int64_t ld, int64_t depth, int64_t cols,
                      uint16_t* packed) {
  pack_tiles(cols, depth, packed, [&](Tile& tile, int64_t j, int64_t k) {
    const auto row = [&](int64_t at) {
      return at < depth ? _mm512_loadu_ps(from + at * ld + j) : __m512{};
    };
    for (int64_t r = 0; r < kTileRows; ++r) {
      const __m512bh both = _mm512_cvtne2ps_pbh(row(k + 2 * r + 1), row(k + 2 * r));
      tile[r] = pair_up(bits_as<__m512i>(both));
    }
    if (kSide == Side::kLeft) transpose(tile);
  });
}

// The compiler does not know that tile registers read and write memory.
inline void written() { __atomic_signal_fence(__ATOMIC_SEQ_CST); }

// C's tiles in registers 0 to 3, A's in 4 and 5, B's in 6 and 7: up to 32 x 32 of C at a time.
template <bool kTall, bool kWide>
void product_amx_tiles(const uint16_t* a, const uint16_t* b, int64_t steps, float* c, int64_t ldc,
                       bool accumulate) {
  const int64_t bytes = ldc * static_cast<int64_t>(sizeof(float));
  float* const below = c + kTileRows * ldc;
  if (accumulate) {
    _tile_loadd(0, c, bytes);
    if (kWide) _tile_loadd(1, c + kTileRows, bytes);
    if (kTall) _tile_loadd(2, below, bytes);
    if (kTall && kWide) _tile_loadd(3, below + kTileRows, bytes);
  } else {
    _tile_zero(0);
    if (kWide) _tile_zero(1);
    if (kTall) _tile_zero(2);
    if (kTall && kWide) _tile_zero(3);
  }
  for (int64_t k = 0; k < steps; ++k) {
    _tile_loadd(4, a + k * kTileElems, 64);
    _tile_loadd(6, b + k * kTileElems, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (kWide) {
      _tile_loadd(7, b + (steps + k) * kTileElems, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (kTall) {
      _tile_loadd(5, a + (steps + k) * kTileElems, 64);
      _tile_dpbf16ps(2, 5, 6);
    }
    if (kTall && kWide) _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, c, bytes);
  if (kWide) _tile_stored(1, c + kTileRows, bytes);
  if (kTall) _tile_stored(2, below, bytes);
  if (kTall && kWide) _tile_stored(3, below + kTileRows, bytes);
}

// All tiles are whole ones. Others may use the unit in between, with tiles of their own.
struct alignas(64) TileConfig {
  uint8_t palette = 1, first_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
constexpr TileConfig kTileConfig;

// A has `rows` rows; C has `cols` columns, a multiple of 16.
inline void product_bf16(int64_t rows, int64_t cols, int64_t depth, const uint16_t* a,
                         const uint16_t* b, float* c, int64_t ldc, bool accumulate) {
  const int64_t steps = round_up(depth, kTileDepth) / kTileDepth;
  written();
  _tile_loadconfig(&kTileConfig);
  for (int64_t j = 0; j < cols; j += 2 * kTileRows) {
    const uint16_t* const panel = b + j / kTileRows * steps * kTileElems;
    const bool wide = j + kTileRows < cols;
    for (int64_t i = 0; i < rows; i += 2 * kTileRows) {
      const uint16_t* const strip = a + i / kTileRows * steps * kTileElems;
      const bool tall = i + kTileRows < rows;
      const auto tiles =
          wide ? (tall ? product_amx_tiles<true, true> : product_amx_tiles<false, true>)
               : (tall ? product_amx_tiles<true, false> : product_amx_tiles<false, false>);
      const int64_t there = smaller(rows - i, tall ? 2 * kTileRows : kTileRows);
      const int64_t width = wide ? 2 * kTileRows : kTileRows;
      float* const at = c + i * ldc + j;
      if (there % kTileRows == 0) {
        tiles(strip, panel, steps, at, ldc, accumulate);
        continue;
      }
      float last[2 * kTileRows * 2 * kTileRows];  // the rows that are there, and others
      for (int64_t r = 0; accumulate && r < there; ++r) {
        __builtin_memcpy(last + r * width, at + r * ldc, width * sizeof(float));
      }
      written();
      tiles(strip, panel, steps, last, width, accumulate);
      written();
      for (int64_t r = 0; r < there; ++r) {
        __builtin_memcpy(at + r * ldc, last + r * width, width * sizeof(float));
      }
    }
  }
  _tile_release();
  written();
}

}  // namespace
}  // namespace flashmoe::cpu

#endif
