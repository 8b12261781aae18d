// Attention forward in fp32.
//
//   O = softmax(S) V      S as score.cuh has it      LSE = log of the softmax's denominator
//
// One CTA takes one tile of queries of one (batch, head) and goes through the keys. Each warp owns
// 16 or 32 rows and all columns, as in mma_sync/fwd.cuh: softmax needs no other warp, and P goes
// from the accumulators of S = Q K^T straight into the operands of O += P V.
//
//   shared memory, fp32:  sQ     block_q x D
//                         sK     stages x block_k x D
//                         sV     stages x block_k x D
//
// A bias comes from global memory to the accumulators of S. With two stages the next tile of keys
// is copied while one is computed, a barrier a tile; with one, K arrives while V is used and the
// other way round, and there are two.
#pragma once

#include "cuda/attention/fp32/rows.cuh"
#include "cuda/attention/fp32/tiles.h"
#include "cuda/attention/mma_sync/fwd.cuh"

namespace flashmoe::cuda {

template <class Chip_, class Product_, Fp32FwdTile kTile, bool kBias_>
struct Fp32FwdConfig {
  using Chip = Chip_;
  using Product = Product_;
  using Type = Fp32;
  static constexpr bool kBias = kBias_, kDropout = true, kShort = false;
  static constexpr int kDim = kTile.head_dim, kStages = kTile.stages, kQSteps = 0;
  static constexpr int kBlockQ = kTile.block_q, kBlockK = kTile.block_k;
  static constexpr int kThreads = kTile.threads();
  static constexpr int kRowTiles = kBlockQ / kTile.warps / 16;  // m16 fragments of a warp
  static constexpr int kKeyTiles = kBlockK / 8;                 // n8 fragments of S
  static constexpr int kDimTiles = kDim / 8;                    // n8 fragments of O
  static constexpr uint32_t kTileBytes = kBlockK * kDim * 4;
  using Layout = FloatTile<kDim>;

  static constexpr uint32_t kSmemQ = 0, kSmemK = kBlockQ * kDim * 4;
  static constexpr uint32_t kSmemV = kSmemK + kStages * kTileBytes;
  static constexpr uint32_t kSmemTask = kSmemV + kStages * kTileBytes;
  static_assert(kSmemTask + kTaskBytes == kTile.shared_bytes() && sizeof(FwdTask) <= kTaskBytes);
  static_assert(kRowTiles * kTile.warps * 16 == kBlockQ && kStages <= 2);
};

// Hides scores: what the mask hides, and guarded what a bias hides, whose -inf a NaN may have
// swallowed.
template <class C, class Rule>
__device__ __forceinline__ void finish_scores(float (&s)[C::kRowTiles][C::kKeyTiles][4], int row,
                                              int first_key, Rule& rule, const FwdTask& task,
                                              const AttentionFwdParams& p) {
  if (rule.transforms()) transform_scores<C>(s, rule);
  const bool late = C::kBias && adds_bias_late(p);
  if (late || (C::kBias && task.guarded)) {
    for_each_bias<C::kRowTiles, C::kKeyTiles>(Pairs<false>(row, first_key), task.bias, task.seq,
                                              [&](int m, int n, int i, float bias) {
                                                if (late) s[m][n][i] = rule.score(s[m][n][i], bias);
                                                if (bias == -INFINITY) s[m][n][i] = bias;
                                              });
  }
  rule.has_bias = late;
  const int tile = first_key / C::kBlockK;
  if (tile >= task.full_end) mask_scores<C, Side::kAfter>(s, row, first_key, task.seq, p);
  if (tile < task.full_begin) mask_scores<C, Side::kBefore>(s, row, first_key, task.seq, p);
}

// Hides the scores of pairs that are dropped, but counts them in the sums, two at a time. P is left
// alone: a branch between its exponentials and the product that takes it costs D = 64 a spill.
template <class C, class Rule>
__device__ __forceinline__ void drop(FwdState<C>& t, float (&s)[C::kRowTiles][C::kKeyTiles][4],
                                     int row, int first_key, const Rule& rule, const FwdTask& task,
                                     const AttentionFwdParams& p) {
  const KeptPairs<C::kRowTiles, C::kKeyTiles, false> kept(row, first_key, task.seed, task.batch,
                                                          task.head, p);
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < C::kKeyTiles; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float reference = t.rows[m].finite_reference(half);
        float sum = 0;
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          if (kept(m, n, i)) continue;
          sum += rule.probability(s[m][n][i], reference);
          s[m][n][i] = -INFINITY;
        }
        t.rows[m].sum[half] += sum;
      }
    }
  }
}

