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

// The order in which tiles of keys add to the dQ of a tile of queries. One of them stores, so that
// nothing need be zeroed.
//   in order     the first that it sees stores. Where sums are deterministic the others add one
//                after the other; where not, all wait for the first only. `dq_semaphore` counts the
//                parts that have added.
//   first comes  whoever comes first stores, and nobody waits for one that has not begun.
//                `dq_semaphore` has a bit for each part that somebody stores, and one for each that
//                is stored.
template <class C>
struct SumOrder {
  int tile;          // of the accumulator
  int parts_before;  // in order: to wait for
  bool stores;       // whether it stores its sums

  __device__ __forceinline__ SumOrder(const BwdTask& task, int head, int first,
                                      const Sm90BwdParams& p) {
    tile = static_cast<int>((head * p.dq_accum_rows + task.slice_row + first) / C::kBlockQ);
    parts_before = 0;
    stores = false;
    if (in_order(p)) {
      // All tiles of keys from the first that a row of the tile sees.
      const int begin = task.seq.begin(first, p) / C::kBlockK, block = task.first_key / C::kBlockK;
      parts_before = kPartsOfBlock * (block - begin);
      stores = parts_before == 0;
      if (!p.deterministic) parts_before = min(parts_before, kPartsOfBlock);
    }
  }
  // Where the tile's sums begin.
  __device__ __forceinline__ int64_t row() const { return int64_t{tile} * C::kBlockQ; }
  __device__ __forceinline__ void wait(const Sm90BwdParams& p) const {
    if (parts_before == 0) return;
    while (ptx::ld_acquire(semaphore(p)) < parts_before) {
    }
  }
  // Whether anybody waits for its sums.
  __device__ __forceinline__ bool counts(const Sm90BwdParams& p) const {
    return p.deterministic || stores;
  }
  __device__ __forceinline__ void release(int parts, const Sm90BwdParams& p) const {
    if (counts(p)) ptx::red_release_add(semaphore(p), parts);
  }

  // The same for one of the C::kDqParts that a tile of keys sends. Before the part is there;
  // returns whether there are sums to add to:
  __device__ __forceinline__ bool wait_part(int part, const Sm90BwdParams& p) const {
    if (!in_order(p)) return ptx::ld_acquire(semaphore(p)) & stored_bit(part);
    wait(p);
    return true;
  }
  // When it is there, if there were none: decides whether to store it, or waits for who does.
  __device__ __forceinline__ void claim_part(int part, const Sm90BwdParams& p) {
    stores = !(atomicOr(semaphore(p), 1 << part) & 1 << part);
    while (!stores && !(ptx::ld_acquire(semaphore(p)) & stored_bit(part))) {
    }
  }
  __device__ __forceinline__ void release_part(int part, const Sm90BwdParams& p) const {
    release(in_order(p) ? kPartsOfBlock / C::kDqParts : stored_bit(part), p);
  }

 private:
  // Two CTAs are to know early who stores.
  static __device__ __forceinline__ bool in_order(const Sm90BwdParams& p) {
    return C::kTwoCta || p.deterministic;
  }
  __device__ __forceinline__ int* semaphore(const Sm90BwdParams& p) const {
    return p.dq_semaphore + tile;
  }
  static __device__ __forceinline__ int stored_bit(int part) { return 1 << (kPartsOfBlock + part); }
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
