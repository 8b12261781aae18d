// The kernels before and after the backward pass for Hopper, bound by memory. Head dims above 128
// have the first alone.
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

inline constexpr int kFinishThreads = 128;

// The rows of queries of a CTA before the backward pass, whose grid is (so many rows x heads, 1,
// batch), or ragged (slots x heads). Heads go first: where they lie side by side, what is read at
// the same time does. And the last go first: what is read last is what the next kernel begins with.
__device__ __forceinline__ QueryRows find_prepared_rows(const Sm90BwdParams& p) {
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

// row_product() of kRows rows, so that more is on its way at once: rows of up to a chunk for each
// thread, all chunks whole; else one after the other.
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

// dQ of a block of queries that sees no key, or whose lengths are wrong: nobody stores sums.
template <class T>
__device__ __forceinline__ void fill_unseen(const Sequence& seq, RaggedKind kind, int batch,
                                            int head, int first, const AttentionBwdParams& p) {
  char* const to =
      const_cast<char*>(rows_of(p.grad_query, p, p.grad_query_strides, batch, head, seq.token_q));
  fill_rows(to, p.grad_query_strides.row_bytes(), first, min(first + p.block_q, seq.len_q),
            p.head_dim, kind == RaggedKind::kInvalid ? T::kNan : 0);
}

// lse in base 2 and delta = out.dO - grad_lse of every row: any/attention_small.cuh has the same
// for the other families. Sums of dQ need no zeros, as the first block of keys stores them; whose
// turn it is does. See find_prepared_rows() for the grid.
template <class T>
__device__ __forceinline__ void attention_bwd_preprocess(const Sm90BwdParams& p) {
  ptx::griddepcontrol_launch_dependents();
  if (blockIdx.x + blockIdx.z + threadIdx.x == 0) p.tile_counter[0] = p.tile_counter[1] = 0;
  const int rows = p.blocks ? p.block_q : p.preprocess_rows;
  const auto [seq, kind, batch, head, first] = find_prepared_rows(p);
  if (kind == RaggedKind::kEmpty) return;
  if (p.converted_tiles > 0) {
    for (int block = first; block < min(first + rows, seq.len_q); block += p.block_q) {
      if (kind == RaggedKind::kBlock && is_seen(seq, block, p)) continue;
      fill_unseen<T>(seq, kind, batch, head, block, p);
    }
  }
  if (kind != RaggedKind::kBlock || first >= seq.len_q) return;
  const int64_t sequence_row = workspace_row(p, seq, batch);
  const int end = (seq.len_q + p.block_q - 1) / p.block_q * p.block_q;  // of its rows there
  if (const int block = first + threadIdx.x * p.block_q;
      p.dq_accum && block < min(first + rows, end)) {
    p.dq_semaphore[(head * p.dq_accum_rows + sequence_row + block - round_rows(p)) / p.block_q] = 0;
    if (block == 0 && head % p.group == 0) *blocks_done(p, batch, head / p.group) = 0;
  }

  // Heads whose rows lie side by side share them out: memory likes to be read so.
  const int beside = p.log2_adjacent_heads, part = head & ((1 << beside) - 1),
            first_head = head - part;
  const int first_row = first + part * (rows >> beside);
  const char* gO = rows_of(p.out, p, p.out_strides, batch, first_head, seq.token_q);
  const char* gQ = rows_of(p.query, p, p.query_strides, batch, first_head, seq.token_q);
  const char* gdO = rows_of(p.grad_out, p, p.grad_out_strides, batch, first_head, seq.token_q);
  const float* lse = p.lse + offset(p, p.lse_strides, batch, first_head, seq.token_q);
  const float* grad_lse =
      p.grad_lse ? p.grad_lse + offset(p, p.grad_lse_strides, batch, first_head, seq.token_q)
                 : nullptr;
  float2* const terms_of =
      reinterpret_cast<float2*>(p.lse_delta) + first_head * p.rows + sequence_row;
  const auto row_of = [&](int r) { return first_row + (r >> beside); };
  const auto head_of = [&](int r) { return r & ((1 << beside) - 1); };
  const auto at = [&](const char* rows, const Strides& strides, int64_t row, int r) {
    return rows + row * strides.row_bytes() + int64_t{head_of(r)} * strides.head * 2;
  };
  const auto number_at = [&](const float* rows, const Strides& strides, int64_t row, int r) {
    return rows[row * strides.row + head_of(r) * strides.head];
  };
  constexpr int kAtOnce = 4;  // rows
  const int dim = max(p.head_dim, p.head_dim_v);
  const int lanes = dim <= 64 ? row_lanes(dim) : dim <= 128 ? 16 : 32;
  const int shift = 31 - __clz(lanes);  // a power of 2
  const int lane = threadIdx.x & (lanes - 1), rows_of_pass = kRowThreads >> shift;
#pragma unroll 1
  for (int i = threadIdx.x >> shift; i < rows; i += kAtOnce * rows_of_pass) {
    if (row_of(i) >= end) break;
    const char *left[kAtOnce], *right[kAtOnce];
    float naturals[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int r = i + j * rows_of_pass;
      const int row = min(row_of(r), seq.len_q - 1);  // past the end, the last once more
      left[j] = at(gO, p.out_strides, row, r);
      right[j] = at(gdO, p.grad_out_strides, row, r);
      naturals[j] = number_at(lse, p.lse_strides, row, r);
    }
    float deltas[kAtOnce] = {};
    if (p.grad_out) row_products<T>(deltas, left, right, p.head_dim_v, lane, lanes);
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int r = i + j * rows_of_pass, row = min(row_of(r), seq.len_q - 1);
      if (r >= rows || row_of(r) >= end) break;
      float delta = deltas[j];
      if (grad_lse) delta -= number_at(grad_lse, p.grad_lse_strides, row, r);
      const float natural = naturals[j];
      // A row that sees no key has probabilities 2^(s - inf) = 0. Where lse and delta would not
      // show that its Q is not finite, a NaN does.
      float2 terms = {natural == -INFINITY ? INFINITY : natural * kLog2e, delta};
      if (__any_sync(0xffffffffu, natural == -INFINITY)) {
        const char* q = at(gQ, p.query_strides, row, r);
        const float square = row_product<T>(q, q, p.head_dim, lane, lanes);
        if (natural == -INFINITY && !(square < INFINITY)) terms.y = NAN;
      }
      if (natural == INFINITY) terms.y = NAN;
      const bool past = row_of(r) >= seq.len_q;
      if (past) terms = {INFINITY, 0};
      // Ragged, others' rows follow. A NaN shows that something there is not finite.
      if (p.blocks && __any_sync(0xffffffffu, past)) {
        const int64_t other = min(int64_t{row_of(r)}, p.tokens_q - 1 - seq.token_q);
        const char* q = at(gQ, p.query_strides, other, r);
        float square = row_product<T>(q, q, p.head_dim, lane, lanes);
        if (p.grad_out) {
          const char* dO = at(gdO, p.grad_out_strides, other, r);
          square += row_product<T>(dO, dO, p.head_dim_v, lane, lanes);
        }
        if (past && !(square < INFINITY)) terms.y = NAN;
      }
      if (lane == 0) terms_of[head_of(r) * p.rows + row_of(r)] = terms;
    }
  }
}

