// One sequence of the batch: where it lies, how long it is, and which keys its rows may see.
#pragma once

#include "cuda/params.h"

namespace flashmoe::cuda {

// What a block of queries x keys needs: products and softmax alone, a mask as well, or anything
// that a call can ask for (softcap, a scale that is not positive, rows that end within a chunk, a
// NaN to be contained). Kernels have a loop for each: even as branches never taken, what is not
// needed costs a tenth of the speed, and long ways around it cost fetching.
enum class Needs { kNothing, kMask, kAnything };

// Keys that a row does not see are masked one side at a time: few blocks need both, and both at
// once take more registers than there are.
enum class Side { kBefore, kAfter };  // the first key it sees, the last

template <Side kSide>
__device__ __forceinline__ bool masked(int key, int limit) {
  return kSide == Side::kBefore ? key < limit : key >= limit;
}

struct Sequence {
  int64_t token_q = 0, token_k = 0;  // ragged: its first tokens
  int len_q = 0, len_k = 0;
  int shift = 0;  // the key position of row 0
  int step = 1;   // key positions from one row to the next
  // False where lengths on the device contradict what the host was told. Nobody can be told then
  // without waiting for the device; the sequence's results become NaN.
  bool valid = true;

  // Row `row` sees the keys [begin, end), none where begin >= end.
  __device__ __forceinline__ int begin(int row, const AttentionParams& p) const {
    return max(row * step + shift - p.left, 0);
  }
  __device__ __forceinline__ int end(int row, const AttentionParams& p) const {
    return min(row * step + shift + p.right + 1, len_k);
  }
  template <Side kSide>
  __device__ __forceinline__ int limit(int row, const AttentionParams& p) const {
    return kSide == Side::kBefore ? begin(row, p) : end(row, p);
  }
};

__device__ __forceinline__ int64_t read_length(const void* lengths, int64_t index, bool wide) {
  return wide ? static_cast<const int64_t*>(lengths)[index]
              : static_cast<const int32_t*>(lengths)[index];
}

// Where a batch index leads in a tensor with these batch strides, in elements.
__device__ __forceinline__ int64_t batch_offset(const AttentionParams& p,
                                                const int64_t (&strides)[kMaxBatchDims],
                                                int batch) {
  int64_t offset = 0;
  for (int i = p.batch_dims - 1; i > 0; --i) {
    offset += batch % p.batch_sizes[i] * strides[i];
    batch /= p.batch_sizes[i];
  }
  return offset + batch * strides[0];
}

// [first, first + length), which are among the `tokens` tokens whatever cu_seqlens holds.
struct TokenRange {
  int64_t first;
  int length;
  bool valid;
};
__device__ __forceinline__ TokenRange token_range(const void* cu_seqlens, int64_t stride, bool wide,
                                                  int sequence, int64_t tokens, int longest) {
  const int64_t begin = read_length(cu_seqlens, sequence * stride, wide);
  const int64_t end = read_length(cu_seqlens, (sequence + 1) * stride, wide);
  const int64_t first = min(max(begin, int64_t{0}), tokens), last = min(max(end, first), tokens);
  const bool valid =
      first == begin && last == end && end - begin <= longest && (sequence > 0 || begin == 0);
  return {first, static_cast<int>(min(last - first, int64_t{kNoLimit})), valid};
}

__device__ __forceinline__ Sequence find_sequence(const AttentionParams& p, int batch) {
  Sequence s;
  s.len_q = p.len_q;
  s.len_k = p.len_k;
  if (p.cu_seqlens_q) {
    const bool wide = p.wide_lengths;
    const auto q =
        token_range(p.cu_seqlens_q, p.cu_seqlens_q_stride, wide, batch, p.tokens_q, p.len_q);
    const auto k =
        token_range(p.cu_seqlens_k, p.cu_seqlens_k_stride, wide, batch, p.tokens_k, p.len_k);
    s.token_q = q.first;
    s.token_k = k.first;
    s.len_q = q.length;
    s.len_k = k.length;
    s.valid = q.valid && k.valid;
  } else if (p.key_lengths) {
    const int64_t length =
        read_length(p.key_lengths, batch_offset(p, p.key_lengths_strides, batch), p.wide_lengths);
    s.valid = length >= 0 && length <= p.len_k;
    s.len_k = s.valid ? static_cast<int>(length) : p.len_k;
  }
  s.shift = s.len_k - s.len_q;
  return s;
}

// The tokens after the last sequence of a ragged batch, which see nothing: as a sequence, for the
// one index past the batch that the grid has then.
__device__ __forceinline__ Sequence find_rest(const AttentionParams& p) {
  Sequence s;
  const auto end = [&](const void* cu, int64_t stride, int64_t tokens) {
    return min(max(read_length(cu, p.batch * stride, p.wide_lengths), int64_t{0}), tokens);
  };
  s.token_q = end(p.cu_seqlens_q, p.cu_seqlens_q_stride, p.tokens_q);
  s.token_k = end(p.cu_seqlens_k, p.cu_seqlens_k_stride, p.tokens_k);
  s.len_q = static_cast<int>(min(p.tokens_q - s.token_q, int64_t{kNoLimit}));
  s.len_k = static_cast<int>(min(p.tokens_k - s.token_k, int64_t{kNoLimit}));
  return s;
}

// Where a sequence's first row is in a tensor, in elements: of its head, or of its first token.
__device__ __forceinline__ int64_t offset(const AttentionParams& p, const Strides& strides,
                                          int batch, int head, int64_t token) {
  const int64_t where =
      p.cu_seqlens_q ? token * strides.row : batch_offset(p, strides.batch, batch);
  return where + head * strides.head;
}
// And as a pointer, to 16-bit elements.
__device__ __forceinline__ const char* rows_of(const void* tensor, const AttentionParams& p,
                                               const Strides& strides, int batch, int head,
                                               int64_t token) {
  return static_cast<const char*>(tensor) + offset(p, strides, batch, head, token) * 2;
}

// Where a sequence's first row is in the workspace of a backward pass, in which every sequence has
// whole blocks of rows.
__device__ __forceinline__ int64_t workspace_row(const AttentionBwdParams& p, const Sequence& seq,
                                                 int batch) {
  if (p.cu_seqlens_q) return (seq.token_q / p.block_q + batch) * p.block_q;
  return int64_t{batch} * ((p.len_q + p.block_q - 1) / p.block_q) * p.block_q;
}

// Rows of 16-bit numbers set to `value`, by gridDim.x CTAs together, of which this is number
// `part`.
__device__ __forceinline__ void fill_rows(char* rows, int64_t row_bytes, int count, int dim,
                                          uint16_t value, int part) {
  for (int64_t row = part; row < count; row += gridDim.x) {
    for (int i = threadIdx.x; i < dim; i += blockDim.x) {
      reinterpret_cast<uint16_t*>(rows + row * row_bytes)[i] = value;
    }
  }
}

}  // namespace flashmoe::cuda
