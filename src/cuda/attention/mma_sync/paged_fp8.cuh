// Products with a cache in fp8: numbers become fp16 in registers, where fragments were read as
// bytes.
//
// ldmatrix moves pairs of bytes. A lane then has four neighbours of a key's row: the first two and
// the last two of them are what mma.sync has 8 apart in 16 of the depth, so Q has its columns in
// the same order. Of V, read transposed, it has two neighbours in the row of each of two keys: even
// and odd columns are fragments of their own, and O has them so until it is stored.
#pragma once

#include "cuda/attention/mma_sync/fwd.cuh"
#include "cuda/attention/mma_sync/paged_tile.cuh"

namespace flashmoe::cuda {

// S += Q K^T
template <class C>
__device__ __forceinline__ void add_scores_fp8(float (&s)[1][C::kKeyTiles][4],
                                               const uint32_t (&rQ)[1][C::kQSteps + 1][4],
                                               uint32_t lane_q, uint32_t lane_k) {
  using Layout = typename C::CacheLayout;
  const AlongA<typename C::Layout> q{lane_q};
  const AlongB<Layout> k{lane_k};
#pragma unroll
  for (int two = 0; two < C::kDimSteps / 2; ++two) {
    uint32_t a[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (C::kQSteps > 0) {
#pragma unroll
        for (int e = 0; e < 4; ++e) a[i][e] = rQ[0][C::kQSteps > 0 ? 2 * two + i : 0][e];
      } else {
        q.load(a[i], 0, 2 * two + i);
      }
    }
#pragma unroll
    for (int n = 0; n < C::kKeyTiles; n += 2) {
      uint32_t bytes[4];  // two n8 fragments, two steps of the depth each
      k.load(bytes, n / 2, two);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        uint32_t b0, b1;
        E4m3::unpack_pairs(bytes[e], b0, b1);
        float(&sum)[4] = s[0][n + e / 2];
        C::Type::mma(sum, a[e % 2], b0, b1, sum);
      }
    }
  }
}

// P = 2^(S - reference), O += P V
template <class C, class Rule>
__device__ __forceinline__ void accumulate_fp8(FwdState<C>& t, float (&s)[1][C::kKeyTiles][4],
                                               const Rule& rule, uint32_t lane_v) {
  const AcrossB<typename C::CacheLayout> v{lane_v};
  float sum[2] = {};
  const float reference[2] = {t.rows[0].finite_reference(0), t.rows[0].finite_reference(1)};
#pragma unroll
  for (int step = 0; step < C::kKeySteps; ++step) {
    uint32_t a[4];
    auto &left = s[0][2 * step], &right = s[0][2 * step + 1];
    probabilities(left, right, sum, rule, reference);
    pack_operand<typename C::Type>(a, left, right);
#pragma unroll
    for (int d = 0; d < C::kDimTiles; d += 4) {
      uint32_t bytes[4];  // 32 columns; of each 16 the first and the last eight keys
      v.load(bytes, d / 4, step);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t even[2], odd[2];
        E4m3::unpack(bytes[2 * half], even[0], odd[0]);
        E4m3::unpack(bytes[2 * half + 1], even[1], odd[1]);
        float(&o)[C::kDimTiles][4] = t.o[0];
        C::Type::mma(o[d + 2 * half], a, even[0], even[1], o[d + 2 * half]);
        C::Type::mma(o[d + 2 * half + 1], a, odd[0], odd[1], o[d + 2 * half + 1]);
      }
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) t.rows[0].sum[half] += sum[half];
}

// Rows of bf16 are brought to fp16's range by a power of two each, which loses nothing that fp32
// sums would keep. This is that power for a row whose largest number is `top`, which gets an
// exponent of 14, one less than fp16 has. Infinity and 0 stay as they are.
template <class C>
__device__ __forceinline__ float power_for_fp16(float top) {
  if (C::Query::kExponent == C::Type::kExponent || !(top > 0 && top < INFINITY)) return 1;
  const int up = min(max(14 - (static_cast<int>(__float_as_uint(top) >> 23) - 127), -126), 126);
  return __uint_as_float(static_cast<uint32_t>(up + 127) << 23);
}