// P = 2^(S - reference) in place of S, added to the sums.
template <class C, class Rule>
__device__ __forceinline__ void exponentiate(FwdState<C>& t,
                                             float (&s)[C::kRowTiles][C::kKeyTiles][4],
                                             const Rule& rule) {
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
    RowState& rows = t.rows[m];
    const float reference[2] = {rows.finite_reference(0), rows.finite_reference(1)};
    float sum[2] = {0, 0};
#pragma unroll
    for (int n = 0; n < C::kKeyTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[m][n][i] = rule.probability(s[m][n][i], reference[i / 2]);
        sum[i / 2] += s[m][n][i];
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) rows.sum[half] += sum[half];
  }
}

// One tile of keys. With one stage, `after_scores` is called when K is done with and before V is
// needed.
template <class C, class AfterScores>
__device__ __forceinline__ void fp32_fwd_step(FwdState<C>& t, uint32_t smem, int stage,
                                              const FwdTask& task, int first_key,
                                              const AttentionFwdParams& p,
                                              const AfterScores& after_scores) {
  using Tile = typename C::Layout;
  const uint32_t sK = smem + C::kSmemK + stage * C::kTileBytes;
  const uint32_t sV = smem + C::kSmemV + stage * C::kTileBytes;
  const int row = task.first_row + warp_row<C>();
  if (C::kStages == 2) {
    if (task.guarded) drop_nonfinite<Tile, C::kBlockK>(sV);
    // Rows past the end, whole warps of them, would cost as much as the others.
    if (row >= task.seq.len_q) return;
  }
  float s[C::kRowTiles][C::kKeyTiles][4];
  start_scores<C::kBias>(s, Pairs<false>(row, first_key), task.bias, task.seq, p);
  multiply_floats<typename C::Product, C::kDim / 8>(s, Along<Tile>(smem + C::kSmemQ, warp_row<C>()),
                                                    Along<Tile>(sK));
  if (C::kStages == 1) {
    after_scores();
    if (task.guarded) drop_nonfinite<Tile, C::kBlockK>(sV);
  }
  ScoreRule rule(p);
  finish_scores<C>(s, row, first_key, rule, task, p);
  update_references<C>(t, s, rule.scale_log2());
  if (p.seed) drop<C>(t, s, row, first_key, rule, task, p);
  exponentiate<C>(t, s, rule);
  multiply_floats<typename C::Product, C::kBlockK / 8, C::kBlockK / 8>(t.o, FromAccumulators(s),
                                                                       Across<Tile>(sV));
}

// Accumulates O over all keys of the task.
template <class C>
__device__ __forceinline__ void fp32_fwd_keys(FwdState<C>& t, uint32_t smem, const FwdTask& task,
                                              const AttentionFwdParams& p) {
  using Chip = typename C::Chip;
  constexpr bool kOneStage = C::kStages == 1;
  load_tile<Chip, typename C::Layout, C::kBlockQ, C::kThreads>(
      smem + C::kSmemQ,
      rows_to_read(p.query, p, p.query_strides, task.batch, task.head, task.seq.token_q),
      task.first_row, task.seq.len_q, p.head_dim);
  if (task.key_begin < task.key_end) {
    load_keys<C>(smem, 0, task.key_begin, task, p);
    if (!kOneStage) load_values<C>(smem, 0, task.key_begin, task, p);
  }
  Chip::commit();
  set_zero(t.o);
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) t.rows[m] = RowState();
#pragma unroll 1
  for (int n = task.key_begin; n < task.key_end; ++n) {
    const int stage = (n - task.key_begin) % C::kStages, coming = n + 1;
    Chip::template wait<0>();
    __syncthreads();  // tile n is there for everyone, and everyone is done with the one before
    if (kOneStage) {
      load_values<C>(smem, 0, n, task, p);
    } else if (coming < task.key_end) {
      load_keys<C>(smem, stage ^ 1, coming, task, p);
      load_values<C>(smem, stage ^ 1, coming, task, p);
    }
    Chip::commit();
    fp32_fwd_step<C>(t, smem, stage, task, n * C::kBlockK, p, [&] {
      Chip::template wait<0>();
      __syncthreads();  // V is there for everyone, and everyone is done with K
      if (coming < task.key_end) load_keys<C>(smem, 0, coming, task, p);
      Chip::commit();
    });
  }
}

