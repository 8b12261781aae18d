// Forward mode, by tiles of queries, over all keys that they see:
//
//   lse' = rowsum(P S')        out' = P (S' - shift) V + P V' - (lse' - shift) out
//
// out comes rounded to its dtype: `shift`, any number for each query, takes the weight off it. It
// is the mean of S' over the first keys that the query sees, and all of lse' where there are no
// others. P is divided by its sum, which is 1 but for what the scores here and those that lse comes
// from were rounded differently: gradients of gradients are differences from these means.
#pragma once

#include "cuda/attention/second/pairs.cuh"

namespace flashmoe::cuda::second {

// The sum over the four lanes that share a row.
__device__ __forceinline__ float row_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// What a lane knows of rows r and r + 8.
struct TangentRows {
  float lse[2], shift[2];
  float lse_move[2], weight[2];  // sums of P S' and of P over the lane's keys
  bool has_shift[2], sees_keys[2];
};

// Adds, of each of the warp's rows, the numbers of the four lanes that share it, and of the two
// warps.
template <class C>
__device__ __forceinline__ void add_up_rows(float4 (&x)[2], char* shared) {
  float4* const sRows = reinterpret_cast<float4*>(shared + C::kNumbers);
  const int lane = ptx::opaque_thread() % 32, row = warp_row() + lane / 4;
  const int own = warp_other() != 0 ? kRows : 0;  // of this warp; the other's are kRows - own
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    x[half] = {row_sum(x[half].x), row_sum(x[half].y), row_sum(x[half].z), row_sum(x[half].w)};
    if (lane % 4 == 0) sRows[own + row + 8 * half] = x[half];
  }
  __syncthreads();  // the sums of the other warp are there
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float4 other = sRows[kRows - own + row + 8 * half];
    x[half].x += other.x, x[half].y += other.y, x[half].z += other.z, x[half].w += other.w;
  }
}

// The products of a tile to P, in place of the score, and P (S' - shift), in place of its move.
// lse' gains what the tile adds. `shifted`: whether all rows of the tile have their shift.
template <class C>
__device__ __forceinline__ void move_softmax(Products& x, TangentRows& rows, bool& shifted,
                                             const Pairs& bias, const Pairs& bias_move, int row,
                                             int key, char* shared, const Sequence& seq,
                                             const AttentionSecondParams& p) {
  float4 sum[2] = {};  // P S' and P
  const uint32_t visible = visible_pairs<By::kTangent>(row, key, seq, p);
#pragma unroll
  for (int n = 0; n < kWarpRows / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Score s = find_score(x.score[n][i], x.move[n][i], bias[n][i], bias_move[n][i],
                                 visible >> (4 * n + i) & 1, rows.lse[i / 2], p);
      x.score[n][i] = weight_of(s.seen, s.probability);
      x.move[n][i] = s.move;
      if (s.seen) {
        sum[i / 2].x += s.probability * s.move;
        sum[i / 2].y += s.probability;
        rows.sees_keys[i / 2] = true;
      }
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    rows.lse_move[half] += sum[half].x;
    rows.weight[half] += sum[half].y;
  }
  if (!shifted) {
    add_up_rows<C>(sum, shared);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (rows.has_shift[half] || !(sum[half].y > 0)) continue;
      rows.shift[half] = sum[half].x / sum[half].y;
      rows.has_shift[half] = true;
    }
    shifted = __syncthreads_and(rows.has_shift[0] && rows.has_shift[1]);
  }
#pragma unroll
  for (int n = 0; n < kWarpRows / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float probability = x.score[n][i];
      const bool seen = __float_as_uint(probability) != kHidden;
      x.move[n][i] = weight_of(seen, probability * (x.move[n][i] - rows.shift[i / 2]));
    }
  }
}

// A head's sink, the score of a key whose value is 0: its weight in a row, and how it moves.
struct Sink {
  float weight = 0, move = 0;
};
template <class C>
__device__ __forceinline__ Sink find_sink(float lse, int head, const AttentionSecondParams& p) {
  if (!p.sinks) return {};
  const float sink = read_number<C>(p.sinks_are_fp32, p.sinks, head * p.sink_head);
  if (sink == -INFINITY) return {};
  Sink found;
  found.weight = ptx::ex2_approx_ftz((sink - lse) * kLog2e);
  if (p.tangent_sinks) {
    found.move = read_number<C>(p.sinks_are_fp32, p.tangent_sinks, head * p.tangent_sink_step);
  }
  return found;
}

template <class C>
__device__ __forceinline__ void fill_tangents(const Place& place, const char* out, float* lse,
                                              float value, const AttentionSecondParams& p) {
  const int first = place.first, end = min(first + kRows, place.seq.len_q);
  if (p.tangent_out) {
    fill_chunk<C>(out, p.tangent_out_strides, first, end, place.chunk, p.head_dim_v, value);
  }
  const int row = first + ptx::opaque_thread();
  if (p.tangent_lse && place.chunk == 0 && row < end) {
    lse[row * p.tangent_lse_strides.row] = value;
  }
}

