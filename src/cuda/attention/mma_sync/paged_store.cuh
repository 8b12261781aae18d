// The end of a tile over pages: accumulators and sums become output and LSE, or one split's part of
// them. Teams that had keys of their own are merged first.
#pragma once

#include "cuda/attention/mma_sync/fwd_store.cuh"
#include "cuda/attention/mma_sync/paged_decode.cuh"
#include "cuda/attention/mma_sync/paged_tile.cuh"

namespace flashmoe::cuda {

// The end of a row of the tile. A split's part has no sink: combining adds it once.
template <class T>
__device__ __forceinline__ RowEnd end_row(float sum, float reference, int row,
                                          const PagedTask& task, const PagedParams& p) {
  const int head = task.head * p.group + (task.first_row + row) % p.group;
  return end_row(sum, reference, task.splits == 1 ? sink_of<T>(p, head) : -INFINITY);
}

// Where a row's results go.
template <class C>
struct PagedRow {
  uint16_t* out;   // of the call, or
  float* partial;  // of the split
  float* lse;      // or null

  __device__ __forceinline__ PagedRow(int row, const PagedTask& task, const PagedParams& p)
      : out(nullptr), partial(nullptr), lse(nullptr) {
    if (task.splits == 1) {
      out = static_cast<uint16_t*>(p.out) + row_offset(row, p.out_strides, task, p);
      if (p.lse) lse = p.lse + row_offset(row, p.lse_strides, task, p);
      return;
    }
    const int pair = task.first_row + row, query = pair / p.group;
    const int64_t part = task.sequence * int64_t{p.partial_rows} + task.split * task.len_q + query;
    const int64_t at = part * p.heads_q + task.head * p.group + pair - query * p.group;
    partial = p.partial_out + at * C::kDim;
    lse = p.partial_lse + at;
  }
  __device__ __forceinline__ void store_lse(float natural) const {
    if (lse) *lse = out ? natural : natural * kLog2e;
  }
  // Two neighbouring columns, the first of them an even one.
  __device__ __forceinline__ void store(int column, float x, float y, const PagedParams& p) const {
    if (!out) {
      *reinterpret_cast<float2*>(partial + column) = {x, y};
    } else if (column + 1 < p.head_dim_v) {
      *reinterpret_cast<uint32_t*>(out + column) = C::Query::pack(x, y);
    } else if (column < p.head_dim_v) {
      out[column] = static_cast<uint16_t>(C::Query::pack(x, 0));
    }
  }
};

// Calls put(column, x, y) for the neighbouring columns of O that a lane holds of one of its rows.
template <class C, class Put>
__device__ __forceinline__ void for_each_column(const float (&o)[C::kDimTiles][4], int half,
                                                const PagedWarp<C>& warp, const Put& put) {
  const int quarter = warp.lane % 4;
#pragma unroll
  for (int d = 0; d < C::kDimTiles; d += 2) {
    const float *left = o[d] + 2 * half, *right = o[d + 1] + 2 * half;
    if constexpr (C::kFp8) {  // even and odd columns of 16
      const int column = warp.column + 8 * d + 4 * quarter;
      put(column, left[0], right[0]);
      put(column + 2, left[1], right[1]);
    } else {
      const int column = warp.column + 8 * d + 2 * quarter;
      put(column, left[0], left[1]);
      put(column + 8, right[0], right[1]);
    }
  }
}

// Stores the rows of a warp, of many. `poison` is NaN where the block table led out of the cache,
// else 1.
template <class C>
__device__ __forceinline__ void store_rows(const FwdState<C>& t, float factor, float poison,
                                           const PagedWarp<C>& warp, const PagedTask& task,
                                           const PagedParams& p) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = quad_sum(t.rows[0].sum[half]);
    const int row = warp.row + 8 * half + warp.lane / 4;
    if (row >= task.rows) continue;
    const RowEnd end = end_row<typename C::Query>(sum, t.rows[0].reference[half], row, task, p);
    const PagedRow<C> to(row, task, p);
    const float times = end.share / end.sum * factor * poison;
    for_each_column<C>(t.o[0], half, warp, [&](int column, float x, float y) {
      to.store(column, x * times, y * times, p);
    });
    if (warp.lane % 4 == 0 && warp.column == 0) to.store_lse(end.lse * poison);
  }
}

// What warps and teams tell each other at the end of a task.
template <class C>
struct TeamWords {
  float2 row[C::kTile.teams][kDecodeRows];  // reference and sum
  uint32_t stage[C::kTile.teams];           // where O is
  // Of a warp: whether the block table led out of the cache. Two, for tasks that follow each other:
  // a warp may write the next one's while another still reads.
  int bad[2][C::kTile.warps];
  __device__ __forceinline__ bool any_bad(int number) const {
    int any = 0;
#pragma unroll
    for (int warp = 0; warp < C::kTile.warps; ++warp) any |= bad[number % 2][warp];
    return any;
  }
};
template <class C>
__device__ __forceinline__ TeamWords<C>& team_words(char* shared) {
  static_assert(sizeof(TeamWords<C>) <= C::kSmemWork - C::kSmemTeams && C::kSmemTeams % 8 == 0);
  return *reinterpret_cast<TeamWords<C>*>(shared + C::kSmemTeams);
}

