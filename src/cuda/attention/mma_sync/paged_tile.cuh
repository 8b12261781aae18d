// What a tile of rows over pages is made of: its configuration, Q on its way in, and K and V
// through the block table.
#pragma once

#include <type_traits>

#include "cuda/attention/paged_work.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/tile/chunk.cuh"
#include "cuda/tile/copy.cuh"
#include "cuda/tile/dtype.cuh"
#include "cuda/tile/e4m3.cuh"
#include "cuda/tile/product.cuh"

namespace flashmoe::cuda {

// A kernel's tiles. With few rows (kFewRows) every team of warps has keys of its own, loads them
// itself and waits for nobody; what the teams found is merged at the end. With many rows all warps
// are one team. Warps of a team share out its rows, and where they are more than there are m16
// fragments of rows, each takes some of the columns of O and computes all scores itself.
//   T       the query's type: what Q comes in and O leaves in
//   Product the type of the products: T, or fp16 where the cache is fp8, which fp16 holds exactly
template <class Chip_, class T, class Product, PagedTile kTile_, bool kFewRows_>
struct PagedShape {
  using Chip = Chip_;
  using Query = T;
  using Type = Product;
  static constexpr PagedTile kTile = kTile_;
  static constexpr bool kFewRows = kFewRows_;
  static constexpr int kCacheBytes = kTile.cache_bytes;
  static constexpr bool kFp8 = kCacheBytes == 1;
  static constexpr int kThreads = kTile.threads(), kDim = kTile.head_dim;
  static constexpr int kStages = kTile.stages, kRows = kTile.block_q;
  static constexpr int kTeams = kTile.teams;
  static constexpr int kTeamWarps = kTile.warps / kTeams;
  static constexpr int kColumnWarps = kFewRows ? kTeamWarps : kTeamWarps * 16 / kRows;
  static constexpr int kKeys = kTile.block_k / kTeams;  // of a team's tile
  static constexpr int kWarpKeys = kKeys / kTeamWarps;  // that a warp loads of a tile
  static constexpr int kColumns = kDim / kColumnWarps;  // of O, of a warp

  // Fragments of a warp, as the pieces of the dense kernel want to know it: of rows (m16), keys and
  // columns of O (n8). With few rows the other way round: see paged_decode.cuh.
  static constexpr int kRowTiles = kFewRows ? kRows / 8 : 1;
  static constexpr int kKeyTiles = kKeys / (kFewRows ? 16 : 8);
  static constexpr int kDimTiles = kColumns / (kFewRows ? 16 : 8);
  static constexpr int kDimSteps = kDim / 16, kKeySteps = kKeys / 16;
  static constexpr int kQSteps = kTile.keeps_queries() ? kDimSteps : 0;  // of Q in registers
  using Layout = Swizzled<kDim>;                                         // of Q in shared memory
  using CacheLayout = Swizzled<kDim, kCacheBytes>;                       // of K and V

  // Byte offsets in shared memory.
  static constexpr uint32_t kTileBytes = kKeys * kDim * kCacheBytes;
  static constexpr uint32_t kSmemQ = 0;
  static constexpr uint32_t kSmemKv = kTile.query_bytes();      // stages of each team's K and V
  static constexpr uint32_t kSmemFactors = kTile.body_bytes();  // fp8: of the rows
  static constexpr uint32_t kSmemTeams = kSmemFactors + kTile.factor_bytes();  // see TeamWords
  static constexpr uint32_t kSmemWork = kSmemTeams + kTile.team_bytes();
  static constexpr uint32_t kSmemTasks = kSmemWork + kTile.work_bytes();
  static_assert(kSmemTasks + kPagedTasks * kPagedTaskBytes == kTile.shared_bytes());

  // How a warp copies rows of K and V: lanes of a row, rows at once, passes over a row. Of a row
  // 128 bytes at once: the rest lies at constant distances, and an address takes five instructions.
  static constexpr int kRowLanes = CacheLayout::kChunks < 8 ? CacheLayout::kChunks : 8;
  static constexpr int kRowsAtOnce = 32 / kRowLanes;
  static constexpr int kRowPasses = CacheLayout::kChunks / kRowLanes;
  static_assert(kWarpKeys % kRowsAtOnce == 0 && CacheLayout::kChunks % kRowLanes == 0);

