// The kernel before the sm90 backward pass, bound by memory: lse in base 2 and delta of every row,
// and semaphores set to zero. At head dim 128 and 512 keys it takes 44 us on an H200 (2026-11-15),
// 72% of the memory's rate.
#pragma once

#include "cuda/attention/mma_sync/bwd_preprocess.cuh"
#include "cuda/attention/sequence.cuh"
#include "cuda/attention/sm90/bwd_dq.cuh"
#include "cuda/attention/sm90/params.h"
#include "cuda/attention/sm90/tiles.h"
#include "cuda/ptx/grid.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/tile/dtype.cuh"
#include "cuda/tma/operand.cuh"

namespace flashmoe::cuda::sm90 {

// The rows of queries of a CTA. The grid is (preprocess_rows x heads, 1, batch), or ragged (slots x
// heads). Heads are the fastest index: where they are adjacent in memory, CTAs that run at the same
// time read adjacent rows. The last rows go first: the backward kernel begins with those read last.
__device__ __forceinline__ QueryRows find_preprocess_rows(const Sm90BwdParams& p) {
  if (p.blocks) return find_query_rows(p);
  const int heads = p.heads * p.group, number = gridDim.x - 1 - blockIdx.x;
  const int batch = p.first_batch + gridDim.z - 1 - blockIdx.z;
  const Sequence seq = find_sequence(p, batch);
  return {.seq = seq,
          .kind = seq.valid ? RaggedKind::kBlock : RaggedKind::kInvalid,
          .batch = batch,
          .head = p.first_head * p.group + number % heads,
          .first = number / heads * p.preprocess_rows};
}

// row_product() of kRows rows, whose loads are all issued before the first is needed. That takes
// rows of whole 16-byte chunks, at most one for each lane; other rows go one after the other.
template <class T, int kRows>
__device__ __forceinline__ void row_products(float (&sums)[kRows], const char* const (&left)[kRows],
                                             const char* const (&right)[kRows], int dim, int lane,
                                             int lanes) {
  if (dim % 8 != 0 || dim > 8 * lanes) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) sums[i] = row_product<T>(left[i], right[i], dim, lane, lanes);
    return;
  }
  uint4 a[kRows], b[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    a[i] = b[i] = {0, 0, 0, 0};
    if (lane * 8 < dim) {
      a[i] = reinterpret_cast<const uint4*>(left[i])[lane];
      b[i] = reinterpret_cast<const uint4*>(right[i])[lane];
    }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const uint32_t as[4] = {a[i].x, a[i].y, a[i].z, a[i].w};
    const uint32_t bs[4] = {b[i].x, b[i].y, b[i].z, b[i].w};
    sums[i] = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      sums[i] += T::unpack(as[j] & 0xffff) * T::unpack(bs[j] & 0xffff);
      sums[i] += T::unpack(as[j] >> 16) * T::unpack(bs[j] >> 16);
    }
  }
#pragma unroll 1
  for (int step = 1; step < lanes; step *= 2) {
#pragma unroll
    for (float& sum : sums) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  }
}

