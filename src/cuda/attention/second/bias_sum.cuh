// Second derivatives: the gradient of a bias that was broadcast, the sum of Z over all that shared
// it.
//
// One CTA takes one tile of the gradient and goes through the batches, heads and tiles of queries
// and keys that share it, in a fixed order (mma_sync/bias_sum_steps.cuh), its sums in registers.
// Where there are few tiles, several CTAs share the steps of one (split), leave their sums in the
// workspace, and a second launch adds those up in their order. Where queries or keys share the
// bias, the tile is summed over them at the end, through shared memory.
#pragma once

#include "cuda/attention/mma_sync/bias_sum_steps.cuh"
#include "cuda/attention/second/pairs.cuh"

namespace flashmoe::cuda::second {

struct SumShape {
  static constexpr int kBlockQ = kRows, kBlockK = kRows;
};
inline constexpr int kSumPitch = kRows + 1;  // of the tile in shared memory, in floats

// Adds Z of one step.
template <class C>
__device__ __forceinline__ void add_step(Pairs& sums, char* shared, const StepPlace& step,
                                         const Sequence& seq, const AttentionSecondParams& p) {
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const int row = step.first_query, key = step.first_key;
  const int last_row = min(row + kRows, seq.len_q) - 1, last_key = min(key + kRows, seq.len_k) - 1;
  if (row > last_row || key > last_key) return;
  if (!seq.valid) {
#pragma unroll
    for (int i = 0; i < kWarpRows / 2; ++i) sums[i / 4][i % 4] = NAN;
    return;
  }
  if (seq.begin(row, p) > last_key || seq.end(last_row, p) <= key) return;
  const Head& h = find_head<C>(shared, p, seq, step.batch, step.head);
  Products x;
  Pairs bias, bias_move;
  find_products<C, By::kQueries>(x, smem, h.in, row, key, 0, false, seq, p, [&] {
    load_numbers<C>(shared, h.numbers + row, seq.len_q - row, p);
  });
  read_pairs<C, By::kQueries>(bias, h.bias, row, key, seq);
  read_pairs<C, By::kQueries>(bias_move, h.bias_move, row, key, seq);
  const uint32_t visible = visible_pairs<By::kQueries>(row, key, seq, p);
#pragma unroll
  for (int n = 0; n < kWarpRows / 8; ++n) {
    differentiate<C, By::kQueries>(x, n, bias[n], bias_move[n], visible, shared, p,
                                   [&](int i, float z) { sums[n][i] += z; });
  }
}

// Where a split leaves its sums, in the order of the registers.
__device__ __forceinline__ float4* split_sums(int tile, int split, const AttentionSecondParams& p) {
  const int tiles = gridDim.x / (p.bias_sum_last ? 1 : p.bias_sum_splits);
  const int64_t at = (int64_t{blockIdx.z} * gridDim.y + blockIdx.y) * tiles + tile;
  return reinterpret_cast<float4*>(p.bias_sums) + ptx::opaque_thread() +
         (at * p.bias_sum_splits + split) * (kRows * kRows / 4);
}

// Stores the tile, as it is or summed over its rows or keys.
template <class C>
__device__ __forceinline__ void store_tile_sums(const Pairs& sums, char* shared,
                                                const PairRows& grad, const SumTile& tile,
                                                bool sum_rows, bool sum_keys) {
  float* const sTile = reinterpret_cast<float*>(shared);
  __syncthreads();  // nobody reads what was there
#pragma unroll
  for (int n = 0; n < kWarpRows / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const LanePair<By::kQueries> at(n, i);
      sTile[at.row * kSumPitch + at.key] = sums[n][i];
    }
  }
  __syncthreads();  // the tile is written
  const int rows = sum_rows ? 1 : min(kRows, tile.len_q - tile.first_query);
  const int keys = sum_keys ? 1 : min(kRows, tile.len_k - tile.first_key);
  for (int i = ptx::opaque_thread(); i < rows * keys; i += kThreads) {
    const int row = i / keys, key = i % keys;
    float sum = 0;
    for (int r = row; r < (sum_rows ? kRows : row + 1); ++r) {
      for (int k = key; k < (sum_keys ? kRows : key + 1); ++k) sum += sTile[r * kSumPitch + k];
    }
    grad.template write<C>(tile.first_query + row, tile.first_key + key, sum);
  }
}

// Sums tile `number` of the gradient over the steps of one split, and stores it.
template <class C>
__device__ __forceinline__ void sum_tile(char* shared, const RaggedBlock* slot, int number,
                                         int split, const AttentionSecondParams& p) {
  const SharedSteps<SumShape> steps(p, slot);
  const SumTile tile = steps.tile(number, p);
  Pairs sums;
  set_zero(sums);
  if (p.bias_sum_last) {
#pragma unroll 1
    for (int i = 0; i < p.bias_sum_splits; ++i) {
      const float4* from = split_sums(number, i, p);
#pragma unroll
      for (int n = 0; n < kWarpRows / 8; ++n) {
        const float4 x = from[n * kThreads];
        float(&sum)[4] = sums[n];
        sum[0] += x.x, sum[1] += x.y, sum[2] += x.z, sum[3] += x.w;
      }
    }
  } else {
    const int64_t count = steps.count();
    const int begin = static_cast<int>(count * split / p.bias_sum_splits);
    const int end = static_cast<int>(count * (split + 1) / p.bias_sum_splits);
#pragma unroll 1
    for (int i = begin; i < end; ++i) {
      const StepPlace step = steps.place(i, tile, p);
      add_step<C>(sums, shared, step, slot ? find_sequence(*slot) : find_sequence(p, step.batch),
                  p);
    }
    if (p.bias_sum_splits > 1) {
      float4* to = split_sums(number, split, p);
#pragma unroll
      for (int n = 0; n < kWarpRows / 8; ++n) {
        const float(&sum)[4] = sums[n];
        to[n * kThreads] = {sum[0], sum[1], sum[2], sum[3]};
      }
      return;
    }
  }
  Sequence seq;
  if (slot) seq = find_sequence(*slot);
  const PairRows grad = find_grad_bias<C>(p, seq, tile.batch, tile.head);
  store_tile_sums<C>(sums, shared, grad, tile, grad.row == 0, grad.column == 0);
}

// The grid is (tiles of the gradient x splits, its heads, its batches); the last of the two
// launches of a split sum has one CTA for each tile. Ragged, it is one CTA for each tile of keys.
template <class C>
__device__ __forceinline__ void attention_second_bias_sum(const AttentionSecondParams& p) {
  extern __shared__ __align__(1024) char shared[];
  if (!p.blocks) {
    const int splits = p.bias_sum_last ? 1 : p.bias_sum_splits;
    sum_tile<C>(shared, nullptr, blockIdx.x / splits, blockIdx.x % splits, p);
    return;
  }
  const RaggedBlock* slot = p.sum_blocks + blockIdx.x;
  if (slot->kind == RaggedKind::kEmpty) return;
  if (slot->kind != RaggedKind::kBlock) {
    const PairRows grad = find_grad_bias<C>(p, find_sequence(*slot), 0, 0);
    const float value = slot->kind == RaggedKind::kRest ? 0.f : NAN;
    for (int64_t i = ptx::opaque_thread(); i < slot->token_q; i += kThreads) {
      grad.template write<C>(0, i, value);
    }
    return;
  }
#pragma unroll 1
  for (int number = 0; number * kRows < slot->len_q; ++number) {
    sum_tile<C>(shared, slot, number, 0, p);
  }
}

}  // namespace flashmoe::cuda::second