  // How many rows a lane copies. It asks for each by a constant, since lanes that copy the same
  // rows look up these: see looked_up_row().
  static constexpr int kRowsOfLanes = kWarpKeys / kRowsAtOnce;
  static_assert(kRowsOfLanes <= kRowLanes && (kWarpKeys & (kWarpKeys - 1)) == 0);

  static_assert(kFewRows ? kRows == 8 || kRows == kDecodeRows
                         : kTeams == 1 && kRows % 16 == 0 && kTeamWarps % (kRows / 16) == 0);
  // A team leaves its O in the place of a tile: see merge_teams().
  static_assert(!kFewRows || kRows * kDim * 4 <= 2 * kTileBytes);
  static_assert(kKeys % 16 == 0 && kWarpKeys > 0 && kWarpKeys <= 32 && kColumns % 16 == 0);
  static_assert(kTileBytes % 1024 == 0 || kDim * kCacheBytes < 128);
  static_assert(kTileBytes % 128 == 0 && kSmemKv % 128 == 0 && kSmemTasks % 16 == 0);
};

// A warp's place.
template <class C>
struct PagedWarp {
  int lane, team, in_team, row, column;  // row: its first, of the tile; column: its first, of O
  __device__ __forceinline__ PagedWarp() {
    const uint32_t thread = ptx::opaque_thread(), warp = thread / 32;
    lane = thread % 32;
    team = warp / C::kTeamWarps;
    in_team = warp % C::kTeamWarps;
    row = in_team / C::kColumnWarps * 16;
    column = in_team % C::kColumnWarps * C::kColumns;
  }
};

// Which of a warp's columns of O lane `lane` has in fragment d, as the first or the second (c).
template <class C>
__device__ __forceinline__ int lane_column(int d, int c, uint32_t lane) {
  if constexpr (C::kFewRows) {  // a row of O^T
    return 16 * d + (C::kFp8 ? 2 * (lane / 4) + c : lane / 4 + 8 * c);
  } else {  // of fp8 even and odd columns of 16
    const int quarter = lane % 4;
    return C::kFp8 ? 8 * (d & ~1) + 4 * quarter + 2 * c + d % 2 : 8 * d + 2 * quarter + c;
  }
}

// Waits for the warps of the team.
template <class C>
__device__ __forceinline__ void sync_team() {
  static_assert(C::kTeamWarps == 1 || C::kTeams == 1 || C::kTeams == 2);
  if constexpr (C::kTeamWarps == 1) {
    __syncwarp();
  } else if constexpr (C::kTeams == 1) {
    __syncthreads();
  } else {
    constexpr int kTeamThreads = C::kTeamWarps * 32;
    ptx::bar_sync(1 + static_cast<int>(threadIdx.x) / kTeamThreads, kTeamThreads);
  }
}

// Where row `row` of the tile is in a tensor (tokens, heads, ...), in elements.
__device__ __forceinline__ int64_t row_offset(int row, const Strides& strides,
                                              const PagedTask& task, const PagedParams& p) {
  const int pair = task.first_row + row, query = pair / p.group;
  return (task.token_q + int64_t{query}) * strides.row +
         (task.head * p.group + pair - query * p.group) * strides.head;
}

// Which of a warp's keys lane `lane` looks up, others the same one perhaps, and which lane looks up
// key `row`.
template <class C>
__device__ __forceinline__ int looked_up_row(uint32_t lane) {
  return lane % C::kRowsOfLanes * C::kRowsAtOnce + lane / C::kRowLanes;
}
template <class C>
__device__ __forceinline__ int lane_of_row(uint32_t row) {
  return row / C::kRowsAtOnce + row % C::kRowsAtOnce * C::kRowLanes;
}
// What the lane knows that looked up row i + lane / kRowLanes, where i is a multiple of
// kRowsAtOnce.
template <class C, class Number>
__device__ __forceinline__ Number of_row(Number x, int i) {
  return __shfl_sync(0xffffffffu, x, i / C::kRowsAtOnce, C::kRowLanes);
}

// From a lane's address in a tile, that of the same chunk `rows` rows on, if the two row numbers
// have no bit in common.
template <class Layout>
__device__ __forceinline__ uint32_t rows_on(uint32_t address, int rows) {
  const int mixed = rows >> Layout::kRowShift & (Layout::kSwizzle - 1);
  return (address ^ mixed * 16) + rows * Layout::kRowBytes;
}

// Where a lane's first chunk of a warp's first keys goes in a tile.
template <class C>
__device__ __forceinline__ uint32_t copied_chunk(int first, uint32_t lane) {
  return C::CacheLayout::at(first + lane / C::kRowLanes, lane % C::kRowLanes);
}

// Copies a warp's keys of a tile where rows of the whole cache are one step apart and as wide as
// the kernel's: to `shared` and behind it, from the lane's chunk of row 0. `number` is that of the
// row that the lane looked up.
template <class C>
__device__ __forceinline__ void copy_even_rows(uint32_t shared, const char* keys,
                                               const char* values, uint32_t number,
                                               const PagedParams& p) {
  using Layout = typename C::CacheLayout;
#pragma unroll
  for (int i = 0; i < C::kWarpKeys; i += C::kRowsAtOnce) {
    const uint32_t from = of_row<C>(number, i), to = rows_on<Layout>(shared, i);
    const char* const key = ptx::mad_wide(from, p.key_step, keys);
    const char* const value = ptx::mad_wide(from, p.value_step, values);
#pragma unroll
    for (int pass = 0; pass < C::kRowPasses; ++pass) {
      const int chunk = pass * C::kRowLanes;
      C::Chip::copy_16(to + chunk * 16, key + chunk * 16, true);
      C::Chip::copy_16(to + chunk * 16 + C::kTileBytes, value + chunk * 16, true);
    }
  }
}

// The same for one tensor, whose rows are where lanes found them; zeros where that is negative, and
// beyond `dim`. `from` is the lane's chunk of row 0.
template <class C>
__device__ __forceinline__ void copy_rows(uint32_t shared, int first, const char* from,
                                          int64_t offset, int dim, uint32_t lane) {
  using Layout = typename C::CacheLayout;
  shared += copied_chunk<C>(first, lane);
#pragma unroll
  for (int i = 0; i < C::kWarpKeys; i += C::kRowsAtOnce) {
    const int64_t where = of_row<C>(offset, i);
#pragma unroll
    for (int pass = 0; pass < C::kRowPasses; ++pass) {
      const int chunk = lane % C::kRowLanes + pass * C::kRowLanes;
      const bool there = where >= 0 && chunk * 16 < dim * C::kCacheBytes;
      C::Chip::copy_16(rows_on<Layout>(shared, i) + pass * C::kRowLanes * 16,
                       from + where + pass * C::kRowLanes * 16, there);
    }
  }
}

// The same number by number, from rows that lie in any way; zeros beyond their end.
template <class C>
__device__ __forceinline__ void gather_rows(uint32_t shared, int first, const char* from,
                                            int64_t offset, int64_t column, int dim, int lane) {
  using Layout = typename C::CacheLayout;
  using Number = std::conditional_t<C::kFp8, uint8_t, uint16_t>;
  constexpr int kNumbers = 4 / C::kCacheBytes;  // of a word: more at once take registers
  constexpr int kWords = C::kDim / kNumbers;    // of a row
#pragma unroll 1
  for (int i = lane; i < C::kWarpKeys * kWords; i += 32) {
    const int row = i / kWords, word = i % kWords;
    const int64_t where = __shfl_sync(0xffffffffu, offset, lane_of_row<C>(row));
    uint32_t packed = 0;
#pragma unroll
    for (int e = 0; e < kNumbers; ++e) {
      const int col = word * kNumbers + e;
      if (where < 0 || col >= dim) continue;
      const uint32_t x =
          *reinterpret_cast<const Number*>(from + where + col * column * C::kCacheBytes);
      packed |= x << (e * C::kCacheBytes * 8);
    }
    ptx::st_shared_u32(shared + Layout::at(first + row, word / 4) + word % 4 * 4, packed);
  }
  static_assert(C::kWarpKeys * kWords % 32 == 0, "all lanes go round together");
}

// A team's tiles of keys, loaded to their stages one after the other, also those of the next task
// before the current one has ended: its stages are then full when it begins.
template <class C>
struct PagedLoader {
  static constexpr int kAhead = C::kStages - 1;  // tiles that are on their way

