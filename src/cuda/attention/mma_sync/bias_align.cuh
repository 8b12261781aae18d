// Copies a bias that many share, and whose rows are not whole chunks of 16 bytes (odd lengths,
// other strides), to rows that are. The copy is small beside what shares it. Bound by memory.
#pragma once

#include "cuda/attention/params.h"
#include "cuda/attention/tiles.h"

namespace flashmoe::cuda {

// The kernel: one CTA for each row, grid (len_q, heads, batch) of the bias.
__device__ __forceinline__ void attention_bias_align(const BiasAlignParams& p) {
  const int64_t row = blockIdx.x, head = blockIdx.y;
  int64_t batch = blockIdx.z, from = row * p.strides.row + head * p.strides.head;
  for (int i = p.batch_dims - 1; i >= 0; --i) {
    from += batch % p.batch_sizes[i] * p.strides.batch[i];
    batch /= p.batch_sizes[i];
  }
  const int64_t to = ((int64_t{blockIdx.z} * gridDim.y + head) * gridDim.x + row) * p.pitch;
  const auto* bias = static_cast<const uint16_t*>(p.bias) + from;
  auto* rows = static_cast<uint16_t*>(p.rows) + to;
  for (int i = threadIdx.x; i < p.pitch; i += kRowThreads) {
    rows[i] = i < p.len_k ? bias[i * p.column] : 0;
  }
}

}  // namespace flashmoe::cuda
