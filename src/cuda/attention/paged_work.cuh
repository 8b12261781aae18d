// Which part of a paged batch a CTA does. Lengths are on the device, so every CTA goes over all
// sequences itself, and nobody waits for a list.
//
// An item is one tile of rows of one key head over one split of its keys. How many splits a
// sequence has follows from its own lengths and from the plan, never from its neighbours: a request
// has the same bits whoever shares its batch. Items lie in a row, sequence by sequence, each as
// wide as its keys; a CTA takes those that begin in its equal share of that row. There is such a
// row for each of p.head_lanes parts of the key heads, and CTAs that follow each other are at the
// same place of each: between a head's rows of a page are those of the other heads, and memory is
// fastest where all are read at about the same time.
//
//   sequence   |       0       |1|        2          |
//   items      |   |   |   |   | | |     |     |     |
//   CTAs       |  0   |   1    |    2    |     3     |
#pragma once

#include "cuda/attention/paged.h"
#include "cuda/attention/sequence.cuh"

namespace flashmoe::cuda {

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

// A sequence and its items.
struct PagedWork {
  int token_q, len_q, len_k;
  int tile_rows, tiles, splits;
  int cost;    // of an item
  bool valid;  // false where lengths contradict what the host was told: its rows become NaN
  bool chunk;  // whether it has a kernel of its own
};

__device__ __forceinline__ int64_t query_end(int i, const PagedParams& p) {
  return read_length(p.cu_seqlens_q, i * p.cu_stride, p.cu_is_int64);
}

// Whether cumulative lengths fall from sequence i to the next. Then nobody knows whose rows are
// whose, and all of them become NaN.
__device__ __forceinline__ bool falls(int i, const PagedParams& p) {
  return p.cu_seqlens_q && query_end(i, p) > query_end(i + 1, p);
}

template <int kBlockQ>
__device__ __forceinline__ PagedWork find_work(int i, const PagedParams& p) {
  PagedWork w;
  w.valid = true;
  int64_t begin = i, end = i + 1;
  if (p.cu_seqlens_q) {
    const int64_t first = query_end(i, p), last = query_end(i + 1, p);
    begin = i == 0 ? 0 : min(max(first, int64_t{0}), p.tokens_q);
    end = max(min(last, p.tokens_q), begin);
    w.valid = begin == first && end == last && end - begin <= p.len_q;
  }
  const int64_t keys = read_length(p.seq_lens, i * p.seq_lens_stride, p.seq_lens_are_int64);
  w.valid = w.valid && keys >= 0 && keys <= p.len_k;
  w.token_q = static_cast<int>(begin);
  w.len_q = static_cast<int>(end - begin);
  w.len_k = w.valid ? static_cast<int>(keys) : 0;
  w.chunk = w.valid && w.len_k > 0 && p.chunk_queries > 0 && w.len_q >= p.chunk_queries;
  const int rows = w.len_q * p.group;
  w.tile_rows = rows <= kDecodeRows ? kDecodeRows : kBlockQ;
  w.tiles = ceil_div(rows, w.tile_rows);
  // What a tile sees at most.
  int span = w.len_k;
  if (p.left < kNoLimit && p.right < kNoLimit) {
    const int64_t window = int64_t{p.left} + p.right + (w.tile_rows - 1) / p.group + 2;
    span = static_cast<int>(min(window, int64_t{span}));
  }
  const int most = p.most_splits / max(ceil_div(rows, kDecodeRows), 1);
  w.splits = max(min(most, ceil_div(span, p.least_keys)), 1);
  w.cost = ceil_div(ceil_div(span, w.splits), p.cost_keys) + 1;
  return w;
}

// Where an item and the one after it begin in the row of all; `found`: whether it is one.
struct PagedPlace {
  int start, next;
  bool found;
};

// What a CTA does at a time. In shared memory.
struct PagedTask {
  bool more;  // false: there is no task any more
  bool valid;
  int sequence, head;   // head: of keys
  int first_row, rows;  // of the sequence's pairs, and how many
  int tile_rows;
  int token_q, len_q, len_k;
  int split, splits;
  int key_begin, key_end;    // the keys of this split that any row sees
  int seen_end;              // the end of those of all splits
  int share, cost;           // keys of a split; how wide the item is
  int full_begin, full_end;  // those of the sequence that every row sees
  const char *key, *value;   // row 0 of block 0 of the head
  int64_t table;             // where the sequence's row of the table begins

