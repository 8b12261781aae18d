// The last part of the backward pass for Hopper, wide: dQ from its sums, once all blocks of keys of
// the head are done with, while they are still in the second-level cache. By warps that have
// nothing else to do: one of each CTA all the time, and those that compute when there is no more
// work.
#pragma once

#include "cuda/attention/sm90/bwd_dq.cuh"
#include "cuda/attention/sm90/bwd_tile.cuh"

namespace flashmoe::cuda::sm90 {

// Rows of dQ whose sums are complete: the 16 that a warp holds of wgmma's accumulators.
struct RoundedRows {
  const float* sums;
  char* to;  // the first row, of 16-bit numbers
  int count;
};

// The next ones, or false. The heads come in the order of the tasks.
template <class C>
__device__ __forceinline__ bool find_rounded_rows(RoundedRows& r, const Sm90BwdParams& p) {
  constexpr int kRows = 16, kOfTile = C::kBlockQ / kRows;
  const int heads = p.heads * p.group;  // of queries
#pragma unroll 1
  for (;;) {
    const int number = warp_uniform(threadIdx.x % 32 == 0 ? atomicAdd(p.tile_counter + 1, 1) : 0);
    const int tile = number / kOfTile;
    if (tile >= p.converted_tiles) return false;
    int batch, head, first;
    Sequence seq;
    if (p.blocks) {
      const RaggedBlock& block = p.query_blocks[tile / heads];
      if (block.kind == RaggedKind::kEmpty) return false;  // and so are all that follow
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
    first = first * C::kBlockQ + number % kOfTile * kRows;
    if (first >= seq.len_q || !is_seen(seq, first, p)) continue;  // filled before
    head += p.first_head * p.group;
    const int64_t row = head * p.dq_accum_rows + workspace_row(p, seq, batch) - round_rows(p);
    r.sums = p.dq_accum + (row + first / 64 * 64) * C::kSumDim + first % 64 * 8;
    r.to = const_cast<char*>(
               rows_of(p.grad_query, p, p.grad_query_strides, batch, head, seq.token_q)) +
           static_cast<int64_t>(first) * p.grad_query_strides.row_bytes();
    r.count = seq.len_q - first;
    wait_until_done(p, seq, batch, head / p.group);
    return true;
  }
}

// Four numbers of each thread, of which thread i of four is to have the i-th of all four.
__device__ __forceinline__ void transpose_fours(uint32_t (&x)[4], int lane) {
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

// By a warp, kAtOnce times 16 columns at once. A thread has 4 sums of each 8 columns, two for each
// of two rows; of 16 columns it leaves with 8 of a row.
template <class C, int kAtOnce>
__device__ __forceinline__ void round_all(const Sm90BwdParams& p) {
  RoundedRows rows;
#pragma unroll 1
  while (find_rounded_rows<C>(rows, p)) {
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
        transpose_fours(eight, lane);
        const int left = columns - 16 * i - lane % 2 * 8;
        if (is_row) store_eight(to, uint4{eight[0], eight[1], eight[2], eight[3]}, left);
        to += 32;
      }
    }
  }
}

}  // namespace flashmoe::cuda::sm90
