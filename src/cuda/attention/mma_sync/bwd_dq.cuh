// dQ in the backward pass with mma.sync, in the way that each need asks for:
//   - Long sequences: every tile of keys adds its share to fp32 accumulators in the workspace,
//   which
//     the preprocess kernel has cleared. They lie in the order of the registers, so that a warp's
//     addresses are consecutive. The kernel attention_bwd_dq converts them to rows in the output's
//     dtype, times the scale. (CTAs with tiles of queries of their own would have to add
//     up dK and dV instead: twice as much.)
//   - Deterministic: the same, but the tiles of keys add in a fixed order, by SumOrder.
//   - Short sequences: no accumulators. attention_bwd_dq computes S and dP once more
//     (bwd_dq_short.cuh): for one or two tiles of keys, clearing, adding and converting cost more.
#pragma once

#include <type_traits>

#include "cuda/attention/mma_sync/bwd_dq_short.cuh"
#include "cuda/attention/mma_sync/bwd_tile.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/tile/sums.cuh"

namespace flashmoe::cuda {

// The accumulators of the warp's part of dQ of one tile of queries.
template <class C>
__device__ __forceinline__ float* dq_accum_of(const BwdTask& task, const QueryTile& tile, int part,
                                              const AttentionBwdParams& p) {
  const int64_t row = tile.head * p.dq_accum_rows + task.slice_row + tile.first;
  const int warp = ptx::opaque_thread() / 32;
  return p.dq_accum + row * C::kDim +
         (warp * C::kQueryParts + part) * (C::kQueryM * C::kPartN * 128);
}

// The columns of dQ that are computed at once.
template <class C>
using DqPart = float[C::kQueryM][C::kPartN][4];

// Adds dQ = dS K to its accumulators, part by part; product(acc, part) computes it.
template <class C, class Product>
__device__ __forceinline__ void add_dq(const BwdTask& task, const QueryTile& tile,
                                       const AttentionBwdParams& p, const Product& product) {
#pragma unroll 1
  for (int part = 0; part < C::kQueryParts; ++part) {
    DqPart<C> acc;
    set_zero(acc);
    product(acc, part);
    if (p.grad_query) add_sums(dq_accum_of<C>(task, tile, part, p), acc);
  }
}

// One part of dQ = dS K.
template <class C, Loop kLoop>
__device__ __forceinline__ void dq_product(DqPart<C>& acc, int part, uint32_t left_lane,
                                           uint32_t right_lane) {
  using Left =
      std::conditional_t<C::kTransposed, AcrossA<typename C::TransposedLayout, C::kQueryRows>,
                         AlongA<typename C::PackedLayout>>;
  // A part has whole runs of the chunks that are mixed.
  constexpr int kPartChunks = C::kQueryCols * C::kPartN;
  static_assert(C::kQueryParts == 1 || kPartChunks % C::Layout::kSwizzle == 0);
  const AcrossB<typename C::Layout, C::kQueryCols> right{right_lane + part * kPartChunks * 16};
  multiply<typename C::Type, C::kBlockK / 16, kUnroll<C, kLoop, C::kBlockK / 16>>(
      acc, Left{left_lane}, right);
}

// Whether the tiles of keys add to dQ from the last to the first: where later queries see more
// keys.
__device__ __forceinline__ bool descending(const AttentionBwdParams& p) {
  return p.right < kNoLimit;
}

// Releases the semaphore of the last tile of queries that this CTA added to. Done by thread 0.
__device__ __forceinline__ void release_semaphore(const BwdTask& task) {
  if (threadIdx.x == 0 && task.semaphore) ptx::st_release(task.semaphore, task.key_tile + 1);
}

// The order in which tiles of keys add to a tile of queries, deterministic: a semaphore for each
// tile of queries holds the number of the tile of keys that added last, plus 1. A CTA waits for its
// predecessor before the barrier in the middle of a tile, and releases the semaphore after the
// middle barrier of its next tile, when all of its own additions are known to be done. Thread 0
// reads the semaphore at the start of the tile: the answer takes as long as the first products.
// (One semaphore for 128 queries needs fewer fences but costs more in waiting: 1.5-1.7 of the time
// without an order, for 1.4-1.5.)
template <class C>
class SumOrder {
 public:
  __device__ __forceinline__ SumOrder(const BwdTask& task, const QueryTile& tile,
                                      const AttentionBwdParams& p) {
    if (!is_ordered(p)) return;
    const int before = key_tile_before(task, p);
    if (before < 0 || before * C::kBlockK >= task.seq.len_k) return;
    const QueryRange<C> queries(task.seq, before, p);
    if (queries.begin <= tile.first && tile.first < queries.end) {
      seen_ = kReadsEarly ? ptx::ld_acquire(address(task, tile, p)) : kNotRead;
    }
  }
  __device__ __forceinline__ void wait(const BwdTask& task, const QueryTile& tile,
                                       const AttentionBwdParams& p) const {
    if (!is_ordered(p) || seen_ == kNobodyBefore) return;
    int seen = seen_;
    while (seen != key_tile_before(task, p) + 1) seen = ptx::ld_acquire(address(task, tile, p));
  }
  // Releases the semaphore taken for the previous tile of queries.
  __device__ __forceinline__ void release_previous(BwdTask& task, const QueryTile& tile,
                                                   const AttentionBwdParams& p) const {
    if (!is_ordered(p)) return;
    release_semaphore(task);
    task.semaphore = address(task, tile, p);
  }

