// dQ in fp32, and the gradient of a bias that is not shared:
//
//   dS = P * (dO V^T - delta)      dQ = dS K
//
// One CTA takes one tile of queries of one (batch, head), as the forward pass does, and goes
// through the keys once more; each warp has 16 queries of its own. bwd_keys.cuh makes dK and dV.
//
//   shared memory, fp32:  sQ, sdO   block_q x D         stay
//                         sK, sV    stages x step x D   a step, and the next on its way
#pragma once

#include "cuda/attention/fp32/rows.cuh"
#include "cuda/attention/fp32/tiles.h"
#include "cuda/attention/guard.cuh"
#include "cuda/attention/mma_sync/bwd_dq_short.cuh"

namespace flashmoe::cuda {

template <class Chip_, class Product_, Fp32BwdTile kTile, bool kBias_>
struct Fp32QueriesConfig {
  using Chip = Chip_;
  using Product = Product_;
  using Type = Fp32;
  static constexpr bool kBias = kBias_, kDropout = true, kShort = false;
  static constexpr int kDim = kTile.head_dim, kStages = kTile.stages;
  static constexpr int kBlockQ = kTile.block_q, kBlockK = kTile.step;
  static constexpr int kThreads = kTile.threads();
  static constexpr int kKeyTiles = kBlockK / 8, kDimTiles = kDim / 8;  // n8 fragments
  using Tile = FloatTile<kDim>;
  static constexpr uint32_t kQueryBytes = kBlockQ * kDim * 4, kKeyBytes = kBlockK * kDim * 4;
  static constexpr uint32_t kSmemQ = 0, kSmemdO = kQueryBytes, kSmemK = 2 * kQueryBytes;
  static constexpr uint32_t kSmemV = kSmemK + kStages * kKeyBytes;
  static constexpr uint32_t kSmemTask = kTile.shared_bytes() - kTaskBytes;
  static_assert(kSmemV + kStages * kKeyBytes <= kSmemTask && kThreads / 32 * 16 == kBlockQ);
};

// The tile of queries of one CTA, kept in shared memory.
struct QueriesTask : DqTask {
  Loop most;  // what its tiles need at most
};

// The accumulators of one warp, and its rows' LSE in base 2 and delta.
template <class C>
struct QueriesState {
  float dq[1][C::kDimTiles][4];
  float2 lse_delta[2];
};

// Loads a step's K and V to a stage.
template <class C>
__device__ __forceinline__ void load_step(uint32_t smem, int stage, int tile,
                                          const QueriesTask& task, const AttentionBwdParams& p) {
  const auto load = [&](uint32_t to, const Rows& rows, int dim) {
    load_float_tile<typename C::Chip, typename C::Tile, C::kBlockK, C::kThreads>(
        smem + to + stage * C::kKeyBytes, rows, tile * C::kBlockK, task.seq.len_k, dim);
  };
  load(C::kSmemK, task.template keys<Fp32>(p), p.head_dim);
  load(C::kSmemV, task.template values<Fp32>(p), p.head_dim_v);
}

// Adds what a step, which is in shared memory, gives to dQ, and stores its gradient of the bias.
template <class C>
__device__ __forceinline__ void add_step(QueriesState<C>& t, uint32_t smem, int stage, int tile,
                                         const QueriesTask& task, const AttentionBwdParams& p) {
  using Tile = typename C::Tile;
  using Product = typename C::Product;
  const uint32_t sK = smem + C::kSmemK + stage * C::kKeyBytes;
  const uint32_t sV = smem + C::kSmemV + stage * C::kKeyBytes;
  const int row = ptx::opaque_thread() / 32 * 16;  // the warp's first
  const Pairs<false> at(task.first_row + row, tile * C::kBlockK);
  float s[1][C::kKeyTiles][4], dp[1][C::kKeyTiles][4];
  start_scores<C::kBias>(s, at, task.bias, task.seq, p);
  multiply_floats<Product, C::kDim / 8>(s, Along<Tile>(smem + C::kSmemQ, row), Along<Tile>(sK));
  set_zero(dp);
  multiply_floats<Product, C::kDim / 8>(dp, Along<Tile>(smem + C::kSmemdO, row), Along<Tile>(sV));
  const KeptPairs<1, C::kKeyTiles, false> kept(task.first_row + row, tile * C::kBlockK, task.seed,
                                               task.batch, task.head, p);
  kept.apply(dp, p);
  const bool full = tile >= task.full_begin && tile < task.full_end;
  const Loop loop = task.guarded                ? Loop::kGeneral
                    : full                      ? task.most
                    : task.most == Loop::kPlain ? Loop::kMasked
                                                : task.most;
  const auto store = [&](int m, int n, int i, float gradient) {
    if constexpr (C::kBias) {
      const int r = at.row(m, n, i), key = at.key(m, n, i);
      if (!p.grad_bias || r >= task.seq.len_q || key >= task.stored_keys) return;
      *reinterpret_cast<float*>(task.grad_bias.at(r, key)) = gradient;
    }
  };
  differentiate<C::kBias>(
      loop, s, dp, at, [&](int, int, int i) { return t.lse_delta[i / 2]; }, task.bias, task.seq, p,
      store);
  if (task.guarded) {
    __syncthreads();  // everyone has S
    drop_nonfinite<Tile, C::kBlockK>(sK);
  }
  multiply_floats<Product, C::kBlockK / 8, C::kBlockK / 8>(t.dq, FromAccumulators(dp),
                                                           Across<Tile>(sK));
}

// Accumulates dQ over all keys of the task.
template <class C>
__device__ __forceinline__ void add_keys(QueriesState<C>& t, uint32_t smem, const QueriesTask& task,
                                         const AttentionBwdParams& p) {
  using Chip = typename C::Chip;
  const auto load_queries = [&](uint32_t to, const void* tensor, const Strides& strides, int dim) {
    load_float_tile<Chip, typename C::Tile, C::kBlockQ, C::kThreads>(
        smem + to, rows_to_read(tensor, p, strides, task.batch, task.head, task.seq.token_q),
        task.first_row, tensor ? task.seq.len_q : 0, dim);
  };
  const auto load = [&](int tile) {
    if (tile < task.key_end) load_step<C>(smem, tile % C::kStages, tile, task, p);
    Chip::commit();
  };
  load_queries(C::kSmemQ, p.query, p.query_strides, p.head_dim);
  load_queries(C::kSmemdO, p.grad_out, p.grad_out_strides, p.head_dim_v);
  load(task.key_begin);
  set_zero(t.dq);
#pragma unroll 1
  for (int tile = task.key_begin; tile < task.key_end; ++tile) {
    Chip::template wait<0>();
    __syncthreads();  // the step is there for everyone, and everyone is done with the one before
    if (C::kStages > 1) load(tile + 1);
    add_step<C>(t, smem, tile % C::kStages, tile, task, p);
    if (C::kStages == 1) {
      __syncthreads();  // everyone is done with K and V
      load(tile + 1);
    }
  }
}

// The kernel: see find_query_rows() for the grid.
template <class C>
__device__ __forceinline__ void attention_fp32_bwd_queries(const AttentionBwdParams& p) {
  extern __shared__ __align__(1024) char shared[];
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  static_assert(sizeof(QueriesTask) <= kTaskBytes);
  QueriesTask& task = *reinterpret_cast<QueriesTask*>(shared + C::kSmemTask);
  if (threadIdx.x == 0) {
    find_task<C>(task, p);
    task.guarded = false;
    task.most = p.softcap_scale || (C::kBias && adds_bias_late(p)) ? Loop::kGeneral : Loop::kPlain;
  }
  __syncthreads();
  if (task.kind == RaggedKind::kEmpty || task.first_row >= task.seq.len_q) return;
  float* const to =
      float_rows(p.grad_query, p, p.grad_query_strides, task.batch, task.head, task.seq.token_q);
  if (task.kind != RaggedKind::kBlock) {
    const int end = min(task.first_row + C::kBlockQ, task.seq.len_q);
    if (p.grad_query) {
      fill_float_rows(to, p.grad_query_strides.row, task.first_row, end, p.head_dim,
                      task.kind == RaggedKind::kRest ? 0.f : NAN);
    }
    if constexpr (C::kBias) {  // of a ragged batch bwd_keys.cuh fills the pairs
      if (!p.grad_bias || p.blocks) return;
      const BiasRows grad = find_grad_bias(p, task.seq, task.batch, task.head);
      for (int row = task.first_row; row < end; ++row) {
        for (int key = threadIdx.x; key < p.len_k; key += C::kThreads) {
          write_bias<Fp32>(grad, row, key, NAN);
        }
      }
    }
    return;
  }
  if constexpr (C::kBias) {
    if (p.grad_bias) clear_bias_gradient<C>(task);
  }

  QueriesState<C> t;
  const int row = ptx::opaque_thread() / 32 * 16;
  const auto* lse_delta = reinterpret_cast<const float2*>(p.lse_delta) + task.head * p.rows +
                          workspace_row(p, task.seq, task.batch) + task.first_row + row;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    t.lse_delta[half] = lse_delta[8 * half + threadIdx.x % 32 / 4];
  }
  while (true) {
    add_keys<C>(t, smem, task, p);
    // Q and dO arrived, even if there was no key to wait for, and no warp reads them any more.
    C::Chip::template wait<0>();
    if (!__syncthreads_or(may_hide<C::kBias>(p) && !all_finite(t.dq)) || task.guarded) break;
    __syncthreads();  // everyone has looked
    if (threadIdx.x == 0) task.guarded = true;
    __syncthreads();  // everyone knows
  }
  if (!p.grad_query) return;
  // What a row sees of K that is not finite makes its dQ NaN: the score is not finite, and its
  // probability is NaN or 0, and 0 times infinity is NaN.
  if (task.guarded) {
    add_nonfinite<typename C::Tile, C::kBlockQ>(
        t.dq, smem + C::kSmemQ, ptx::opaque_thread() / 32 * 16, task.template keys<Fp32>(p),
        task.key_begin * C::kBlockK, min(task.key_end * C::kBlockK, task.seq.len_k), p.head_dim, 0,
        [&](int row, int key) {
          return sees_key<C::kBias>(task.first_row + row, key, task.seq, task.bias, p);
        });
  }
  store_float_rows(
      t.dq, [&](int, int) { return p.scale; }, to, p.grad_query_strides.row,
      task.first_row + ptx::opaque_thread() / 32 * 16, task.seq.len_q, p.head_dim);
}

}  // namespace flashmoe::cuda
