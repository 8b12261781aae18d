// The dQ accumulator of the sm90 backward pass: who adds to it when, and when it is complete.
//
// Tiles of keys add their dQ to fp32 sums in global memory, in the order of wgmma's accumulators:
// 64 rows of all columns, then the next 64 rows, each 128 threads x 4 floats for each 8 columns. A
// last step converts the sums of a head to 16 bits once all its tiles of keys have added.
#pragma once

#include "cuda/attention/sequence.cuh"
#include "cuda/attention/sm90/bwd_scheduler.cuh"
#include "cuda/attention/sm90/params.h"
#include "cuda/ptx/memory.cuh"

namespace flashmoe::cuda::sm90 {

// Keys of a tile, and parts in which it adds to dQ: one by each warpgroup, or by each CTA of two.
inline constexpr int kKeysOfBlock = 128, kPartsOfBlock = 2;

// Whether the tile of queries that `first` is in sees any key. If not, no tile of keys adds to its
// dQ, and the preprocess or convert kernel writes it.
__device__ __forceinline__ bool is_seen(const Sequence& seq, int first,
                                        const AttentionBwdParams& p) {
  const int begin = first / p.block_q * p.block_q, end = min(begin + p.block_q, seq.len_q);
  return seq.valid && begin < end && seq.begin(begin, p) < seq.end(end - 1, p);
}

// Writes dQ of a tile of queries that sees no key (0), or whose lengths are wrong (NaN).
template <class T>
__device__ __forceinline__ void fill_unseen_dq(const Sequence& seq, RaggedKind kind, int batch,
                                               int head, int first, const AttentionBwdParams& p) {
  char* const to =
      const_cast<char*>(rows_of(p.grad_query, p, p.grad_query_strides, batch, head, seq.token_q));
  fill_rows(to, p.grad_query_strides.row_bytes(), first, min(first + p.block_q, seq.len_q),
            p.head_dim, kind == RaggedKind::kInvalid ? T::kNan : 0);
}

// Part `part` of the sums of a tile of queries that begins at row `row` of the accumulator.
template <class C>
__device__ __forceinline__ float* dq_accum_part(int64_t row, uint32_t part,
                                                const Sm90BwdParams& p) {
  return p.dq_accum + row * C::kDqAccumDim + part * (C::kDqBytes / 4);
}

// The order in which tiles of keys add to the dQ of a tile of queries. The first that it sees
// stores, so that nothing need be zeroed. Where sums are deterministic the others add one after the
// other; where not, all wait for the first only. `dq_semaphore` counts the parts that have added.
template <class C>
struct SumOrder {
  int64_t row;  // where the tile's sums begin
  int* semaphore;
  int parts_before;     // to wait for
  bool stores, counts;  // whether it stores its sums; whether anybody waits for them

  __device__ __forceinline__ SumOrder(const BwdTask& task, int head, int first,
                                      const Sm90BwdParams& p) {
    row = head * p.dq_accum_rows + task.slice_row + first;
    semaphore = p.dq_semaphore + row / C::kBlockQ;
    // All tiles of keys from the first that a row of the tile sees.
    const int begin = task.seq.begin(first, p) / C::kBlockK, block = task.first_key / C::kBlockK;
    parts_before = kPartsOfBlock * (block - begin);
    stores = parts_before == 0;
    counts = p.deterministic || stores;
    if (!p.deterministic) parts_before = min(parts_before, kPartsOfBlock);
  }
  __device__ __forceinline__ void wait() const {
    if (parts_before == 0) return;
    while (ptx::ld_acquire(semaphore) < parts_before) {
    }
  }
  __device__ __forceinline__ void release(int parts = 1) const {
    if (counts) ptx::red_release_add(semaphore, parts);
  }
};

// How many parts of tiles of keys of a head have added all their dQ.
__device__ __forceinline__ int* parts_done(const Sm90BwdParams& p, int sequence, int key_head) {
  const int64_t of_slice = p.blocks ? sequence : sequence - p.first_batch;
  return p.done + of_slice * p.heads + key_head - p.first_head;
}

// Waits until every tile of keys of the head has added its dQ.
__device__ __forceinline__ void wait_until_done(const Sm90BwdParams& p, const Sequence& seq,
                                                int sequence, int key_head) {
  const int blocks = p.blocks ? (seq.len_k + kKeysOfBlock - 1) / kKeysOfBlock : p.key_blocks;
  const int* const done = parts_done(p, sequence, key_head);
  while (ptx::ld_acquire(done) < kPartsOfBlock * blocks) __nanosleep(200);
}

}  // namespace flashmoe::cuda::sm90