// Sets the results of rows without keys to one value.
template <class C>
__device__ __forceinline__ void fill_float_output(const FwdTask& task, float out, float lse,
                                                  const AttentionFwdParams& p) {
  const Sequence& seq = task.seq;
  const int end = min(task.first_row + C::kBlockQ, seq.len_q);
  fill_float_rows(float_rows(p.out, p, p.out_strides, task.batch, task.head, seq.token_q),
                  p.out_strides.row, task.first_row, end, p.head_dim_v, out);
  if (!p.lse) return;
  float* gLse = p.lse + offset(p, p.lse_strides, task.batch, task.head, seq.token_q);
  for (int row = task.first_row + threadIdx.x; row < end; row += C::kThreads) {
    gLse[row * p.lse_strides.row] = lse;
  }
}

// Stores O / sum, and the LSE.
template <class C>
__device__ __forceinline__ void store_float_output(const FwdState<C>& t, const FwdTask& task,
                                                   const AttentionFwdParams& p) {
  const Sequence& seq = task.seq;
  const int lane = threadIdx.x % 32, first = task.first_row + warp_row<C>();
  float* gLse =
      p.lse ? p.lse + offset(p, p.lse_strides, task.batch, task.head, seq.token_q) : nullptr;
  const auto inverse = [&](int m, int half) {
    const int r = first + 16 * m + 8 * half + lane / 4;
    const float sink = sink_of<Fp32>(p, task.head, min(r, seq.len_q - 1));
    const RowEnd end = end_row(quad_sum(t.rows[m].sum[half]), t.rows[m].reference[half], sink);
    if (gLse && lane % 4 == 0 && r < seq.len_q) gLse[r * p.lse_strides.row] = end.lse;
    return end.share * (1.f / end.sum) * (p.seed ? p.kept_scale : 1.f);
  };
  store_float_rows(t.o, inverse,
                   float_rows(p.out, p, p.out_strides, task.batch, task.head, seq.token_q),
                   p.out_strides.row, first, seq.len_q, p.head_dim_v);
}

template <class C>
__device__ __forceinline__ void attention_fp32_fwd(const AttentionFwdParams& p) {
  extern __shared__ __align__(1024) char shared[];
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  FwdTask& task = *reinterpret_cast<FwdTask*>(shared + C::kSmemTask);
  if (threadIdx.x == 0) {
    find_task<C>(task, p);
    task.guarded = false;
  }
  __syncthreads();
  if (task.kind == RaggedKind::kEmpty) return;
  if (task.kind != RaggedKind::kBlock) {
    const bool rest = task.kind == RaggedKind::kRest;
    fill_float_output<C>(task, rest ? 0.f : NAN, rest ? -INFINITY : NAN, p);
    return;
  }
  if (task.first_row >= task.seq.len_q) return;

  FwdState<C> t;
  while (true) {
    fp32_fwd_keys<C>(t, smem, task, p);
    // Q arrived, even if there was no key to wait for, and no warp reads it any more.
    C::Chip::template wait<0>();
    if (!__syncthreads_or(may_hide<C::kBias>(p) && !all_finite(t.o)) || task.guarded) break;
    __syncthreads();  // everyone has looked
    if (threadIdx.x == 0) task.guarded = true;
    __syncthreads();  // everyone knows
  }
  if (task.guarded) {
    add_nonfinite<typename C::Layout, C::kBlockQ>(
        t.o, smem + C::kSmemQ, warp_row<C>(), task.template values<Fp32>(p),
        task.key_begin * C::kBlockK, min(task.key_end * C::kBlockK, task.seq.len_k), p.head_dim_v,
        1, [&](int r, int key) {
          const int row = task.first_row + r;
          return sees_key<C::kBias>(row, key, task.seq, task.bias, p) &&
                 keeps_pair(row, key, task.seed, task.batch, task.head, p);
        });
  }
  store_float_output<C>(t, task, p);
}

}  // namespace flashmoe::cuda
