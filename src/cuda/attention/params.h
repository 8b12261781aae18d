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

// What a CTA does of a ragged batch. Lists of these are made on the device, where the lengths are:
// see ragged.cuh.
enum class RaggedKind : int32_t {
  kEmpty,    // 0: nothing. A list has as many slots as there may be blocks
  kBlock,    // one block of a sequence
  kInvalid,  // rows whose lengths are wrong: their results are NaN
  kRest,     // rows after the last sequence: 0, and an lse of -inf
};
struct alignas(16) RaggedBlock {
  // The sequence's first tokens, and how many; of kInvalid and kRest the rows themselves.
  int64_t token_q, token_k;
  // Queries x keys of the sequences before it. Of kInvalid and kRest in a list of keys: the first
  // pair to be filled, and in token_q how many.
  int64_t pair;
  int32_t len_q, len_k;
  int32_t sequence;
  int32_t block;  // which, of the sequence
  RaggedKind kind;
  int32_t unused;  // written as well: whoever copies the struct reads it
};
static_assert(sizeof(RaggedBlock) == 48);

// One side of a ragged batch, as cu_seqlens has it.
struct RaggedSide {
  const void* cu_seqlens;  // (batch + 1), int64 or int32
  int64_t stride;
  int64_t tokens;   // of the tensor
  int32_t longest;  // sequence, as the caller says
};
struct RaggedList {
  RaggedBlock* blocks;  // (slots)
  int32_t slots;
  int32_t block;       // rows of a block
  int32_t of_keys;     // whether rows are keys
  int32_t descending;  // whether a sequence's last block comes first
};
// Of the kernel that makes the lists.
struct RaggedParams {
  RaggedSide query, key;
  int64_t pairs;  // of the bias; enough for anything where there is none
  int32_t batch;
  int32_t lengths_are_int64;  // whether cu_seqlens is int64
  RaggedList lists[3];        // grid.y of them
  int32_t* tile_counter;      // set to 0, for a kernel that gives out its work by counting; or null
};

// The problem, as every kernel of it sees it.
struct AttentionParams {
  const void* query;  // (batch, heads_q, len_q, D)         ragged: (tokens_q, heads_q, D)
  const void* key;    // (batch, heads_k, len_k, D)                 (tokens_k, heads_k, D)
  const void* value;  // (batch, heads_k, len_k, Dv)                (tokens_k, heads_k, Dv)
  void* out;          // (batch, heads_q, len_q, Dv)                (tokens_q, heads_q, Dv)
  float* lse;         // (batch, heads_q, len_q), natural log       (tokens_q, heads_q)
  Strides query_strides, key_strides, value_strides, out_strides, lse_strides;

  // Kernels with a bias, whose own shape is broadcast: strides may be 0.
  const void* bias;  // (batch, heads_q, len_q, len_k), in the inputs' dtype, fp32, or a mask; null
                     // with dropout: there is none
  Strides bias_strides;
  int64_t bias_column;   // stride from one key to the next
  float bias_scale;      // 1 / scale
  int32_t bias_is_fp32;  // whether it is fp32
  int32_t bias_is_mask;  // whether it is a byte for each pair: 0 hides the key
  int32_t bias_padded;   // whether rows end with a whole chunk of 16 bytes, whatever len_k
  // Ragged: the bias that `bias` is a copy of, with its heads side by side; null: it is none. The
  // copy makes room for the gradient, tile by tile.
  const void* packed_bias;
  int64_t packed_head, packed_pair;  // strides

  // Lengths that only the device knows; null where there are none. int64 or int32.
  const void* key_lengths;  // (batch), with these strides
  int64_t key_lengths_strides[kMaxBatchDims];
  int32_t lengths_are_int64;  // whether they are int64

  // Ragged: the blocks of queries of a forward pass, of keys of a backward pass; null otherwise.
  // The grid is then (slots x heads), heads fastest.
  const RaggedBlock* blocks;
  // The heads [first_head, first_head + heads) of this launch: of queries in a forward pass, of
  // keys in a backward pass. A ragged batch may take its heads in several rounds.
  int32_t first_head, heads;

