// A learned bias: one number for each pair of query and key, anywhere in memory.
//
// In 16 bits it comes to shared memory tile by tile, and from there into the accumulators of S
// before the product begins: q.k is then added to it for nothing. Rows of 16-byte chunks come as Q,
// K and V do, in the background; any other (odd lengths, other strides) number by number. A bias in
// fp32 is read where it lies, by the loops that can do anything.
#pragma once

#include "cuda/params.h"
#include "cuda/tile/copy.cuh"
#include "cuda/tile/product.cuh"
#include "cuda/tile/sequence.cuh"
#include "cuda/tile/softmax.cuh"

namespace flashmoe::cuda {

// The bias of one (batch, head), or its gradient.
struct BiasRows {
  char* data;           // of the first query and key
  int64_t row, column;  // strides in elements
  bool wide;            // fp32
  bool chunks;          // 16-bit, rows of 16-byte chunks

  __device__ __forceinline__ char* at(int64_t row, int64_t key) const {
    return data + (row * this->row + key * column) * (wide ? 4 : 2);
  }
};

// A ragged batch has its pairs one after the other, all heads of a pair side by side.
__device__ __forceinline__ BiasRows find_bias(const void* bias, const Strides& strides,
                                              int64_t column, const AttentionParams& p,
                                              const Sequence& seq, int batch, int head) {
  BiasRows rows;
  const int64_t where = p.blocks ? seq.pair * column : batch_offset(p, strides.batch, batch);
  rows.data = static_cast<char*>(const_cast<void*>(bias)) +
              (where + head * strides.head) * (p.bias_wide ? 4 : 2);
  rows.row = p.blocks ? seq.len_k * column : strides.row;
  rows.column = column;
  rows.wide = p.bias_wide;
  // A row's bytes are counted in 32 bits.
  rows.chunks = !rows.wide && column == 1 && rows.row % 8 == 0 && rows.row < kNoLimit &&
                reinterpret_cast<uintptr_t>(rows.data) % 16 == 0;
  return rows;
}
__device__ __forceinline__ BiasRows find_bias(const AttentionParams& p, const Sequence& seq,
                                              int batch, int head) {
  return find_bias(p.bias, p.bias_strides, p.bias_column, p, seq, batch, head);
}
__device__ __forceinline__ BiasRows find_grad_bias(const AttentionBwdParams& p, const Sequence& seq,
                                                   int batch, int head) {
  return find_bias(p.grad_bias, p.grad_bias_strides, p.grad_bias_column, p, seq, batch, head);
}

template <class T>
__device__ __forceinline__ float read_bias(const BiasRows& bias, int row, int key) {
  const char* at = bias.at(row, key);
  if (bias.wide) return *reinterpret_cast<const float*>(at);
  return T::unpack(*reinterpret_cast<const uint16_t*>(at));
}

template <class T>
__device__ __forceinline__ void write_bias(const BiasRows& bias, int64_t row, int64_t key,
                                           float x) {
  char* at = bias.at(row, key);
  if (bias.wide) {
    *reinterpret_cast<float*>(at) = x;
  } else {
    *reinterpret_cast<uint16_t*>(at) = T::pack(x, 0) & 0xffff;
  }
}

// Whether it cannot be in the accumulators from the start: it is fp32, or comes after a softcap, or
// the scale is not one to divide by.
__device__ __forceinline__ bool late_bias(const AttentionParams& p) {
  return p.bias_wide || p.softcap_scale || p.bias_scale <= 0;
}
// A score in base 2 with its bias.
__device__ __forceinline__ float add_bias(float score, float bias, float scale_log2) {
  return score * scale_log2 + bias * kLog2e;
}

// Whether the loops for plain calls can take it: whole chunks, there from the start.
__device__ __forceinline__ bool plain_bias(const BiasRows& bias, const AttentionParams& p) {
  const bool whole = p.bias_padded || (p.blocks ? bias.row : p.len_k) % 8 == 0;
  return bias.chunks && whole && !late_bias(p);
}

// Pairs of a ragged batch that belong to no valid sequence, from where `grad` begins.
template <class T>
__device__ __forceinline__ void fill_pairs(const BiasRows& grad, int64_t count, float value) {
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) write_bias<T>(grad, 0, i, value);
}

// -inf is a mask.
template <class T>
__device__ __forceinline__ bool hidden(const BiasRows& bias, int row, int key) {
  return read_bias<T>(bias, row, key) == -INFINITY;
}

// A tile of kRows queries x kKeys keys in shared memory.
template <class T, int kRows, int kKeys, int kThreads>
struct BiasTile {
  using Layout = Swizzled<kKeys>;
  static constexpr uint32_t kBytes = kRows * kKeys * 2;

  // Numbers past the last row or key become 0, and are not read. Without kMaybeOdd rows are whole
  // chunks; else an fp32 bias stays where it is.
  template <class Chip, bool kMaybeOdd = true>
  static __device__ __forceinline__ void load(uint32_t shared, const BiasRows& bias, int first_row,
                                              int first_key, const Sequence& seq) {
    if (!kMaybeOdd || bias.chunks) {
      load_tile<Chip, Layout, kRows, kThreads, kMaybeOdd>(shared, bias.data + first_key * 2,
                                                          static_cast<int>(bias.row) * 2, first_row,
                                                          seq.len_q, seq.len_k - first_key);
    } else if (!bias.wide) {
      load_numbers(shared, bias, first_row, first_key, seq);
    }
  }