 private:
  static constexpr int kNobodyBefore = -1;  // this CTA is the first to add
  static constexpr int kNotRead = 0;        // what the semaphore holds before anyone has added
  // Transposed, 64 queries at D = 64 have no register for what was read (24 bytes would spill).
  static constexpr bool kReadsEarly =
      C::kBias || !C::kTransposed || C::kDim < 64 || C::kBlockQ < 64;

  // Asked at run time: a loop of its own for each answer takes twice the code and compile time.
  static __device__ __forceinline__ bool is_ordered(const AttentionBwdParams& p) {
    return !C::kShort && p.deterministic && threadIdx.x == 0;
  }

  static __device__ __forceinline__ int key_tile_before(const BwdTask& task,
                                                        const AttentionBwdParams& p) {
    return task.key_tile + (descending(p) ? 1 : -1);
  }
  static __device__ __forceinline__ int* address(const BwdTask& task, const QueryTile& tile,
                                                 const AttentionBwdParams& p) {
    const int64_t row = tile.head * p.dq_accum_rows + task.slice_row + tile.first;
    return p.dq_semaphore + row / C::kBlockQ;
  }

  int seen_ = kNobodyBefore;  // what the semaphore held; not waited for before it is needed
};

// The kernel for dQ: one CTA for a tile of queries of one (batch, head).
template <class C>
__device__ __forceinline__ void attention_bwd_dq(const AttentionBwdParams& p) {
  if constexpr (C::kShort) {
    attention_bwd_dq_short<FwdConfig<typename C::Chip, typename C::Type, C::kDqTile, C::kBias, 2>>(
        p);
    return;
  }
  extern __shared__ __align__(1024) char shared[];
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const QueryRows rows = find_query_rows(p);
  if (rows.kind == RaggedKind::kEmpty) return;
  const Sequence& seq = rows.seq;
  const QueryTile tile{rows.head, rows.first};
  char* to = const_cast<char*>(
      rows_of(p.grad_query, p, p.grad_query_strides, rows.batch, tile.head, seq.token_q));
  const int row_bytes = p.grad_query_strides.row_bytes();
  if (rows.kind != RaggedKind::kBlock) {
    fill_rows(to, row_bytes, tile.first, min(tile.first + C::kBlockQ, seq.len_q), p.head_dim,
              rows.kind == RaggedKind::kRest ? 0 : C::Type::kNan);
    return;
  }
  if (tile.first >= seq.len_q) return;
  BwdTask task;
  task.slice_row = workspace_row(p, seq, rows.batch) - rows_before_slice(p);

  const int warp = threadIdx.x / 32;
#pragma unroll
  for (int m = 0; m < C::kQueryM; ++m) {
#pragma unroll
    for (int n = 0; n < C::kQueryN; ++n) {
      float x[4];
      read_sums(x, dq_accum_of<C>(task, tile, n / C::kPartN, p), m * C::kPartN + n % C::kPartN);
      store_fragment<C, C::kQueryCols>(smem, query_row<C>(warp / C::kQueryCols, m), n,
                                       warp % C::kQueryCols, x, p.scale);
    }
  }
  __syncthreads();  // the tile is written
  store_tile<typename C::Layout, C::kBlockQ, C::kThreads>(smem, threadIdx.x, to, row_bytes,
                                                          tile.first, seq.len_q, p.head_dim);
}

}  // namespace flashmoe::cuda
