// The gradient of a bias that was broadcast: dBias = sum of P * (dP - delta) over all that shared
// it.
//
// One CTA takes one tile of the gradient and goes through the batches, heads and tiles of queries
// and keys that share it, in a fixed order (bias_sum_steps.cuh): no atomics, and always the same
// bits. S and dP are computed once more for that; the tile's bias and its sums stay in registers.
// Where there are few tiles, several CTAs share the steps of one (split), leave their sums in the
// workspace, and a second launch adds those up in their order. Where queries or keys share the
// bias, the tile is summed over them at the end.
//
//   shared memory: sQ, sdO    stages x block_q x D
//                  sK, sV     stages x block_k x D
//                  sBias      block_q x block_k
//                  sLseDelta  stages x block_q     LSE and delta of the rows
//                  steps      what the next kKnownSteps steps read
//                  task
// At the end the tile itself, in fp32, takes the place of all but the task. Registers: 75 to 174
// (all tiles and chips).
#pragma once

#include <type_traits>

#include "cuda/attention/bias.cuh"
#include "cuda/attention/dropout.cuh"
#include "cuda/attention/guard.cuh"
#include "cuda/attention/mma_sync/bias_sum_steps.cuh"
#include "cuda/attention/params.h"
#include "cuda/attention/score.cuh"
#include "cuda/attention/sequence.cuh"
#include "cuda/attention/tiles.h"
#include "cuda/tile/copy.cuh"
#include "cuda/tile/dtype.cuh"
#include "cuda/tile/product.cuh"

namespace flashmoe::cuda {

template <class Chip_, class T, BiasSumTile kTile_>
struct BiasSumConfig {
  using Chip = Chip_;
  using Type = T;
  static constexpr BiasSumTile kTile = kTile_;
  static constexpr int kDim = kTile.head_dim, kStages = kTile.stages;
  static constexpr int kBlockQ = kTile.block_q, kBlockK = kTile.block_k;
  static constexpr int kThreads = kTile.threads();
  static constexpr int kCols = kTile.cols, kRows = kTile.warps / kCols;  // of warps
  static constexpr int kM = kBlockQ / kRows / 16, kN = kBlockK / kCols / 8;
  static_assert(kM * 16 * kRows == kBlockQ && kN * 8 * kCols == kBlockK);