  PageRow page;  // the lane's key of the tile that is loaded next
  int key = 0;   // that key
  // Of its task: the end of its keys, its row of the table, and the lane's chunks of row 0.
  int key_end = 0;
  const char *table = nullptr, *keys = nullptr, *values = nullptr;
  int left = 0;     // tiles of that task that are still to be loaded
  int ahead = 0;    // tiles that are loaded or on their way, and not used yet
  int stage = 0;    // of the tile that is used next
  int in_next = 0;  // 1: that task is the next one
  int bad = 0;  // whether the table led out of the cache, in the current task, and times 2 the next

  static __device__ __forceinline__ int first_key(int tile, const PagedWarp<C>& warp,
                                                  const PagedTask& task) {
    return task.key_begin + (tile * C::kTeams + warp.team) * C::kKeys;
  }
  // How many tiles the team has.
  static __device__ __forceinline__ int tiles(const PagedWarp<C>& warp, const PagedTask& task) {
    const int all = ceil_div(task.key_end - task.key_begin, C::kKeys);
    return ceil_div(max(all - warp.team, 0), C::kTeams);
  }
  static __device__ __forceinline__ int wrap(int stage) {
    return C::kStages == 1 ? 0 : stage >= C::kStages ? stage - C::kStages : stage;
  }
  static __device__ __forceinline__ uint32_t stage_at(int stage, const PagedWarp<C>& warp) {
    return C::kSmemKv + (warp.team * C::kStages + stage) * 2 * C::kTileBytes;
  }
  // The stage that no tile is in, nor on its way to.
  __device__ __forceinline__ uint32_t free_stage(const PagedWarp<C>& warp) const {
    return stage_at(wrap(stage + kAhead), warp);
  }

