// What a kernel is given, by value. Read by nvcc and by the host compiler, so: plain numbers and
// pointers.
#pragma once

#include <cstdint>

namespace flashmoe::cuda {

inline constexpr int kMaxBatchDims = 5;
// No limit to one side of the window. Lengths stay below it, so that adding one to a position fits
// in 32 bits.
inline constexpr int32_t kNoLimit = 1 << 30;

// Strides in elements; the last dimension has stride 1. Offsets are 64-bit: tensors may be larger
// than 2^31. Ragged tensors (tokens, heads, D) have no batch strides, and `row` steps over tokens.
struct Strides {
  int64_t batch[kMaxBatchDims];
  int64_t head, row;

#if defined(__CUDACC__)
  // Of 16-bit elements: in_place() makes sure that it fits.
  __device__ __forceinline__ int row_bytes() const { return static_cast<int>(row) * 2; }
#endif
};

// The problem, as every kernel of it sees it.
struct AttentionParams {
  const void* query;  // (batch, heads_q, len_q, D)         ragged: (tokens_q, heads_q, D)
  const void* key;    // (batch, heads_k, len_k, D)                 (tokens_k, heads_k, D)
  const void* value;  // (batch, heads_k, len_k, Dv)                (tokens_k, heads_k, Dv)
  void* out;          // (batch, heads_q, len_q, Dv)                (tokens_q, heads_q, Dv)
  float* lse;         // (batch, heads_q, len_q), natural log       (tokens_q, heads_q)
  Strides query_strides, key_strides, value_strides, out_strides, lse_strides;

  // Lengths that only the device knows; null where there are none. int64 or int32.
  const void* key_lengths;                  // (batch), with these strides
  const void *cu_seqlens_q, *cu_seqlens_k;  // (batch + 1)
  int64_t key_lengths_strides[kMaxBatchDims];
  int64_t cu_seqlens_q_stride, cu_seqlens_k_stride;
  int64_t tokens_q, tokens_k;
  int32_t wide_lengths;  // whether they are int64

  // The batch as leading dimensions, outermost first: a batch index is taken apart by their sizes.
  int32_t batch, batch_dims;
  int32_t batch_sizes[kMaxBatchDims];
  int32_t first_batch;  // of this launch, whose grid holds only a part of a huge batch

  int32_t group;         // query heads per key head
  int32_t len_q, len_k;  // ragged: the longest
  int32_t head_dim, head_dim_v;
  // Row i sits at key position i + len_k - len_q and sees `left` keys before it, `right` after it.
  int32_t left, right;

  // Scores are scale_log2 * q.k in base 2; with a softcap, scale_log2 * tanh(softcap_scale * q.k).
  float scale_log2;
  float softcap_scale;  // 0: no softcap
  float scale;          // of q.k, in the gradient
};

struct AttentionFwdParams : AttentionParams {
  // The softmax takes the largest product for the largest score, so scale_log2 is above 0 here, and
  // products are first multiplied by sign: 1, or -1 for a negative scale, or 0 for a scale of 0.
  float sign;
  // Rows are the heads of a group with one query each: all sit at the position of that query.
  int32_t one_query;

  // The grid is (query blocks x splits, heads, batch). With several splits each takes a part of the
  // keys and leaves its result here, for the combining kernel.
  int32_t splits;
  int32_t dim;         // the kernel's head dim: D rounded up
  float* partial_out;  // (splits, batch, heads, len_q, dim)
  float* partial_lse;  // (splits, batch, heads, len_q), base 2
};

struct AttentionBwdParams : AttentionParams {
  const void* grad_out;   // like out; null: zero
  const float* grad_lse;  // like lse; null: zero
  void* grad_query;       // like query; null: not wanted, as the next two
  void* grad_key;
  void* grad_value;
  Strides grad_out_strides, grad_lse_strides, grad_query_strides, grad_key_strides,
      grad_value_strides;
  int32_t heads_q;

  // Workspace. Sequences have whole blocks of rows in it: see first_row() in tile/sequence.cuh.
  int64_t rows;            // of one head, all sequences
  int32_t block_q;         // rows of a block
  int32_t dim;             // the kernel's head dim: D rounded up
  float* row_terms;        // (heads_q, rows, 2): lse in base 2, and out.dO - grad_lse
  float* grad_query_sums;  // (heads_q, rows, dim), in the order of the accumulators

  // Deterministic: blocks of keys add to a block of grad_query_sums in their order. `turns` holds
  // whose turn it is for each (head, block of rows); `tickets` gives out the work, so that who
  // waits waits for someone already at work.
  int32_t deterministic;
  int32_t* tickets;
  int32_t* turns;
};

}  // namespace flashmoe::cuda
