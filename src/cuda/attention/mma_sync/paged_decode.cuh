// A tile of keys under few rows: operands change places, so that keys and columns of V, of which
// there are many, fill the 16 rows of an MMA, and the rows of Q its 8 columns.
//
//   S^T = K Q^T      A: 16 keys           B: 8 rows of Q
//   O^T += V^T P^T   A: 16 columns of V   B: P of 8 rows and 16 keys, S^T's accumulators moved to
//                                            where B has them by movmatrix
//
// A lane has two keys (lane / 4 and 8 more) of two rows (2 (lane % 4) and the next) of each
// fragment of S^T, and as many columns of those rows of O^T. With 8 rows everything is half of what
// it is with 16, and a row has the same bits in both.
//
// Of an fp8 cache (see paged_fp8.cuh) the 16 columns of a fragment of O^T are the even ones, then
// the odd ones.
#pragma once

#include <cfloat>

#include "cuda/attention/mma_sync/fwd.cuh"
#include "cuda/attention/mma_sync/paged_fp8.cuh"
#include "cuda/attention/mma_sync/paged_tile.cuh"
#include "cuda/ptx/movmatrix.cuh"

namespace flashmoe::cuda {

// What a warp has of its rows. Row 8 n + 2 (lane % 4) + c of the tile is [n][c].
template <class C>
struct DecodeState {
  // The reference of a row that has seen no key yet. No finite score is below it, and unlike -inf
  // it may be subtracted from -inf.
  static constexpr float kNoKey = -FLT_MAX;

  uint32_t rQ[C::kQSteps + 1][C::kRowTiles][2];  // one more than used: no array of size 0
  float factor[C::kRowTiles][2];                 // fp8: times which a product is q.k
  float o[C::kDimTiles][C::kRowTiles][4];
  float reference[C::kRowTiles][2];  // probabilities are 2^(score - reference)
  float sum[C::kRowTiles][2];        // of them, the lane's own share