// load_query_fragments() as fp16, columns in the order that add_scores_fp8() wants. `inverse` gets
// one over the factor of each of the rows.
template <class C, int kHalves, class Pair>
__device__ __forceinline__ void load_query_fragments_fp8(const Pair& pair_at,
                                                         float (&inverse)[kHalves],
                                                         const PagedWarp<C>& warp,
                                                         const PagedTask& task,
                                                         const PagedParams& p) {
  using T = typename C::Query;
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    const int row = warp.row + 8 * half + warp.lane / 4;
    const typename T::Storage* from = static_cast<const typename T::Storage*>(p.query) +
                                      row_offset(row, p.query_strides, task, p);
    const int dim = row < task.rows ? p.head_dim : 0;
    float top = 0;
#pragma unroll
    for (int step = 0; step < C::kQSteps; ++step) {
      const int column = 16 * step + 4 * (warp.lane % 4);
      uint2 four = {0, 0};
      if (column + 4 <= dim) four = *reinterpret_cast<const uint2*>(from + column);
      pair_at(half, step, 0) = four.x;
      pair_at(half, step, 1) = four.y;
    }
    if (p.head_dim % 4 != 0) {  // one branch for all: most have no part
#pragma unroll
      for (int step = 0; step < C::kQSteps; ++step) {
        const int column = 16 * step + 4 * (warp.lane % 4);
        if (column >= dim || column + 4 <= dim) continue;
        uint32_t& first = pair_at(half, step, 0);
        first = from[column];
        if (column + 1 < dim) first |= uint32_t{from[column + 1]} << 16;
        if (column + 2 < dim) pair_at(half, step, 1) = from[column + 2];
      }
    }
#pragma unroll
    for (int i = 0; i < 4 * C::kQSteps; ++i) {
      const uint32_t two = pair_at(half, i / 4, i / 2 % 2) >> (i % 2 * 16);
      top = fmaxf(top, fabsf(T::unpack(static_cast<typename T::Storage>(two))));
    }
    const float factor = power_for_fp16<C>(quad_max(top));
    inverse[half] = 1 / factor;
    if constexpr (T::kExponent != C::Type::kExponent) {
#pragma unroll
      for (int i = 0; i < 2 * C::kQSteps; ++i) {
        uint32_t& two = pair_at(half, i / 2, i % 2);
        const float low = T::unpack(static_cast<typename T::Storage>(two));
        const float high = T::unpack(static_cast<typename T::Storage>(two >> 16));
        two = C::Type::pack(low * factor, high * factor);
      }
    }
  }
}

// The same in shared memory, a warp for a row; behind it `scale` over the factor of each row.
template <class C>
__device__ __forceinline__ void load_queries_fp8(char* shared, float scale, const PagedTask& task,
                                                 const PagedParams& p) {
  using Layout = typename C::Layout;
  using T = typename C::Query;
  constexpr int kPasses = (Layout::kChunks + 31) / 32;
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int row = threadIdx.x / 32; row < C::kRows; row += C::kThreads / 32) {
    float x[kPasses][8];
    float top = 0;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int chunk = lane + 32 * pass;
      const uint4 eight = chunk < Layout::kChunks ? query_chunk<T>(row, chunk, task, p) : uint4{};
      unpack_chunk<T>(x[pass], eight);
#pragma unroll
      for (int i = 0; i < 8; ++i) top = fmaxf(top, fabsf(x[pass][i]));
    }
    const float factor = power_for_fp16<C>(warp_max(top));
    if (lane == 0) reinterpret_cast<float*>(shared + C::kSmemFactors)[row] = scale / factor;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int chunk = lane + 32 * pass;
      if (chunk >= Layout::kChunks) break;
      float(&y)[8] = x[pass];
#pragma unroll
      for (int i = 0; i < 8; ++i) y[i] *= factor;
      using Out = typename C::Type;
      const uint2 first = {Out::pack(y[0], y[1]), Out::pack(y[4], y[5])};
      const uint2 second = {Out::pack(y[2], y[3]), Out::pack(y[6], y[7])};
      char* const to = shared + C::kSmemQ + chunk % 2 * 8;
      *reinterpret_cast<uint2*>(to + Layout::at(row, chunk & ~1)) = first;
      *reinterpret_cast<uint2*>(to + Layout::at(row, chunk | 1)) = second;
    }
  }
}

// Q to shared memory, where the CTA waits until it is there; `scale` is that of the keys.
template <class C>
__device__ __forceinline__ void share_queries(char* shared, float scale, const PagedTask& task,
                                              const PagedParams& p) {
  if constexpr (C::kFp8) {
    load_queries_fp8<C>(shared, scale, task, p);
  } else {
    load_queries<C>(shared, task, p);
  }
  __syncthreads();  // Q is there
}

}  // namespace flashmoe::cuda
