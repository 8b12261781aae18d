// The dQ accumulator of the sm90 backward pass: who adds to it when, and when it is complete.
//
// Tiles of keys add their dQ to fp32 sums in global memory, in the order of wgmma's accumulators:
// 64 rows of all columns, then the next 64 rows, each 128 threads x 4 floats for each 8 columns.
// Transposed, in tiles of 80 rows: 64 columns of a tile, then the next 64 columns, each 128 threads
// x 4 floats for each 8 rows. A last step converts the sums of a head to 16 bits once all its tiles
// of keys have added.
#pragma once

#include "cuda/attention/sequence.cuh"
#include "cuda/attention/sm90/bwd_scheduler.cuh"
#include "cuda/attention/sm90/params.h"
#include "cuda/attention/sm90/warpgroup.cuh"
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

// The order in which tiles of keys add to the dQ of a tile of queries.
//   deterministic  the first that it sees stores, so that nothing need be zeroed, and the others
//                  add one after the other. `dq_semaphore` counts the parts that have added.
//   otherwise      all wait for the first only.
//   zeroes_dq      all add to zeros, and nobody waits (see zero_next_wave()).
template <class C>
__device__ __forceinline__ bool zeroes_dq(const Sm90BwdParams& p) {
  return C::kZeroesDq && p.zeroes_dq;
}
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
    stores = parts_before == 0 && !zeroes_dq<C>(p);
    counts = p.deterministic || stores;
    if (zeroes_dq<C>(p)) parts_before = 0;
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

// How many tasks have zeroed their part of the sums of a key head's group.
__device__ __forceinline__ int* zeroed_parts(const Sm90BwdParams& p, int batch, int key_head) {
  const int64_t row = key_head * p.group * p.dq_accum_rows + workspace_row(p, {}, batch);
  return p.dq_semaphore + (row - rows_before_slice(p)) / p.block_q;
}
// The number of a key head among those of the launch, as waves count them.
__device__ __forceinline__ int head_index(int batch, int key_head, const Sm90BwdParams& p) {
  return (batch - p.first_batch) * p.heads + key_head - p.first_head;
}
// Zeros for rows [first, end) of a head of the accumulator, by one of kThreads threads.
template <int kThreads>
__device__ __forceinline__ void zero_dq_rows(int batch, int head, int first, int end, int thread,
                                             const Sm90BwdParams& p) {
  const int64_t row = head * p.dq_accum_rows + workspace_row(p, {}, batch) - rows_before_slice(p);
  uint4* const to = reinterpret_cast<uint4*>(p.dq_accum + (row + first) * p.dim);
  const int count = (end - first) * (p.dim / 4);
#pragma unroll 4
  for (int i = thread; i < count; i += kThreads) to[i] = uint4{0, 0, 0, 0};
}

// Zeroes sums of the next wave of heads, by a warp, while consumers add to those of this one: a
// task has as many rows as it has keys of all. They are in L2 then when they are needed. (The
// preprocess kernel zeroes those of the first wave. Where it zeroed all, memory would be written
// and read once more: H200, 4,096 keys, D = 128, 40 us of 1,400.)
template <class C>
__device__ __forceinline__ void zero_next_wave(const BwdTask& task, const Sm90BwdParams& p) {
  const int index = head_index(task.batch, task.key_head, p) + p.zeroed_ahead;
  const bool first_of_tile = task.part < p.split_tiles;
  if (!p.zeroes_dq || !first_of_tile || index >= p.key_tiles / p.key_blocks) return;
  const int batch = p.first_batch + index / p.heads, key_head = p.first_head + index % p.heads;
  const int rows = (p.len_q + p.block_q - 1) / p.block_q * p.block_q;
  const int part = (rows + p.key_blocks - 1) / p.key_blocks;
  const int first = task.first_key / C::kBlockK * part, end = min(first + part, rows);
#pragma unroll 1
  for (int head = key_head * p.group; head < (key_head + 1) * p.group; ++head) {
    zero_dq_rows<32>(batch, head, first, end, lane(), p);
  }
  ptx::fence_proxy_async();  // TMA will add to them
  __syncwarp();              // all lanes' zeros are written
  if (lane() == 0) ptx::red_release_add(zeroed_parts(p, batch, key_head), 1);
}
// Waits until the sums that a task adds to have been zeroed. (Without tiles it adds nothing, and
// nobody has set the semaphore of a sequence whose length is wrong.)
__device__ __forceinline__ void wait_until_zeroed(const BwdTask& task, const Sm90BwdParams& p) {
  if (task.tiles == 0 || head_index(task.batch, task.key_head, p) < p.zeroed_ahead) return;
  const int* const parts = zeroed_parts(p, task.batch, task.key_head);
  while (ptx::ld_acquire(parts) < p.key_blocks) {
  }
}

// How many parts of tiles of keys of a head have added all their dQ, each counted as often as a
// tile of keys may be split.
__device__ __forceinline__ int* parts_done(const Sm90BwdParams& p, int sequence, int key_head) {
  const int64_t of_slice = p.blocks ? sequence : sequence - p.first_batch;
  return p.done + of_slice * p.heads + key_head - p.first_head;
}

template <class C>
__device__ __forceinline__ void add_parts_done(const Sm90BwdParams& p, const BwdTask& task,
                                               int parts) {
  if constexpr (C::kSplits) {
    if (task.part == BwdTask::kWhole) parts *= p.splits;
  }
  ptx::red_release_add(parts_done(p, task.sequence, task.key_head), parts);
}

// Waits until every tile of keys of the head has added its dQ.
__device__ __forceinline__ void wait_until_done(const Sm90BwdParams& p, const Sequence& seq,
                                                int sequence, int key_head) {
  const int blocks = p.blocks ? (seq.len_k + kKeysOfBlock - 1) / kKeysOfBlock : p.key_blocks;
  const int* const done = parts_done(p, sequence, key_head);
  while (ptx::ld_acquire(done) < kPartsOfBlock * blocks * p.splits) __nanosleep(200);
}

}  // namespace flashmoe::cuda::sm90
