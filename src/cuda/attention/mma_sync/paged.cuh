// Attention forward over the pages of a cache with mma.sync, for every chip from Turing on.
//
//   O = softmax(S) V      S as score.cuh has it      LSE = log of the softmax's denominator
//
// A CTA takes items (paged_work.cuh) until its share is done. The rows of a tile are the heads of a
// group for one query after the other. With few of them the work is reading the cache:
//
//                keys of a split ->
//   16 rows  |team 0|team 1|team 2|team 3|team 0|...      a warp (or two) each, which loads its
//   keys
//                                                         by itself, some tiles ahead, and waits
//                                                         for no other team until all are merged
//
// With more rows all warps share the keys, a warp takes 16 rows and all columns, and one barrier a
// tile keeps a stage from being overwritten while it is read.
//
//   shared memory: sQ rows x D, 16-bit; K and V of each team and stage, as the cache has them; at
//   the end O of each team in fp32 in their place
//
// Keys come through the block table: a lane looks up one key for the tile after the next, so that
// its copies wait for nobody (PageRow). Nothing past key_end is looked up or read. Where keys were
// split, paged_combine.cuh makes one result of the parts.
#pragma once

#include "cuda/attention/guard.cuh"
#include "cuda/attention/mma_sync/fwd.cuh"
#include "cuda/attention/mma_sync/paged_fp8.cuh"
#include "cuda/attention/mma_sync/paged_store.cuh"
#include "cuda/attention/mma_sync/paged_tile.cuh"

namespace flashmoe::cuda {

// What the products of a lane's two rows with an fp8 cache are to be times of.
template <class C>
struct PagedFactors {
  float factor[2];

  __device__ __forceinline__ PagedFactors(const char* shared, const PagedWarp<C>& warp,
                                          const PagedTask& task, const PagedParams& p) {
    const float scale = C::kFp8 && p.k_scale ? p.k_scale[task.head * p.k_scale_stride] : 1;
    const float* factors = reinterpret_cast<const float*>(shared + C::kSmemFactors);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      factor[half] = scale;
      if (C::kFp8 && C::Query::kExponent != C::Type::kExponent) {
        factor[half] *= factors[warp.row + 8 * half + warp.lane / 4];
      }
    }
  }
};

// The keys that a lane's two rows see. Found where they are needed: few tiles have a mask, and the
// main loop has no registers for them.
template <class C>
struct PagedBounds {
  int begin[2], end[2];

  __device__ __forceinline__ PagedBounds(const PagedWarp<C>& warp, const PagedTask& task,
                                         const PagedParams& p) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp.row + 8 * half + warp.lane / 4;
      begin[half] = task.begin(row, p);
      end[half] = min(task.end(row, p), task.key_end);
    }
  }
};

// Sets scores to -inf where the row does not see the key.
template <class C>
__device__ __forceinline__ void mask_pages(float (&s)[1][C::kKeyTiles][4], int first_key,
                                           const PagedWarp<C>& warp, const PagedTask& task,
                                           const PagedParams& p) {
  const PagedBounds<C> rows(warp, task, p);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int from = first_key + warp.lane % 4 * 2;
    const int begin = rows.begin[half] - from, end = rows.end[half] - from;
#pragma unroll
    for (int i = 0; i < 2 * C::kKeyTiles; ++i) {
      const int key = i / 2 * 8 + i % 2;
      if (key < begin || key >= end) s[0][i / 2][2 * half + i % 2] = -INFINITY;
    }
  }
}

// Puts zeros in place of what is not finite in a tile of V.
template <class C>
__device__ __forceinline__ void drop_nonfinite_pages(char* sV, const PagedWarp<C>& warp) {
  constexpr int kTeamThreads = C::kTeamWarps * 32, kNumbers = C::kKeys * C::kDim;
#pragma unroll 1
  for (int i = warp.in_team * 32 + warp.lane; i < kNumbers; i += kTeamThreads) {
    if constexpr (C::kFp8) {
      uint8_t& x = reinterpret_cast<uint8_t*>(sV)[i];
      if ((x & E4m3::kNan) == E4m3::kNan) x = 0;
    } else {
      uint16_t& x = reinterpret_cast<uint16_t*>(sV)[i];
      if ((x & C::Type::kExponent) == C::Type::kExponent) x = 0;
    }
  }
  sync_team<C>();  // the tile is finite
}