  // Begins with task `current`, whose first tiles may be on their way already; or, `again`, once
  // more.
  __device__ __forceinline__ void begin(int current, bool again, uint32_t smem,
                                        const PagedWarp<C>& warp, const PagedTask* tasks,
                                        const PagedParams& p) {
    if (again) {
      C::Chip::template wait<0>();
      ahead = in_next = 0;
    }
    bad = in_next ? bad / 2 : 0;
    if (!in_next) enter(current, warp, tasks, p);
    in_next = 0;
    if (left == 0) enter_next(current, warp, tasks, p);
#pragma unroll 1
    while (ahead < kAhead && left > 0) load_tile(current, smem, warp, tasks, p);
  }
  // Waits for the next tile, by the team, and has another one loaded. Returns where the tile is.
  __device__ __forceinline__ uint32_t next(int current, uint32_t smem, const PagedWarp<C>& warp,
                                           const PagedTask* tasks, const PagedParams& p) {
    if constexpr (kAhead == 0) {
      sync_team<C>();  // the team is done with the tile before
      load_tile(current, smem, warp, tasks, p);
    }
    if (kAhead > 1 && ahead == kAhead) {
      C::Chip::template wait<(kAhead > 1 ? kAhead - 1 : 0)>();
    } else {
      C::Chip::template wait<0>();
    }
    sync_team<C>();  // the tile is there for the team, which is done with the one before
    const uint32_t here = stage_at(stage, warp);
    // The stage of the tile before is free, and one more tile may be on its way.
    if (kAhead > 0 && left > 0) load_tile(current, smem, warp, tasks, p);
    --ahead;
    stage = wrap(stage + 1);
    return here;
  }