  // The tile as accumulators of scores that are yet to be scaled: bias * inverse, for kM m16
  // fragments of rows and kN n8 fragments of keys that begin at (row, key) of the tile.
  template <int kM, int kN>
  static __device__ __forceinline__ void start(float (&s)[kM][kN][4], uint32_t shared, int row,
                                               int key, float inverse) {
    const uint32_t lane = lane_rows<Layout>(shared, row, key / 8);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      const uint32_t rows = 16 * m * Layout::kRowBytes;
#pragma unroll
      for (int n = 0; n + 1 < kN; n += 2) {
        uint32_t x[4];  // rows 0-7 and 8-15, of keys 0-7 and 8-15
        ptx::ldmatrix_x4(x, Layout::along(lane, n) + rows);
#pragma unroll
        for (int i = 0; i < 4; ++i) unpack(s[m][n + i / 2], i % 2, x[i], inverse);
      }
      if constexpr (kN % 2) {
        uint32_t x[2];
        ptx::ldmatrix_x2(x, Layout::along(lane, kN - 1) + rows);
        unpack(s[m][kN - 1], 0, x[0], inverse);
        unpack(s[m][kN - 1], 1, x[1], inverse);
      }
    }
  }
  // And as keys x queries: kM m16 fragments of keys and kN n8 fragments of rows.
  template <int kM, int kN>
  static __device__ __forceinline__ void start_across(float (&s)[kM][kN][4], uint32_t shared,
                                                      int row, int key, float inverse) {
    static_assert(kN % 2 == 0);
    const uint32_t lane = lane_cols<Layout>(shared, row, key / 8);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kN; n += 2) {
        uint32_t x[4];  // keys 0-7 and 8-15, of rows 0-7 and 8-15
        ptx::ldmatrix_x4_trans(x, Layout::along(lane, 2 * m) + 8 * n * Layout::kRowBytes);
#pragma unroll
        for (int i = 0; i < 4; ++i) unpack(s[m][n + i / 2], i % 2, x[i], inverse);
      }
    }
  }

  // The bias of one pair, wherever it is. (row, key) is in the tile that begins at (first_row,
  // first_key).
  static __device__ __forceinline__ float read(uint32_t shared, const BiasRows& bias, int row,
                                               int key, int first_row, int first_key,
                                               const Sequence& seq) {
    if (!bias.wide) {
      return T::unpack(ptx::ld_shared_u16(shared + Layout::at(row, key / 8) + key % 8 * 2));
    }
    const bool exists = first_row + row < seq.len_q && first_key + key < seq.len_k;
    return exists ? read_bias<T>(bias, first_row + row, first_key + key) : 0.f;
  }

 private:
  static __device__ __forceinline__ void unpack(float (&s)[4], int half, uint32_t two,
                                                float inverse) {
    s[2 * half] = T::unpack(two & 0xffff) * inverse;
    s[2 * half + 1] = T::unpack(two >> 16) * inverse;
  }

  // Neighbouring threads take what is neighbouring in memory. Small tiles have registers to wait
  // for several at once.
  static __device__ __forceinline__ void load_numbers(uint32_t shared, const BiasRows& bias,
                                                      int first_row, int first_key,
                                                      const Sequence& seq) {
    constexpr int kPairs = kKeys / 2, kEach = kRows * kPairs / kThreads;
    constexpr int kAtOnce = kThreads > 64 ? 1 : kEach < 8 ? kEach : 8;
    static_assert(kRows * kPairs % (kThreads * kAtOnce) == 0);
    const bool along_rows = bias.row == 1;
    const auto* numbers = reinterpret_cast<const uint16_t*>(bias.data);
#pragma unroll 4
    for (int first = ptx::opaque_thread(); first < kRows * kPairs; first += kThreads * kAtOnce) {
      uint32_t left[kAtOnce], right[kAtOnce];
      const auto each = [&](const auto& f) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int pair = first + i * kThreads;
          f(i, along_rows ? pair % kRows : pair / kPairs,
            2 * (along_rows ? pair / kRows : pair % kPairs));
        }
      };
      each([&](int i, int row, int key) {
        const int there = first_row + row < seq.len_q ? seq.len_k - first_key - key : 0;
        const int64_t at = (first_row + row) * bias.row + (first_key + key) * bias.column;
        left[i] = there > 0 ? numbers[at] : 0;
        right[i] = there > 1 ? numbers[at + bias.column] : 0;
      });
      each([&](int i, int row, int key) {
        ptx::st_shared_u32(shared + Layout::at(row, key / 8) + key % 8 * 2,
                           left[i] | right[i] << 16);
      });
    }
  }
};

// Eight neighbouring keys of one row of the gradient, as packed, of which `keys` exist.
__device__ __forceinline__ void store_eight(const BiasRows& grad, int row, int key, int keys,
                                            const uint4& packed) {
  char* to = grad.at(row, key);
  if (grad.chunks && keys >= 8) {
    *reinterpret_cast<uint4*>(to) = packed;
    return;
  }
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i < keys) {
      *reinterpret_cast<uint16_t*>(to + i * grad.column * 2) = words[i / 2] >> (i % 2 * 16);
    }
  }
}

}  // namespace flashmoe::cuda