  using Layout = Swizzled<kDim, T::kBytes>;
  using Bias = BiasTile<T, kBlockQ, kBlockK, kThreads>;
  static constexpr uint32_t kQueryBytes = kBlockQ * kDim * T::kBytes;
  static constexpr uint32_t kKeyBytes = kBlockK * kDim * T::kBytes;
  static constexpr uint32_t kLseDeltaBytes = kBlockQ * 8;
  static constexpr uint32_t kSmemQ = 0, kSmemdO = kStages * kQueryBytes;
  static constexpr uint32_t kSmemK = 2 * kStages * kQueryBytes;
  static constexpr uint32_t kSmemV = kSmemK + kStages * kKeyBytes;
  static constexpr uint32_t kSmemBias = kSmemV + kStages * kKeyBytes;
  static constexpr uint32_t kSmemLseDelta = kSmemBias + Bias::kBytes;
  static constexpr uint32_t kSmemSteps = kSmemLseDelta + kStages * kLseDeltaBytes;
  static constexpr uint32_t kSmemTask = kTile.shared_bytes() - kTaskBytes;
  static_assert(sizeof(BiasStep) <= kStepBytes && kKnownSteps <= kThreads);
  static_assert(kSmemSteps + kKnownSteps * kStepBytes <= kSmemTask);
  static constexpr int kAhead = kStages > 1 ? kStages - 1 : 1;  // steps that are on their way
  static constexpr int kPitch = kBlockK * 4 + 16;               // of the tile in fp32, in bytes
};

template <class C>
using BiasSums = float[C::kM][C::kN][4];
// The tile's bias, two numbers in a register.
template <class C>
using PackedBias = uint32_t[C::kM][C::kN][2];

// Loads what a step reads to a stage.
template <class C, bool kPartialChunks>
__device__ __forceinline__ void load_step(uint32_t smem, int stage, const BiasStep& step,
                                          const AttentionBwdParams& p) {
  using Chip = typename C::Chip;
  using Type = typename C::Type;
  const auto load = [&](auto count, uint32_t to, uint32_t bytes, const auto& rows, int first,
                        int len, int dim) {
    load_tile<Chip, typename C::Layout, decltype(count)::value, C::kThreads, kPartialChunks>(
        smem + to + stage * bytes, rows, first, len, dim);
  };
  const std::integral_constant<int, C::kBlockQ> queries;
  const std::integral_constant<int, C::kBlockK> keys;
  const Sequence& seq = step.seq;
  load(queries, C::kSmemQ, C::kQueryBytes, Rows{step.query, p.query_strides.row_bytes()},
       step.first_query, seq.len_q, p.head_dim);
  load(queries, C::kSmemdO, C::kQueryBytes, Rows{step.grad_out, p.grad_out_strides.row_bytes()},
       step.first_query, p.grad_out ? seq.len_q : 0, p.head_dim_v);
  load(keys, C::kSmemK, C::kKeyBytes, key_rows_at<Type>(step.key, p.key_strides), step.first_key,
       seq.len_k, p.head_dim);
  load(keys, C::kSmemV, C::kKeyBytes, key_rows_at<Type>(step.value, p.value_strides),
       step.first_key, seq.len_k, p.head_dim_v);
  // Rows past the end have no LSE and delta, and need none: with a dO and a delta of 0 they add
  // nothing. The workspace has whole tiles of 16 rows.
  const int thread = ptx::opaque_thread();
  if (thread < C::kBlockQ / 2) {
    C::Chip::copy_16(smem + C::kSmemLseDelta + stage * C::kLseDeltaBytes + thread * 16,
                     reinterpret_cast<const char*>(step.lse_delta) + thread * 16,
                     step.first_query + 2 * thread < seq.len_q);
  }
}

// Where the warp's part of the tile begins.
template <class C>
__device__ __forceinline__ int sum_row() {
  return ptx::opaque_thread() / 32 / C::kCols * (C::kM * 16);
}
template <class C>
__device__ __forceinline__ int sum_col() {
  return ptx::opaque_thread() / 32 % C::kCols * (C::kN * 8);
}

// Whether the warp's rows or keys are all past the end: they would cost as much as the others.
template <class C>
__device__ __forceinline__ bool past_end(const BiasStep& step) {
  return step.first_query + sum_row<C>() >= step.seq.len_q ||
         step.first_key + sum_col<C>() >= step.seq.len_k;
}

// LSE and delta of the two rows that a lane holds of a fragment.
template <class C>
__device__ __forceinline__ void load_lse_delta(float2 (&lse_delta)[2], uint32_t smem, int stage,
                                               int row) {
  const uint32_t from = smem + C::kSmemLseDelta + stage * C::kLseDeltaBytes;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    lse_delta[half] =
        ptx::ld_shared_v2_f32(from + (row + 8 * half + ptx::opaque_thread() % 32 / 4) * 8);
  }
}

// The operands of S = Q K^T and dP = dO V^T in shared memory, from a row and a key of the tile on.
template <class C>
struct SumOperands {
  using Layout = typename C::Layout;
  AlongA<Layout> q, dO;
  AlongB<Layout> k, v;
  __device__ __forceinline__ SumOperands(uint32_t smem, int stage, int row, int key)
      : q{lane_rows<Layout>(smem + C::kSmemQ + stage * C::kQueryBytes, row, 0)},
        dO{lane_rows<Layout>(smem + C::kSmemdO + stage * C::kQueryBytes, row, 0)},
        k{lane_cols<Layout>(smem + C::kSmemK + stage * C::kKeyBytes, key, 0)},
        v{lane_cols<Layout>(smem + C::kSmemV + stage * C::kKeyBytes, key, 0)} {}
};