// lse in base 2 and delta = out.dO - grad_lse of every row; mma_sync/bwd_preprocess.cuh has the
// same for the other families. And zeros: for the semaphores of the dQ accumulator, and for its
// sums where no tile of keys stores the first.
template <class T>
__device__ __forceinline__ void attention_bwd_preprocess(const Sm90BwdParams& p) {
  // The backward kernel reads what kernels ahead of this one have written: it must not begin before
  // they have ended.
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  if (blockIdx.x + blockIdx.z + threadIdx.x == 0) p.tile_counter[0] = p.tile_counter[1] = 0;
  const int rows = p.blocks ? p.block_q : p.preprocess_rows;
  const auto [seq, kind, batch, head, first] = find_preprocess_rows(p);
  if (kind == RaggedKind::kEmpty) return;
  if (p.converted_tiles > 0) {
    for (int block = (first + p.block_q - 1) / p.block_q * p.block_q;
         block < min(first + rows, seq.len_q); block += p.block_q) {
      if (kind == RaggedKind::kBlock && is_seen(seq, block, p)) continue;
      fill_unseen_dq<T>(seq, kind, batch, head, block, p);
    }
  }
  const int end = (seq.len_q + p.block_q - 1) / p.block_q * p.block_q;  // in the workspace
  if (kind != RaggedKind::kBlock || first >= end) return;
  const int64_t sequence_row = workspace_row(p, seq, batch);
  const int first_block = (first + p.block_q - 1) / p.block_q * p.block_q;
  if (const int block = first_block + threadIdx.x * p.block_q;
      p.dq_accum && block < min(first + rows, end)) {
    p.dq_semaphore[(head * p.dq_accum_rows + sequence_row + block - rows_before_slice(p)) /
                   p.block_q] = 0;
    if (block == 0 && head % p.group == 0) *parts_done(p, batch, head / p.group) = 0;
  }
  if (p.zeroes_dq && head_index(batch, head / p.group, p) < p.zeroed_ahead) {
    zero_dq_rows<kRowThreads>(batch, head, first, min(first + rows, end), threadIdx.x, p);
  }

  // Adjacent heads share out their rows, so that a CTA reads contiguous memory.
  const int log2_heads = p.log2_adjacent_heads, part = head & ((1 << log2_heads) - 1),
            first_head = head - part;
  const int first_row = first + part * (rows >> log2_heads);
  const char* gO = rows_of(p.out, p, p.out_strides, batch, first_head, seq.token_q);
  const char* gQ = rows_of(p.query, p, p.query_strides, batch, first_head, seq.token_q);
  const char* gdO = rows_of(p.grad_out, p, p.grad_out_strides, batch, first_head, seq.token_q);
  const float* lse = p.lse + offset(p, p.lse_strides, batch, first_head, seq.token_q);
  const float* grad_lse =
      p.grad_lse ? p.grad_lse + offset(p, p.grad_lse_strides, batch, first_head, seq.token_q)
                 : nullptr;
  float2* const lse_delta =
      reinterpret_cast<float2*>(p.lse_delta) + first_head * p.rows + sequence_row;
  const auto row_of = [&](int r) { return first_row + (r >> log2_heads); };
  const auto head_of = [&](int r) { return r & ((1 << log2_heads) - 1); };
  const auto at = [&](const char* rows, const Strides& strides, int64_t row, int r) {
    return rows + row * strides.row_bytes() + int64_t{head_of(r)} * strides.head * 2;
  };
  const auto number_at = [&](const float* rows, const Strides& strides, int64_t row, int r) {
    return rows[row * strides.row + head_of(r) * strides.head];
  };
  bool any_far = false;
  constexpr int kAtOnce = 4;  // rows
  const int dim = max(p.head_dim, p.head_dim_v);
  const int lanes = dim <= 64 ? row_lanes(dim) : dim <= 128 ? 16 : 32;
  const int shift = 31 - __clz(lanes);  // a power of 2
  const int lane = threadIdx.x & (lanes - 1), rows_of_pass = kRowThreads >> shift;
#pragma unroll 1
  for (int i = threadIdx.x >> shift; i < rows; i += kAtOnce * rows_of_pass) {
    if (row_of(i) >= end) break;
    const char *left[kAtOnce], *right[kAtOnce];
    float natural_lse[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int r = i + j * rows_of_pass;
      const int row = min(row_of(r), seq.len_q - 1);  // past the end, the last row once more
      left[j] = at(gO, p.out_strides, row, r);
      right[j] = at(gdO, p.grad_out_strides, row, r);
      natural_lse[j] = number_at(lse, p.lse_strides, row, r);
    }
    float deltas[kAtOnce] = {};
    if (p.grad_out) row_products<T>(deltas, left, right, p.head_dim_v, lane, lanes);
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int r = i + j * rows_of_pass, row = min(row_of(r), seq.len_q - 1);
      if (r >= rows || row_of(r) >= end) break;
      float delta = deltas[j];
      if (grad_lse) delta -= number_at(grad_lse, p.grad_lse_strides, row, r);
      const float natural = natural_lse[j];
      // A row that sees no key has probabilities 2^(s - inf) = 0, or a mask makes them 0 where its
      // lse is that of the sink alone. Where lse and delta would not show that its Q is not finite,
      // a NaN does.
      float2 row_lse_delta = {natural == -INFINITY ? INFINITY : natural * kLog2e, delta};
      const bool may_see_none = natural == sink_of<T>(p, first_head + head_of(r));
      if (__any_sync(0xffffffffu, may_see_none)) {
        const char* q = at(gQ, p.query_strides, row, r);
        const float square = row_product<T>(q, q, p.head_dim, lane, lanes);
        if (may_see_none && !(square < INFINITY)) row_lse_delta.y = NAN;
      }
      if (natural == INFINITY) row_lse_delta.y = NAN;
      any_far |= is_far(natural, row_lse_delta.y);
      const bool past = row_of(r) >= seq.len_q;
      if (past) row_lse_delta = {INFINITY, 0};
      // Ragged, rows of the next sequence follow. A NaN shows that something there is not finite.
      if (p.blocks && __any_sync(0xffffffffu, past)) {
        const int64_t other = min(int64_t{row_of(r)}, p.tokens_q - 1 - seq.token_q);
        const char* q = at(gQ, p.query_strides, other, r);
        float square = row_product<T>(q, q, p.head_dim, lane, lanes);
        if (p.grad_out) {
          const char* dO = at(gdO, p.grad_out_strides, other, r);
          square += row_product<T>(dO, dO, p.head_dim_v, lane, lanes);
        }
        if (past && !(square < INFINITY)) row_lse_delta.y = NAN;
      }
      if (lane == 0) lse_delta[head_of(r) * p.rows + row_of(r)] = row_lse_delta;
    }
  }
  // Once more where it must be, as the loop has no registers to spare.
  if (!__any_sync(0xffffffffu, any_far)) return;
#pragma unroll 1
  for (int r = threadIdx.x >> shift; r < rows && row_of(r) < end; r += rows_of_pass) {
    const int row = min(row_of(r), seq.len_q - 1);
    float2& mine = lse_delta[head_of(r) * p.rows + row_of(r)];  // lane 0 has written it
    const float delta = lane == 0 ? mine.y : 0;
    const auto dO = [&] { return at(gdO, p.grad_out_strides, row, r); };
    const bool unused =
        is_far_and_unused<T>(number_at(lse, p.lse_strides, row, r), delta, dO, p, lane, lanes);
    if (unused && lane == 0 && row_of(r) < seq.len_q) mine.x = kLseOfNoWeight;
  }
}

}  // namespace flashmoe::cuda::sm90