  __device__ __forceinline__ void clear() {
    set_zero(o);
#pragma unroll
    for (int i = 0; i < 2 * C::kRowTiles; ++i) {
      reference[i / 2][i % 2] = kNoKey;
      sum[i / 2][i % 2] = 0;
    }
  }
};

// The lane's row [n][c].
template <class C>
__device__ __forceinline__ int decode_row(int n, int c, const PagedWarp<C>& warp) {
  return 8 * n + 2 * (warp.lane % 4) + c;
}

// The maximum and the sum over the lanes that share a row.
__device__ __forceinline__ float column_max(float x) {
#pragma unroll
  for (int step = 4; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}
__device__ __forceinline__ float column_sum(float x) {
#pragma unroll
  for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

// Loads Q, as load_query() does under many rows.
template <class C>
__device__ __forceinline__ void load_query(DecodeState<C>& t, char* shared,
                                           const PagedWarp<C>& warp, const PagedTask& task,
                                           const PagedParams& p) {
  const float scale = C::kFp8 && p.k_scale ? p.k_scale[task.head * p.k_scale_stride] : 1;
  const auto pair = [&](int n, int step, int i) -> uint32_t& { return t.rQ[step][n][i]; };
  if constexpr (C::kQSteps == 0) {
    share_queries<C>(shared, scale, task, p);
    if constexpr (C::kFp8) {
      const float* of_rows = reinterpret_cast<const float*>(shared + C::kSmemFactors);
#pragma unroll
      for (int i = 0; i < 2 * C::kRowTiles; ++i) {
        t.factor[i / 2][i % 2] = of_rows[decode_row<C>(i / 2, i % 2, warp)];
      }
    }
  } else if constexpr (C::kFp8) {
    float inverse[C::kRowTiles];  // of row lane / 4
    load_query_fragments_fp8<C>(pair, inverse, warp, task, p);
#pragma unroll
    for (int i = 0; i < 2 * C::kRowTiles; ++i) {
      const int lane = 4 * decode_row<C>(0, i % 2, warp);  // the first that has the row
      t.factor[i / 2][i % 2] = __shfl_sync(0xffffffffu, inverse[i / 2], lane) * scale;
    }
  } else {
    load_query_fragments<C, C::kRowTiles>(pair, warp, task, p);
  }
}

// Where a lane reads Q, from the beginning of its place: of 8 rows two steps of the depth at once.
template <class C>
__device__ __forceinline__ uint32_t decode_lane_q(const PagedWarp<C>& warp) {
  const uint32_t lane = warp.lane;
  return C::kRowTiles == 1 ? C::Layout::at(lane % 8, lane / 8)
                           : C::Layout::at(lane % 16, lane / 16);
}
// Q at two steps of the depth.
template <class C>
__device__ __forceinline__ void query_of(uint32_t (&b)[2][C::kRowTiles][2], const DecodeState<C>& t,
                                         uint32_t lane_q, int two) {
  using Layout = typename C::Layout;
  if constexpr (C::kQSteps > 0) {
#pragma unroll
    for (int i = 0; i < 4 * C::kRowTiles; ++i) {
      const int step = i % 2, n = i / 4, e = i / 2 % 2;
      b[step][n][e] = t.rQ[2 * two + step][n][e];
    }
  } else if constexpr (C::kRowTiles == 1) {
    uint32_t r[4];
    ptx::ldmatrix_x4(r, Layout::along(lane_q, 4 * two));
#pragma unroll
    for (int i = 0; i < 4; ++i) b[i / 2][0][i % 2] = r[i];
  } else {
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      uint32_t r[4];
      ptx::ldmatrix_x4(r, Layout::along(lane_q, 2 * (2 * two + step)));
#pragma unroll
      for (int i = 0; i < 4; ++i) b[step][i % 2][i / 2] = r[i];
    }
  }
}

// S^T = K Q^T. Even and odd steps of the depth have sums of their own: one chain of MMAs would be
// waited for.
template <class C>
__device__ __forceinline__ void decode_scores(float (&s)[C::kRowTiles][C::kKeyTiles][4],
                                              const DecodeState<C>& t, uint32_t lane_q,
                                              uint32_t lane_k) {
  const AlongA<typename C::CacheLayout> k{lane_k};
  float odd[C::kRowTiles][C::kKeyTiles][4];
  // Unrolled altogether, a row of 512 takes more registers than there are where conversions from
  // fp8 take several.
  constexpr bool kLong = C::kFp8 && !ptx::kConvertsE4m3 && C::kDim > 256;
  constexpr int kUnroll = kLong ? 4 : C::kDimSteps / 2;
  set_zero(s);
  set_zero(odd);
#pragma unroll kUnroll
  for (int two = 0; two < C::kDimSteps / 2; ++two) {
    uint32_t b[2][C::kRowTiles][2];
    query_of<C>(b, t, lane_q, two);
#pragma unroll
    for (int j = 0; j < C::kKeyTiles; ++j) {
      uint32_t a[2][4];
      if constexpr (C::kFp8) {
        uint32_t bytes[4];  // of each step the first and the last eight keys
        k.load(bytes, j, two);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          E4m3::unpack_pairs(bytes[e], a[e / 2][e % 2], a[e / 2][2 + e % 2]);
        }
      } else {
        k.load(a[0], j, 2 * two);
        k.load(a[1], j, 2 * two + 1);
      }
#pragma unroll
      for (int n = 0; n < C::kRowTiles; ++n) {
        C::Type::mma(s[n][j], a[0], b[0][n][0], b[0][n][1], s[n][j]);
        C::Type::mma(odd[n][j], a[1], b[1][n][0], b[1][n][1], odd[n][j]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < C::kRowTiles * C::kKeyTiles * 4; ++i) {
    float& x = s[i / 4 / C::kKeyTiles][i / 4 % C::kKeyTiles][i % 4];
    x += odd[i / 4 / C::kKeyTiles][i / 4 % C::kKeyTiles][i % 4];
    if (C::kFp8) x *= t.factor[i / 4 / C::kKeyTiles][i % 2];
  }
}

// The keys that a lane's rows see. Found where they are needed: few tiles have a mask.
template <class C>
struct DecodeBounds {
  int begin[C::kRowTiles][2], end[C::kRowTiles][2];

  __device__ __forceinline__ DecodeBounds(const PagedWarp<C>& warp, const PagedTask& task,
                                          const PagedParams& p) {
#pragma unroll
    for (int i = 0; i < 2 * C::kRowTiles; ++i) {
      const int row = decode_row<C>(i / 2, i % 2, warp);
      begin[i / 2][i % 2] = task.begin(row, p);
      end[i / 2][i % 2] = min(task.end(row, p), task.key_end);
    }
  }
};

// Sets scores to -inf where the row does not see the key.
template <class C>
__device__ __forceinline__ void mask_decode(float (&s)[C::kRowTiles][C::kKeyTiles][4],
                                            int first_key, const PagedWarp<C>& warp,
                                            const PagedTask& task, const PagedParams& p) {
  const DecodeBounds<C> rows(warp, task, p);
  const int from = first_key + warp.lane / 4;
#pragma unroll
  for (int i = 0; i < 2 * C::kRowTiles; ++i) {
    const int begin = rows.begin[i / 2][i % 2] - from, end = rows.end[i / 2][i % 2] - from;
#pragma unroll
    for (int eight = 0; eight < 2 * C::kKeyTiles; ++eight) {
      const int key = 8 * eight;
      if (key < begin || key >= end) s[i / 2][eight / 2][eight % 2 * 2 + i % 2] = -INFINITY;
    }
  }
}

// Moves the references of rows whose maximum outgrew theirs, and their output and sum with them.
// Each lane looks at its own keys: the maximum of a row is found only if one of them is too large.
template <class C>
__device__ __forceinline__ void update_decode_references(
    DecodeState<C>& t, const float (&s)[C::kRowTiles][C::kKeyTiles][4], float scale_log2) {
  float top[C::kRowTiles][2];
  bool outgrown = false;
#pragma unroll
  for (int i = 0; i < 2 * C::kRowTiles; ++i) {
    const int n = i / 2, c = i % 2;
    float largest = fmaxf(s[n][0][c], s[n][0][2 + c]);
#pragma unroll
    for (int j = 1; j < C::kKeyTiles; ++j) {
      largest = fmaxf(largest, fmaxf(s[n][j][c], s[n][j][2 + c]));
    }
    top[n][c] = largest * scale_log2;
    outgrown |= top[n][c] > t.reference[n][c] + kSlack;
  }
  if (!__any_sync(0xffffffffu, outgrown)) return;
#pragma unroll
  for (int i = 0; i < 2 * C::kRowTiles; ++i) {
    const int n = i / 2, c = i % 2;
    const float largest = column_max(top[n][c]);
    float& reference = t.reference[n][c];
    // Each row by itself: its bits do not depend on its neighbours.
    const float raised = largest > reference + kSlack ? largest : reference;
    const float correction = ptx::ex2_approx_ftz(reference - raised);
    reference = raised;
    t.sum[n][c] *= correction;
#pragma unroll
    for (int d = 0; d < C::kDimTiles; ++d) {
      t.o[d][n][c] *= correction;
      t.o[d][n][2 + c] *= correction;
    }
  }
}

// P = 2^(S - reference), O^T += V^T P^T
template <class C, class Rule>
__device__ __forceinline__ void accumulate_decode(DecodeState<C>& t,
                                                  float (&s)[C::kRowTiles][C::kKeyTiles][4],
                                                  const Rule& rule, uint32_t lane_v) {
  const AcrossA<typename C::CacheLayout> v{lane_v};
  uint32_t b[C::kRowTiles][C::kKeyTiles][2];
#pragma unroll
  for (int n = 0; n < C::kRowTiles; ++n) {
    float sum[2];  // of the tile: see probabilities()
#pragma unroll
    for (int j = 0; j < C::kKeyTiles; ++j) {
      float(&x)[4] = s[n][j];
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = rule.probability(x[i], t.reference[n][i % 2]);
#pragma unroll
      for (int c = 0; c < 2; ++c) sum[c] = j == 0 ? x[c] + x[2 + c] : sum[c] + (x[c] + x[2 + c]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        b[n][j][half] = ptx::movmatrix_trans(C::Type::pack(x[2 * half], x[2 * half + 1]));
      }
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) t.sum[n][c] += sum[c];
  }
  const auto add = [&](int d, int j, const uint32_t(&a)[4]) {
#pragma unroll
    for (int n = 0; n < C::kRowTiles; ++n) {
      C::Type::mma(t.o[d][n], a, b[n][j][0], b[n][j][1], t.o[d][n]);
    }
  };
#pragma unroll
  for (int j = 0; j < C::kKeyTiles; ++j) {
    if constexpr (C::kFp8) {
#pragma unroll
      for (int d = 0; d < C::kDimTiles; d += 2) {
        uint32_t bytes[4];  // of the first and the last eight keys 16 columns and 16 more
        v.load(bytes, d / 2, j);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          uint32_t a[4];
          E4m3::unpack(bytes[i], a[0], a[1]);
          E4m3::unpack(bytes[2 + i], a[2], a[3]);
          add(d + i, j, a);
        }
      }
    } else {
#pragma unroll
      for (int d = 0; d < C::kDimTiles; ++d) {
        uint32_t a[4];
        v.load(a, d, j);
        add(d, j, a);
      }
    }
  }
}

// Adds x to the lane's rows that see `key`, at its column `half` of fragment d.
template <class C>
__device__ __forceinline__ void add_to_rows(DecodeState<C>& t, int d, int half, int key, float x,
                                            const DecodeBounds<C>& rows) {
#pragma unroll
  for (int i = 0; i < 2 * C::kRowTiles; ++i) {
    const int n = i / 2, c = i % 2;
    if (key >= rows.begin[n][c] && key < rows.end[n][c]) t.o[d][n][2 * half + c] += x;
  }
}

// Where a lane reads fragments, from the beginning of a stage or of Q's place.
template <class C>
struct DecodeLanes {
  uint32_t q, k, v;
  __device__ __forceinline__ explicit DecodeLanes(const PagedWarp<C>& warp) {
    using Cache = typename C::CacheLayout;
    const uint32_t lane = warp.lane;
    q = C::kSmemQ + decode_lane_q<C>(warp);
    k = Cache::at(lane % 16, lane / 16);
    v = C::kTileBytes +
        Cache::at(lane % 8 + lane / 16 * 8, warp.column * C::kCacheBytes / 16 + lane / 8 % 2);
  }
};

}  // namespace flashmoe::cuda
