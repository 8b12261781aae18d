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

// One of the two shapes of a kernel's tiles. With few rows (kDecode) every team of warps has keys
// of its own, loads them itself and waits for nobody; what the teams found is merged at the end.
// With many rows all warps are one team. Warps of a team share out its rows, and where they are
// more than there are m16 fragments of rows, each takes some of the columns of O and computes all
// scores itself.
//   T       the query's type: what Q comes in and O leaves in
//   Product the type of the products: T, or fp16 where the cache is fp8, which fp16 holds exactly
template <class Chip_, class T, class Product, PagedTile kTile_, bool kDecode>
struct PagedShape {
  using Chip = Chip_;
  using Query = T;
  using Type = Product;
  static constexpr PagedTile kTile = kTile_;
  static constexpr int kCacheBytes = kTile.cache_bytes;
  static constexpr bool kFp8 = kCacheBytes == 1;
  static constexpr int kThreads = kTile.threads(), kDim = kTile.head_dim;
  static constexpr int kStages = kTile.stages, kBlockQ = kTile.block_q;
  static constexpr int kTeams = kDecode ? kTile.teams : 1;
  static constexpr int kTeamWarps = kTile.warps / kTeams;
  static constexpr int kColumnWarps = kDecode ? kTeamWarps : kTile.row_columns();
  static constexpr int kRows = kTeamWarps / kColumnWarps * 16;
  static constexpr int kKeys = kDecode ? kTile.team_keys : kTile.block_k;
  static constexpr int kWarpKeys = kKeys / kTeamWarps;  // that a warp loads of a tile
  static constexpr int kColumns = kDim / kColumnWarps;  // of O, of a warp

  // As the pieces of the dense kernel want to know it.
  static constexpr int kRowTiles = 1, kKeyTiles = kKeys / 8, kDimTiles = kColumns / 8;
  static constexpr int kDimSteps = kDim / 16, kKeySteps = kKeys / 16;
  static constexpr int kQSteps = kDim <= 128 ? kDimSteps : 0;  // of Q that stay in registers
  using Layout = Swizzled<kDim>;                               // of Q
  using CacheLayout = Swizzled<kDim, kCacheBytes>;             // of K and V

  // Byte offsets in shared memory.
  static constexpr uint32_t kTileBytes = kKeys * kDim * kCacheBytes;
  static constexpr uint32_t kSmemQ = 0;
  static constexpr uint32_t kSmemKv = kTile.query_bytes();  // stages of each team's K and V
  static constexpr uint32_t kSmemMerge = kSmemKv;
  static constexpr uint32_t kSmemFactors = kTile.body_bytes();  // fp8: of the rows
  static constexpr uint32_t kSmemWork = kSmemFactors + kTile.factor_bytes();
  static constexpr uint32_t kSmemTask = kSmemWork + kTile.work_bytes();
  static_assert(kSmemTask + kPagedTaskBytes == kTile.shared_bytes());

  // How a warp copies rows of K and V: lanes of a row, rows at once, passes over a row.
  static constexpr int kRowLanes =
      power_of_two_from(CacheLayout::kChunks < 32 ? CacheLayout::kChunks : 32);
  static constexpr int kRowsAtOnce = 32 / kRowLanes;
  static constexpr int kRowPasses = (CacheLayout::kChunks + 31) / 32;
  static_assert(kWarpKeys % kRowsAtOnce == 0 && CacheLayout::kChunks % kRowLanes == 0);

  static_assert(kRows * kDim * 2 <= kTile.query_bytes() && kRows % 16 == 0 && kRows > 0);
  static_assert(kKeys % 16 == 0 && kWarpKeys > 0 && kWarpKeys <= 32 && kColumns % 16 == 0);
  static_assert(kTeams * kStages * 2 * kTileBytes <= kStages * kTile.stage_bytes());
  static_assert(kTileBytes % 1024 == 0 || kDim * kCacheBytes < 128);
  static_assert(kTileBytes % 128 == 0 && kSmemKv % 128 == 0);
};

// A warp's place.
template <class C>
struct PagedWarp {
  int lane, team, in_team, row, column;  // row: its first, of the tile; column: its first, of O
  __device__ __forceinline__ PagedWarp() {
    const int thread = ptx::opaque_thread(), warp = thread / 32;
    lane = thread % 32;
    team = warp / C::kTeamWarps;
    in_team = warp % C::kTeamWarps;
    row = in_team / C::kColumnWarps * 16;
    column = in_team % C::kColumnWarps * C::kColumns;
  }
};

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
    ptx::bar_sync(1 + threadIdx.x / kTeamThreads, kTeamThreads);
  }
}

