// dQ from its fp32 accumulator to 16 bits, once all tiles of keys of the head have added to it.
//
// Up to head dim 128 that is the pass's last kernel, attention_bwd_dq(), bound by memory. Above it,
// warps of the backward kernel that have nothing else to do convert heads as they are complete,
// while their sums are still in L2: one of each CTA all the time, and the consumers when there is
// no more task. (At head dim 128 and 512 keys, converting inside the backward kernel made it 15%
// slower.)
#pragma once

#include "cuda/attention/sequence.cuh"
#include "cuda/attention/sm90/bwd_dq.cuh"
#include "cuda/attention/sm90/params.h"
#include "cuda/attention/sm90/tiles.h"
#include "cuda/ptx/grid.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/tile/dtype.cuh"
#include "cuda/tma/operand.cuh"
#include "cuda/tma/pipeline.cuh"

namespace flashmoe::cuda::sm90 {

// Stores eight numbers of a row of dQ, or as many as are left of the row.
__device__ __forceinline__ void store_eight(char* to, const uint4& eight, int left) {
  if (left >= 8) {
    *reinterpret_cast<uint4*>(to) = eight;
    return;
  }
  const uint32_t twos[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint16_t one = static_cast<uint16_t>(twos[i / 2] >> (i % 2 * 16));
    if (i < left) reinterpret_cast<uint16_t*>(to)[i] = one;
  }
}

// Threads for 64 rows at a time; a CTA has as many of these as its tile of queries takes.
inline constexpr int kConvertDqThreads = 128, kMostConvertDqThreads = 256;

// Up to 64 rows x 64 columns of 16-bit numbers that a CTA stores: what is beyond them is left out.
struct StoredPart {
  char* to;
  int64_t row_bytes;
  int rows, columns;
};
// Sums in the order of wgmma's accumulators, times `times`, through shared memory to whole rows, by
// kConvertDqThreads threads. Transposed, wgmma's rows are columns. All threads of the CTA call it
// as often.
template <class T>
__device__ __forceinline__ void store_sums(const float4 (&four)[8], float times, bool transposed,
                                           const StoredPart& part) {
  using Part = tma::Tile<64, 64>;
  extern __shared__ __align__(1024) char shared[];
  static_assert(Part::kBytes == kConvertDqSharedBytes);
  const int thread = threadIdx.x % kConvertDqThreads, lane = thread % 32, warp = thread / 32;
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared)) +
                        threadIdx.x / kConvertDqThreads * Part::kBytes;
  __syncthreads();  // what was there before is stored
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    uint32_t packed[4];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float4 x = four[i + j];
      packed[2 * j] = T::pack(x.x * times, x.y * times);
      packed[2 * j + 1] = T::pack(x.z * times, x.w * times);
    }
    const int along = 16 * warp + lane % 16, across = 8 * i + lane / 16 * 8;
    if (transposed) {
      const int row = across + lane % 8, dim = 16 * warp + lane / 8 % 2 * 8;
      ptx::stmatrix_x4_trans(smem + Part::at(row, dim), packed);
    } else {
      ptx::stmatrix_x4(smem + Part::at(along, across), packed);
    }
  }
  __syncthreads();  // all rows are there
#pragma unroll
  for (int i = thread; i < 64 * 8; i += kConvertDqThreads) {
    const int row = i / 8, chunk = i % 8, left = part.columns - 8 * chunk;
    if (row >= part.rows || left <= 0) continue;
    const uint4 eight = ptx::ld_shared_v4(smem + Part::at(row, 8 * chunk));
    store_eight(part.to + row * part.row_bytes + chunk * 16, eight, left);
  }
}

// A tile of queries by a CTA, 64 columns at a time. See find_query_rows() for the grid.
template <class T>
__device__ __forceinline__ void convert_dq_tile(const Sm90BwdParams& p) {
  const QueryRows rows = find_query_rows(p);
  if (rows.kind == RaggedKind::kEmpty) return;
  const Sequence& seq = rows.seq;
  char* const to = const_cast<char*>(
      rows_of(p.grad_query, p, p.grad_query_strides, rows.batch, rows.head, seq.token_q));
  const int64_t row_bytes = p.grad_query_strides.row_bytes();
  if (rows.kind != RaggedKind::kBlock || !is_seen(seq, rows.first, p)) {
    return fill_unseen_dq<T>(seq, rows.kind, rows.batch, rows.head, rows.first, p);
  }
  if (threadIdx.x == 0) wait_until_done(p, seq, rows.batch, rows.head / p.group);
  __syncthreads();  // the sums are complete
  const int64_t slice_row = workspace_row(p, seq, rows.batch) - rows_before_slice(p);
  const float* const sums =
      p.dq_accum + (rows.head * p.dq_accum_rows + slice_row + rows.first) * p.dim;

  const bool transposed = p.block_q % 64 != 0;  // as transposes_dq() has it
  const int thread = threadIdx.x % kConvertDqThreads, part = threadIdx.x / kConvertDqThreads * 64;
  const int first = rows.first + part, count = min(p.block_q - part, 64);
#pragma unroll 1
  for (int column = 0; column < p.head_dim; column += 64) {
    const int64_t at = transposed ? column * int64_t{p.block_q} + part * 64
                                  : part * static_cast<int64_t>(p.dim) + column * 64;
    const int eights = (transposed ? count : min(p.dim - column, 64)) / 8;
    const float4* const from = reinterpret_cast<const float4*>(sums + at) + thread;
    float4 four[8] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < eights) four[i] = __ldcs(from + i * 128);
    }
    store_sums<T>(four, p.scale, transposed,
                  {.to = to + first * row_bytes + column * 2,
                   .row_bytes = row_bytes,
                   .rows = min(count, seq.len_q - first),
                   .columns = p.head_dim - column});
  }
}

