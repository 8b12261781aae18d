// A learned bias: one number for each pair of query and key, anywhere in memory.
//
// A bias in the inputs' dtype comes to shared memory tile by tile, and from there into the
// accumulators of S before the product begins: q.k is then added to it for nothing. Rows of 16-byte
// chunks come as Q, K and V do, in the background; any other (odd lengths, other strides) number by
// number. A bias in fp32 is read where it lies, by the general loops. A mask is read byte by byte
// and becomes a 16-bit bias, 0 or -inf, on its way to shared memory.
#pragma once

#include "cuda/attention/params.h"
#include "cuda/attention/score.cuh"
#include "cuda/attention/sequence.cuh"
#include "cuda/tile/copy.cuh"
#include "cuda/tile/product.cuh"

namespace flashmoe::cuda {

// The bias of one (batch, head), or its gradient.
struct BiasRows {
  char* data;           // the number of the first query and key
  int64_t row, column;  // strides in elements
  bool is_fp32, is_mask;
  bool chunks;  // whether it is 16-bit, in rows of 16-byte chunks
  bool words;   // whether it is 16-bit, all keys side by side, and one more may be read at the end

  __device__ __forceinline__ int element_bytes() const { return is_fp32 ? 4 : is_mask ? 1 : 2; }
  __device__ __forceinline__ char* at(int64_t row, int64_t key) const {
    return data + (row * this->row + key * column) * element_bytes();
  }
};

// The rows that begin at element `where` of a bias.
__device__ __forceinline__ BiasRows bias_from(const void* bias, int64_t where, int64_t row,
                                              int64_t column, const AttentionParams& p) {
  BiasRows rows;
  rows.row = row;
  rows.column = column;
  rows.is_fp32 = p.bias_is_fp32;
  rows.is_mask = p.bias_is_mask;
  rows.data = static_cast<char*>(const_cast<void*>(bias)) + where * rows.element_bytes();
  // A row's bytes are counted in 32 bits.
  rows.chunks = !rows.is_fp32 && !rows.is_mask && column == 1 && row % 8 == 0 && row < kNoLimit &&
                reinterpret_cast<uintptr_t>(rows.data) % 16 == 0;
  rows.words = false;
  return rows;
}

// The bias of one (batch, head). A ragged batch has its pairs one after the other.
__device__ __forceinline__ BiasRows find_bias(const void* bias, const Strides& strides,
                                              int64_t column, const AttentionParams& p,
                                              const Sequence& seq, int batch, int head) {
  const int64_t where = p.blocks ? seq.pair * column : batch_offset(p, strides.batch, batch);
  return bias_from(bias, where + head * strides.head, p.blocks ? seq.len_k * column : strides.row,
                   column, p);
}
__device__ __forceinline__ BiasRows find_bias(const AttentionParams& p, const Sequence& seq,
                                              int batch, int head) {
  BiasRows rows = find_bias(p.bias, p.bias_strides, p.bias_column, p, seq, batch, head);
  rows.words = p.packed_bias;
  return rows;
}
// The bias as the caller gave it: find_bias() may lead to a copy, which the gradient overwrites
// tile by tile.
__device__ __forceinline__ BiasRows find_packed_bias(const AttentionParams& p, const Sequence& seq,
                                                     int batch, int head) {
  if (!p.packed_bias) return find_bias(p, seq, batch, head);
  return bias_from(p.packed_bias, seq.pair * p.packed_pair + head * p.packed_head,
                   seq.len_k * p.packed_pair, p.packed_pair, p);
}
__device__ __forceinline__ BiasRows find_grad_bias(const AttentionBwdParams& p, const Sequence& seq,
                                                   int batch, int head) {
  return find_bias(p.grad_bias, p.grad_bias_strides, p.grad_bias_column, p, seq, batch, head);
}

template <class T>
__device__ __forceinline__ float read_bias(const BiasRows& bias, int row, int key) {
  const char* at = bias.at(row, key);
  if (bias.is_fp32) return *reinterpret_cast<const float*>(at);
  if (bias.is_mask) return *at ? 0.f : -INFINITY;
  return T::unpack(*reinterpret_cast<const uint16_t*>(at));
}

template <class T>
__device__ __forceinline__ void write_bias(const BiasRows& bias, int64_t row, int64_t key,
                                           float x) {
  char* at = bias.at(row, key);
  if (bias.is_fp32) {
    *reinterpret_cast<float*>(at) = x;
  } else {
    *reinterpret_cast<uint16_t*>(at) = T::pack(x, 0) & 0xffff;
  }
}

// Whether the plain and masked loops can take the bias: it is in the accumulators from the start
// and, except for short sequences, comes in whole chunks.
template <bool kShort>
__device__ __forceinline__ bool plain_bias(const BiasRows& bias, const AttentionParams& p) {
  const bool whole = p.bias_padded || (p.blocks ? bias.row : p.len_k) % 8 == 0;
  return !p.bias || ((kShort || (bias.chunks && whole)) && !late_bias(p));
}

// Sets the gradient of `count` pairs of a ragged batch, from where `grad` begins: those that belong
// to no valid sequence.
template <class T>
__device__ __forceinline__ void fill_pairs(const BiasRows& grad, int64_t count, float value) {
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) write_bias<T>(grad, 0, i, value);
}

