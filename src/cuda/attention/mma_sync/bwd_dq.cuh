// dQ
#pragma once

#include <type_traits>

#include "cuda/attention/mma_sync/bwd_dq_short.cuh"
#include "cuda/attention/mma_sync/bwd_tile.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/tile/sums.cuh"

namespace flashmoe::cuda {

// The sums of a part of dQ of one block of queries, in the order of the accumulators.
template <class C>
__device__ __forceinline__ float* query_sums(const BwdTask& task, const QueryBlock& block, int part,
                                             const AttentionBwdParams& p) {
  const int64_t row = block.head * p.dq_accum_rows + task.round_row + block.first;
  const int warp = ptx::opaque_thread() / 32;
  return p.dq_accum + row * C::kDim +
         (warp * C::kQueryParts + part) * (C::kQueryM * C::kPartN * 128);
}

// dQ = dS K, added to its sums a part of the columns at a time; product(acc, part) computes it.
template <class C>
using QueryPart = float[C::kQueryM][C::kPartN][4];

template <class C, class Product>
__device__ __forceinline__ void add_query_gradient(const BwdTask& task, const QueryBlock& block,
                                                   const AttentionBwdParams& p,
                                                   const Product& product) {
#pragma unroll 1
  for (int part = 0; part < C::kQueryParts; ++part) {
    QueryPart<C> acc;
    set_zero(acc);
    product(acc, part);
    if (p.grad_query) add_sums(query_sums<C>(task, block, part, p), acc);
  }
}

template <class C, Loop kLoop>
__device__ __forceinline__ void query_gradient(QueryPart<C>& acc, int part, uint32_t left_lane,
                                               uint32_t right_lane) {
  using Left = std::conditional_t<C::kOwnKeys, AcrossA<typename C::OwnLayout, C::kQueryRows>,
                                  AlongA<typename C::PairLayout>>;
  // A part is a whole number of the groups that chunks are mixed in.
  constexpr int kPartChunks = C::kQueryCols * C::kPartN;
  static_assert(C::kQueryParts == 1 || kPartChunks % C::Layout::kGroup == 0);
  const AcrossB<typename C::Layout, C::kQueryCols> right{right_lane + part * kPartChunks * 16};
  multiply<typename C::Type, C::kBlockK / 16, kUnroll<C, kLoop, C::kBlockK / 16>>(
      acc, Left{left_lane}, right);
}

// Deterministic: the blocks of keys take turns in adding to a block of queries. A turn is waited
// for before the barrier in the middle of a block, and passed on after that of the next one, when
// all sums of this one are known to be on their way. Thread 0 looks for its turn at the start of
// the block: the answer takes as long as the first products. (Turns for 128 queries at once need
// fewer fences, but cost more in waiting: 1.5-1.7 of the time for 1.4-1.5.)

// From the last block of keys to the first, or the other way round.
__device__ __forceinline__ bool descending(const AttentionBwdParams& p) {
  return p.right < kNoLimit;
}

// By thread 0.
__device__ __forceinline__ void pass_on_turn(const BwdTask& task) {
  if (threadIdx.x == 0 && task.turn) ptx::st_release(task.turn, task.key_block + 1);
}

template <class C, bool kDeterministic>
class Turn {
 public:
  __device__ __forceinline__ Turn(const BwdTask& task, const QueryBlock& block,
                                  const AttentionBwdParams& p) {
    if (!takes_turns(p)) return;
    const int before = key_block_before(task, p);
    if (before < 0 || before * C::kBlockK >= task.seq.len_k) return;
    const QueryRange<C> queries(task.seq, before, p);
    if (queries.begin <= block.first && block.first < queries.end) {
      seen_ = ptx::ld_acquire(address(task, block, p));
    }
  }
  __device__ __forceinline__ void wait(const BwdTask& task, const QueryBlock& block,
                                       const AttentionBwdParams& p) const {
    if (!takes_turns(p) || seen_ == kAnyones) return;
    int seen = seen_;
    while (seen != key_block_before(task, p) + 1) seen = ptx::ld_acquire(address(task, block, p));
  }
  // The one before.
  __device__ __forceinline__ void pass_on(BwdTask& task, const QueryBlock& block,
                                          const AttentionBwdParams& p) const {
    if (!takes_turns(p)) return;
    pass_on_turn(task);
    task.turn = address(task, block, p);
  }

 private:
  static constexpr int kAnyones = -1;  // nobody adds before

  // With a bias it is asked at run time: half the code to compile.
  static __device__ __forceinline__ bool takes_turns(const AttentionBwdParams& p) {
    return kDeterministic && threadIdx.x == 0 && (!C::kBias || p.deterministic);
  }

  static __device__ __forceinline__ int key_block_before(const BwdTask& task,
                                                         const AttentionBwdParams& p) {
    return task.key_block + (descending(p) ? 1 : -1);
  }
  static __device__ __forceinline__ int* address(const BwdTask& task, const QueryBlock& block,
                                                 const AttentionBwdParams& p) {
    const int64_t row = block.head * p.dq_accum_rows + task.round_row + block.first;
    return p.dq_semaphore + row / C::kBlockQ;
  }

  int seen_ = kAnyones;  // in a register: nobody waits for it before it is needed
};

// dQ of one block of queries of one (batch, head): from its sums or, with short sequences, from the
// keys once more.
template <class C>
__device__ __forceinline__ void attention_bwd_dq(const AttentionBwdParams& p) {
  if constexpr (C::kShort) {
    attention_bwd_query<FwdConfig<typename C::Chip, typename C::Type, C::kQueryTile, C::kBias, 2>>(
        p);
    return;
  }
  extern __shared__ __align__(1024) char shared[];
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const QueryRows rows = find_query_rows(p);
  if (rows.kind == RaggedKind::kEmpty) return;
  const Sequence& seq = rows.seq;
  const QueryBlock block{rows.head, rows.first};
  char* to = const_cast<char*>(
      rows_of(p.grad_query, p, p.grad_query_strides, rows.batch, block.head, seq.token_q));
  const int row_bytes = p.grad_query_strides.row_bytes();
  if (rows.kind != RaggedKind::kBlock) {
    fill_rows(to, row_bytes, block.first, min(block.first + C::kBlockQ, seq.len_q), p.head_dim,
              rows.kind == RaggedKind::kRest ? 0 : C::Type::kNan);
    return;
  }
  if (block.first >= seq.len_q) return;
  BwdTask task;
  task.round_row = workspace_row(p, seq, rows.batch) - round_rows(p);

  const int warp = threadIdx.x / 32;
#pragma unroll
  for (int m = 0; m < C::kQueryM; ++m) {
#pragma unroll
    for (int n = 0; n < C::kQueryN; ++n) {
      float x[4];
      read_sums(x, query_sums<C>(task, block, n / C::kPartN, p), m * C::kPartN + n % C::kPartN);
      store_fragment<C, C::kQueryCols>(smem, query_row<C>(warp / C::kQueryCols, m), n,
                                       warp % C::kQueryCols, x, p.scale);
    }
  }
  __syncthreads();  // the tile is written
  store_tile<typename C::Layout, C::kBlockQ, C::kThreads>(smem, threadIdx.x, to, row_bytes,
                                                          block.first, seq.len_q, p.head_dim);
}

}  // namespace flashmoe::cuda