  // Row `row` of the tile sees the keys [begin, end).
  __device__ __forceinline__ int position(int row, const PagedParams& p) const {
    return (first_row + row) / p.group + len_k - len_q;
  }
  __device__ __forceinline__ int begin(int row, const PagedParams& p) const {
    return max(position(row, p) - p.left, 0);
  }
  __device__ __forceinline__ int end(int row, const PagedParams& p) const {
    return min(position(row, p) + p.right + 1, len_k);
  }
  // Finding an item takes hundreds of instructions, the next split of the same rows a few.
  __device__ __forceinline__ bool has_next_split() const {
    return more && valid && split + 1 < splits;
  }
  __device__ __forceinline__ void go_to_next_split() {
    ++split;
    key_begin = min(key_begin + share, seen_end);
    key_end = min(key_begin + share, seen_end);
  }
};
static_assert(sizeof(PagedTask) <= kPagedTaskBytes);

// Tiles come as last, first, last but one, second and so on: with a causal mask two neighbours then
// have as much to do as any other two.
__device__ __forceinline__ int folded_tile(int tile, int tiles) {
  return tile % 2 ? tile / 2 : tiles - 1 - tile / 2;
}

// Item `item` of a sequence, of the heads of `lane`.
template <int kCacheBytes>
__device__ __forceinline__ void find_item(PagedTask& task, int sequence, const PagedWork& w,
                                          int item, int lane, const PagedParams& p) {
  constexpr int kRound = 64;  // keys that shares are multiples of
  const int of_head = w.tiles * w.splits, tile = item % of_head / w.splits;
  task.valid = w.valid;
  task.sequence = sequence;
  task.head = item / of_head * p.head_lanes + lane;
  task.tile_rows = w.tile_rows;
  task.first_row = folded_tile(tile, w.tiles) * w.tile_rows;
  task.rows = min(w.len_q * p.group - task.first_row, w.tile_rows);
  task.token_q = w.token_q;
  task.len_q = w.len_q;
  task.len_k = w.len_k;
  task.split = item % w.splits;
  task.splits = w.splits;
  const int last = task.rows - 1;
  const int begin = task.begin(0, p), end = max(task.end(last, p), begin);
  const int share = ceil_div(ceil_div(end - begin, w.splits), kRound) * kRound;
  task.seen_end = end;
  task.share = share;
  task.cost = w.cost;
  task.key_begin = min(begin + task.split * share, end);
  task.key_end = min(task.key_begin + share, end);
  task.full_begin = task.begin(last, p);
  task.full_end = task.end(0, p);
  task.key = static_cast<const char*>(p.key) + task.head * p.key_strides.head * kCacheBytes;
  task.value = static_cast<const char*>(p.value) + task.head * p.value_strides.head * kCacheBytes;
  task.table = sequence * p.table_row;
}

// The items of the kernel with tiles of pairs (query, head), which has every sequence that no other
// kernel has.
template <int kBlockQ, int kCacheBytes>
struct PairItems {
  using Task = PagedTask;
  static __device__ __forceinline__ int lanes(const PagedParams& p) { return p.head_lanes; }
  static __device__ __forceinline__ PagedWork find(int i, const PagedParams& p) {
    return find_work<kBlockQ>(i, p);
  }
  // Of a lane.
  static __device__ __forceinline__ int count(const PagedWork& w, const PagedParams& p) {
    return w.chunk ? 0 : w.tiles * w.splits * (p.heads_k / p.head_lanes);
  }
  static __device__ __forceinline__ void take(PagedTask& task, int sequence, const PagedWork& w,
                                              int item, const PagedParams& p) {
    find_item<kCacheBytes>(task, sequence, w, item, blockIdx.x % p.head_lanes, p);
  }
};

// The page of a key.
__device__ __forceinline__ int page_of(int key, const PagedParams& p) {
  return p.page_log2 >= 0 ? key >> p.page_log2 : key / p.page;
}

// The way of a key through the block table. A table's entry comes from far away: it is looked up
// ahead of time, and stays as it came until it is needed, since a check would wait for it.
struct PageRow {
  uint32_t low = 0, high = 0;  // the table's entry
  int row = 0;                 // of the page