  // The batch as leading dimensions, outermost first: a batch index is taken apart by their sizes.
  int32_t batch, batch_dims;
  int32_t batch_sizes[kMaxBatchDims];
  int32_t first_batch;  // of this launch, whose grid holds only a part of a huge dense batch

  int32_t group;         // query heads per key head
  int32_t len_q, len_k;  // ragged: the longest
  int32_t head_dim, head_dim_v;
  // Row i sits at key position i + len_k - len_q and sees `left` keys before it, `right` after it.
  int32_t left, right;

  // Scores are scale_log2 * q.k in base 2; with a softcap, scale_log2 * tanh(softcap_scale * q.k).
  float scale_log2;
  float softcap_scale;  // 0: no softcap
  float scale;          // of q.k, in the gradient

  // Rows have a stride too: they may be heads, see one_query.
  const void* sinks;  // (heads_q), in the inputs' dtype or fp32; null: none
  int64_t sink_head, sink_row;
  int32_t sinks_are_fp32;  // whether they are fp32

  // Dropout: which pairs is said by attention/dropout.h.
  const uint64_t* seed;  // one number; null: no dropout
  uint32_t drop_limit;   // 16 bits that are the upper half of a word drop a pair up to this word
  float kept_scale;      // what is kept is times this
};

// Of the kernel that copies a bias to rows of whole 16-byte chunks: 16-bit, (batch, heads, len_q,
// len_k), each dimension as the bias itself has it.
struct BiasAlignParams {
  const void* bias;
  void* rows;       // (batch, heads, len_q, pitch)
  Strides strides;  // of the bias
  int64_t column;
  int32_t batch_dims;
  int32_t batch_sizes[kMaxBatchDims];
  int32_t len_q, len_k, pitch;
};

// Of the kernel that copies the bias of a ragged batch, 16-bit, from (pairs, heads) to (heads,
// pairs) or its gradient back. Strides in elements.
struct BiasTransposeParams {
  void* packed;  // (pairs, heads)
  int64_t packed_pair, packed_head;
  void* by_head;           // (heads, pairs), in whole 16-byte chunks
  int64_t by_head_stride;  // from one head to the next
  int64_t pairs;
  int32_t heads;
  int32_t back;
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
  void* grad_bias;  // (batch, heads_q, len_q, len_k), in bias's dtype; null: not wanted
  Strides grad_bias_strides;
  int64_t grad_bias_column;
  // Its sum over what shared it, split over several blocks: each leaves its part here, and a last
  // launch adds them up.
  float* bias_sums;  // (tiles of the gradient, splits, tile)
  int32_t bias_sum_splits, bias_sum_last;
  const RaggedBlock* sum_blocks;  // ragged: blocks of keys

  // The gradient of the sinks, summed in parts, which a last launch adds up.
  void* grad_sinks;  // (heads_q), in sinks's dtype
  int64_t grad_sink_step;
  float* sink_sums;   // (heads_q, parts)
  int64_t sink_rows;  // of a head, all sequences
  int32_t sink_parts, sink_sum_last;

  // Ragged: the blocks of queries, for the kernels before and after.
  const RaggedBlock* query_blocks;
  uint32_t preprocess_heads;  // of a block of the kernel before

  // Workspace. The sums of dQ may have room for a part of the batch only, or of the heads of a
  // ragged batch: launches come in rounds then. Sequences have whole blocks of rows in it: see
  // workspace_row().
  int64_t rows;           // of one head, all sequences
  int64_t dq_accum_rows;  // of one head, those of a round
  int32_t block_q;        // rows of a block
  int32_t dim;            // the kernel's head dim: D rounded up
  float* lse_delta;       // (heads_q, rows, 2): lse in base 2, and out.dO - grad_lse
  // (heads x group, dq_accum_rows, dim), in the order of the accumulators; null: dQ is not summed
  // up
  float* dq_accum;

  // Deterministic: blocks of keys add to a block of dq_accum in their order. `dq_semaphore` holds
  // whose turn it is for each (head of the round, block of rows); `tile_counter` gives out the
  // work, so that who waits waits for someone already at work.
  int32_t deterministic;
  int32_t* tile_counter;
  int32_t* dq_semaphore;
};

}  // namespace flashmoe::cuda