// Whether the bias, if there is one, hides the key from the row: -inf is a mask.
template <class T>
__device__ __forceinline__ bool hidden(const BiasRows& bias, int row, int key) {
  return bias.data && read_bias<T>(bias, row, key) == -INFINITY;
}

// A tile of the bias in shared memory: kRows queries x kKeys keys.
// kOptional: there may be none, which is as good as 0.
template <class T, int kRows, int kKeys, int kThreads, bool kOptional = false>
struct BiasTile {
  using Layout = Swizzled<kKeys>;
  static constexpr uint32_t kBytes = kRows * kKeys * T::kBytes;
  static constexpr uint32_t kMinusInfinities = (0x8000 | T::kExponent) * 0x10001u;

  // Loads the tile that begins at (first_row, first_key). Numbers past the last row or key become 0
  // and are not read. Without kPartialChunks rows are whole chunks. An fp32 bias stays where it is.
  template <class Chip, bool kPartialChunks = true>
  static __device__ __forceinline__ void load(uint32_t shared, const BiasRows& bias, int first_row,
                                              int first_key, const Sequence& seq) {
    if (kOptional && !bias.data) return;
    if (!kPartialChunks || bias.chunks) {
      const Rows rows{bias.data + first_key * T::kBytes, static_cast<int>(bias.row) * T::kBytes};
      load_tile<Chip, Layout, kRows, kThreads, kPartialChunks>(shared, rows, first_row, seq.len_q,
                                                               seq.len_k - first_key);
    } else if (bias.words) {
      load_words(shared, bias, first_row, first_key, seq);
    } else if (bias.is_mask) {
      load_mask(shared, bias, first_row, first_key, seq);
    } else if (!bias.is_fp32) {
      load_numbers(shared, bias, first_row, first_key, seq);
    }
  }

