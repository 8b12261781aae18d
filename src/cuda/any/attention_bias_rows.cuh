// A bias that many share, and whose rows are not whole chunks of 16 bytes (odd lengths, other
// strides), is copied once to rows that are: it is small beside what shares it.
#pragma once

#include "cuda/params.h"

namespace flashmoe::cuda {

inline constexpr int kBiasRowThreads = 128;

// The grid is (len_q, heads, batch) of the bias.
__device__ __forceinline__ void attention_bias_rows(const AttentionBiasRowsParams& p) {
  const int64_t row = blockIdx.x, head = blockIdx.y;
  int64_t batch = blockIdx.z, from = row * p.strides.row + head * p.strides.head;
  for (int i = p.batch_dims - 1; i >= 0; --i) {
    from += batch % p.batch_sizes[i] * p.strides.batch[i];
    batch /= p.batch_sizes[i];
  }
  const int64_t to = ((int64_t{blockIdx.z} * gridDim.y + head) * gridDim.x + row) * p.pitch;
  const auto* bias = static_cast<const uint16_t*>(p.bias) + from;
  auto* rows = static_cast<uint16_t*>(p.rows) + to;
  for (int i = threadIdx.x; i < p.pitch; i += kBiasRowThreads) {
    rows[i] = i < p.len_k ? bias[i * p.column] : 0;
  }
}

}  // namespace flashmoe::cuda
