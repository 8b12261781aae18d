// Attention forward over the pages of a cache with mma.sync, for every chip from Turing on.
//
//   O = softmax(S) V      S as score.cuh has it      LSE = log of the softmax's denominator
//
// A CTA takes items (paged_work.cuh) until its share is done. The rows of a tile are the heads of a
// group for one query after the other. There is a kernel for sequences with few of them, whose work
// is reading the cache:
//
//                     keys of a split ->
//   8 or 16 rows  |team 0|team 1|team 2|team 3|team 0|...   a warp (or two) each, which loads its
//                                                           keys by itself, some tiles ahead, and
//                                                           waits for no other until all are merged
//
// There the operands of the MMAs have changed places (paged_decode.cuh): with 8 rows there are half
// as many MMAs, accumulators and exponentials as with 16, and more warps fit on an SM. A tile of 16
// keys of D = 128 takes 189 instructions of a warp.
//
// Loads do not stop between items: a team's next tiles are on their way, those of the next item
// too, while the teams of this one are merged. So a task is found two items ahead, by one thread.
//
// In the one for more rows all warps share the keys, a warp takes 16 rows and all columns, and one
// barrier a tile keeps a stage from being overwritten while it is read.
//
//   shared memory: sQ rows x D, 16-bit, unless Q stays in registers (up to D = 128, with 8 rows up
//   to 256); K and V of each team and stage, as the cache has them; at the end of an item a team's
//   O in fp32 in the place of the tile it has just used
//
// Keys come through the block table: a lane looks up one key for the tile after the next, so that
// its copies wait for nobody (PageRow). Nothing past key_end is looked up or read. Where keys were
// split, paged_combine.cuh makes one result of the parts.
#pragma once

#include <climits>

#include "cuda/attention/guard.cuh"
#include "cuda/attention/mma_sync/fwd.cuh"
#include "cuda/attention/mma_sync/paged_decode.cuh"
#include "cuda/attention/mma_sync/paged_fp8.cuh"
#include "cuda/attention/mma_sync/paged_store.cuh"
#include "cuda/attention/mma_sync/paged_tile.cuh"
#include "cuda/ptx/grid.cuh"

namespace flashmoe::cuda {

// What a warp has with many rows. Where the cache is fp8 the products of a row are to be times a
// factor, which is here if Q is, else in shared memory.
template <class C>
struct ManyRowsState : FwdState<C> {
  float factors[2];

  __device__ __forceinline__ void clear() {
    set_zero(this->o);
    this->rows[0] = RowState();
  }
};

// Loads Q: to registers, or to shared memory, where the CTA waits until it is there.
template <class C>
__device__ __forceinline__ void load_query(ManyRowsState<C>& t, char* shared,
                                           const PagedWarp<C>& warp, const PagedTask& task,
                                           const PagedParams& p) {
  const float scale = C::kFp8 && p.k_scale ? p.k_scale[task.head * p.k_scale_stride] : 1;
  const auto pair = [&](int half, int step, int i) -> uint32_t& {
    return t.rQ[0][step][2 * i + half];
  };
  if constexpr (C::kQSteps == 0) {
    share_queries<C>(shared, scale, task, p);
  } else if constexpr (C::kFp8) {
    load_query_fragments_fp8<C>(pair, t.factors, warp, task, p);
    t.factors[0] *= scale;
    t.factors[1] *= scale;
  } else {
    load_query_fragments<C, 2>(pair, warp, task, p);
  }
}
template <class C>
__device__ __forceinline__ float query_factor(const float (&factors)[2], int half,
                                              const char* shared, const PagedWarp<C>& warp) {
  if constexpr (C::kQSteps > 0) return factors[half];
  const float* of_rows = reinterpret_cast<const float*>(shared + C::kSmemFactors);
  return of_rows[warp.row + 8 * half + warp.lane / 4];
}

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

// Adds x, which was left out at a column of `key`, to the lane's rows that see it.
template <class C>
__device__ __forceinline__ void add_to_rows(ManyRowsState<C>& t, int d, int c, int key, float x,
                                            const PagedBounds<C>& rows) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (key >= rows.begin[half] && key < rows.end[half]) t.o[0][d][2 * half + c] += x;
  }
}

