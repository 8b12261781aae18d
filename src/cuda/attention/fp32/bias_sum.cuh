// The gradient of a bias that was broadcast, in fp32: the sum of P * (dP - delta) over all that
// shared it, in the fixed order of mma_sync/bias_sum_steps.cuh. No atomics, always the same bits.
//
// One CTA takes one tile of the gradient and goes through its steps, each warp with 16 of its rows;
// S and dP are computed once more. Where there are few tiles, several CTAs share the steps of one
// and a second launch adds up theirs, as mma_sync/bias_sum.cuh tells.
//
//   shared memory, fp32:  sQ, sdO   block_q x D
//                         sK, sV    block_k x D
#pragma once

#include "cuda/attention/fp32/rows.cuh"
#include "cuda/attention/fp32/tiles.h"
#include "cuda/attention/mma_sync/bias_sum.cuh"

namespace flashmoe::cuda {

template <class Chip_, class Product_, Fp32BiasSumTile kTile>
struct Fp32BiasSumConfig {
  using Chip = Chip_;
  using Product = Product_;
  using Type = Fp32;
  static constexpr int kDim = kTile.head_dim;
  static constexpr int kBlockQ = kTile.block_q, kBlockK = kTile.block_k;
  static constexpr int kThreads = kTile.threads();
  static constexpr int kCols = 1, kM = 1, kN = kBlockK / 8;  // of a warp
  using Tile = FloatTile<kDim>;
  static constexpr uint32_t kQueryBytes = kBlockQ * kDim * 4, kKeyBytes = kBlockK * kDim * 4;
  static constexpr uint32_t kSmemQ = 0, kSmemdO = kQueryBytes, kSmemK = 2 * kQueryBytes;
  static constexpr uint32_t kSmemV = kSmemK + kKeyBytes;
  static constexpr uint32_t kSmemTask = kTile.shared_bytes() - kTaskBytes;
  static constexpr uint32_t kSmemSteps = kSmemTask - kFp32KnownSteps * kFp32StepBytes;
  static constexpr int kPitch = kBlockK * 4 + 16;  // of the tile in fp32, in bytes
  static_assert(kSmemV + kKeyBytes <= kSmemSteps && kBlockQ * kPitch <= kSmemSteps);
  static_assert(kFp32KnownSteps <= kThreads);
};

// What one step reads.
struct Fp32SumStep {
  Sequence seq;
  StepPlace place;
  bool seen;  // whether the queries see some of the keys
  bool full;  // whether all queries see all keys
};
static_assert(sizeof(Fp32SumStep) <= kFp32StepBytes);

// The tile of one CTA and its share of the steps, kept in shared memory.
template <class C>
struct Fp32SumTask {
  SharedSteps<C> steps;
  SumTile tile;
  BiasRows bias, grad;
  int number, split;  // of the tile, and among its splits
  int begin, end;     // its steps
  bool guarded;
  uint64_t seed;  // of dropout
};

template <class C>
__device__ __forceinline__ Fp32SumStep find_step(int i, const Fp32SumTask<C>& task,
                                                 const RaggedBlock* slot,
                                                 const AttentionBwdParams& p) {
  Fp32SumStep s;
  s.place = task.steps.place(i, task.tile, p);
  s.seq = slot ? find_sequence(*slot) : find_sequence(p, s.place.batch);
  const Sequence& seq = s.seq;
  // Row i sees key j when i + shift - left <= j <= i + shift + right.
  const int first_query = s.place.first_query, first_key = s.place.first_key;
  const int last_query = min(first_query + C::kBlockQ, seq.len_q) - 1;
  const int last_key = min(first_key + C::kBlockK, seq.len_k) - 1;
  s.seen = first_query <= last_query && first_key <= last_key &&
           seq.begin(first_query, p) <= last_key && seq.end(last_query, p) > first_key;
  s.full = last_key - first_key + 1 == C::kBlockK && seq.begin(last_query, p) <= first_key &&
           seq.end(first_query, p) > last_key;
  return s;
}

// Loads what a step reads.
template <class C>
__device__ __forceinline__ void load_step(uint32_t smem, const Fp32SumStep& step,
                                          const AttentionBwdParams& p) {
  const Sequence& seq = step.seq;
  const auto load = [&]<int kRows>(std::integral_constant<int, kRows>, uint32_t to,
                                   const void* tensor, const Strides& strides, int head,
                                   int64_t token, int first, int len, int dim) {
    load_float_tile<typename C::Chip, typename C::Tile, kRows, C::kThreads>(
        smem + to, rows_to_read(tensor, p, strides, step.place.batch, head, token), first,
        tensor ? len : 0, dim);
  };
  const std::integral_constant<int, C::kBlockQ> queries;
  const std::integral_constant<int, C::kBlockK> keys;
  const int head = step.place.head, key_head = head / p.group;
  load(queries, C::kSmemQ, p.query, p.query_strides, head, seq.token_q, step.place.first_query,
       seq.len_q, p.head_dim);
  load(queries, C::kSmemdO, p.grad_out, p.grad_out_strides, head, seq.token_q,
       step.place.first_query, seq.len_q, p.head_dim_v);
  load(keys, C::kSmemK, p.key, p.key_strides, key_head, seq.token_k, step.place.first_key,
       seq.len_k, p.head_dim);
  load(keys, C::kSmemV, p.value, p.value_strides, key_head, seq.token_k, step.place.first_key,
       seq.len_k, p.head_dim_v);
  C::Chip::commit();
}

// Adds P * (dP - delta) of one step, whose tiles are in shared memory.
template <class C>
__device__ __forceinline__ void add_step(BiasSums<C>& sums, uint32_t smem, const Fp32SumStep& step,
                                         const Fp32SumTask<C>& task, const float2 (&lse_delta)[2],
                                         const AttentionBwdParams& p) {
  using Tile = typename C::Tile;
  using Product = typename C::Product;
  const int row = sum_row<C>();
  const Pairs<false> at(step.place.first_query + row, step.place.first_key);
  const KeptPairs<1, C::kN, false> kept(step.place.first_query + row, step.place.first_key,
                                        task.seed, step.place.batch, step.place.head, p);
  float s[1][C::kN][4], dp[1][C::kN][4];
  start_scores<true>(s, at, task.bias, step.seq, p);
  multiply_floats<Product, C::kDim / 8>(s, Along<Tile>(smem + C::kSmemQ, row),
                                        Along<Tile>(smem + C::kSmemK));
  set_zero(dp);
  multiply_floats<Product, C::kDim / 8>(dp, Along<Tile>(smem + C::kSmemdO, row),
                                        Along<Tile>(smem + C::kSmemV));
  kept.apply(dp, p);
  const Loop loop = adds_bias_late(p) || task.guarded ? Loop::kGeneral
                    : step.full                       ? Loop::kPlain
                                                      : Loop::kMasked;
  differentiate<true>(
      loop, s, dp, at, [&](int, int, int i) { return lse_delta[i / 2]; }, task.bias, step.seq, p,
      [&](int m, int n, int i, float gradient) {
        sums[m][n][i] += step.seq.valid ? gradient : NAN;
      });
}

// Adds all steps of the task.
template <class C>
__device__ __forceinline__ void add_steps(BiasSums<C>& sums, char* shared,
                                          const Fp32SumTask<C>& task, const RaggedBlock* slot,
                                          const AttentionBwdParams& p) {
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const auto known = [&](int i) -> Fp32SumStep& {
    return *reinterpret_cast<Fp32SumStep*>(shared + C::kSmemSteps +
                                           i % kFp32KnownSteps * kFp32StepBytes);
  };
  set_zero(sums);
#pragma unroll 1
  for (int i = task.begin; i < task.end; ++i) {
    __syncthreads();  // everyone is done with the step before
    if ((i - task.begin) % kFp32KnownSteps == 0) {
      const int thread = ptx::opaque_thread();
      if (thread < kFp32KnownSteps && i + thread < task.end) {
        known(i + thread) = find_step(i + thread, task, slot, p);
      }
      __syncthreads();  // the next steps are known
    }
    const Fp32SumStep& step = known(i);
    if (!step.seen) continue;
    load_step<C>(smem, step, p);
    const int64_t first = step.place.head * p.rows + workspace_row(p, step.seq, step.place.batch);
    float2 lse_delta[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row =
          step.place.first_query + sum_row<C>() + 8 * half + ptx::opaque_thread() % 32 / 4;
      const bool exists = row < step.seq.len_q;
      lse_delta[half] =
          exists ? reinterpret_cast<const float2*>(p.lse_delta)[first + row] : float2{INFINITY, 0};
    }
    C::Chip::template wait<0>();
    __syncthreads();  // the step's tiles are there
    add_step<C>(sums, smem, step, task, lse_delta, p);
  }
}

template <class C>
__device__ __forceinline__ void find_task(Fp32SumTask<C>& task, const RaggedBlock* slot,
                                          const AttentionBwdParams& p) {
  task.steps = SharedSteps<C>(p, slot);
  task.tile = task.steps.tile(task.number, p);
  task.guarded = false;
  task.seed = read_seed(p);
  const int64_t count = task.steps.count();
  task.begin = static_cast<int>(count * task.split / p.bias_sum_splits);
  task.end = static_cast<int>(count * (task.split + 1) / p.bias_sum_splits);
  Sequence all;  // every query and key of the bias
  if (slot) all = find_sequence(*slot);
  all.len_k = task.tile.len_k;
  task.bias = find_bias(p, all, task.tile.batch, task.tile.head);
  task.grad = find_grad_bias(p, all, task.tile.batch, task.tile.head);
}

// Sums one tile and stores it, through shared memory, or in the workspace where it is split.
template <class C>
__device__ __forceinline__ void sum_tile(char* shared, Fp32SumTask<C>& task,
                                         const RaggedBlock* slot, const AttentionBwdParams& p) {
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  BiasSums<C> sums;
  if (p.bias_sum_last) {
    set_zero(sums);
#pragma unroll 1
    for (int i = 0; i < p.bias_sum_splits; ++i) {
      const float4* from = split_sums<C>(task.number, i, p);
#pragma unroll
      for (int n = 0; n < C::kN; ++n) {
        const float4 x = from[n * C::kThreads];
        float(&sum)[4] = sums[0][n];
        sum[0] += x.x, sum[1] += x.y, sum[2] += x.z, sum[3] += x.w;
      }
    }
  } else {
    while (true) {
      add_steps<C>(sums, shared, task, slot, p);
      // Something not finite may be hidden: the steps are added once more, guarded.
      if (!__syncthreads_or(!all_finite(sums)) || task.guarded) break;
      __syncthreads();  // everyone has looked
      if (threadIdx.x == 0) task.guarded = true;
      __syncthreads();  // everyone knows
    }
    if (p.bias_sum_splits > 1) {
      float4* to = split_sums<C>(task.number, task.split, p);
#pragma unroll
      for (int n = 0; n < C::kN; ++n) {
        const float(&sum)[4] = sums[0][n];
        to[n * C::kThreads] = {sum[0], sum[1], sum[2], sum[3]};
      }
      return;
    }
  }
  __syncthreads();  // nobody reads what was there
  const int lane = ptx::opaque_thread() % 32;
  const uint32_t to = smem + (sum_row<C>() + lane / 4) * C::kPitch + lane % 4 * 8;
#pragma unroll
  for (int i = 0; i < C::kN * 4; ++i) {
    ptx::st_shared_f32(to + i % 4 / 2 * 8 * C::kPitch + (8 * (i / 4) + i % 2) * 4,
                       sums[0][i / 4][i % 4]);
  }
  __syncthreads();  // the tile is written
  store_sums<C>(smem, task.grad, task.tile);
}

// The grid is (tiles of the gradient x splits, its heads, its batches); the last of the two
// launches of a split sum has one CTA for each tile. Ragged, it is one CTA for each tile of keys.
template <class C>
__device__ __forceinline__ void attention_fp32_bias_sum(const AttentionBwdParams& p) {
  extern __shared__ __align__(1024) char shared[];
  Fp32SumTask<C>& task = *reinterpret_cast<Fp32SumTask<C>*>(shared + C::kSmemTask);
  static_assert(sizeof(Fp32SumTask<C>) <= kTaskBytes);
  const RaggedBlock* slot = p.blocks ? p.sum_blocks + blockIdx.x : nullptr;
  if (slot && slot->kind != RaggedKind::kBlock) {
    if (slot->kind == RaggedKind::kEmpty) return;
    fill_pairs<Fp32>(find_grad_bias(p, find_sequence(*slot), 0, 0), slot->token_q,
                     slot->kind == RaggedKind::kRest ? 0.f : NAN);
    return;
  }
  const int splits = p.bias_sum_last ? 1 : p.bias_sum_splits;
  int number = slot ? 0 : blockIdx.x / splits;
#pragma unroll 1
  do {
    if (threadIdx.x == 0) {
      task.number = number;
      task.split = slot ? 0 : blockIdx.x % splits;
      find_task<C>(task, slot, p);
    }
    __syncthreads();  // the task is known
    sum_tile<C>(shared, task, slot, p);
    __syncthreads();  // the tile is stored
    ++number;
  } while (slot && number * C::kBlockQ < slot->len_q);
}

}  // namespace flashmoe::cuda