// What dropout leaves of dP - delta, which a lane holds of 16 rows x 8 keys from (row, col) of the
// tile on. For general steps: plain ones have no registers for it, up to D = 32.
__device__ __forceinline__ void drop_gradients(float (&dp)[4], const float2 (&lse_delta)[2],
                                               int row, int col, const BiasStep& step,
                                               const AttentionBwdParams& p) {
  DrawnPairs<8> drawn;
  drawn.draw(step.first_query + row, step.first_key + col, ptx::opaque_thread() % 32,
             DropoutOfHead(*p.seed, step.batch, step.head));
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float delta = lse_delta[i / 2].y;
    dp[i] = minus_delta<true>(dp[i] + delta, delta, drawn.keeps(0, 0, i / 2, i % 2, p), p);
  }
}

// Adds P * (dP - delta) of one step, whose tiles are in shared memory: a fragment of 16 rows at a
// time.
template <class C>
__device__ __forceinline__ void add_plain_step(BiasSums<C>& sums, const PackedBias<C>& bias,
                                               uint32_t smem, int stage, const BiasStep& step,
                                               const AttentionBwdParams& p) {
  using Type = typename C::Type;
  constexpr int kSteps = C::kDim / 16, kUnroll = kSteps < 4 ? kSteps : 4;
  if (past_end<C>(step)) return;
  const ScoreRule rule(p);
#pragma unroll
  for (int m = 0; m < C::kM; ++m) {
    const int row = sum_row<C>() + 16 * m;
    const SumOperands<C> operands(smem, stage, row, sum_col<C>());
    float2 lse_delta[2];
    load_lse_delta<C>(lse_delta, smem, stage, row);
    float minus[4];  // delta
#pragma unroll
    for (int i = 0; i < 4; ++i) minus[i] = -lse_delta[i / 2].y;
    float s[1][C::kN][4], dp[1][C::kN][4];
#pragma unroll
    for (int n = 0; n < C::kN; ++n) {
      // A bias that stayed unpacked would take twice the registers.
      const uint32_t two[2] = {ptx::opaque(bias[m][n][0]), ptx::opaque(bias[m][n][1])};
      C::Bias::start(s[0][n], two, p.bias_scale);
    }
    multiply<Type, kSteps, kUnroll>(s, operands.q, operands.k);
    multiply_from<Type, kSteps, kUnroll>(dp, operands.dO, operands.v,
                                         [&](int, int) -> const float(&)[4] { return minus; });
#pragma unroll
    for (int i = 0; i < C::kN * 4; ++i) {
      sums[m][i / 4][i % 4] +=
          rule.probability(s[0][i / 4][i % 4], lse_delta[i % 4 / 2].x) * dp[0][i / 4][i % 4];
    }
  }
}