  // `table` is where the sequence's row of the table begins.
  __device__ __forceinline__ void look_up(int key, int64_t table, const PagedParams& p) {
    const int page = page_of(key, p);
    const int64_t at = table + page * p.table_column;
    row = key - page * p.page;
    if (p.table_is_int64) {
      const uint2 entry = static_cast<const uint2*>(p.block_table)[at];
      low = entry.x;
      high = entry.y;
    } else {
      low = static_cast<const uint32_t*>(p.block_table)[at];
      high = 0;
    }
  }
  // Whether the cache has that block. Negative numbers are large ones here.
  __device__ __forceinline__ bool sound(const PagedParams& p) const {
    return high == 0 && low < static_cast<uint32_t>(p.blocks);
  }
  // Bytes from row 0 of block 0.
  template <int kBytes>
  __device__ __forceinline__ int64_t offset(int64_t block_stride, int64_t row_stride) const {
    return (low * block_stride + row * row_stride) * kBytes;
  }
};

// Gives out a CTA's items, one after the other, to its first thread. `before` has the work of all
// sequences before those of each thread, and at its end that of all; thread t has the t-th part of
// the sequences.
template <int kThreads, class Items>
struct PagedSchedule {
  using Task = typename Items::Task;
  // (kThreads + 1), and behind it a sum for each warp. When these are not needed any more they make
  // room for the CTA's share: where its next item may begin, and what comes after.
  int* before;
  static constexpr int kAt = kThreads + 1, kEnd = kAt + 1;
  static_assert(kThreads >= 64);
  bool broken;  // cumulative lengths fall somewhere

  // `ctas` share the work: the first of the grid. A multiple of lanes.
  __device__ __forceinline__ PagedSchedule(int* shared, int ctas, const PagedParams& p)
      : before(shared) {
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    int mine = 0;
    bool fall = false;
    for (int i = first_of(thread, p); i < first_of(thread + 1, p); ++i) {
      const PagedWork w = Items::find(i, p);
      mine += Items::count(w, p) * w.cost;
      fall |= falls(i, p);
    }
    broken = __syncthreads_or(fall);
    int sum = mine;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int left = __shfl_up_sync(0xffffffffu, sum, step);
      if (lane >= step) sum += left;
    }
    int* const warps = before + kThreads + 1;
    if (lane == 31) warps[warp] = sum;
    __syncthreads();  // every warp's sum is there
    for (int i = 0; i < warp; ++i) sum += warps[i];
    before[thread] = sum - mine;
    if (thread == kThreads - 1) before[kThreads] = sum;
    __syncthreads();  // the work of all is there
    const int64_t all = before[kThreads];
    if (thread == 0) {
      const int share = blockIdx.x / Items::lanes(p), shares = ctas / Items::lanes(p);
      before[kAt] = static_cast<int>(all * share / shares);
      before[kEnd] = broken ? 0 : static_cast<int>(all * (share + 1) / shares);
    }
  }

  // The next item, by the first thread; false: there is none any more.
  __device__ __forceinline__ bool next(Task& task, const PagedParams& p) {
    int at = before[kAt];
    const int end = before[kEnd];
    while (at < end) {
      int part = 0, parts = kThreads;  // the last part that begins at `at` or before
      while (parts > 1) {
        const int half = parts / 2;
        const bool upper = before[part + half] <= at;
        part += upper ? half : 0;
        parts = upper ? parts - half : half;
      }
      const PagedPlace place = find(task, part, at, p);
      at = before[kAt] = place.next;
      if (place.found) return place.start < end;
    }
    return false;
  }

  // The same where the next item is known, as wide as `cost`: false if it is another CTA's.
  __device__ __forceinline__ bool take_next(int cost) {
    const int at = before[kAt];
    before[kAt] = at + cost;
    return at < before[kEnd];
  }

  // The first sequence of a thread.
  static __device__ __forceinline__ int first_of(int thread, const PagedParams& p) {
    return min(thread * ceil_div(p.batch, kThreads), p.batch);
  }

 private:
  // The first item of a part of the sequences that begins at `at` or after, if there is one.
  __device__ __forceinline__ PagedPlace find(Task& task, int part, int at,
                                             const PagedParams& p) const {
    int from = before[part];
    for (int i = first_of(part, p); i < first_of(part + 1, p); ++i) {
      const PagedWork w = Items::find(i, p);
      const int items = Items::count(w, p), width = items * w.cost;
      if (at >= from + width) {
        from += width;
        continue;
      }
      const int item = ceil_div(at - from, w.cost);
      if (item == items) return {from + width, from + width, false};
      Items::take(task, i, w, item, p);
      return {from + item * w.cost, from + (item + 1) * w.cost, true};
    }
    return {at, before[part + 1], false};
  }
};

}  // namespace flashmoe::cuda
