// Which part of a paged batch a CTA does. Lengths are on the device, so CTAs look at them
// themselves, and nobody waits for a list.
//
// An item is one tile of rows of one key head over one split of its keys. How many splits a
// sequence has follows from its own lengths and from the plan, never from its neighbours: a request
// has the same bits whoever shares its batch. Where there are few items each CTA has one. Else they
// lie in a row, sequence by sequence, each as wide as its keys, and every CTA goes over all
// sequences and takes those that begin in its share of that row. There is such a row for each of
// p.head_lanes parts of the key heads, and CTAs that follow each other are at the same place of
// each: between a head's rows of a page are those of the other heads, and memory is fastest where
// all are read at about the same time.
//
//   sequence   |       0       |1|        2          |
//   items      |   |   |   |   | | |     |     |     |
//   CTAs       |  0   |   1    |    2    |     3     |
#pragma once

#include "cuda/attention/paged.h"
#include "cuda/attention/sequence.cuh"
#include "cuda/ptx/arithmetic.cuh"
#include "cuda/ptx/grid.cuh"

namespace flashmoe::cuda {

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

// A sequence, and its items in one of the kernels.
struct PagedWork {
  int token_q, len_q, len_k;
  bool valid;  // false where lengths contradict what the host was told: its rows become NaN
  bool few;    // whether the kernel for few rows has it, which also has those that are not valid
  bool chunk;  // whether the kernel for chunks has it
  int tiles, splits, cost;  // cost: of an item
  int share;                // keys of a split, with few rows
};

__device__ __forceinline__ int64_t query_end(int i, const PagedParams& p) {
  return read_length(p.cu_seqlens_q, i * p.cu_stride, p.cu_is_int64);
}

// Whether cumulative lengths fall from sequence i to the next. Then nobody knows whose rows are
// whose, and all of them become NaN.
__device__ __forceinline__ bool falls(int i, const PagedParams& p) {
  return p.cu_seqlens_q && query_end(i, p) > query_end(i + 1, p);
}

__device__ __forceinline__ PagedWork find_sequence(int i, const PagedParams& p) {
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
  w.few = w.len_q * p.group <= kDecodeRows || !w.valid;
  w.chunk = w.valid && w.len_k > 0 && p.chunk_queries > 0 && w.len_q >= p.chunk_queries;
  return w;
}

// How wide an item of so many keys is.
__device__ __forceinline__ int cost_of(int keys, const PagedParams& p) {
  return (keys >> p.cost_keys_log2) + 1;
}

// Keys of a split that are left to one tile of rows.
__device__ __forceinline__ int share_of(int keys, int splits) {
  constexpr int kRound = 64;
  return ceil_div(ceil_div(keys, splits), kRound) * kRound;
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
  int token_q, len_q, len_k;
  int split, splits;
  int key_begin, key_end;    // the keys of this split that any row sees
  int seen_end;              // the end of those of all splits
  int share, cost;           // keys of a split; how wide the item is
  int full_begin, full_end;  // those of the sequence that every row sees
  const char *key, *value;   // row 0 of block 0 of the head
  const char* table;         // the sequence's row of the table

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

// Tells the combining kernel of a sequence.
__device__ __forceinline__ void tell(int sequence, const PagedWork& w, int splits,
                                     const PagedParams& p) {
  p.sequences[sequence] = {w.token_q, w.len_q, splits};
}

// What is the same in all tasks of a sequence over pairs (query, head), and the keys of its split:
// the task has its rows and what they see already.
template <int kCacheBytes>
__device__ __forceinline__ void fill_task(PagedTask& task, int sequence, const PagedWork& w,
                                          int head, int split, const PagedParams& p) {
  task.valid = w.valid;
  task.sequence = sequence;
  task.head = head;
  task.token_q = w.token_q;
  task.len_q = w.len_q;
  task.len_k = w.len_k;
  task.split = split;
  task.splits = w.splits;
  task.cost = w.cost;
  task.key_begin = min(task.key_begin + split * task.share, task.seen_end);
  task.key_end = min(task.key_begin + task.share, task.seen_end);
  task.key = static_cast<const char*>(p.key) + head * p.key_strides.head * kCacheBytes;
  task.value = static_cast<const char*>(p.value) + head * p.value_strides.head * kCacheBytes;
  task.table = static_cast<const char*>(p.block_table) +
               sequence * p.table_row * (p.table_is_int64 ? int64_t{8} : int64_t{4});
}

// The head of item `item` of a lane, of which each head has `of_head`.
__device__ __forceinline__ int head_of(int item, int of_head, int lane, const PagedParams& p) {
  return item / of_head * p.head_lanes + lane;
}

// The items of the kernel for few rows: one tile has all of a sequence's. Finding them is what a
// decode waits for before it reads its first key: there is one division.
template <int kCacheBytes>
struct FewRowsItems {
  using Task = PagedTask;
  static constexpr bool kTickets = true;
  // Keys that any row sees: [x, y).
  static __device__ __forceinline__ int2 seen(const PagedWork& w, const PagedParams& p) {
    const int begin = max(w.len_k - w.len_q - p.left, 0);
    return {begin, max(min(w.len_k + p.right, w.len_k), begin)};
  }
  static __device__ __forceinline__ PagedWork find(int i, const PagedParams& p) {
    PagedWork w = find_sequence(i, p);
    const int2 keys = seen(w, p);
    w.tiles = w.few && w.len_q > 0;
    w.splits = max(min(p.most_splits, ceil_div(keys.y - keys.x, kLeastSplitKeys)), 1);
    w.share = share_of(keys.y - keys.x, w.splits);
    w.cost = cost_of(w.share, p);
    return w;
  }
  static __device__ __forceinline__ void note(int i, const PagedWork& w, const PagedParams& p) {
    if (blockIdx.x == 0 && w.few) tell(i, w, w.splits, p);
  }
  static __device__ __forceinline__ int lanes(const PagedParams& p) { return p.head_lanes; }
  // Of a lane.
  static __device__ __forceinline__ int count(const PagedWork& w, const PagedParams& p) {
    return w.tiles * w.splits * (p.heads_k / p.head_lanes);
  }
  static __device__ __forceinline__ void take(PagedTask& task, int sequence, const PagedWork& w,
                                              int item, int lane, const PagedParams& p) {
    take_split(task, sequence, w, head_of(item, w.splits, lane, p), item % w.splits, p);
  }
  static __device__ __forceinline__ void take_split(PagedTask& task, int sequence,
                                                    const PagedWork& w, int head, int split,
                                                    const PagedParams& p) {
    const int2 keys = seen(w, p);
    task.first_row = 0;
    task.rows = w.len_q * p.group;  // more than a tile has where they are not valid
    task.seen_end = keys.y;
    task.share = w.share;
    task.key_begin = keys.x;
    task.full_begin = max(w.len_k - 1 - p.left, 0);
    task.full_end = min(w.len_k - w.len_q + p.right + 1, w.len_k);
    fill_task<kCacheBytes>(task, sequence, w, head, split, p);
  }
};

// Of the kernel for more rows. Every tile of a sequence has as many splits.
template <int kBlockQ, int kCacheBytes>
struct ManyRowsItems {
  using Task = PagedTask;
  static constexpr bool kTickets = false;
  static __device__ __forceinline__ PagedWork find(int i, const PagedParams& p) {
    PagedWork w = find_sequence(i, p);
    const int rows = w.len_q * p.group;
    // What a tile sees at most.
    int span = w.len_k;
    if (p.left < kNoLimit && p.right < kNoLimit) {
      const int64_t window = int64_t{p.left} + p.right + (kBlockQ - 1) / p.group + 2;
      span = static_cast<int>(min(window, int64_t{span}));
    }
    const int most = p.most_splits / max(ceil_div(rows, kDecodeRows), 1);
    w.tiles = w.few || w.chunk ? 0 : ceil_div(rows, kBlockQ);
    w.splits = max(min(most, ceil_div(span, kLeastSplitKeys)), 1);
    w.cost = cost_of(ceil_div(span, w.splits), p);
    return w;
  }
  static __device__ __forceinline__ void note(int i, const PagedWork& w, const PagedParams& p) {
    if (blockIdx.x == 0 && !w.few) tell(i, w, w.chunk ? 1 : w.splits, p);
  }
  static __device__ __forceinline__ int lanes(const PagedParams& p) { return p.head_lanes; }
  // Of a lane.
  static __device__ __forceinline__ int count(const PagedWork& w, const PagedParams& p) {
    return w.tiles * w.splits * (p.heads_k / p.head_lanes);
  }
  static __device__ __forceinline__ void take(PagedTask& task, int sequence, const PagedWork& w,
                                              int item, int lane, const PagedParams& p) {
    const int of_head = w.tiles * w.splits, tile = item % of_head / w.splits;
    task.first_row = folded_tile(tile, w.tiles) * kBlockQ;
    task.rows = min(w.len_q * p.group - task.first_row, kBlockQ);
    task.len_q = w.len_q;
    task.len_k = w.len_k;
    const int last = task.rows - 1, begin = task.begin(0, p);
    task.seen_end = max(task.end(last, p), begin);
    task.share = share_of(task.seen_end - begin, w.splits);
    task.key_begin = begin;
    task.full_begin = task.begin(last, p);
    task.full_end = task.end(0, p);
    fill_task<kCacheBytes>(task, sequence, w, head_of(item, of_head, lane, p), item % w.splits, p);
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
  // The same from the sequence's row of the table, if there is such a key; if not, no cache has its
  // block.
  __device__ __forceinline__ void look_up(int key, bool is_there, const char* table,
                                          const PagedParams& p) {
    const int page = page_of(key, p);
    const uint32_t* at =
        reinterpret_cast<const uint32_t*>(ptx::mad_wide(page, p.table_step, table));
    row = key - page * p.page;
    high = !is_there;
    if (is_there) low = __ldg(at);
    if (is_there && p.table_is_int64) high = __ldg(at + 1);
  }
  // Whether a cache of so many blocks has that block. Negative numbers are large ones here.
  __device__ __forceinline__ bool in(int blocks) const {
    return high == 0 && low < static_cast<uint32_t>(blocks);
  }
  __device__ __forceinline__ bool sound(const PagedParams& p) const { return in(p.blocks); }
  // Of all rows of the cache.
  __device__ __forceinline__ uint32_t number(const PagedParams& p) const {
    return low * p.page + row;
  }
  // Bytes from row 0 of block 0.
  template <int kBytes>
  __device__ __forceinline__ int64_t offset(int64_t block_stride, int64_t row_stride) const {
    return (low * block_stride + row * row_stride) * kBytes;
  }
};

// Gives out a CTA's items, one after the other, to its first thread: those that begin in its share
// of the row of all. With tickets, three quarters of the row are shared out that way; the rest are
// units of an item or more, which CTAs take as they come to them: memory does not serve all SMs
// alike.
template <int kThreads, class Items>
struct PagedSchedule {
  using Task = typename Items::Task;
  // Shared: the work of all sequences before those of each thread, which has the t-th part of them,
  // and at the end that of all; behind it words, which first hold a sum for each warp.
  int* before;
  enum Word {
    kAll = kThreads,                          // the work of all
    kAt,                                      // where the CTA's next item may begin,
    kEnd,                                     // what comes after its share or unit,
    kLane,                                    // and in which row that is
    kGiven,                                   // where the units begin
    kUnit,                                    // how long they are; 0: there are none
    kItems = kThreads + kPagedWorkWords - 1,  // how many items there are
  };
  static_assert(kUnit < kItems && kAll + kThreads / 32 < kItems);

  // Nothing to give out, by the first thread.
  __device__ __forceinline__ void start_empty() { before[kAt] = before[kEnd] = before[kUnit] = 0; }

  // By all threads. Returns whether cumulative lengths fall somewhere: then there is nothing.
  __device__ __forceinline__ bool start(const PagedParams& p) {
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    if (thread == 0) before[kItems] = 0;
    int mine = 0, items = 0;
    bool fall = false;
#pragma unroll 1
    for (int i = first_of(thread, p); i < first_of(thread + 1, p); ++i) {
      const PagedWork w = Items::find(i, p);
      Items::note(i, w, p);
      mine += Items::count(w, p) * w.cost;
      items += Items::count(w, p);
      fall |= falls(i, p);
    }
    const bool broken = __syncthreads_or(fall);
    if (Items::kTickets && items > 0) atomicAdd(before + kItems, items);
    int sum = mine;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int left = __shfl_up_sync(0xffffffffu, sum, step);
      if (lane >= step) sum += left;
    }
    int* const warps = before + kAll + 1;
    if (lane == 31) warps[warp] = sum;
    __syncthreads();  // every warp's sum is there
#pragma unroll 1
    for (int i = 0; i < warp; ++i) sum += warps[i];
    before[thread] = sum - mine;
    if (thread == kThreads - 1) before[kAll] = sum;
    __syncthreads();  // the work of all is there
    if (thread == 0) share_out(broken, p);
    return broken;
  }

  // The next item, by the first thread; false: there is none any more.
  __device__ __forceinline__ bool next(Task& task, const PagedParams& p) {
    do {
      int at = before[kAt];
      const int end = before[kEnd];
      while (at < end) {
        int part = 0, parts = kThreads;  // the last part that begins at `at` or before
#pragma unroll 1
        while (parts > 1) {
          const int half = parts / 2;
          const bool upper = before[part + half] <= at;
          part += upper ? half : 0;
          parts = upper ? parts - half : half;
        }
        const PagedPlace place = find(task, part, at, p);
        at = before[kAt] = place.next;
        if (place.found && place.start < end) return true;
      }
    } while (take_ticket(p));
    return false;
  }

  // The same where the next item is known, as wide as `cost`: false if it is not in the share.
  __device__ __forceinline__ bool take_next(int cost) {
    const int at = before[kAt];
    if (at >= before[kEnd]) return false;
    before[kAt] = at + cost;
    return true;
  }

 private:
  // The first sequence of a thread.
  static __device__ __forceinline__ int first_of(int thread, const PagedParams& p) {
    return min(thread * ceil_div(p.batch, kThreads), p.batch);
  }

  __device__ __forceinline__ void share_out(bool broken, const PagedParams& p) {
    constexpr int kUnits = 8;  // of a CTA, on average
    const int lanes = Items::lanes(p), shares = gridDim.x / lanes, share = blockIdx.x / lanes;
    const int all = before[kAll];
    int given = all;
    before[kUnit] = 0;
    if (Items::kTickets && p.tickets && !broken && all > 0) {
      given = all - all / 4;
      before[kGiven] = given;
      before[kUnit] = max(all / 4 / (kUnits * shares), all / before[kItems]);
    }
    // Shares differ by 1 at most, the first ones are longer.
    const int each = given / shares, longer = given - each * shares;
    before[kAt] = each * share + min(share, longer);
    before[kEnd] = broken ? 0 : each * (share + 1) + min(share + 1, longer);
    before[kLane] = blockIdx.x % lanes;
  }

  // Goes on with a unit; false: none is left.
  __device__ __forceinline__ bool take_ticket(const PagedParams& p) {
    if (!Items::kTickets || before[kUnit] == 0) return false;
    ptx::griddepcontrol_wait();  // the kernel before this one has set them to 0
    const int ticket = atomicAdd(p.tickets, 1), lanes = Items::lanes(p);
    const int unit = ticket / lanes, begin = before[kGiven] + unit * before[kUnit];
    if (begin >= before[kAll]) {
      before[kUnit] = 0;
      return false;
    }
    before[kAt] = begin;
    before[kEnd] = min(begin + before[kUnit], before[kAll]);
    before[kLane] = ticket - unit * lanes;
    return true;
  }

  // The first item of a part of the sequences that begins at `at` or after, if there is one.
  __device__ __forceinline__ PagedPlace find(Task& task, int part, int at,
                                             const PagedParams& p) const {
    int from = before[part];
#pragma unroll 1
    for (int i = first_of(part, p); i < first_of(part + 1, p); ++i) {
      const PagedWork w = Items::find(i, p);
      const int items = Items::count(w, p), width = items * w.cost;
      if (at >= from + width) {
        from += width;
        continue;
      }
      const int item = ceil_div(at - from, w.cost);
      if (item == items) return {from + width, from + width, false};
      Items::take(task, i, w, item, before[kLane], p);
      return {from + item * w.cost, from + (item + 1) * w.cost, true};
    }
    return {at, before[part + 1], false};
  }
};

}  // namespace flashmoe::cuda
