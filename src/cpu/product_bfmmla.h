// C = A B or C += A B with bf16 operands and fp32 sums, on the CPU's bf16 matrix instruction:
// BFMMLA multiplies 2 x 4 by 4 x 2. A loop of nothing else does 263 GFLOP/s on a Neoverse V1 core,
// one of fp32 FMAs 82.
//
// Both operands are packed the same way, as rows over the depth (B by its columns): what a tile of
// eight rows wants next lies side by side, 16 bytes for each two rows, zeros beyond the edges.
//
//   [rows / 8][depth / 4][8][4]
#pragma once

#include "cpu/tile.h"

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define FLASHMOE_CPU_HAS_BF16_PRODUCT 1

namespace flashmoe::cpu {
namespace {

constexpr int64_t kBf16Block = 80, kBf16KeyStep = 5;  // see Kernels

// Where four elements of `row` from depth 4 * `quad` on are.
inline uint16_t* packed_at(uint16_t* packed, int64_t row, int64_t quad, int64_t quads) {
  return packed + ((row / 8 * quads + quad) * 8 + row % 8) * 4;
}

// Packed memory for this many rows or columns, whichever of the two is the depth.
constexpr int64_t packed_elems(int64_t rows, int64_t depth) {
  return round_up(rows, 8) * round_up(depth, 8);
}

// Packs the rows of a bf16 tensor.
template <Side>
inline void pack_rows(const Matrix& m, int64_t first, int64_t rows, int64_t depth,
                      uint16_t* packed) {
  const int64_t quads = round_up(depth, 4) / 4;
  const auto row = [&](int64_t i) {
    return reinterpret_cast<const uint16_t*>(element(m, first + i, 0));
  };
  for (int64_t i = 0; i < round_up(rows, 8); i += 2) {
    int64_t q = 0;
    if (m.col == 1 && i + 2 <= rows) {  // two rows, 8 deep
      const uint16_t *const upper = row(i), *const lower = row(i + 1);
      for (; 4 * q + 8 <= depth; q += 2) {
        const auto u = load<uint64x2_t>(upper + 4 * q), l = load<uint64x2_t>(lower + 4 * q);
        store(packed_at(packed, i, q, quads), vzip1q_u64(u, l));
        store(packed_at(packed, i, q + 1, quads), vzip2q_u64(u, l));
      }
    }
    for (; q < quads; ++q) {
      for (int64_t r = i; r < i + 2; ++r) {
        uint16_t* const to = packed_at(packed, r, q, quads);
        for (int64_t k = 0; k < 4; ++k) {
          to[k] = r < rows && 4 * q + k < depth ? row(r)[(4 * q + k) * m.col] : 0;
        }
      }
    }
  }
}

// Packs the columns of a bf16 tensor: `depth` rows of it lie along the depth.
template <Side>
inline void pack_cols(const Matrix& m, int64_t first, int64_t depth, int64_t cols,
                      uint16_t* packed) {
  const int64_t quads = round_up(depth, 4) / 4;
  for (int64_t q = 0; q < quads; ++q) {
    int64_t j = 0;
    if (m.col == 1 && 4 * q + 4 <= depth) {
      const auto* from = reinterpret_cast<const uint16_t*>(element(m, first + 4 * q, 0));
      for (; j + 8 <= cols; j += 8) {
        const uint16x8_t r0 = vld1q_u16(from + j), r1 = vld1q_u16(from + m.row + j);
        const uint16x8_t r2 = vld1q_u16(from + 2 * m.row + j), r3 = vld1q_u16(from + 3 * m.row + j);
        const auto lo01 = vreinterpretq_u32_u16(vzip1q_u16(r0, r1));
        const auto lo23 = vreinterpretq_u32_u16(vzip1q_u16(r2, r3));
        const auto hi01 = vreinterpretq_u32_u16(vzip2q_u16(r0, r1));
        const auto hi23 = vreinterpretq_u32_u16(vzip2q_u16(r2, r3));
        store(packed_at(packed, j, q, quads), vzip1q_u32(lo01, lo23));
        store(packed_at(packed, j + 2, q, quads), vzip2q_u32(lo01, lo23));
        store(packed_at(packed, j + 4, q, quads), vzip1q_u32(hi01, hi23));
        store(packed_at(packed, j + 6, q, quads), vzip2q_u32(hi01, hi23));
      }
    }
    for (; j < round_up(cols, 8); ++j) {
      uint16_t* to = packed_at(packed, j, q, quads);
      for (int64_t k = 0; k < 4; ++k) {
        const bool inside = j < cols && 4 * q + k < depth;
        to[k] = inside ? *reinterpret_cast<const uint16_t*>(element(m, first + 4 * q + k, j)) : 0;
      }
    }
  }
}

// Packs the rows of a tile of fp32, rounding. What lies past `depth` in the tile is not looked at.
inline void pack_rows(const float* tile, int64_t ld, int64_t rows, int64_t depth,
                      uint16_t* packed) {
  const int64_t quads = round_up(depth, 4) / 4;
  for (int64_t i = 0; i < round_up(rows, 8); ++i) {
    for (int64_t q = 0; q < quads; ++q) {
      uint16_t* to = packed_at(packed, i, q, quads);
      if (i < rows && 4 * q + 4 <= depth) {
        narrow_bf16(to, load<Vec<float>>(tile + i * ld + 4 * q));
        continue;
      }
      for (int64_t k = 0; k < 4; ++k) {
        to[k] = i < rows && 4 * q + k < depth ? to_bf16(tile[i * ld + 4 * q + k]) : 0;
      }
    }
  }
}

// Packs the columns of a tile of fp32, whose rows lie along the depth and have room for whole
// vectors. Of the last eight columns only whole fours are packed, as a product looks at those.
template <Side>
inline void pack_cols(const float* tile, int64_t ld, int64_t depth, int64_t cols,
                      uint16_t* packed) {
  const int64_t quads = round_up(depth, 4) / 4;
  for (int64_t q = 0; q < quads; ++q) {
    for (int64_t j = 0; j < round_up(cols, 4); j += 4) {
      float32x4_t r[4];
      for (int64_t k = 0; k < 4; ++k) {
        r[k] = 4 * q + k < depth ? vld1q_f32(tile + (4 * q + k) * ld + j) : vdupq_n_f32(0);
      }
      // A 4 x 4 transpose: pairs of rows interleaved, then pairs of pairs.
      const auto lo01 = vreinterpretq_f64_f32(vzip1q_f32(r[0], r[1]));
      const auto lo23 = vreinterpretq_f64_f32(vzip1q_f32(r[2], r[3]));
      const auto hi01 = vreinterpretq_f64_f32(vzip2q_f32(r[0], r[1]));
      const auto hi23 = vreinterpretq_f64_f32(vzip2q_f32(r[2], r[3]));
      narrow_bf16(packed_at(packed, j, q, quads), vreinterpretq_f32_f64(vzip1q_f64(lo01, lo23)));
      narrow_bf16(packed_at(packed, j + 1, q, quads),
                  vreinterpretq_f32_f64(vzip2q_f64(lo01, lo23)));
      narrow_bf16(packed_at(packed, j + 2, q, quads),
                  vreinterpretq_f32_f64(vzip1q_f64(hi01, hi23)));
      narrow_bf16(packed_at(packed, j + 3, q, quads),
                  vreinterpretq_f32_f64(vzip2q_f64(hi01, hi23)));
    }
  }
}

// kPairs pairs of rows by kQuads fours of columns; of the rows only the first `rows` are stored.
template <int kPairs, int kQuads>
void product_bf16_tile(const uint16_t* a, const uint16_t* b, int64_t quads, float* c, int64_t ldc,
                       int64_t rows, bool accumulate) {
  float32x4_t acc[kPairs][2 * kQuads] = {};  // 2 x 2 of C each
  for (int64_t q = 0; q < quads; ++q) {
    bfloat16x8_t ra[kPairs], rb[2 * kQuads];
    for (int i = 0; i < kPairs; ++i) ra[i] = load<bfloat16x8_t>(a + (4 * q + i) * 8);
    for (int j = 0; j < 2 * kQuads; ++j) rb[j] = load<bfloat16x8_t>(b + (4 * q + j) * 8);
    for (int i = 0; i < kPairs; ++i) {
      for (int j = 0; j < 2 * kQuads; ++j) acc[i][j] = vbfmmlaq_f32(acc[i][j], ra[i], rb[j]);
    }
  }
  for (int i = 0; i < kPairs; ++i) {
    for (int j = 0; j < kQuads; ++j) {
      const auto left = vreinterpretq_f64_f32(acc[i][2 * j]);
      const auto right = vreinterpretq_f64_f32(acc[i][2 * j + 1]);
      const float32x4_t row[2] = {vreinterpretq_f32_f64(vzip1q_f64(left, right)),
                                  vreinterpretq_f32_f64(vzip2q_f64(left, right))};
      for (int half = 0; half < 2; ++half) {
        if (2 * i + half >= rows) continue;
        float* at = c + (2 * i + half) * ldc + 4 * j;
        vst1q_f32(at, accumulate ? vld1q_f32(at) + row[half] : row[half]);
      }
    }
  }
}

// A has `rows` rows; C has `cols` columns, a multiple of 4. Eight rows of A stay in the first-level
// cache while B passes by.
inline void product_bf16(int64_t rows, int64_t cols, int64_t depth, const uint16_t* a,
                         const uint16_t* b, float* c, int64_t ldc, bool accumulate) {
  const int64_t quads = round_up(depth, 4) / 4;
  for (int64_t i = 0; i < rows; i += 8) {
    const uint16_t* const strip = a + i * quads * 4;
    const bool tall = i + 4 < rows;
    for (int64_t j = 0; j < cols; j += 8) {
      const bool wide = j + 4 < cols;
      const auto tile = wide ? (tall ? product_bf16_tile<4, 2> : product_bf16_tile<2, 2>)
                             : (tall ? product_bf16_tile<4, 1> : product_bf16_tile<2, 1>);
      tile(strip, b + j * quads * 4, quads, c + i * ldc + j, ldc, rows - i, accumulate);
    }
  }
}

}  // namespace
}  // namespace flashmoe::cpu

#endif