// Adds what was left out to the rows that see it, key by key.
template <class C>
__device__ __forceinline__ void add_nonfinite_pages(FwdState<C>& t, const PagedWarp<C>& warp,
                                                    const PagedTask& task, const PagedParams& p) {
  const auto infinite = [&](const char* row, int column) -> float {
    if (column >= p.head_dim_v) return 0;
    // Opaque: ahead of the loop over keys there are no registers for as many offsets.
    const int64_t at = ptx::opaque(column) * p.value_column;
    if constexpr (C::kFp8) {
      return (row[at] & E4m3::kNan) == E4m3::kNan ? NAN : 0;
    } else {
      return infinity_or_nan<typename C::Type>(reinterpret_cast<const uint16_t*>(row)[at]);
    }
  };
  const PagedBounds<C> rows(warp, task, p);
  const int tiles = PagedLoader<C>::tiles(warp, task);
#pragma unroll 1
  for (int i = 0; i < tiles * C::kKeys; ++i) {
    const int key = PagedLoader<C>::first_key(i / C::kKeys, warp, task) + i % C::kKeys;
    PageRow page;
    page.look_up(key, task, p);
    const int64_t at = page.offset<C::kCacheBytes>(p.value_block, p.value_strides.row);
    if (at < 0) continue;
    const char* row = task.value + at;
#pragma unroll
    for (int d = 0; d < C::kDimTiles; ++d) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        // See for_each_column().
        const int quarter = warp.lane % 4;
        const int column = warp.column + (C::kFp8 ? 8 * (d & ~1) + 4 * quarter + 2 * c + d % 2
                                                  : 8 * d + 2 * quarter + c);
        const float x = infinite(row, column);
        if (x == 0) continue;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (key >= rows.begin[half] && key < rows.end[half]) t.o[0][d][2 * half + c] += x;
        }
      }
    }
  }
}

// One tile of keys, in shared memory.
template <class C>
__device__ __forceinline__ void paged_step(FwdState<C>& t, char* shared, uint32_t smem, uint32_t sK,
                                           int first_key, bool guarded,
                                           const PagedFactors<C>& factors, const PagedWarp<C>& warp,
                                           const PagedTask& task, const PagedParams& p) {
  using Cache = typename C::CacheLayout;
  const uint32_t lane_q = lane_rows<typename C::Layout>(smem + C::kSmemQ, warp.row, 0);
  const uint32_t lane_k = lane_cols<Cache>(smem + sK, 0, 0);
  const uint32_t lane_v =
      lane_rows<Cache>(smem + sK + C::kTileBytes, 0, warp.column * C::kCacheBytes / 16);
  float s[1][C::kKeyTiles][4];
  set_zero(s);
  if constexpr (C::kFp8) {
    add_scores_fp8<C>(s, t.rQ, lane_q, lane_k);
#pragma unroll
    for (int i = 0; i < C::kKeyTiles * 4; ++i) s[0][i / 4][i % 4] *= factors.factor[i % 4 / 2];
  } else {
    add_scores<C>(s, t.rQ, lane_q, lane_k);
  }
  const ScoreRule rule(p);
  if (rule.transforms()) transform_scores<C>(s, rule);
  if (first_key < task.full_begin || first_key + C::kKeys > min(task.full_end, task.key_end)) {
    mask_pages<C>(s, first_key, warp, task, p);
  }
  update_references<C>(t, s, rule.scale_log2());
  if (guarded) drop_nonfinite_pages<C>(shared + sK + C::kTileBytes, warp);
  if constexpr (C::kFp8) {
    accumulate_fp8<C>(t, s, rule, lane_v);
  } else {
    accumulate<C>(t, s, rule, lane_v);
  }
}