// Adds what was left out to the rows that see it, key by key.
template <class C, class State>
__device__ __forceinline__ void add_nonfinite_pages(State& t, const PagedWarp<C>& warp,
                                                    const PagedTask& task, const PagedParams& p) {
  const auto infinite = [&](const char* row, int column) -> float {
    if (column >= p.head_dim_v) return 0;
    const int64_t at = column * p.value_column;
    if constexpr (C::kFp8) {
      return (row[at] & E4m3::kNan) == E4m3::kNan ? NAN : 0;
    } else {
      return infinity_or_nan<typename C::Type>(reinterpret_cast<const uint16_t*>(row)[at]);
    }
  };
  const std::conditional_t<C::kFewRows, DecodeBounds<C>, PagedBounds<C>> rows(warp, task, p);
  const int tiles = PagedLoader<C>::tiles(warp, task);
#pragma unroll 1
  for (int i = 0; i < tiles * C::kKeys; ++i) {
    const int key = PagedLoader<C>::first_key(i / C::kKeys, warp, task) + i % C::kKeys;
    if (key >= task.key_end) continue;
    PageRow page;
    page.look_up(key, true, task.table, p);
    if (!page.sound(p)) continue;
    const char* row = task.value + page.offset<C::kCacheBytes>(p.value_block, p.value_strides.row);
    // Opaque: ahead of the loop over keys there are no registers for as many columns.
    const uint32_t lane = ptx::opaque(warp.lane);
#pragma unroll
    for (int d = 0; d < C::kDimTiles; ++d) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float x = infinite(row, warp.column + lane_column<C>(d, c, lane));
        if (x != 0) add_to_rows<C>(t, d, c, key, x, rows);
      }
    }
  }
}

// One tile of keys, in shared memory, under many rows.
template <class C>
__device__ __forceinline__ void paged_step(ManyRowsState<C>& t, char* shared, uint32_t smem,
                                           uint32_t sK, int first_key, bool guarded,
                                           const PagedWarp<C>& warp, const PagedTask& task,
                                           const PagedParams& p) {
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
    for (int half = 0; half < 2; ++half) {
      const float factor = query_factor<C>(t.factors, half, shared, warp);
#pragma unroll
      for (int i = 0; i < C::kKeyTiles * 2; ++i) s[0][i / 2][2 * half + i % 2] *= factor;
    }
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

// Accumulates O over the team's keys, under few rows. What few tiles need, or few calls, is behind
// one branch.
template <class C>
__device__ __forceinline__ void paged_keys(DecodeState<C>& t, PagedLoader<C>& loader, int number,
                                           char* shared, uint32_t smem, bool guarded,
                                           const PagedWarp<C>& warp, const PagedTask* tasks,
                                           const PagedParams& p) {
  const PagedTask& task = tasks[number % kPagedTasks];
  const DecodeLanes<C> lanes(warp);
  const ScoreRule rule(p);
  const int key_end = task.key_end, full_end = min(task.full_end, key_end);
  const int plain_end = guarded || rule.transforms() ? INT_MIN : full_end - C::kKeys + 1;
  const int full_begin = task.full_begin;
  t.clear();
#pragma unroll 1
  for (int key = loader.first_key(0, warp, task); key < key_end; key += C::kTeams * C::kKeys) {
    const uint32_t sK = loader.next(number, smem, warp, tasks, p);
    float s[C::kRowTiles][C::kKeyTiles][4];
    decode_scores<C>(s, t, smem + lanes.q, smem + sK + lanes.k);
    if (key < full_begin || key >= plain_end) {
      if (rule.transforms()) transform_scores<C>(s, rule);
      if (key < full_begin || key + C::kKeys > full_end) mask_decode<C>(s, key, warp, task, p);
      if (guarded) drop_nonfinite_pages<C>(shared + sK + C::kTileBytes, warp);
    }
    update_decode_references<C>(t, s, rule.scale_log2());
    accumulate_decode<C>(t, s, rule, smem + sK + lanes.v);
  }
  if (guarded) add_nonfinite_pages<C>(t, warp, task, p);
}

// The same under many rows.
template <class C>
__device__ __forceinline__ void paged_keys(ManyRowsState<C>& t, PagedLoader<C>& loader, int number,
                                           char* shared, uint32_t smem, bool guarded,
                                           const PagedWarp<C>& warp, const PagedTask* tasks,
                                           const PagedParams& p) {
  const PagedTask& task = tasks[number % kPagedTasks];
  t.clear();
  const int tiles = loader.tiles(warp, task);
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    const uint32_t sK = loader.next(number, smem, warp, tasks, p);
    paged_step<C>(t, shared, smem, sK, loader.first_key(tile, warp, task), guarded, warp, task, p);
  }
  if (guarded) add_nonfinite_pages<C>(t, warp, task, p);
}