// Teams leave O in fp32 in the stage that their loader keeps free. Eight columns are moved to
// others in each pair of rows, so that those of a fragment's that are written at once lie in
// different banks.
template <class C>
__device__ __forceinline__ int merge_place(int row, int column) {
  static_assert(C::kDim % 32 == 0);
  return row * C::kDim + (column ^ row / 2 % 4 * 8);
}
template <class C>
__device__ __forceinline__ void leave_for_merge(const DecodeState<C>& t, char* shared,
                                                uint32_t stage, TeamWords<C>& words,
                                                const PagedWarp<C>& warp, const PagedTask& task) {
  // Its columns of row 0 in the first two fragments of O^T: others are at constant distances.
  float* sO[2][2];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = decode_row<C>(0, 0, warp), column = lane_column<C>(i / 2, i % 2, warp.lane);
    sO[i / 2][i % 2] =
        reinterpret_cast<float*>(shared + stage) + warp.column + merge_place<C>(row, column);
  }
  static_assert(C::kColumns % 32 == 0);
  if (warp.in_team == 0 && warp.lane == 0) words.stage[warp.team] = stage;
  sync_team<C>();  // the team is done with the tile in whose place O is put
#pragma unroll
  for (int i = 0; i < 2 * C::kRowTiles; ++i) {
    const int n = i / 2, c = i % 2, row = decode_row<C>(n, c, warp);
    const float sum = column_sum(t.sum[n][c]);
    if (row >= task.rows) continue;
#pragma unroll
    for (int d = 0; d < C::kDimTiles; ++d) {
      const float x = t.o[d][n][c], y = t.o[d][n][2 + c];
      const int further = (8 * n + c) * C::kDim + d / 2 * 32;
      if constexpr (C::kFp8) {  // neighbours
        *reinterpret_cast<float2*>(sO[d % 2][0] + further) = {x, y};
      } else {
        sO[d % 2][0][further] = x;
        sO[d % 2][1][further] = y;
      }
    }
    if (warp.lane / 4 == 0 && warp.column == 0) {
      words.row[warp.team][row] = {t.reference[n][c], sum};
    }
  }
}

// Merges what the teams left, in their order, and stores it.
template <class C>
__device__ __forceinline__ void merge_teams(float factor, float poison, const char* shared,
                                            const TeamWords<C>& words, const PagedTask& task,
                                            const PagedParams& p) {
  constexpr int kQuads = C::kDim / 4;
#pragma unroll 1
  for (int i = threadIdx.x; i < task.rows * kQuads; i += C::kThreads) {
    const int row = i / kQuads, column = i % kQuads * 4;
    float top = -INFINITY;
#pragma unroll
    for (int team = 0; team < C::kTeams; ++team) top = fmaxf(top, words.row[team][row].x);
    float sum = 0, value[4] = {0, 0, 0, 0};
#pragma unroll
    for (int team = 0; team < C::kTeams; ++team) {
      const float* const sO = reinterpret_cast<const float*>(shared + words.stage[team]);
      const float weight = ptx::ex2_approx_ftz(words.row[team][row].x - top);
      const float4 x = *reinterpret_cast<const float4*>(sO + merge_place<C>(row, column));
      sum += weight * words.row[team][row].y;
      value[0] += weight * x.x;
      value[1] += weight * x.y;
      value[2] += weight * x.z;
      value[3] += weight * x.w;
    }
    const RowEnd end = end_row<typename C::Query>(sum, top, row, task, p);
    const PagedRow<C> to(row, task, p);
    const float times = end.share / end.sum * factor * poison;
    to.store(column, value[0] * times, value[1] * times, p);
    to.store(column + 2, value[2] * times, value[3] * times, p);
    if (column == 0) to.store_lse(end.lse * poison);
  }
}

// Sets row `row` of all of a tensor's tokens to one value: the row of one token and head.
__device__ __forceinline__ void fill_row(int64_t out, int64_t lse, uint32_t value, float lse_value,
                                         const PagedParams& p) {
  uint16_t* const to = static_cast<uint16_t*>(p.out) + out;
#pragma unroll 1
  for (int i = threadIdx.x; i < p.head_dim_v; i += blockDim.x) {
    to[i] = static_cast<uint16_t>(value);
  }
  if (p.lse && threadIdx.x == 0) p.lse[lse] = lse_value;
}

// Sets the rows of a task whose lengths are wrong to NaN.
template <class C>
__device__ __forceinline__ void store_nan(const PagedTask& task, const PagedParams& p) {
#pragma unroll 1
  for (int row = 0; row < task.rows; ++row) {
    fill_row(row_offset(row, p.out_strides, task, p), row_offset(row, p.lse_strides, task, p),
             C::Query::kNan, NAN, p);
  }
}

// Rows after the last sequence: 0, and an LSE of -inf. Where cumulative lengths fall nobody knows
// whose rows are whose: all of them are NaN, and there is nothing to combine.
template <class T>
__device__ __forceinline__ void store_rest(bool broken, const PagedParams& p) {
  const int ctas = gridDim.x * gridDim.y * gridDim.z;
  const int cta = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  if (cta == 0 && threadIdx.x == 0) p.sequences[p.batch].splits = broken;
  if (!p.cu_seqlens_q) return;
  int64_t first = 0;
  if (!broken && p.batch > 0) {
    first = max(read_length(p.cu_seqlens_q, p.batch * p.cu_stride, p.cu_is_int64), int64_t{0});
  }
  const int64_t rows = (p.tokens_q - first) * p.heads_q;
#pragma unroll 1
  for (int64_t i = cta; i < rows; i += ctas) {
    const int64_t token = first + i / p.heads_q, head = i % p.heads_q;
    fill_row(token * p.out_strides.row + head * p.out_strides.head,
             token * p.lse_strides.row + head * p.lse_strides.head, broken ? T::kNan : 0,
             broken ? NAN : -INFINITY, p);
  }
}

}  // namespace flashmoe::cuda