// Accumulates O over the team's keys. Returns whether the block table led out of the cache.
template <class C>
__device__ __forceinline__ bool paged_keys(FwdState<C>& t, char* shared, uint32_t smem,
                                           bool guarded, const PagedWarp<C>& warp,
                                           const PagedTask& task, const PagedParams& p) {
  using Chip = typename C::Chip;
  constexpr int kAhead = C::kStages - 1;  // tiles that are on their way
  PagedLoader<C> loader;
  loader.look_up(warp, task, p);
#pragma unroll
  for (int i = 0; i < kAhead; ++i) loader.load(smem, warp, task, p);
  if (!guarded) {
    if constexpr (C::kFp8) {
      float* const factors = reinterpret_cast<float*>(shared + C::kSmemFactors);
      load_queries_fp8<C>(shared, factors, task, p);
    } else {
      load_queries<C>(shared, task, p);
    }
  }
  set_zero(t.o);
  t.rows[0] = RowState();
  __syncthreads();  // Q is there
  if (C::kQSteps > 0) {
    const AlongA<typename C::Layout> q{
        lane_rows<typename C::Layout>(smem + C::kSmemQ, warp.row, 0)};
#pragma unroll
    for (int step = 0; step < C::kQSteps; ++step) q.load(t.rQ[0][step], 0, step);
  }
  const PagedFactors<C> factors(shared, warp, task, p);
  const int tiles = loader.tiles(warp, task);
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    if constexpr (kAhead == 0) {
      sync_team<C>();  // the team is done with the tile before
      loader.load(smem, warp, task, p);
      Chip::template wait<0>();
    } else {
      Chip::template wait<kAhead - 1>();
    }
    sync_team<C>();  // the tile is there for the team, which is done with the one before
    if (kAhead > 0) loader.load(smem, warp, task, p);
    paged_step<C>(t, shared, smem, loader.keys_at(tile, warp), loader.first_key(tile, warp, task),
                  guarded, factors, warp, task, p);
  }
  if (guarded) add_nonfinite_pages<C>(t, warp, task, p);
  return loader.page.bad;
}

// One item.
template <class C>
__device__ __forceinline__ void paged_tile(char* shared, const PagedTask& task,
                                           const PagedParams& p) {
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const PagedWarp<C> warp;
  FwdState<C> t;
  // Whether there are keys that some rows see and others do not: something in V that is not finite
  // must reach the ones only.
  const bool masked = task.full_begin > task.key_begin || task.full_end < task.key_end;
  bool bad = paged_keys<C>(t, shared, smem, false, warp, task, p);
  C::Chip::template wait<0>();
  // Also: nobody reads K, V or Q any more.
  if (__syncthreads_or(masked && !all_finite(t.o))) {
    paged_keys<C>(t, shared, smem, true, warp, task, p);
    C::Chip::template wait<0>();
  }
  bad = __syncthreads_or(bad);
  const float factor = C::kFp8 && p.v_scale ? p.v_scale[task.head * p.v_scale_stride] : 1;
  const float poison = bad ? NAN : 1;
  if constexpr (C::kTeams > 1) {
    merge_teams<C>(t, factor, poison, shared, warp, task, p);
  } else {
    store_rows<C>(t, factor, poison, warp, task, p);
  }
}

// The kernel. Decode and Chunk are the two shapes of its tile.
template <class Decode, class Chunk>
__device__ __forceinline__ void attention_paged(const PagedParams& p) {
  extern __shared__ __align__(1024) char shared[];
  PagedTask& task = *reinterpret_cast<PagedTask*>(shared + Decode::kSmemTask);
  using Items = PairItems<Decode::kBlockQ, Decode::kCacheBytes>;
  using Schedule = PagedSchedule<Decode::kThreads, Items>;
  Schedule schedule(reinterpret_cast<int*>(shared + Decode::kSmemWork), p);
  store_rest<typename Decode::Query>(schedule.broken, p);
  if (blockIdx.x == 0) {  // the combining kernel looks here
    const int thread = threadIdx.x;
    for (int i = Schedule::first_of(thread, p); i < Schedule::first_of(thread + 1, p); ++i) {
      const PagedWork w = Items::find(i, p);
      p.sequences[i] = {w.token_q, w.len_q, schedule.broken || w.chunk ? 1 : w.splits};
    }
  }
#pragma unroll 1
  while (schedule.next(task, p)) {
    if (!task.valid) {
      store_nan<Decode>(task, p);
    } else if (task.tile_rows == kDecodeRows) {
      paged_tile<Decode>(shared, task, p);
    } else {
      paged_tile<Chunk>(shared, task, p);
    }
  }
}

}  // namespace flashmoe::cuda
