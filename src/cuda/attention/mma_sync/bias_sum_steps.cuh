// The steps of the sum of a bias's gradient (bias_sum.cuh, sm90/bwd_bias_sum.cuh): one for each
// tile of queries x keys, head and batch that shares a tile of the gradient, in a fixed order.
#pragma once

#include "cuda/attention/params.h"
#include "cuda/attention/score.cuh"
#include "cuda/attention/sequence.cuh"

namespace flashmoe::cuda {

// What one step reads, found by one thread and kept in shared memory.
struct BiasStep {
  Sequence seq;
  int first_query, first_key;
  bool seen;   // whether the queries see some of the keys
  bool plain;  // whether all queries see all keys of the tile, none is dropped, and the bias does
               // not come late
  const char *query, *grad_out, *key, *value;  // the first rows of the sequence
  const float* lse_delta;                      // of the step's first query
  int batch, head;
};

// Which tile of queries x keys a step is.
struct StepPlace {
  int batch, head, first_query, first_key;
};

// A tile of the bias's gradient.
struct SumTile {
  int first_query, first_key;
  int len_q, len_k;  // of the matrix that it is a tile of
  int batch, head;   // one of those that share it
};

// Finds what step number i of a CTA is.
template <class C>
class SharedSteps {
 public:
  SharedSteps() = default;
  // `slot` is null in a dense batch.
  __device__ __forceinline__ SharedSteps(const AttentionBwdParams& p, const RaggedBlock* slot)
      : slot_(slot),
        has_queries_(slot || p.grad_bias_strides.row != 0),
        has_keys_(slot || p.grad_bias_column != 0),
        has_head_(p.grad_bias_strides.head != 0) {
    query_blocks_ = has_queries_ ? 1 : blocks(p.len_q, C::kBlockQ);
    key_blocks_ = has_keys_ ? 1 : blocks(p.len_k, C::kBlockK);
    heads_ = has_head_ ? 1 : p.heads_q;
    batches_ = 1;
#pragma unroll 1
    for (int i = 0; i < p.batch_dims && !slot; ++i) {
      if (p.grad_bias_strides.batch[i] == 0) batches_ *= p.batch_sizes[i];
    }
  }
  __device__ __forceinline__ int count() const {
    return query_blocks_ * key_blocks_ * heads_ * batches_;
  }
  // Tile number `tile` of the matrix of the gradient that this CTA works on.
  __device__ __forceinline__ SumTile tile(int tile, const AttentionBwdParams& p) const {
    if (slot_) {
      return {tile * C::kBlockQ, slot_->block * C::kBlockK, slot_->len_q,
              slot_->len_k,      slot_->sequence,           0};
    }
    const int in_row = has_keys_ ? blocks(p.len_k, C::kBlockK) : 1;
    return {tile / in_row * C::kBlockQ,
            tile % in_row * C::kBlockK,
            p.len_q,
            p.len_k,
            join_batch(p, p.first_batch + blockIdx.z, 0),
            static_cast<int>(blockIdx.y)};
  }
  __device__ __forceinline__ StepPlace place(int step, const SumTile& tile,
                                             const AttentionBwdParams& p) const {
    const int key_tile = step % key_blocks_;
    step /= key_blocks_;
    const int query_tile = step % query_blocks_;
    step /= query_blocks_;
    const int head = has_head_ ? tile.head : step % heads_;
    const int batch = slot_ ? tile.batch : join_batch(p, p.first_batch + blockIdx.z, step / heads_);
    return {batch, head, has_queries_ ? tile.first_query : query_tile * C::kBlockQ,
            has_keys_ ? tile.first_key : key_tile * C::kBlockK};
  }
  __device__ __forceinline__ BiasStep find(int step, const SumTile& tile,
                                           const AttentionBwdParams& p) const {
    const auto [batch, head, first_query, first_key] = place(step, tile, p);
    BiasStep s;
    s.seq = slot_ ? find_sequence(*slot_) : find_sequence(p, batch);
    s.batch = batch;
    s.head = head;
    s.first_key = first_key;
    s.first_query = first_query;
    // Row i sees key j when i + shift - left <= j <= i + shift + right.
    const Sequence& seq = s.seq;
    const int last_query = min(s.first_query + C::kBlockQ, seq.len_q) - 1;
    const int last_key = min(s.first_key + C::kBlockK, seq.len_k) - 1;
    s.seen = s.first_query <= last_query && s.first_key <= last_key &&
             seq.begin(s.first_query, p) <= last_key && seq.end(last_query, p) > s.first_key;
    // The sum does not matter of keys that the gradient does not have.
    const bool all_keys =
        last_key - s.first_key + 1 == C::kBlockK || (has_keys_ && seq.len_k == tile.len_k);
    s.plain = s.seen && seq.valid && !late_bias(p) && !p.seed && all_keys &&
              seq.begin(last_query, p) <= s.first_key && seq.end(s.first_query, p) > last_key;
    const int key_head = head / p.group;
    s.query = rows_of(p.query, p, p.query_strides, batch, head, seq.token_q);
    s.grad_out = rows_of(p.grad_out, p, p.grad_out_strides, batch, head, seq.token_q);
    s.key = rows_of(p.key, p, p.key_strides, batch, key_head, seq.token_k);
    s.value = rows_of(p.value, p, p.value_strides, batch, key_head, seq.token_k);
    s.lse_delta = p.lse_delta + 2 * (head * p.rows + workspace_row(p, seq, batch) + s.first_query);
    return s;
  }

 private:
  // The number of blocks, at least one: where there is nothing to sum, the sum is 0.
  static __device__ __forceinline__ int blocks(int length, int block) {
    return max((length + block - 1) / block, 1);
  }
  // The batch whose digits are those of `own` where the gradient has the batch dimension, and those
  // of `shared` where it is summed over it.
  static __device__ __forceinline__ int join_batch(const AttentionBwdParams& p, int own,
                                                   int shared) {
    int batch = 0, unit = 1;
#pragma unroll 1
    for (int i = p.batch_dims - 1; i >= 0; --i) {
      const int size = max(p.batch_sizes[i], 1);
      const bool sums = p.grad_bias_strides.batch[i] == 0;
      batch += (sums ? shared : own) % size * unit;
      shared = sums ? shared / size : shared;
      own = sums ? own : own / size;
      unit *= size;
    }
    return batch;
  }

  const RaggedBlock* slot_;
  bool has_queries_, has_keys_, has_head_;           // dimensions that the gradient has
  int query_blocks_, key_blocks_, heads_, batches_;  // how many share the tile
};

}  // namespace flashmoe::cuda