// Adds P * (dP - delta) of one step pair by pair, for anything that a call can ask for, and
// guarded. One loop over the fragments: it must not take registers or instruction cache from the
// plain step.
template <class C>
__device__ __forceinline__ void add_general_step(BiasSums<C>& sums, uint32_t smem, int stage,
                                                 const BiasStep& step, const BiasRows& bias,
                                                 const AttentionBwdParams& p) {
  using Type = typename C::Type;
  const int lane = ptx::opaque_thread() % 32;
  const Sequence& seq = step.seq;
  if (!step.seen || past_end<C>(step)) return;
#pragma unroll 1
  for (int i = 0; i < C::kM * C::kN; ++i) {
    const int row = sum_row<C>() + 16 * (i / C::kN), col = sum_col<C>() + 8 * (i % C::kN);
    const SumOperands<C> operands(smem, stage, row, col);
    float2 lse_delta[2];
    load_lse_delta<C>(lse_delta, smem, stage, row);
    float s[1][1][4], dp[1][1][4], gradient[4];
    set_zero(s);
    set_zero(dp);
    multiply<Type, C::kDim / 16, 1>(s, operands.q, operands.k);
    multiply<Type, C::kDim / 16, 1>(dp, operands.dO, operands.v);
#pragma unroll
    for (int e = 0; e < 4; ++e) dp[0][0][e] -= lse_delta[e / 2].y;
    if (p.seed) drop_gradients(dp[0][0], lse_delta, row, col, step, p);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int query = row + e / 2 * 8 + lane / 4, key = col + lane % 4 * 2 + e % 2;
      const int r = step.first_query + query, j = step.first_key + key;
      const float b = C::Bias::read(smem + C::kSmemBias, bias, query, key, step.first_query,
                                    step.first_key, seq);
      const PairScore pair = ScoreRule(p).pair(s[0][0][e], b, r, j, seq);
      const float2 row_terms = lse_delta[e / 2];
      gradient[e] = !seq.valid ? NAN
                    : pair.seen && row_terms.x != INFINITY
                        ? pair.probability(row_terms.x) * dp[0][0][e]
                        : 0;
    }
#pragma unroll
    for (int f = 0; f < C::kM * C::kN; ++f) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (f == i) sums[f / C::kN][f % C::kN][e] += gradient[e];
      }
    }
  }
}

// The tile of one CTA and its share of the steps. Kept in shared memory.
template <class C>
struct SumTask {
  SharedSteps<C> steps;
  SumTile tile;
  Sequence all;  // every query and key of the bias
  BiasRows bias, grad;
  int number, split;  // of the tile, and among its splits
  int begin, end;     // its steps
  int next;           // the first step that is yet to be found
  bool guarded;       // whether all steps go pair by pair
};

// Adds all steps of the task. They are found many at a time, a thread for each.
template <class C>
__device__ __forceinline__ void add_steps(BiasSums<C>& sums, const PackedBias<C>& bias,
                                          char* shared, SumTask<C>& task,
                                          const AttentionBwdParams& p) {
  using Chip = typename C::Chip;
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const auto known = [&](int i) -> BiasStep& {
    return *reinterpret_cast<BiasStep*>(shared + C::kSmemSteps + i * kStepBytes);
  };
  const bool odd = has_partial_chunk<typename C::Type>(p.head_dim) ||
                   has_partial_chunk<typename C::Type>(p.head_dim_v);
#pragma unroll 1
  while (task.next < task.end) {
    const int count = min(task.end - task.next, kKnownSteps);
    const auto load = [&](int i) {
      if (i < count && known(i).seen) {
        if (odd) {
          load_step<C, true>(smem, i % C::kStages, known(i), p);
        } else {
          load_step<C, false>(smem, i % C::kStages, known(i), p);
        }
      }
      Chip::commit();
    };
    __syncthreads();  // the steps before are done with
    if (const int thread = ptx::opaque_thread(); thread < count) {
      known(thread) = task.steps.find(task.next + thread, task.tile, p);
    }
    __syncthreads();  // the next steps are known
    if (ptx::opaque_thread() == 0) task.next += count;
#pragma unroll 1
    for (int i = 0; i < C::kAhead; ++i) load(i);
    int i = 0;
    const auto plain = [&] { return known(i).plain && !task.guarded; };
    // Adds the steps from this one on that are alike.
    const auto run = [&](auto constant) {
      constexpr bool kPlain = decltype(constant)::value;
      do {
        Chip::template wait<C::kAhead - 1>();
        __syncthreads();  // the step is there for everyone, and everyone is done with the one
                          // before
        if (C::kStages > 1) load(i + C::kAhead);
        if constexpr (kPlain) {
          add_plain_step<C>(sums, bias, smem, i % C::kStages, known(i), p);
        } else {
          add_general_step<C>(sums, smem, i % C::kStages, known(i), task.bias, p);
        }
        if (C::kStages == 1) {
          __syncthreads();  // everyone is done with its tiles
          load(i + 1);
        }
        ++i;
      } while (i < count && plain() == kPlain);
    };
#pragma unroll 1
    while (i < count) {
      if (plain()) {
        run(std::true_type());
      } else {
        run(std::false_type());
      }
    }
  }
}

