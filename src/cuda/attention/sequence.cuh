// One sequence of the batch: where its rows lie, how long it is, and which keys a row sees.
#pragma once

#include "cuda/attention/params.h"
#include "cuda/tile/rows.cuh"

namespace flashmoe::cuda {

// What a tile of queries x keys needs: products and softmax alone, a mask as well, or anything that
// a call can ask for (softcap, a scale that is not positive, rows that end within a chunk, a bias
// that is fp32 or whose rows are not chunks, the guarded path). Kernels with mma.sync have a loop
// for each: even as branches never taken, what is not needed costs a tenth of the speed, and long
// ways around it cost fetching.
enum class Loop { kPlain, kMasked, kGeneral };

// Keys that a row does not see are masked one side at a time: few tiles need both, and both at once
// take more registers than there are.
enum class Side { kBefore, kAfter };  // the first key it sees, the last

// Whether a key is on that side of the row's limit.
template <Side kSide>
__device__ __forceinline__ bool masked(int key, int limit) {
  return kSide == Side::kBefore ? key < limit : key >= limit;
}

struct Sequence {
  int64_t token_q = 0, token_k = 0;  // ragged: its first tokens
  int64_t pair = 0;                  // ragged: queries x keys of the sequences before it
  int len_q = 0, len_k = 0;
  int shift = 0;     // the key position of row 0
  int16_t step = 1;  // key positions from one row to the next
  // False where lengths on the device contradict what the host was told. The host cannot hear of it
  // without waiting for the device, so the sequence's results become NaN.
  bool valid = true;
  bool rest = false;  // where kernels take rows after the last sequence for one of no keys

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

// A length that only the device knows.
__device__ __forceinline__ int64_t read_length(const void* lengths, int64_t index, bool is_int64) {
  return is_int64 ? static_cast<const int64_t*>(lengths)[index]
                  : static_cast<const int32_t*>(lengths)[index];
}

// Where a batch index leads in a tensor with these batch strides, in elements.
__device__ __forceinline__ int64_t batch_offset(const AttentionParams& p,
                                                const int64_t (&strides)[kMaxBatchDims],
                                                int batch) {
  int64_t offset = 0;
#pragma unroll 1
  for (int i = p.batch_dims - 1; i > 0; --i) {
    offset += batch % p.batch_sizes[i] * strides[i];
    batch /= p.batch_sizes[i];
  }
  return offset + batch * strides[0];
}

// The sequence of a dense batch.
__device__ __forceinline__ Sequence find_sequence(const AttentionParams& p, int batch) {
  Sequence s;
  s.len_q = p.len_q;
  s.len_k = p.len_k;
  if (p.key_lengths) {
    const int64_t length = read_length(p.key_lengths, batch_offset(p, p.key_lengths_strides, batch),
                                       p.lengths_are_int64);
    s.valid = length >= 0 && length <= p.len_k;
    s.len_k = s.valid ? static_cast<int>(length) : p.len_k;
  }
  s.shift = s.len_k - s.len_q;
  return s;
}

// The sequence of a ragged batch that a block belongs to.
__device__ __forceinline__ Sequence find_sequence(const RaggedBlock& block) {
  Sequence s;
  s.token_q = block.token_q;
  s.token_k = block.token_k;
  s.pair = block.pair;
  s.len_q = block.len_q;
  s.len_k = block.len_k;
  s.shift = s.len_k - s.len_q;
  s.valid = block.kind == RaggedKind::kBlock;
  return s;
}

// Where a sequence's first row is in a tensor, in elements: of its head, or of its first token.
__device__ __forceinline__ int64_t offset(const AttentionParams& p, const Strides& strides,
                                          int batch, int head, int64_t token) {
  const int64_t where = p.blocks ? token * strides.row : batch_offset(p, strides.batch, batch);
  return where + head * strides.head;
}
// The address of a sequence's first row, in a tensor whose elements have kElementBytes.
template <int kElementBytes = 2>
__device__ __forceinline__ const char* rows_of(const void* tensor, const AttentionParams& p,
                                               const Strides& strides, int batch, int head,
                                               int64_t token) {
  return static_cast<const char*>(tensor) + offset(p, strides, batch, head, token) * kElementBytes;
}

// The keys or values of one sequence and head, the only way kernels with mma.sync reach them. Dense
// and ragged tensors are rows at equal distances; a paged cache will be a type with the functions
// of Rows.
using KeyRows = Rows;

template <class T>
__device__ __forceinline__ KeyRows key_rows_at(const char* first, const Strides& strides) {
  return {first, static_cast<int>(strides.row) * T::kBytes};
}
template <class T>
__device__ __forceinline__ KeyRows find_key_rows(const void* tensor, const AttentionParams& p,
                                                 const Strides& strides, int batch, int key_head,
                                                 const Sequence& seq) {
  return key_rows_at<T>(rows_of<T::kBytes>(tensor, p, strides, batch, key_head, seq.token_k),
                        strides);
}

// Where a sequence's first row is in the workspace of a backward pass, in which every sequence has
// whole blocks of rows.
__device__ __forceinline__ int64_t workspace_row(const AttentionBwdParams& p, const Sequence& seq,
                                                 int batch) {
  if (p.blocks) return (seq.token_q / p.block_q + batch) * p.block_q;
  return int64_t{batch} * ((p.len_q + p.block_q - 1) / p.block_q) * p.block_q;
}

// Rows of the workspace before those of this launch: where the accumulator of dQ has room for a
// slice of the batch only, the backward pass is launched once for each slice.
__device__ __forceinline__ int64_t rows_before_slice(const AttentionBwdParams& p) {
  const int64_t heads = p.first_head * p.group * p.dq_accum_rows;
  return p.blocks ? heads : heads + workspace_row(p, {}, p.first_batch);
}

// The tile of queries of a CTA of the kernels before and after the backward pass, whose grid is
// (tiles of block_q rows, heads, batch), or ragged (slots x heads).
struct QueryRows {
  Sequence seq;
  RaggedKind kind;
  int batch;
  int head;   // the first, where a CTA of a ragged batch has several
  int first;  // row of the sequence
};
__device__ __forceinline__ QueryRows find_query_rows(const AttentionBwdParams& p,
                                                     int heads_of_cta = 1) {
  QueryRows r;
  const int first_head = p.first_head * p.group;
  if (p.blocks) {
    const int heads = p.heads * p.group / heads_of_cta;
    const RaggedBlock block = p.query_blocks[blockIdx.x / heads];
    r.seq = find_sequence(block);
    r.kind = block.kind;
    r.batch = block.sequence;
    r.head = first_head + blockIdx.x % heads * heads_of_cta;
    r.first = block.block * p.block_q;
  } else {
    r.batch = p.first_batch + blockIdx.z;
    r.seq = find_sequence(p, r.batch);
    r.kind = r.seq.valid ? RaggedKind::kBlock : RaggedKind::kInvalid;
    r.head = first_head + blockIdx.y;
    r.first = blockIdx.x * p.block_q;
  }
  return r;
}

// Sets the rows [first, end) of 16-bit elements to `value`.
__device__ __forceinline__ void fill_rows(char* rows, int64_t row_bytes, int first, int end,
                                          int dim, uint16_t value) {
  for (int row = first; row < end; ++row) {
    for (int i = threadIdx.x; i < dim; i += blockDim.x) {
      reinterpret_cast<uint16_t*>(rows + row * row_bytes)[i] = value;
    }
  }
}

}  // namespace flashmoe::cuda