// A CTA's tasks, found two ahead.
template <class Schedule>
struct PagedTasks {
  PagedTask* tasks;  // shared (kPagedTasks)
  Schedule& schedule;

  __device__ __forceinline__ const PagedTask& operator[](int number) const {
    return tasks[number % kPagedTasks];
  }
  // Finds task `number`, by one thread. Others may read it after a barrier of all.
  __device__ __forceinline__ void find(int number, const PagedParams& p) {
    if (threadIdx.x == 0) {
      PagedTask& task = tasks[number % kPagedTasks];
      const PagedTask& last = tasks[(number + kPagedTasks - 1) % kPagedTasks];
      if (number > 0 && last.has_next_split() && schedule.take_next(last.cost)) {
        task = last;
        task.go_to_next_split();
      } else {
        task.more = schedule.next(task, p);
      }
    }
    __syncwarp();
  }
};

// One item.
template <class C, class Schedule>
__device__ __forceinline__ void paged_tile(PagedLoader<C>& loader, int number,
                                           PagedTasks<Schedule>& all, char* shared, uint32_t smem,
                                           const PagedParams& p) {
  const PagedWarp<C> warp;
  const PagedTask *const tasks = all.tasks, &task = all[number];
  TeamWords<C>& words = team_words<C>(shared);
  std::conditional_t<C::kFewRows, DecodeState<C>, ManyRowsState<C>> t;
#pragma unroll 1
  for (int guarded = 0;; guarded = 1) {
    loader.begin(number, guarded, smem, warp, tasks, p);
    if (!guarded) all.find(number + 2, p);
    load_query<C>(t, shared, warp, task, p);
    paged_keys<C>(t, loader, number, shared, smem, guarded, warp, tasks, p);
    if constexpr (C::kFewRows) {
      leave_for_merge<C>(t, shared, loader.free_stage(warp), words, warp, task);
    }
    const bool bad = __any_sync(0xffffffffu, loader.bad & 1);
    if (warp.lane == 0) words.bad[number % 2][threadIdx.x / 32] = bad;
    // Whether there are keys that some rows see and others do not: something in V that is not
    // finite must reach the ones only. Then all is computed once more.
    const bool masked = task.full_begin > task.key_begin || task.full_end < task.key_end;
    // Also: everything that teams leave for each other is there, and the task that was found.
    if (!__syncthreads_or(masked && !guarded && !all_finite(t.o))) break;
  }
  const float factor = C::kFp8 && p.v_scale ? p.v_scale[task.head * p.v_scale_stride] : 1;
  const float poison = words.any_bad(number) ? NAN : 1;
  if constexpr (C::kFewRows) {
    merge_teams<C>(factor, poison, shared, words, task, p);
    __syncthreads();  // what teams left is read: tiles may take its place
  } else {
    store_rows<C>(t, factor, poison, warp, task, p);
  }
}