// Where row `row` of the tile is in a tensor (tokens, heads, ...), in elements.
__device__ __forceinline__ int64_t row_offset(int row, const Strides& strides,
                                              const PagedTask& task, const PagedParams& p) {
  const int pair = task.first_row + row, query = pair / p.group;
  return (task.token_q + int64_t{query}) * strides.row +
         (task.head * p.group + pair - query * p.group) * strides.head;
}

// The way of a warp's keys through the block table. A lane looks up one key a tile, ahead of time:
// a table's entry comes from far away, and the copies need it.
struct PageRow {
  int block = -1, row = 0;  // negative: nothing is read
  bool bad = false;         // whether the table led out of the cache

  __device__ __forceinline__ void look_up(int key, const PagedTask& task, const PagedParams& p) {
    block = -1;
    if (key >= task.key_end) return;
    const int page = key / p.page;
    const int64_t found =
        read_length(p.block_table, task.table + page * p.table_column, p.table_is_int64);
    row = key - page * p.page;
    if (found < 0 || found >= p.blocks) {
      bad = true;
    } else {
      block = static_cast<int>(found);
    }
  }
  // Bytes from row 0 of block 0; negative: nothing is read.
  template <int kBytes>
  __device__ __forceinline__ int64_t offset(int64_t block_stride, int64_t row_stride) const {
    return block < 0 ? -1 : (block * block_stride + row * row_stride) * kBytes;
  }
};

// Copies a warp's keys of a tile, one tensor of them: row i is where lane i found it.
template <class C>
__device__ __forceinline__ void copy_rows(uint32_t shared, int first, const char* from,
                                          int64_t offset, int dim, int lane) {
  using Layout = typename C::CacheLayout;
#pragma unroll
  for (int i = 0; i < C::kWarpKeys; i += C::kRowsAtOnce) {
    const int row = i + lane / C::kRowLanes;
    const int64_t where = __shfl_sync(0xffffffffu, offset, row);
#pragma unroll
    for (int pass = 0; pass < C::kRowPasses; ++pass) {
      const int chunk = lane % C::kRowLanes + pass * C::kRowLanes;
      const bool there = where >= 0 && chunk * 16 < dim * C::kCacheBytes;
      C::Chip::copy_16(shared + Layout::at(first + row, chunk), from + where + chunk * 16, there);
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
    const int64_t where = __shfl_sync(0xffffffffu, offset, row);
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

// A team's tiles of keys, loaded to their stages one after the other.
template <class C>
struct PagedLoader {
  PageRow page;
  int coming = 0;  // the tile that is loaded next, of the team's

  static __device__ __forceinline__ int first_key(int tile, const PagedWarp<C>& warp,
                                                  const PagedTask& task) {
    return task.key_begin + (tile * C::kTeams + warp.team) * C::kKeys;
  }
  // How many tiles the team has.
  static __device__ __forceinline__ int tiles(const PagedWarp<C>& warp, const PagedTask& task) {
    const int all = ceil_div(task.key_end - task.key_begin, C::kKeys);
    return ceil_div(max(all - warp.team, 0), C::kTeams);
  }
  static __device__ __forceinline__ uint32_t keys_at(int tile, const PagedWarp<C>& warp) {
    return C::kSmemKv + (warp.team * C::kStages + tile % C::kStages) * 2 * C::kTileBytes;
  }

  __device__ __forceinline__ void look_up(const PagedWarp<C>& warp, const PagedTask& task,
                                          const PagedParams& p) {
    // Lanes beyond the warp's keys look up what nobody reads, and must find nothing wrong there.
    const int key = first_key(coming, warp, task) + warp.in_team * C::kWarpKeys + warp.lane;
    page.look_up(warp.lane < C::kWarpKeys ? key : task.key_end, task, p);
  }
  __device__ __forceinline__ void load(uint32_t smem, const PagedWarp<C>& warp,
                                       const PagedTask& task, const PagedParams& p) {
    if (coming < tiles(warp, task)) {
      const uint32_t sK = smem + keys_at(coming, warp);
      const int first = warp.in_team * C::kWarpKeys;
      const int64_t key = page.offset<C::kCacheBytes>(p.key_block, p.key_strides.row);
      const int64_t value = page.offset<C::kCacheBytes>(p.value_block, p.value_strides.row);
      const uint32_t sV = sK + C::kTileBytes;
      if (p.whole_chunks) {
        copy_rows<C>(sK, first, task.key, key, p.head_dim, warp.lane);
        copy_rows<C>(sV, first, task.value, value, p.head_dim_v, warp.lane);
      } else {
        gather_rows<C>(sK, first, task.key, key, p.key_column, p.head_dim, warp.lane);
        gather_rows<C>(sV, first, task.value, value, p.value_column, p.head_dim_v, warp.lane);
      }
      ++coming;
      look_up(warp, task, p);
    }
    C::Chip::commit();
  }
};

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