// The last kernel of the pass. It begins while the backward kernel ends: an SM that is through with
// that one converts the heads that are complete. One CTA waits for the backward kernel, so that
// this kernel ends after it.
template <class T>
__device__ __forceinline__ void attention_bwd_dq(const Sm90BwdParams& p) {
  convert_dq_tile<T>(p);
  if (blockIdx.x + blockIdx.y + blockIdx.z == 0) ptx::griddepcontrol_wait();
}

// 16 rows of dQ whose sums are complete: those that a warp holds of wgmma's accumulators.
struct CompleteRows {
  const float* sums;
  char* to;  // the first row of dQ, 16-bit
  int count;
};

// Finds the next rows and waits until they are complete; false where there are none any more. Heads
// come in the order of the tasks.
template <class C>
__device__ __forceinline__ bool find_complete_rows(CompleteRows& r, const Sm90BwdParams& p) {
  constexpr int kRows = 16, kPartsOfTile = C::kBlockQ / kRows;
  const int heads = p.heads * p.group;  // of queries
#pragma unroll 1
  for (;;) {
    const int number =
        tma::warp_uniform(threadIdx.x % 32 == 0 ? atomicAdd(p.tile_counter + 1, 1) : 0);
    const int tile = number / kPartsOfTile;
    if (tile >= p.converted_tiles) return false;
    int batch, head, first;
    Sequence seq;
    if (p.blocks) {
      const RaggedBlock& block = p.query_blocks[tile / heads];
      if (block.kind == RaggedKind::kEmpty) return false;  // all that follow are empty as well
      seq = find_sequence(block);
      batch = block.sequence;
      head = tile % heads;
      first = block.block;
    } else {
      const int tiles = (p.len_q + C::kBlockQ - 1) / C::kBlockQ;
      batch = p.first_batch + tile / tiles / heads;
      head = tile / tiles % heads;
      first = tile % tiles;
      seq = find_sequence(p, batch);
    }
    first = first * C::kBlockQ + number % kPartsOfTile * kRows;
    if (first >= seq.len_q || !is_seen(seq, first, p))
      continue;  // attention_bwd_preprocess() fills them
    head += p.first_head * p.group;
    const int64_t row =
        head * p.dq_accum_rows + workspace_row(p, seq, batch) - rows_before_slice(p);
    r.sums = p.dq_accum + (row + first / 64 * 64) * C::kDqAccumDim + first % 64 * 8;
    r.to = const_cast<char*>(
               rows_of(p.grad_query, p, p.grad_query_strides, batch, head, seq.token_q)) +
           static_cast<int64_t>(first) * p.grad_query_strides.row_bytes();
    r.count = seq.len_q - first;
    wait_until_done(p, seq, batch, head / p.group);
    return true;
  }
}

// Transposes 4 x 4 registers over four threads: thread i gets register i of all four.
__device__ __forceinline__ void transpose_4x4(uint32_t (&x)[4], int lane) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const bool odd = lane & step;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const uint32_t other = __shfl_xor_sync(0xffffffffu, odd ? x[i] : x[i + step], step);
      (odd ? x[i] : x[i + step]) = other;
    }
  }
}

// Converts by warps of the backward kernel until no rows are left, kAtOnce x 16 columns at a time.
// A thread loads 4 sums of each 8 columns, two for each of two rows; of 16 columns it stores 8 of a
// row.
template <class C, int kAtOnce>
__device__ __forceinline__ void convert_dq(const Sm90BwdParams& p) {
  CompleteRows rows;
#pragma unroll 1
  while (find_complete_rows<C>(rows, p)) {
    const int lane = threadIdx.x % 32, row = lane / 4 + lane % 4 / 2 * 8;
    const bool is_row = row < rows.count;
    const float4* from = reinterpret_cast<const float4*>(rows.sums) + lane;
    char* to =
        rows.to + static_cast<int64_t>(row) * p.grad_query_strides.row_bytes() + lane % 2 * 16;
#pragma unroll 1
    for (int columns = p.head_dim; columns > 0; columns -= 16 * kAtOnce) {
      float4 fours[2 * kAtOnce];
#pragma unroll
      for (int i = 0; i < 2 * kAtOnce; ++i) fours[i] = __ldcg(from + i * 128);
      from += 2 * kAtOnce * 128;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        uint32_t eight[4];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float4 x = fours[2 * i + j];
          eight[j] = C::Type::pack(x.x * p.scale, x.y * p.scale);
          eight[2 + j] = C::Type::pack(x.z * p.scale, x.w * p.scale);
        }
        transpose_4x4(eight, lane);
        const int left = columns - 16 * i - lane % 2 * 8;
        if (is_row) store_eight(to, uint4{eight[0], eight[1], eight[2], eight[3]}, left);
        to += 32;
      }
    }
  }
}

}  // namespace flashmoe::cuda::sm90
