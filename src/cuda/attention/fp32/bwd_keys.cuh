// dK and dV in fp32. With P = 2^(S - LSE):
//
//   dV = P^T dO      dP = dO V^T      dS = P * (dP - delta)      dK = dS^T Q
//
// One CTA takes one tile of keys of one (batch, key head) and goes through the queries that see it,
// of all heads of the group. Each warp has 16 keys of its own and all queries of a step, so that
// S^T and dP^T are in its registers as dV and dK need them. Nothing is added up in memory: dQ has a
// kernel of its own (bwd_queries.cuh), and the bits are always the same.
//
//   shared memory, fp32:  sK, sV     block_k x D         stay
//                         sQ, sdO    stages x step x D   a step, and the next on its way
//                         sLseDelta  stages x step       LSE and delta of the rows
//
// Above D = 128 dK and dV do not both fit into registers: one CTA makes dV, its neighbour dK.
#pragma once

#include "cuda/attention/fp32/rows.cuh"
#include "cuda/attention/fp32/tiles.h"
#include "cuda/attention/guard.cuh"

namespace flashmoe::cuda {

template <class Chip_, class Product_, Fp32BwdTile kTile, bool kBias_>
struct Fp32KeysConfig {
  using Chip = Chip_;
  using Product = Product_;
  static constexpr bool kBias = kBias_;
  static constexpr int kDim = kTile.head_dim, kStages = kTile.stages;
  static constexpr int kBlockK = kTile.block_k, kStep = kTile.step;
  static constexpr int kThreads = kTile.threads();
  static constexpr int kQueryTiles = kStep / 8, kDimTiles = kDim / 8;  // n8 fragments
  static constexpr int kParts = kTile.key_parts();                     // CTAs that share a tile
  using Tile = FloatTile<kDim>;
  static constexpr uint32_t kKeyBytes = kBlockK * kDim * 4, kQueryBytes = kStep * kDim * 4;
  static constexpr uint32_t kLseDeltaBytes = kStep * 8;
  static constexpr uint32_t kSmemK = 0, kSmemV = kKeyBytes, kSmemQ = 2 * kKeyBytes;
  static constexpr uint32_t kSmemdO = kSmemQ + kStages * kQueryBytes;
  static constexpr uint32_t kSmemLseDelta = kSmemdO + kStages * kQueryBytes;
  static constexpr uint32_t kSmemTask = kSmemLseDelta + kStages * kLseDeltaBytes;
  static_assert(kSmemTask + kTaskBytes == kTile.shared_bytes());
  static_assert(kThreads / 32 * 16 == kBlockK && kTile.block_q % kStep == 0 && kStep % 8 == 0);
};

// The tile of keys of one CTA, kept in shared memory.
struct KeysTask {
  Sequence seq;
  int batch, key_head;
  int first_key;
  int query_begin, query_end;  // the queries that see the keys, in whole steps
  int steps, steps_of_head;    // of all heads of the group, and of one
  int full_begin, full_end;    // steps that begin in this range need no mask
  bool plain;                  // whether no step needs more than a mask
  bool guarded;
  bool makes_dv, makes_dk;
  RaggedKind kind;
  int stored_keys;    // keys with a gradient: also those past the sequence's length, where it is 0
  int64_t first_row;  // of the sequence in the workspace
  uint64_t seed;      // of dropout
};

// A step's queries.
struct QueryStep {
  int head, first;
};
// Found from the step's number: a head and a row kept over the main loop would cost registers.
template <class C>
__device__ __forceinline__ QueryStep find_step(int i, const KeysTask& task,
                                               const AttentionBwdParams& p) {
  return {task.key_head * p.group + i / task.steps_of_head,
          task.query_begin + i % task.steps_of_head * C::kStep};
}

template <class C>
__device__ __forceinline__ void find_task(KeysTask& task, const AttentionBwdParams& p) {
  const int x = blockIdx.x / C::kParts, part = blockIdx.x % C::kParts;
  task.guarded = false;
  task.makes_dv = p.grad_value && (C::kParts == 1 || part == 0);
  task.makes_dk = p.grad_key && (C::kParts == 1 || part == 1);
  int block = x;
  if (p.blocks) {
    const RaggedBlock slot = p.blocks[x / p.heads];
    block = slot.block;
    task.key_head = p.first_head + x % p.heads;
    task.seq = find_sequence(slot);
    task.batch = slot.sequence;
    task.kind = slot.kind;
    task.stored_keys = task.seq.len_k;
  } else {
    task.key_head = p.first_head + blockIdx.y;
    task.batch = p.first_batch + blockIdx.z;
    task.seq = find_sequence(p, task.batch);
    task.kind = task.seq.valid ? RaggedKind::kBlock : RaggedKind::kInvalid;
    task.stored_keys = p.len_k;
  }
  task.first_key = block * C::kBlockK;
  if (task.kind != RaggedKind::kBlock) return;
  const Sequence& seq = task.seq;
  task.first_row = workspace_row(p, seq, task.batch);
  task.seed = read_seed(p);
  // Row i sees key j when i + shift - left <= j <= i + shift + right.
  const int last_key = min(task.first_key + C::kBlockK, seq.len_k) - 1;
  const int first = max(task.first_key - seq.shift - p.right, 0);
  const int last = min(last_key - seq.shift + p.left, seq.len_q - 1);
  task.query_begin = first / C::kStep * C::kStep;
  task.query_end = last < first || last_key < task.first_key ? task.query_begin
                                                             : (last / C::kStep + 1) * C::kStep;
  task.steps_of_head = (task.query_end - task.query_begin) / C::kStep;
  task.steps = task.steps_of_head * p.group;
  // In a full step all keys exist, the first query sees the last of them, and the last query the
  // first.
  const int whole = task.first_key + C::kBlockK - 1;
  task.full_begin = whole < seq.len_k ? whole - seq.shift - p.right : kNoLimit;
  task.full_end = task.first_key - seq.shift + p.left - C::kStep + 2;
  task.plain = !p.softcap_scale && !(C::kBias && adds_bias_late(p));
}

// The accumulators of one warp: with two parts there is one for both.
template <class C>
struct KeysState {
  float sums[3 - C::kParts][1][C::kDimTiles][4];
  __device__ __forceinline__ auto& dv() { return sums[0]; }
  __device__ __forceinline__ auto& dk() { return sums[2 - C::kParts]; }
};

// Loads a step's Q and dO, with LSE and delta, to a stage.
template <class C>
__device__ __forceinline__ void load_step(uint32_t smem, int stage, const KeysTask& task,
                                          const QueryStep& step, const AttentionBwdParams& p) {
  const auto load = [&](uint32_t to, const void* tensor, const Strides& strides, int dim) {
    load_float_tile<typename C::Chip, typename C::Tile, C::kStep, C::kThreads>(
        smem + to + stage * C::kQueryBytes,
        rows_to_read(tensor, p, strides, task.batch, step.head, task.seq.token_q), step.first,
        tensor ? task.seq.len_q : 0, dim);
  };
  load(C::kSmemQ, p.query, p.query_strides, p.head_dim);
  load(C::kSmemdO, p.grad_out, p.grad_out_strides, p.head_dim_v);
  // The workspace has whole steps of rows.
  const int64_t row = step.head * p.rows + task.first_row + step.first;
  for (int i = ptx::opaque_thread(); i < C::kStep / 2; i += C::kThreads) {
    C::Chip::copy_16(smem + C::kSmemLseDelta + stage * C::kLseDeltaBytes + i * 16,
                     reinterpret_cast<const char*>(p.lse_delta + 2 * row) + i * 16, true);
  }
}

// Adds what a step, which is in shared memory, gives to dV and dK.
template <class C>
__device__ __forceinline__ void add_step(KeysState<C>& t, uint32_t smem, int stage,
                                         const KeysTask& task, const QueryStep& step,
                                         const AttentionBwdParams& p) {
  using Tile = typename C::Tile;
  using Product = typename C::Product;
  const uint32_t sQ = smem + C::kSmemQ + stage * C::kQueryBytes;
  const uint32_t sdO = smem + C::kSmemdO + stage * C::kQueryBytes;
  const uint32_t sLseDelta = smem + C::kSmemLseDelta + stage * C::kLseDeltaBytes;
  const int key = ptx::opaque_thread() / 32 * 16;  // the warp's first
  const Pairs<true> at(step.first, task.first_key + key);
  BiasRows bias;
  if (C::kBias) bias = find_bias(p, task.seq, task.batch, step.head);
  float s[1][C::kQueryTiles][4], dp[1][C::kQueryTiles][4];
  start_scores<C::kBias>(s, at, bias, task.seq, p);
  multiply_floats<Product, C::kDim / 8>(s, Along<Tile>(smem + C::kSmemK, key), Along<Tile>(sQ));
  set_zero(dp);
  if (task.makes_dk) {
    multiply_floats<Product, C::kDim / 8>(dp, Along<Tile>(smem + C::kSmemV, key), Along<Tile>(sdO));
  }
  const KeptPairs<1, C::kQueryTiles, true> kept(step.first, task.first_key + key, task.seed,
                                                task.batch, step.head, p);
  kept.apply(dp, p);
  const bool full = step.first >= task.full_begin && step.first < task.full_end;
  const Loop loop = !task.plain || task.guarded ? Loop::kGeneral
                    : full                      ? Loop::kPlain
                                                : Loop::kMasked;
  const uint32_t row_terms = sLseDelta + ptx::opaque_thread() % 4 * 16;
  differentiate<C::kBias>(
      loop, s, dp, at,
      [&](int, int n, int i) { return ptx::ld_shared_v2_f32(row_terms + (8 * n + i % 2) * 8); },
      bias, task.seq, p, [](int, int, int, float) {});
  if (task.guarded) {
    __syncthreads();  // everyone has S and dP
    drop_nonfinite<Tile, C::kStep>(sQ);
    drop_nonfinite<Tile, C::kStep>(sdO);
  }
  constexpr int kSteps = C::kStep / 8;
  if constexpr (C::kParts == 2) {
    kept.apply(s, p);
    for_each_element<1, C::kQueryTiles>([&](int m, int n, int i) {
      if (task.makes_dk) s[m][n][i] = dp[m][n][i];
    });
    multiply_floats<Product, kSteps, kSteps>(t.dk(), FromAccumulators(s),
                                             Across<Tile>(task.makes_dk ? sQ : sdO));
    return;
  }
  // dK first: between dS and the product that takes it no branch is left, which D = 64 has no
  // registers for.
  if (task.makes_dk) {
    multiply_floats<Product, kSteps, kSteps>(t.dk(), FromAccumulators(dp), Across<Tile>(sQ));
  }
  if (task.makes_dv) {
    kept.apply(s, p);
    multiply_floats<Product, kSteps, kSteps>(t.dv(), FromAccumulators(s), Across<Tile>(sdO));
  }
}

// Accumulates dK and dV over all queries of the task.
template <class C>
__device__ __forceinline__ void add_queries(KeysState<C>& t, uint32_t smem, const KeysTask& task,
                                            const AttentionBwdParams& p) {
  using Chip = typename C::Chip;
  const auto load_keys = [&](uint32_t to, const void* tensor, const Strides& strides, int dim) {
    load_float_tile<Chip, typename C::Tile, C::kBlockK, C::kThreads>(
        smem + to, rows_to_read(tensor, p, strides, task.batch, task.key_head, task.seq.token_k),
        task.first_key, task.seq.len_k, dim);
  };
  load_keys(C::kSmemK, p.key, p.key_strides, p.head_dim);
  load_keys(C::kSmemV, p.value, p.value_strides, p.head_dim_v);
  const auto load = [&](int i) {
    if (i < task.steps) {
      load_step<C>(smem, i % C::kStages, task, find_step<C>(i, task, p), p);
    }
    Chip::commit();
  };
  load(0);
#pragma unroll
  for (auto& sums : t.sums) set_zero(sums);
#pragma unroll 1
  for (int i = 0; i < task.steps; ++i) {
    Chip::template wait<0>();
    __syncthreads();  // the step is there for everyone, and everyone is done with the one before
    if (C::kStages > 1) load(i + 1);
    add_step<C>(t, smem, i % C::kStages, task, find_step<C>(i, task, p), p);
    if (C::kStages == 1) {
      __syncthreads();  // everyone is done with Q and dO
      load(i + 1);
    }
  }
}

// Gives the keys of a guarded tile what they see of Q or dO that is not finite: of dO, which has
// weights for factors, only where these are not dropped.
template <class C, bool kWeights, class Sums>
__device__ __forceinline__ void add_nonfinite_queries(Sums& sums, uint32_t tile, const void* tensor,
                                                      const Strides& strides, int dim,
                                                      const KeysTask& task,
                                                      const AttentionBwdParams& p) {
  const int first_head = task.key_head * p.group;
#pragma unroll 1
  for (int head = first_head; tensor && head < first_head + p.group; ++head) {
    BiasRows bias;
    if (C::kBias) bias = find_bias(p, task.seq, task.batch, head);
    __syncthreads();  // the head before is done with
    add_nonfinite<typename C::Tile, C::kBlockK>(
        sums, tile, ptx::opaque_thread() / 32 * 16,
        rows_to_read(tensor, p, strides, task.batch, head, task.seq.token_q), task.query_begin,
        min(task.query_end, task.seq.len_q), dim, kWeights ? 1 : 0, [&](int k, int row) {
          const int key = task.first_key + k;
          return sees_key<C::kBias>(row, key, task.seq, bias, p) &&
                 (!kWeights || keeps_pair(row, key, task.seed, task.batch, head, p));
        });
  }
}

// Sets dK and dV of the tile to one value, and the gradient of a ragged bias's pairs that belong to
// no valid sequence.
template <class C>
__device__ __forceinline__ void fill_invalid(const KeysTask& task, float value,
                                             const AttentionBwdParams& p) {
  const auto fill = [&](bool wanted, void* gradient, const Strides& strides, int dim) {
    if (!wanted) return;
    fill_float_rows(float_rows(gradient, p, strides, task.batch, task.key_head, task.seq.token_k),
                    strides.row, task.first_key, min(task.first_key + C::kBlockK, task.stored_keys),
                    dim, value);
  };
  fill(task.makes_dk, p.grad_key, p.grad_key_strides, p.head_dim);
  fill(task.makes_dv, p.grad_value, p.grad_value_strides, p.head_dim_v);
  if constexpr (C::kBias) {
    if (!p.grad_bias || !p.blocks || blockIdx.x % C::kParts != 0) return;
    for (int head = task.key_head * p.group; head < (task.key_head + 1) * p.group; ++head) {
      fill_pairs<Fp32>(find_grad_bias(p, task.seq, task.batch, head), task.seq.token_q, value);
    }
  }
}

// The kernel: grid (tiles of keys x parts, key heads, batch), or ragged (slots x key heads x
// parts).
template <class C>
__device__ __forceinline__ void attention_fp32_bwd_keys(const AttentionBwdParams& p) {
  extern __shared__ __align__(1024) char shared[];
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  static_assert(sizeof(KeysTask) <= kTaskBytes);
  KeysTask& task = *reinterpret_cast<KeysTask*>(shared + C::kSmemTask);
  if (threadIdx.x == 0) find_task<C>(task, p);
  __syncthreads();
  if (task.kind == RaggedKind::kEmpty) return;
  if (task.kind != RaggedKind::kBlock) {
    fill_invalid<C>(task, task.kind == RaggedKind::kRest ? 0.f : NAN, p);
    return;
  }
  if (task.first_key >= task.stored_keys || !(task.makes_dk || task.makes_dv)) return;

  // Keys past their sequence's end have gradients too, which are 0.
  const bool hides = may_hide<C::kBias>(p) || p.key_lengths;
  KeysState<C> t;
  while (true) {
    add_queries<C>(t, smem, task, p);
    // K and V arrived, even if there was no query to wait for, and no warp reads them any more.
    C::Chip::template wait<0>();
    const bool finite = all_finite(t.dv()) && all_finite(t.dk());
    if (!__syncthreads_or(hides && !finite) || task.guarded) break;
    __syncthreads();  // everyone has looked
    if (threadIdx.x == 0) task.guarded = true;
    __syncthreads();  // everyone knows
  }
  if (task.guarded) {
    // What a key sees of Q that is not finite makes its dK NaN: the score is not finite, and its
    // probability is NaN or 0, and 0 times infinity is NaN.
    if (task.makes_dv) {
      add_nonfinite_queries<C, true>(t.dv(), smem + C::kSmemV, p.grad_out, p.grad_out_strides,
                                     p.head_dim_v, task, p);
    }
    if (task.makes_dk) {
      add_nonfinite_queries<C, false>(t.dk(), smem + C::kSmemK, p.query, p.query_strides,
                                      p.head_dim, task, p);
    }
  }
  const auto store = [&](auto& sums, float scale, void* gradient, const Strides& strides, int dim) {
    store_float_rows(
        sums, [&](int, int) { return scale; },
        float_rows(gradient, p, strides, task.batch, task.key_head, task.seq.token_k), strides.row,
        task.first_key + static_cast<int>(threadIdx.x) / 32 * 16, task.stored_keys, dim);
  };
  if (task.makes_dv) store(t.dv(), 1, p.grad_value, p.grad_value_strides, p.head_dim_v);
  if (task.makes_dk) store(t.dk(), p.scale, p.grad_key, p.grad_key_strides, p.head_dim);
}

}  // namespace flashmoe::cuda