 private:
  __device__ __forceinline__ void look_up(const PagedParams& p) {
    page.look_up(key, key < key_end, table, p);
  }
  __device__ __forceinline__ void enter(int number, const PagedWarp<C>& warp,
                                        const PagedTask* tasks, const PagedParams& p) {
    const PagedTask& task = tasks[number % kPagedTasks];
    left = tiles(warp, task);
    key = first_key(0, warp, task) + warp.in_team * C::kWarpKeys + looked_up_row<C>(warp.lane);
    key_end = task.key_end;
    table = task.table;
    keys = ptx::mad_wide(warp.lane % C::kRowLanes, 16, task.key);
    values = ptx::mad_wide(warp.lane % C::kRowLanes, 16, task.value);
    if (left > 0) look_up(p);
  }
  // Goes on to the task after `current`, unless it is there already or there is none. With many
  // rows the work is not loading, and registers are few.
  __device__ __forceinline__ void enter_next(int current, const PagedWarp<C>& warp,
                                             const PagedTask* tasks, const PagedParams& p) {
    const PagedTask& next = tasks[(current + 1) % kPagedTasks];
    if (!C::kFewRows || in_next || !next.more || !next.valid) return;
    in_next = 1;
    enter(current + 1, warp, tasks, p);
  }
  __device__ __forceinline__ void load_tile(int current, uint32_t smem, const PagedWarp<C>& warp,
                                            const PagedTask* tasks, const PagedParams& p) {
    const uint32_t sK = smem + stage_at(wrap(stage + ahead), warp), sV = sK + C::kTileBytes;
    const int first = warp.in_team * C::kWarpKeys;
    if (__all_sync(0xffffffffu, page.in(p.even_blocks))) {
      copy_even_rows<C>(sK + copied_chunk<C>(first, warp.lane), keys, values, page.number(p), p);
    } else {
      const bool sound = page.sound(p);
      if (key < key_end && !sound) bad |= in_next ? 2 : 1;
      int64_t from_key = -1, from_value = -1;  // nothing is read
      if (sound) {
        from_key = page.offset<C::kCacheBytes>(p.key_block, p.key_strides.row);
        from_value = page.offset<C::kCacheBytes>(p.value_block, p.value_strides.row);
      }
      if (p.whole_chunks) {
        copy_rows<C>(sK, first, keys, from_key, p.head_dim, warp.lane);
        copy_rows<C>(sV, first, values, from_value, p.head_dim_v, warp.lane);
      } else {
        const int back = warp.lane % C::kRowLanes * 16;
        gather_rows<C>(sK, first, keys - back, from_key, p.key_column, p.head_dim, warp.lane);
        gather_rows<C>(sV, first, values - back, from_value, p.value_column, p.head_dim_v,
                       warp.lane);
      }
    }
    C::Chip::commit();
    ++ahead;
    key += C::kTeams * C::kKeys;
    if (--left > 0) {
      look_up(p);
    } else {
      enter_next(current, warp, tasks, p);
    }
  }
};

// A lane's fragments of Q from global memory. Of row lane / 4 + 8 `half`, pair_at(half, step, i) is
// where the columns 16 step + 8 i + lane % 4 * 2 and the next one go.
template <class C, int kHalves, class Pair>
__device__ __forceinline__ void load_query_fragments(const Pair& pair_at, const PagedWarp<C>& warp,
                                                     const PagedTask& task, const PagedParams& p) {
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    const int row = warp.row + 8 * half + warp.lane / 4;
    const uint16_t* from =
        static_cast<const uint16_t*>(p.query) + row_offset(row, p.query_strides, task, p);
    const int dim = row < task.rows ? p.head_dim : 0;
#pragma unroll
    for (int i = 0; i < 2 * C::kQSteps; ++i) {
      const int column = 8 * i + warp.lane % 4 * 2;
      uint32_t& pair = pair_at(half, i / 2, i % 2);
      pair = column + 1 < dim ? *reinterpret_cast<const uint32_t*>(from + column) : 0;
    }
    if (p.head_dim % 2 == 0) continue;  // one branch for all pairs: most have no half
#pragma unroll
    for (int i = 0; i < 2 * C::kQSteps; ++i) {
      const int column = 8 * i + warp.lane % 4 * 2;
      if (column + 1 == dim) pair_at(half, i / 2, i % 2) = from[column];
    }
  }
}

// Eight numbers of a row of Q; zeros beyond its end, and where there is no row.
template <class T>
__device__ __forceinline__ uint4 query_chunk(int row, int chunk, const PagedTask& task,
                                             const PagedParams& p) {
  const char* from = static_cast<const char*>(p.query) +
                     row_offset(row, p.query_strides, task, p) * 2 + chunk * 16;
  return read_chunk<T, true>(from, row < task.rows ? p.head_dim - 8 * chunk : 0);
}

// Q in shared memory where the products are of its own type: rows as they are, zeros beyond.
template <class C>
__device__ __forceinline__ void load_queries(char* shared, const PagedTask& task,
                                             const PagedParams& p) {
  using Layout = typename C::Layout;
  constexpr int kSteps = (C::kRows * Layout::kChunks + C::kThreads - 1) / C::kThreads;
#pragma unroll 4
  for (int i = 0; i < kSteps; ++i) {
    const int at = threadIdx.x + i * C::kThreads, row = at / Layout::kChunks;
    const int chunk = at % Layout::kChunks;
    if (C::kRows * Layout::kChunks % C::kThreads && row >= C::kRows) break;
    *reinterpret_cast<uint4*>(shared + C::kSmemQ + Layout::at(row, chunk)) =
        query_chunk<typename C::Query>(row, chunk, task, p);
  }
}

}  // namespace flashmoe::cuda