template <class C>
__device__ __forceinline__ void attention_tangent(const AttentionSecondParams& p) {
  extern __shared__ __align__(1024) char shared[];
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const Place place = find_place(p, p.query_blocks, p.heads_q, chunks_of(p.head_dim_v));
  const Sequence& seq = place.seq;
  const int batch = place.batch, head = place.head, first = place.first;
  if (place.kind == RaggedKind::kEmpty) return;
  const char* to =
      rows_of<C::kBytes>(p.tangent_out, p, p.tangent_out_strides, batch, head, seq.token_q);
  float* const to_lse = p.tangent_lse + offset(p, p.tangent_lse_strides, batch, head, seq.token_q);
  if (place.kind != RaggedKind::kBlock) {
    fill_tangents<C>(place, to, to_lse, place.kind == RaggedKind::kRest ? 0.f : NAN, p);
    return;
  }
  const int end = min(first + kRows, seq.len_q), lane = ptx::opaque_thread() % 32;
  const Head& h = find_head<C>(shared, p, seq, batch, head);
  const float* lse = p.lse + offset(p, p.lse_strides, batch, head, seq.token_q);
  const int key_begin = seq.begin(first, p), key_end = seq.end(end - 1, p);
  const int columns = min(p.head_dim_v - place.chunk * kColumns, kColumns);
  HalfSums results;
  TangentRows rows;
  bool guarded = false;
  // Where something is not finite, once more and guarded.
#pragma unroll 1
  while (true) {
    Sums sums;
    set_zero(sums);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first + warp_row() + lane / 4 + 8 * half;
      rows.lse[half] = row < end ? lse[row * p.lse_strides.row] : 0;
      rows.lse_move[half] = rows.shift[half] = rows.weight[half] = 0;
      rows.has_shift[half] = row >= end;
      rows.sees_keys[half] = false;
    }
    bool own_there = false, shifted = false;
#pragma unroll 1
    for (int key = key_begin / kRows * kRows; key < key_end; key += kRows) {
      Products x;
      Pairs rBias, rBiasMove;
      // On their way while the products are made.
      read_pairs<C, By::kTangent>(rBias, h.bias, first, key, seq);
      read_pairs<C, By::kTangent>(rBiasMove, h.bias_move, first, key, seq);
      find_products<C, By::kTangent>(x, smem, h.in, first, key, place.chunk, own_there, seq, p,
                                     [] {});
      own_there = true;
      move_softmax<C>(x, rows, shifted, rBias, rBiasMove, first, key, shared, seq, p);
      add_rows<C>(sums, x.move, smem + C::kValue, columns, guarded);
      if (h.in.value_move) add_rows<C>(sums, x.score, smem + C::kValueMove, columns, guarded);
    }
    add_up(results, sums, shared);
    if (guarded || !__syncthreads_or(!all_finite(results))) break;
    guarded = true;
  }
  float4 all_keys[2];  // P S', P, and whether there are any
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    all_keys[half] = {rows.lse_move[half], rows.weight[half],
                      static_cast<float>(rows.sees_keys[half]), 0};
  }
  add_up_rows<C>(all_keys, shared);
  float rest[2];  // of lse', times which out is taken off
  float share[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first + warp_row() + lane / 4 + 8 * half;
    const Sink sink = find_sink<C>(rows.lse[half], head, p);
    const float all = all_keys[half].y + sink.weight;
    share[half] = all == 0 ? 0 : 1 / all;  // 0: the row sees nothing
    const float move = (all_keys[half].x + sink.weight * sink.move) * share[half];
    const bool writes = lane % 4 == 0 && warp_other() == 0 && place.chunk == 0;
    if (p.tangent_lse && row < end && writes) {
      to_lse[row * p.tangent_lse_strides.row] = move;
    }
    // A row that sees a sink alone has an out of 0, however the sink moves.
    rest[half] = all_keys[half].z > 0 ? move - rows.shift[half] : 0;
  }
  if (!p.tangent_out) return;
  const char* out = rows_of<C::kBytes>(p.out, p, p.out_strides, batch, head, seq.token_q);
  for_each_two(results, first, end, place.chunk, p.head_dim_v, [&](int row, int column, float2 x) {
    const bool second = (row - first) / 8 % 2;
    const float move = second ? rest[1] : rest[0];
    x.x *= second ? share[1] : share[0];
    x.y *= second ? share[1] : share[0];
    const char* from = out + row * p.out_strides.row * C::kBytes;
    x.x -= move * read_element(C::kElement, from, column);
    if (column + 1 < p.head_dim_v) x.y -= move * read_element(C::kElement, from, column + 1);
    write_two<C>(const_cast<char*>(to) + row * p.tangent_out_strides.row * C::kBytes, column,
                 p.head_dim_v, x);
  });
}

}  // namespace flashmoe::cuda::second