// Stores the tile, which is in shared memory: as it is, or summed over its rows or keys.
template <class C>
__device__ __forceinline__ void store_sums(uint32_t sTile, const BiasRows& grad,
                                           const SumTile& tile) {
  const bool sum_rows = grad.row == 0, sum_keys = grad.column == 0;
  const int rows = sum_rows ? 1 : min(C::kBlockQ, tile.len_q - tile.first_query);
  const int keys = sum_keys ? 1 : min(C::kBlockK, tile.len_k - tile.first_key);
  for (int i = ptx::opaque_thread(); i < rows * keys; i += C::kThreads) {
    const int row = i / keys, key = i % keys;
    float sum = 0;
    for (int r = row; r < (sum_rows ? C::kBlockQ : row + 1); ++r) {
      for (int k = key; k < (sum_keys ? C::kBlockK : key + 1); ++k) {
        sum += ptx::ld_shared_f32(sTile + r * C::kPitch + k * 4);
      }
    }
    write_bias<typename C::Type>(grad, tile.first_query + row, tile.first_key + key, sum);
  }
}

// Where a split leaves its sums, in the order of the registers.
template <class C>
__device__ __forceinline__ float4* split_sums(int tile, int split, const AttentionBwdParams& p) {
  const int tiles = gridDim.x / (p.bias_sum_last ? 1 : p.bias_sum_splits);
  const int64_t at = ((int64_t{blockIdx.z} * gridDim.y + blockIdx.y) * tiles + tile);
  return reinterpret_cast<float4*>(p.bias_sums) + ptx::opaque_thread() +
         (at * p.bias_sum_splits + split) * (C::kBlockQ * C::kBlockK / 4);
}

template <class C>
__device__ __forceinline__ void find_task(SumTask<C>& task, const AttentionBwdParams& p) {
  task.steps = SharedSteps<C>(p, p.blocks ? p.sum_blocks + blockIdx.x : nullptr);
  task.tile = task.steps.tile(task.number, p);
  task.guarded = false;
  const int64_t count = task.steps.count();
  task.begin = static_cast<int>(count * task.split / p.bias_sum_splits);
  task.end = static_cast<int>(count * (task.split + 1) / p.bias_sum_splits);
  task.next = task.begin;
  task.all = task.steps.find(0, task.tile, p).seq;
  task.all.len_q = task.tile.len_q;
  task.all.len_k = task.tile.len_k;
  task.bias = find_bias(p, task.all, task.tile.batch, task.tile.head);
  task.grad = find_grad_bias(p, task.all, task.tile.batch, task.tile.head);
}

// Sums one split over its steps.
template <class C>
__device__ __forceinline__ void sum_split(BiasSums<C>& sums, char* shared, SumTask<C>& task,
                                          const AttentionBwdParams& p) {
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  C::Bias::template load<typename C::Chip>(smem + C::kSmemBias, task.bias, task.tile.first_query,
                                           task.tile.first_key, task.all);
  C::Chip::commit();
  C::Chip::template wait<0>();
  __syncthreads();  // the bias is there
  PackedBias<C> bias;
  C::Bias::read(bias, smem + C::kSmemBias, sum_row<C>(), sum_col<C>());
  while (true) {
    set_zero(sums);
    add_steps<C>(sums, bias, shared, task, p);
    C::Chip::template wait<0>();
    // Something not finite may be hidden: the steps are added once more, guarded.
    if (!__syncthreads_or(!all_finite(sums)) || task.guarded) return;
    __syncthreads();  // everyone has looked
    if (ptx::opaque_thread() == 0) {
      task.guarded = true;
      task.next = task.begin;
    }
    __syncthreads();  // everyone knows
  }
}

