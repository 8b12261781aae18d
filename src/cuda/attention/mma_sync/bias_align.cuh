// Copies a bias whose rows are not whole chunks of 16 bytes (odd lengths, other strides) to rows
// that are. Bound by memory.
#pragma once

#include "cuda/attention/params.h"
#include "cuda/attention/tiles.h"

namespace flashmoe::cuda {

// Eight neighbouring numbers of a row, of which `count` exist; the others are 0. Where they are
// neighbours in memory they are read as the words of 32 bits that hold them, none beyond the last.
__device__ __forceinline__ uint4 load_eight(const uint16_t* from, int64_t column, int count) {
  uint32_t x[4] = {};
  if (column == 1) {
    const auto address = reinterpret_cast<uintptr_t>(from);
    const auto* words = reinterpret_cast<const uint32_t*>(address & ~uintptr_t{3});
    const int odd = address / 2 % 2, end = odd + count;  // in numbers, from the first word on
    uint32_t w[5] = {};
#pragma unroll
    for (int i = 0; i < 5; ++i) {
      if (2 * i + 2 <= end && (i > 0 || !odd)) {
        w[i] = words[i];
      } else if (2 * i < end) {  // one half of the word exists
        const bool upper = i == 0 && odd;
        const uint32_t half = reinterpret_cast<const uint16_t*>(words)[2 * i + upper];
        w[i] = upper ? half << 16 : half;
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = __funnelshift_r(w[i], w[i + 1], 16 * odd);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < count) x[i / 2] |= static_cast<uint32_t>(from[i * column]) << 16 * (i % 2);
    }
  }
  return {x[0], x[1], x[2], x[3]};
}

// The kernel: a CTA for kAlignedRows rows, grid (rows, heads, batch) of the bias.
__device__ __forceinline__ void attention_bias_align(const BiasAlignParams& p) {
  const int64_t head = blockIdx.y;
  int64_t batch = blockIdx.z, matrix = head * p.strides.head;
  for (int i = p.batch_dims - 1; i >= 0; --i) {
    matrix += batch % p.batch_sizes[i] * p.strides.batch[i];
    batch /= p.batch_sizes[i];
  }
  const auto* bias = static_cast<const uint16_t*>(p.bias) + matrix;
  auto* rows =
      static_cast<uint16_t*>(p.rows) + (int64_t{blockIdx.z} * gridDim.y + head) * p.len_q * p.pitch;
  const int chunks = p.pitch / 8, first = blockIdx.x * kAlignedRows;
  const int count = min(kAlignedRows, p.len_q - first) * chunks;
#pragma unroll 4
  for (int i = threadIdx.x; i < count; i += kRowThreads) {
    const int64_t row = first + i / chunks;
    const int key = i % chunks * 8;
    reinterpret_cast<uint4*>(rows + row * p.pitch)[key / 8] =
        load_eight(bias + row * p.strides.row + key * p.column, p.column, p.len_k - key);
  }
}

}  // namespace flashmoe::cuda