  // Reads what a lane holds of kM m16 fragments of rows and kN n8 fragments of keys that begin at
  // (row, key): two neighbouring keys of two rows of each fragment.
  template <int kM, int kN>
  static __device__ __forceinline__ void read(uint32_t (&two)[kM][kN][2], uint32_t shared, int row,
                                              int key) {
    const uint32_t lane = lane_rows<Layout>(shared, row, key / 8);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      const uint32_t rows = 16 * m * Layout::kRowBytes;
#pragma unroll
      for (int n = 0; n + 1 < kN; n += 2) {
        uint32_t x[4];  // rows 0-7 and 8-15, of keys 0-7 and 8-15
        ptx::ldmatrix_x4(x, Layout::along(lane, n) + rows);
#pragma unroll
        for (int i = 0; i < 4; ++i) two[m][n + i / 2][i % 2] = x[i];
      }
      if constexpr (kN % 2) ptx::ldmatrix_x2(two[m][kN - 1], Layout::along(lane, kN - 1) + rows);
    }
  }
  // Starts the accumulators of scores that are yet to be scaled: bias * inverse.
  static __device__ __forceinline__ void start(float (&s)[4], const uint32_t (&two)[2],
                                               float inverse) {
    unpack(s, 0, two[0], inverse);
    unpack(s, 1, two[1], inverse);
  }
  template <int kM, int kN>
  static __device__ __forceinline__ void start(float (&s)[kM][kN][4], uint32_t shared, int row,
                                               int key, float inverse) {
    uint32_t two[kM][kN][2];
    read(two, shared, row, key);
#pragma unroll
    for (int i = 0; i < kM * kN; ++i) start(s[i / kN][i % kN], two[i / kN][i % kN], inverse);
  }
  // start() for keys x queries: kM m16 fragments of keys and kN n8 fragments of rows.
  template <int kM, int kN>
  static __device__ __forceinline__ void start_transposed(float (&s)[kM][kN][4], uint32_t shared,
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
    if (kOptional && !bias.data) return 0;
    if (!bias.is_fp32) {
      return T::unpack(ptx::ld_shared_u16(shared + Layout::at_element(row, key)));
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

  // Loads eight neighbouring keys of a row at a time, from the words of 32 bits that hold them.
  static __device__ __forceinline__ void load_words(uint32_t shared, const BiasRows& bias,
                                                    int first_row, int first_key,
                                                    const Sequence& seq) {
    constexpr int kChunks = kKeys / 8, kStep = kThreads / kChunks;  // rows at once
    static_assert(kThreads % kChunks == 0);
    const int thread = ptx::opaque_thread(), chunk = thread % kChunks;
    const int there = seq.len_k - first_key - 8 * chunk;
    const char* from = bias.at(first_row + thread / kChunks, first_key + 8 * chunk);
#pragma unroll 2
    for (int row = thread / kChunks; row < kRows;
         row += kStep, from += kStep * bias.row * T::kBytes) {
      const auto address = reinterpret_cast<uintptr_t>(from);
      const bool odd = address & 2;
      const auto* words = reinterpret_cast<const uint32_t*>(address & ~uintptr_t{3});
      const int count = first_row + row < seq.len_q ? (there + odd + 1) / 2 : 0;
      uint32_t x[5];
#pragma unroll
      for (int j = 0; j < 5; ++j) x[j] = j < count ? words[j] : 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) x[j] = __funnelshift_r(x[j], x[j + 1], odd ? 16 : 0);
      ptx::st_shared_v4(shared + Layout::at(row, chunk), {x[0], x[1], x[2], x[3]});
    }
  }

  // Loads eight neighbouring keys of a row at a time, from the words of 32 bits that hold their
  // bytes where these all exist, else byte by byte.
  static __device__ __forceinline__ void load_mask(uint32_t shared, const BiasRows& bias,
                                                   int first_row, int first_key,
                                                   const Sequence& seq) {
    constexpr int kChunks = kKeys / 8, kStep = kThreads / kChunks;  // rows at once
    static_assert(kThreads % kChunks == 0);
    const int thread = ptx::opaque_thread(), chunk = thread % kChunks;
    const int there = seq.len_k - first_key - 8 * chunk;
    const char* from = bias.at(first_row + thread / kChunks, first_key + 8 * chunk);
#pragma unroll 2
    for (int row = thread / kChunks; row < kRows; row += kStep, from += kStep * bias.row) {
      uint32_t bytes[2] = {0x01010101, 0x01010101};  // other masks hide what does not exist
      const bool exists = first_row + row < seq.len_q;
      const auto address = reinterpret_cast<uintptr_t>(from);
      const int odd = address % 4;
      if (exists && bias.column == 1 && there >= 8 + (4 - odd) % 4) {
        const auto* words = reinterpret_cast<const uint32_t*>(address - odd);
        const uint32_t x[3] = {words[0], words[1], odd ? words[2] : 0};
        bytes[0] = __funnelshift_r(x[0], x[1], 8 * odd);
        bytes[1] = __funnelshift_r(x[1], x[2], 8 * odd);
      } else if (exists) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if (i < there && !from[i * bias.column]) bytes[i / 4] &= ~(0xffu << (i % 4 * 8));
        }
      }
      uint32_t two[4];  // 0 or -inf
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t hidden = __vcmpeq4(bytes[i], 0);
        two[2 * i] = __byte_perm(hidden, 0, 0x1100) & kMinusInfinities;
        two[2 * i + 1] = __byte_perm(hidden, 0, 0x3322) & kMinusInfinities;
      }
      ptx::st_shared_v4(shared + Layout::at(row, chunk), {two[0], two[1], two[2], two[3]});
    }
  }

  // Loads two neighbouring keys of a row at a time. Neighbouring threads take what is neighbouring
  // in memory, along the rows or across them; a thread's steps are all equal. Small tiles have
  // registers to wait for several numbers at once.
  static __device__ __forceinline__ void load_numbers(uint32_t shared, const BiasRows& bias,
                                                      int first_row, int first_key,
                                                      const Sequence& seq) {
    constexpr int kPairs = kKeys / 2, kEach = kRows * kPairs / kThreads;
    constexpr int kAtOnce = kThreads > 64 ? 1 : kEach < 8 ? kEach : 8;
    static_assert(kThreads % kPairs == 0 && kThreads % kRows == 0 && kEach % kAtOnce == 0);
    const int thread = ptx::opaque_thread();
    const bool across = bias.row == 1;
    int row = across ? thread % kRows : thread / kPairs;
    int key = 2 * (across ? thread / kRows : thread % kPairs);
    const int rows = across ? 0 : kThreads / kPairs, keys = across ? 2 * (kThreads / kRows) : 0;
    const char* from = bias.at(first_row + row, first_key + key);
    const int64_t next = bias.at(rows, keys) - bias.data;
    const int64_t right = bias.column * T::kBytes;
#pragma unroll 1
    for (int i = 0; i < kEach; i += kAtOnce) {
      uint32_t two[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const bool exists = first_row + row + j * rows < seq.len_q;
        const int there = seq.len_k - first_key - key - j * keys;
        uint32_t x = 0, y = 0;
        if (exists && there > 0) x = *reinterpret_cast<const uint16_t*>(from);
        if (exists && there > 1) y = *reinterpret_cast<const uint16_t*>(from + right);
        two[j] = x | y << 16;
        from += next;
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j, row += rows, key += keys) {
        ptx::st_shared_u32(shared + Layout::at_element(row, key), two[j]);
      }
    }
  }
};

// Stores the gradient of eight neighbouring keys of one row, 16-bit, of which `keys` exist.
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