// The kernel before that for few rows, where CTAs take tickets: there is none yet. It ends when
// those before it have, so that whoever waits for one waits for all.
__device__ __forceinline__ void attention_paged_tickets(const PagedParams& p) {
  ptx::griddepcontrol_launch_dependents();
  if (threadIdx.x == 0) *p.tickets = 0;
  ptx::griddepcontrol_wait();
}

// With few rows and no more CTAs than the chip holds a few times over each has an item of its own:
// a head, a split, a sequence. Returns whether cumulative lengths fall somewhere.
template <class C, class Schedule>
__device__ __forceinline__ bool find_own_task(PagedTasks<Schedule>& tasks, const PagedParams& p) {
  using Items = FewRowsItems<C::kCacheBytes>;
  const int head = blockIdx.x, split = blockIdx.y, sequence = blockIdx.z;
  PagedTask& task = tasks.tasks[0];
  if (threadIdx.x == 0) {
    const PagedWork w = Items::find(sequence, p);
    task.more = w.tiles > 0 && split < w.splits;
    if (task.more) Items::take_split(task, sequence, w, head, split, p);
    if (head == 0 && split == 0 && w.few) tell(sequence, w, w.splits, p);
    tasks.tasks[1].more = false;
    tasks.schedule.start_empty();
  }
  if (!p.cu_seqlens_q) return false;
  bool fall = false;
#pragma unroll 1
  for (int i = threadIdx.x; i < p.batch; i += C::kThreads) fall |= falls(i, p);
  const bool broken = __syncthreads_or(fall);
  if (broken && threadIdx.x == 0) task.more = false;
  return broken;
}

// The kernel. The one for few rows also stores what is no sequence's.
template <class C>
__device__ __forceinline__ void attention_paged(const PagedParams& p) {
  extern __shared__ __align__(1024) char shared[];
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  ptx::griddepcontrol_launch_dependents();  // the kernel after this one
  using Items = std::conditional_t<C::kFewRows, FewRowsItems<C::kCacheBytes>,
                                   ManyRowsItems<C::kRows, C::kCacheBytes>>;
  using Schedule = PagedSchedule<C::kThreads, Items>;
  Schedule schedule{reinterpret_cast<int*>(shared + C::kSmemWork)};
  PagedTasks<Schedule> tasks{reinterpret_cast<PagedTask*>(shared + C::kSmemTasks), schedule};
  bool broken;
  if (C::kFewRows && p.item_each) {
    broken = find_own_task<C>(tasks, p);
  } else {
    broken = schedule.start(p);
#pragma unroll 1
    for (int number = 0; number < 2; ++number) tasks.find(number, p);
  }
  __syncthreads();  // two tasks are there
  PagedLoader<C> loader;
#pragma unroll 1
  for (int number = 0; tasks[number].more;) {
    if (tasks[number].valid) {
      paged_tile<C>(loader, number, tasks, shared, smem, p);
    } else {
      tasks.find(number + 2, p);
      store_nan<C>(tasks[number], p);
      __syncthreads();  // the task that was found is there
    }
    number = __shfl_sync(0xffffffffu, number + 1, 0);  // in a uniform register: no other is left
  }
  if constexpr (C::kFewRows) store_rest<typename C::Query>(broken, p);
  // A kernel before this one may still be at work beside it. The last CTA of the grid waits for it:
  // whoever waits for this kernel then waits for both. Others would keep places from CTAs that have
  // not begun.
  const bool last =
      blockIdx.x + 1 == gridDim.x && blockIdx.y + 1 == gridDim.y && blockIdx.z + 1 == gridDim.z;
  if (last) ptx::griddepcontrol_wait();
}

}  // namespace flashmoe::cuda