// dQ from its sums: 64 rows x 64 columns at a time, from the order of wgmma's accumulators through
// shared memory to whole rows. See find_query_rows() for the grid.
template <class T>
__device__ __forceinline__ void finish_rows(const Sm90BwdParams& p) {
  using Part = tma::Tile<64, 64>;
  extern __shared__ __align__(1024) char shared[];
  static_assert(Part::kBytes == kConvertDqSharedBytes);
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const QueryRows rows = find_query_rows(p);
  if (rows.kind == RaggedKind::kEmpty) return;
  const Sequence& seq = rows.seq;
  char* const to = const_cast<char*>(
      rows_of(p.grad_query, p, p.grad_query_strides, rows.batch, rows.head, seq.token_q));
  const int64_t row_bytes = p.grad_query_strides.row_bytes();
  if (rows.kind != RaggedKind::kBlock || !is_seen(seq, rows.first, p)) {
    return fill_unseen<T>(seq, rows.kind, rows.batch, rows.head, rows.first, p);
  }
  if (threadIdx.x == 0) wait_until_done(p, seq, rows.batch, rows.head / p.group);
  __syncthreads();  // the sums are complete
  const int64_t round_row = workspace_row(p, seq, rows.batch) - round_rows(p);
  const float* const sums =
      p.dq_accum + (rows.head * p.dq_accum_rows + round_row + rows.first) * p.dim;

  const int lane = threadIdx.x % 32, r = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll 1
  for (int part = 0; part < p.block_q / 64; ++part) {
    const int first = rows.first + 64 * part;
    if (first >= seq.len_q) break;
#pragma unroll 1
    for (int column = 0; column < p.head_dim; column += 64) {
      const float4* const from = reinterpret_cast<const float4*>(
          sums + (part * static_cast<int64_t>(p.dim) + column) * 64 + threadIdx.x * 4);
      float4 four[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) four[i] = __ldcs(from + i * 128);
      __syncthreads();  // what was there has left
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float4 x = four[i];
        const uint32_t at = smem + Part::at(r, 8 * i + lane % 4 * 2);
        ptx::st_shared_u32(at, T::pack(x.x * p.scale, x.y * p.scale));
        ptx::st_shared_u32(at + 8 * 128, T::pack(x.z * p.scale, x.w * p.scale));
      }
      __syncthreads();  // all rows are there
#pragma unroll
      for (int i = threadIdx.x; i < 64 * 8; i += kFinishThreads) {
        const int row = i / 8, chunk = i % 8, left = p.head_dim - column - 8 * chunk;
        if (first + row >= seq.len_q || left <= 0) continue;
        const uint4 eight = ptx::ld_shared_v4(smem + Part::at(row, 8 * chunk));
        char* const there = to + (first + row) * row_bytes + (column + 8 * chunk) * 2;
        store_eight(there, eight, left);
      }
    }
  }
}

// While the main kernel ends: whatever SM is through with it begins with the heads that are done
// with. This kernel ends after that one.
template <class T>
__device__ __forceinline__ void attention_bwd_dq(const Sm90BwdParams& p) {
  finish_rows<T>(p);
  if (blockIdx.x + blockIdx.y + blockIdx.z == 0) ptx::griddepcontrol_wait();
}

}  // namespace flashmoe::cuda::sm90
