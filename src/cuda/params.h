// What a kernel is given, by value. Read by nvcc and by the host compiler, so: plain numbers and
// pointers.
#pragma once

#include <cstdint>

namespace flashmoe::cuda {

// Strides in elements; the last dimension has stride 1. Offsets are 64-bit: tensors may be larger
// than 2^31.
struct Strides {
  int64_t batch, head, row;
};

struct AttentionFwdParams {
  const void* query;  // (batch, heads_q, len_q, D)
  const void* key;    // (batch, heads_k, len_k, D)
  const void* value;  // (batch, heads_k, len_k, D)
  void* out;          // (batch, heads_q, len_q, D)
  float* lse;         // (batch, heads_q, len_q), natural log; may be null
  Strides query_strides, key_strides, value_strides, out_strides, lse_strides;

  // The grid is (query blocks, heads_q, batch).
  int32_t group;  // query heads per key head
  int32_t len_q, len_k;
  // Scores are sign * scale_log2 * q.k, in base 2. scale_log2 is above 0, so that the largest
  // product is the largest score; sign is 1, or -1 for a negative scale, or 0 (with scale_log2 = 1)
  // for a scale of 0.
  float scale_log2;
  float sign;
};

}  // namespace flashmoe::cuda