// Sums one tile and stores it, through shared memory, or in the workspace where it is split.
template <class C>
__device__ __forceinline__ void sum_tile(char* shared, SumTask<C>& task,
                                         const AttentionBwdParams& p) {
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  BiasSums<C> sums;
  if (p.bias_sum_last) {
    set_zero(sums);
#pragma unroll 1
    for (int i = 0; i < p.bias_sum_splits; ++i) {
      const float4* from = split_sums<C>(task.number, i, p);
#pragma unroll
      for (int j = 0; j < C::kM * C::kN; ++j) {
        const float4 x = from[j * C::kThreads];
        float(&sum)[4] = sums[j / C::kN][j % C::kN];
        sum[0] += x.x, sum[1] += x.y, sum[2] += x.z, sum[3] += x.w;
      }
    }
  } else {
    sum_split<C>(sums, shared, task, p);
    if (p.bias_sum_splits > 1) {
      float4* to = split_sums<C>(task.number, task.split, p);
#pragma unroll
      for (int j = 0; j < C::kM * C::kN; ++j) {
        const float(&sum)[4] = sums[j / C::kN][j % C::kN];
        to[j * C::kThreads] = {sum[0], sum[1], sum[2], sum[3]};
      }
      return;
    }
  }
  __syncthreads();  // nobody reads what was there

  const int lane = ptx::opaque_thread() % 32;
  const uint32_t to =
      smem + (sum_row<C>() + lane / 4) * C::kPitch + (sum_col<C>() + lane % 4 * 2) * 4;
#pragma unroll
  for (int i = 0; i < C::kM * C::kN * 4; ++i) {
    const int m = i / 4 / C::kN, n = i / 4 % C::kN;
    ptx::st_shared_f32(to + (16 * m + i % 4 / 2 * 8) * C::kPitch + (8 * n + i % 2) * 4,
                       sums[m][n][i % 4]);
  }
  __syncthreads();  // the tile is written
  store_sums<C>(smem, task.grad, task.tile);
}

// The grid is (tiles of the gradient x splits, its heads, its batches); the last of the two
// launches of a split sum has one CTA for each tile. Ragged, it is one CTA for each tile of keys.
template <class C>
__device__ __forceinline__ void attention_bwd_bias_sum(const AttentionBwdParams& p) {
  extern __shared__ __align__(1024) char shared[];
  SumTask<C>& task = *reinterpret_cast<SumTask<C>*>(shared + C::kSmemTask);
  const RaggedBlock* slot = p.blocks ? p.sum_blocks + blockIdx.x : nullptr;
  if (slot && slot->kind != RaggedKind::kBlock) {
    const BiasRows grad = find_grad_bias(p, find_sequence(*slot), 0, 0);
    const float value = slot->kind == RaggedKind::kRest ? 0.f : NAN;
    if (slot->kind != RaggedKind::kEmpty) {
      fill_pairs<typename C::Type>(grad, slot->token_q, value);
    }
    return;
  }
  if (ptx::opaque_thread() == 0) {
    const int splits = p.bias_sum_last ? 1 : p.bias_sum_splits;
    task.number = p.blocks ? 0 : blockIdx.x / splits;
    task.split = p.blocks ? 0 : blockIdx.x % splits;
  }
#pragma unroll 1
  do {
    if (ptx::opaque_thread() == 0) find_task<C>(task, p);
    __syncthreads();  // the task is known
    sum_tile<C>(shared, task, p);
    if (!p.blocks) return;
    __syncthreads();  // the tile is stored
    if (ptx::opaque_thread() == 0) ++task.number;
    __syncthreads();  // everyone knows
    // The length is read where it came from: the first thread may already write the next task.
  } while (task.number * C::kBlockQ < p.sum_blocks[blockIdx.x].len_q);
}

}  // namespace flashmoe::cuda
