// The kernel before the backward pass: LSE in base 2 and delta = out.dO - grad_lse of every row,
// and zeros where dQ is added up. It goes row by row and is bound by memory.
//
// One CTA takes a tile of queries of preprocess_heads heads; 2 to 8 lanes share a row.
#pragma once

#include "cuda/attention/params.h"
#include "cuda/attention/score.cuh"
#include "cuda/attention/sequence.cuh"
#include "cuda/attention/softmax.cuh"
#include "cuda/attention/tiles.h"
#include "cuda/tile/dtype.cuh"

namespace flashmoe::cuda {

// How many lanes share a row, each with chunks of 16 bytes: up to 128 bytes at once.
__device__ __forceinline__ int row_lanes(int dim) { return dim > 32 ? 8 : dim > 16 ? 4 : 2; }

// The dot product of two rows, in all lanes of the row.
template <class T>
__device__ __forceinline__ float row_product(const char* left, const char* right, int dim, int lane,
                                             int lanes) {
  constexpr int kChunk = 16 / T::kBytes;  // elements
  float sum = 0;
  for (int chunk = lane; chunk * kChunk < dim; chunk += lanes) {
    if (chunk * kChunk + kChunk <= dim) {
      const uint4 a = reinterpret_cast<const uint4*>(left)[chunk];
      const uint4 b = reinterpret_cast<const uint4*>(right)[chunk];
      const uint32_t as[4] = {a.x, a.y, a.z, a.w}, bs[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (T::kBytes == 4) {
          sum += __uint_as_float(as[i]) * __uint_as_float(bs[i]);
        } else {
          sum += T::unpack(as[i] & 0xffff) * T::unpack(bs[i] & 0xffff);
          sum += T::unpack(as[i] >> 16) * T::unpack(bs[i] >> 16);
        }
      }
    } else {
      for (int i = chunk * kChunk; i < dim; ++i) {
        sum += T::unpack(reinterpret_cast<const typename T::Storage*>(left)[i]) *
               T::unpack(reinterpret_cast<const typename T::Storage*>(right)[i]);
      }
    }
  }
#pragma unroll 1
  for (int step = 1; step < lanes; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  return sum;
}

// LSE in base 2 of a row to which nothing comes back, where its own is so large that its rounding
// could make 2^(s - LSE) more than fp16 or a float can hold: infinity times 0 is NaN. It is finite,
// as an infinite one means something else.
inline constexpr float kLseOfNoWeight = 0x1.fffffep127f;

__device__ __forceinline__ bool is_far(float natural, float delta) {
  constexpr float kFar = 0x1p25f;  // from here on LSE in base 2 has steps of 4 at least
  return delta == 0 && fabsf(natural) > kFar && fabsf(natural) < INFINITY;
}
// Whether a row is such a one. All lanes of a warp ask together; grad_out() is the row.
template <class T, class Row>
__device__ __forceinline__ bool is_far_and_unused(float natural, float delta, const Row& grad_out,
                                                  const AttentionBwdParams& p, int lane,
                                                  int lanes) {
  const bool far = is_far(natural, delta);
  if (!__any_sync(0xffffffffu, far) || !p.grad_out) return far;
  const char* const row = grad_out();
  return row_product<T>(row, row, p.head_dim_v, lane, lanes) == 0 && far;
}

// The kernel: see find_query_rows() for the grid.
template <class T>
__device__ __forceinline__ void attention_bwd_preprocess(const AttentionBwdParams& p) {
  if (p.deterministic && blockIdx.x + blockIdx.y + blockIdx.z + threadIdx.x == 0)
    *p.tile_counter = 0;
  const int heads = p.preprocess_heads;
  const auto [seq, kind, batch, first_head, first] = find_query_rows(p, heads);
  if (kind != RaggedKind::kBlock || first >= seq.len_q) return;
  const int64_t sequence_row = workspace_row(p, seq, batch) + first;

  const char* gO = rows_of<T::kBytes>(p.out, p, p.out_strides, batch, first_head, seq.token_q);
  const char* gQ = rows_of<T::kBytes>(p.query, p, p.query_strides, batch, first_head, seq.token_q);
  const char* gdO =
      rows_of<T::kBytes>(p.grad_out, p, p.grad_out_strides, batch, first_head, seq.token_q);
  const float* lse = p.lse + offset(p, p.lse_strides, batch, first_head, seq.token_q);
  const float* grad_lse =
      p.grad_lse ? p.grad_lse + offset(p, p.grad_lse_strides, batch, first_head, seq.token_q)
                 : nullptr;
  const int lanes = row_lanes(max(p.head_dim, p.head_dim_v)), lane = threadIdx.x % lanes;
  const auto at = [](const Strides& strides, int64_t row, int64_t head) {
    return row * strides.row + head * strides.head;
  };
#pragma unroll 4
  for (int i = threadIdx.x / lanes; i < p.block_q * heads; i += kRowThreads / lanes) {
    const int r = i / heads, head = i % heads;
    const int64_t row = min(first + r, seq.len_q - 1);  // past the end, the last row again
    float delta = 0;
    if (p.grad_out) {
      delta = row_product<T>(gO + at(p.out_strides, row, head) * T::kBytes,
                             gdO + at(p.grad_out_strides, row, head) * T::kBytes, p.head_dim_v,
                             lane, lanes);
    }
    if (grad_lse) delta -= grad_lse[at(p.grad_lse_strides, row, head)];
    const float natural = lse[at(p.lse_strides, row, head)];
    // A row that sees no key has probabilities 2^(s - inf) = 0, or a mask makes them 0 where its
    // LSE is that of the sink alone. Where LSE and delta do not show that its Q is not finite,
    // delta becomes NaN, so that bwd_guard.cuh sees it.
    float2 lse_delta = {natural == -INFINITY ? INFINITY : natural * kLog2e, delta};
    const bool may_see_none = natural == sink_of<T>(p, first_head + head);
    if (__any_sync(0xffffffffu, may_see_none)) {
      const char* q = gQ + at(p.query_strides, row, head) * T::kBytes;
      const float square = row_product<T>(q, q, p.head_dim, lane, lanes);
      if (may_see_none && !(square < INFINITY)) lse_delta.y = NAN;
    }
    if (natural == INFINITY) lse_delta.y = NAN;
    const auto dO = [&] { return gdO + at(p.grad_out_strides, row, head) * T::kBytes; };
    if (is_far_and_unused<T>(natural, lse_delta.y, dO, p, lane, lanes))
      lse_delta.x = kLseOfNoWeight;
    if (first + r >= seq.len_q) lse_delta = {INFINITY, 0};
    if (lane == 0) {
      reinterpret_cast<float2*>(p.lse_delta)[(first_head + head) * p.rows + sequence_row + r] =
          lse_delta;
    }
  }
  if (!p.dq_accum) return;
  for (int head = first_head; head < first_head + heads; ++head) {
    const int64_t slice_row = head * p.dq_accum_rows + sequence_row - rows_before_slice(p);
    float4* sums = reinterpret_cast<float4*>(p.dq_accum + slice_row * p.dim);
    for (int i = threadIdx.x; i < p.block_q * p.dim / 4; i += kRowThreads) sums[i] = {0, 0, 0, 0};
    if (p.deterministic && threadIdx.x == 0) p.dq_semaphore[slice_row / p.block_q] = 0;
  }
}

}  // namespace flashmoe::cuda
