// Attention backward with mma.sync, for every chip from Turing on. With P = 2^(S - LSE):
//
//   dV = P^T dO      dP = dO V^T      dS = P * (dP - delta)      dQ = dS K      dK = dS^T Q
//
// One CTA takes one tile of keys of one (batch, key head), keeps its K and V in shared memory and
// its dK and dV in registers, and goes through the queries that see it, of all heads of the group:
//
//            keys            shared memory, 16-bit, swizzled:
//           ┌─────┐            sK, sV     block_k x D           stay; dK and dV leave through them
//   queries │  i  │            sQ, sdO    stages x block_q x D  tile i, and the next on its way
//     |     ├─────┤            sP, sdS    block_q x block_k
//     v     │ i+1 │            sLseDelta  stages x block_q      LSE and delta of the rows
//           └─────┘            sBias      one or two x block_q x block_k, if there is one
//
// bwd_step.cuh and bwd_transposed.cuh have what is done with a tile, bwd_dq.cuh the way of dQ. All
// warps load and all compute. Two barriers a tile: Q and dO have arrived, P and dS are written.
//
// bwd_preprocess.cuh runs before and makes LSE and delta of each row, attention_bwd_dq runs after.
// Registers: up to 255, so many CTAs on an SM as the tile says. Rate: 321 TFLOP/s at D = 64, 298 at
// D = 128 (H200, 2026-11-15; kernels/sm80.h has the tiles).
#pragma once

#include <type_traits>

#include "cuda/attention/mma_sync/bwd_dq.cuh"
#include "cuda/attention/mma_sync/bwd_guard.cuh"
#include "cuda/attention/mma_sync/bwd_step.cuh"
#include "cuda/attention/mma_sync/bwd_transposed.cuh"
#include "cuda/tile/copy.cuh"

namespace flashmoe::cuda {

// Stores dK or dV, rounded: through shared memory to 16-byte stores.
template <class C>
__device__ __forceinline__ void store_key_gradient(float (&acc)[C::kKeyM][C::kKeyN][4], float scale,
                                                   uint32_t shared, void* gradient,
                                                   const Strides& strides, int dim,
                                                   const BwdTask& task,
                                                   const AttentionBwdParams& p) {
  const int warp = threadIdx.x / 32;
#pragma unroll
  for (int m = 0; m < C::kKeyM; ++m) {
#pragma unroll
    for (int n = 0; n < C::kKeyN; ++n) {
      store_fragment<C, C::kKeyCols>(shared, key_row<C>(warp / C::kKeyCols, m), n,
                                     warp % C::kKeyCols, acc[m][n], scale);
    }
  }
  __syncthreads();  // the tile is written
  const char* to = rows_of(gradient, p, strides, task.batch, task.key_head, task.seq.token_k);
  store_tile<typename C::Layout, C::kBlockK, C::kThreads>(
      shared, threadIdx.x, const_cast<char*>(to), strides.row_bytes(), task.key_tile * C::kBlockK,
      task.stored_keys, dim);
}

// Sets dK and dV of the tile to one value.
template <class C>
__device__ __forceinline__ void fill_key_gradients(const BwdTask& task, uint16_t value,
                                                   const AttentionBwdParams& p) {
  const Sequence& seq = task.seq;
  const auto fill = [&](void* gradient, const Strides& strides, int dim) {
    if (!gradient) return;
    const char* to = rows_of(gradient, p, strides, task.batch, task.key_head, seq.token_k);
    const int first = task.key_tile * C::kBlockK;
    fill_rows(const_cast<char*>(to), strides.row_bytes(), first,
              min(first + C::kBlockK, task.stored_keys), dim, value);
  };
  fill(p.grad_key, p.grad_key_strides, p.head_dim);
  fill(p.grad_value, p.grad_value_strides, p.head_dim_v);
}

// Sets the bias's gradient where no query sees the keys of the tile (rows before query_begin and
// from query_end on), or where lengths are wrong.
template <class C>
__device__ __forceinline__ void fill_bias_gradient(const BwdTask& task, float value,
                                                   const AttentionBwdParams& p) {
  const int first_key = task.key_tile * C::kBlockK;
  const int keys = min(C::kBlockK, task.stored_keys - first_key);
  for (int head = task.key_head * p.group; head < (task.key_head + 1) * p.group; ++head) {
    const BiasRows grad = grad_bias_of(task, {head, 0}, p);
    if (p.blocks && task.kind != RaggedKind::kBlock) {
      fill_pairs<typename C::Type>(grad, task.seq.token_q, value);
      continue;
    }
    for (int row = 0; row < task.seq.len_q; ++row) {
      const bool seen = task.kind == RaggedKind::kBlock && task.query_begin < task.query_end;
      if (seen && row == task.query_begin) row = task.query_end;
      if (row >= task.seq.len_q) break;
      for (int key = threadIdx.x; key < keys; key += C::kThreads) {
        write_bias<typename C::Type>(grad, row, first_key + key, value);
      }
    }
  }
}

// Finds the tile of keys of this CTA, by one thread. Deterministic, a counter gives out the tiles:
// a CTA waits only for tiles given out before its own, which are being computed. Where later
// queries see more keys, the last tile of keys goes first: each CTA then finds the one it waits for
// a step ahead.
template <class C>
__device__ __forceinline__ void find_task(BwdTask& task, const AttentionBwdParams& p) {
  int x = blockIdx.x, y = blockIdx.y, z = blockIdx.z;
  if (p.deterministic) {
    const int ticket = atomicAdd(p.tile_counter, 1);
    x = ticket % gridDim.x;
    y = ticket / gridDim.x % gridDim.y;
    z = ticket / gridDim.x / gridDim.y;
    if (descending(p) && !p.blocks) x = gridDim.x - 1 - x;
  }
  task.semaphore = nullptr;
  task.nonfinite_keys = false;
  if (p.blocks) {  // in the order of the list, all heads of a tile together
    const RaggedBlock slot = p.blocks[x / p.heads];
    y = x % p.heads;
    x = slot.block;
    task.seq = find_sequence(slot);
    task.batch = slot.sequence;
    task.kind = slot.kind;
    task.stored_keys = task.seq.len_k;
  } else {
    task.batch = p.first_batch + z;
    task.seq = find_sequence(p, task.batch);
    task.kind = task.seq.valid ? RaggedKind::kBlock : RaggedKind::kInvalid;
    task.stored_keys = p.len_k;
  }
  task.key_tile = x;
  task.key_head = p.first_head + y;
  if (task.kind == RaggedKind::kEmpty) return;
  task.first_row = workspace_row(p, task.seq, task.batch);
  task.slice_row = task.first_row - rows_before_slice(p);
  const QueryRange<C> queries(task.seq, x, p);
  task.query_begin = queries.begin;
  task.query_end = queries.end;
  // In a full tile all keys exist, the first query sees the last of them, and the last query the
  // first.
  const int first_key = x * C::kBlockK, last_key = first_key + C::kBlockK - 1;
  task.full_begin = last_key < task.seq.len_k ? last_key - task.seq.shift - p.right : kNoLimit;
  task.full_end = first_key - task.seq.shift + p.left - C::kBlockQ + 2;
  task.plain = !p.softcap_scale && !has_partial_chunk<typename C::Type>(p.head_dim) &&
               !has_partial_chunk<typename C::Type>(p.head_dim_v);
  const int head = task.key_head * p.group;
  if constexpr (C::kBias) {
    task.bias = find_bias(p, task.seq, task.batch, head);
    task.bias.chunks &= p.group == 1 || p.bias_strides.head % 8 == 0;
    task.plain &= plain_bias<C::kShort>(task.bias, p);
    task.grad_bias = find_grad_bias(p, task.seq, task.batch, head);
    task.grad_bias.chunks &= p.group == 1 || p.grad_bias_strides.head % 8 == 0;
  }
  if constexpr (C::kDropout) task.seed = read_seed(p);
  task.query = rows_of(p.query, p, p.query_strides, task.batch, head, task.seq.token_q);
  task.grad_out = rows_of(p.grad_out, p, p.grad_out_strides, task.batch, head, task.seq.token_q);
}

// The tile of queries after this one: the next of its head, or the first of the next head.
template <class C>
__device__ __forceinline__ QueryTile next(const QueryTile& tile, const BwdTask& task) {
  const int first = tile.first + C::kBlockQ;
  return first < task.query_end ? QueryTile{tile.head, first}
                                : QueryTile{tile.head + 1, task.query_begin};
}

// Loads a tile of Q and dO, with LSE and delta, to a stage.
template <class C, bool kPartialChunks = true>
__device__ __forceinline__ void load_queries(uint32_t smem, int stage, const BwdTask& task,
                                             const QueryTile& tile, const AttentionBwdParams& p) {
  const int head = tile.head - task.key_head * p.group;
  const auto load = [&](uint32_t to, const char* from, const Strides& strides, int len, int dim) {
    load_tile<typename C::Chip, typename C::Layout, C::kBlockQ, C::kThreads, kPartialChunks>(
        smem + to + stage * C::kQueryBytes,
        Rows{from + head * strides.head * C::Type::kBytes, strides.row_bytes()}, tile.first, len,
        dim);
  };
  load(C::kSmemQ, task.query, p.query_strides, task.seq.len_q, p.head_dim);
  load(C::kSmemdO, task.grad_out, p.grad_out_strides, p.grad_out ? task.seq.len_q : 0,
       p.head_dim_v);
  const int thread = ptx::opaque_thread();
  if (thread < C::kBlockQ / 2) {
    const int64_t row = tile.head * p.rows + task.first_row + tile.first;
    C::Chip::copy_16(smem + C::kSmemLseDelta + stage * C::kLseDeltaBytes + thread * 16,
                     reinterpret_cast<const char*>(p.lse_delta + 2 * row) + thread * 16, true);
  }
}

// Loads the bias of a tile.
template <class C, bool kPartialChunks = true>
__device__ __forceinline__ void load_bias(uint32_t smem, int stage, const BwdTask& task,
                                          const QueryTile& tile, const AttentionBwdParams& p) {
  C::Bias::template load<typename C::Chip, kPartialChunks>(bias_address<C>(smem, stage),
                                                           bias_of(task, tile, p), tile.first,
                                                           task.key_tile * C::kBlockK, task.seq);
}

// Loads K and V of the task.
template <class C>
__device__ __forceinline__ void load_keys(uint32_t smem, const BwdTask& task,
                                          const AttentionBwdParams& p) {
  const auto load = [&](uint32_t to, const void* tensor, const Strides& strides, int dim) {
    load_tile<typename C::Chip, typename C::Layout, C::kBlockK, C::kThreads>(
        smem + to,
        find_key_rows<typename C::Type>(tensor, p, strides, task.batch, task.key_head, task.seq),
        task.key_tile * C::kBlockK, task.seq.len_k, dim);
  };
  load(C::kSmemK, p.key, p.key_strides, p.head_dim);
  load(C::kSmemV, p.value, p.value_strides, p.head_dim_v);
}

// Accumulates dK and dV over all queries of the task, and adds its share to their dQ.
template <class C>
__device__ __forceinline__ void bwd_queries(BwdState<C>& t, uint32_t smem, BwdTask& task,
                                            const AttentionBwdParams& p) {
  using Chip = typename C::Chip;
  load_keys<C>(smem, task, p);
  QueryTile tile{task.key_head * p.group, task.query_begin};
  const auto exists = [&](const QueryTile& b) {
    return task.query_begin < task.query_end && b.head < (task.key_head + 1) * p.group;
  };
  if (exists(tile)) {
    load_queries<C>(smem, 0, task, tile, p);
    if constexpr (C::kBias) load_bias<C>(smem, 0, task, tile, p);
  }
  Chip::commit();
  set_zero(t.rdK);
  set_zero(t.rdV);
  if constexpr (C::kTransposed) {
    if (keys_past_end<C>(task)) clear_packed<C>(smem + C::kSmemdS);
  }

  int stage = 0;
  bool needs_guard = false;  // whether the tile was left to the general loop
  if (C::kBias || (task.plain && (p.left < kNoLimit || p.right < kNoLimit))) {
    Chip::template wait<0>();
    __syncthreads();  // K and V are there
    if (__syncthreads_or(keys_nonfinite<C>(smem))) {
      if (threadIdx.x == 0) {
        task.plain = false;
        task.nonfinite_keys = true;
      }
      __syncthreads();  // everyone knows
    }
  }
  const auto needs = [&] {
    if (!task.plain || needs_guard) return Loop::kGeneral;
    const bool full = tile.first >= task.full_begin && tile.first < task.full_end;
    return full && !C::kShort ? Loop::kPlain : Loop::kMasked;
  };
  // Goes through the tiles from this one on that need the same loop.
  const auto run = [&](auto constant) {
    constexpr Loop kLoop = decltype(constant)::value;
    constexpr bool kPartialChunks = kLoop == Loop::kGeneral;
    const auto load_next = [&](int stage) {
      const QueryTile coming = next<C>(tile, task);
      if (exists(coming)) {
        load_queries<C, kPartialChunks>(smem, stage, task, coming, p);
        if constexpr (C::kBias && C::kBiasStages > 1) {
          load_bias<C, kPartialChunks || C::kShort>(smem, stage, task, coming, p);
        }
      }
      Chip::commit();
    };
    do {
      Chip::template wait<0>();
      __syncthreads();  // the tile is there for everyone, and everyone is done with the one before
      if (C::kStages > 1) load_next(stage ^ 1);
      const auto after_bias = [&] {
        if constexpr (C::kBias && C::kBiasStages == 1) {
          const QueryTile coming = next<C>(tile, task);
          if (exists(coming)) load_bias<C, kPartialChunks || C::kShort>(smem, 0, task, coming, p);
          Chip::commit();
        }
      };
      const SumOrder<C> order(task, tile, p);
      if constexpr (C::kTransposed) {
        needs_guard =
            !bwd_step_transposed<C, kLoop>(t, smem, stage, task, tile, p, order, after_bias);
      } else {
        needs_guard = !bwd_step<C, kLoop>(t, smem, stage, task, tile, p, order, after_bias);
      }
      if (needs_guard) break;
      if (C::kStages == 1) {
        __syncthreads();  // everyone is done with Q and dO
        load_next(0);
      }
      tile = next<C>(tile, task);
      if (C::kStages > 1) stage ^= 1;
    } while (exists(tile) && needs() == kLoop);
  };
#pragma unroll 1
  while (exists(tile)) {
    const Loop here = needs();
    if (here == Loop::kGeneral) {
      run(std::integral_constant<Loop, Loop::kGeneral>());
    } else if (here == Loop::kMasked) {
      run(std::integral_constant<Loop, Loop::kMasked>());
    } else if constexpr (!C::kShort) {
      run(std::integral_constant<Loop, Loop::kPlain>());
    }
  }
  Chip::template wait<0>();
  __syncthreads();  // no warp still reads K and V
  if (!C::kShort) release_semaphore(task);
}

template <class C>
__device__ __forceinline__ void attention_bwd(const AttentionBwdParams& p) {
  extern __shared__ __align__(1024) char shared[];
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  BwdTask& task = *reinterpret_cast<BwdTask*>(shared + C::kSmemTask);
  if (threadIdx.x == 0) find_task<C>(task, p);
  __syncthreads();
  if (task.kind == RaggedKind::kEmpty) return;
  if (task.kind != RaggedKind::kBlock) {
    const bool rest = task.kind == RaggedKind::kRest;
    fill_key_gradients<C>(task, rest ? 0 : C::Type::kNan, p);
    if constexpr (C::kBias) {
      if (p.grad_bias) fill_bias_gradient<C>(task, rest ? 0.f : NAN, p);
    }
    return;
  }
  if (task.key_tile * C::kBlockK >= task.stored_keys) return;
  if constexpr (C::kBias && !C::kShort) {
    if (p.grad_bias) fill_bias_gradient<C>(task, 0, p);
  }

  BwdState<C> t;
  bwd_queries<C>(t, smem, task, p);
  if (p.grad_key) {
    store_key_gradient<C>(t.rdK, p.scale, smem + C::kSmemK, p.grad_key, p.grad_key_strides,
                          p.head_dim, task, p);
  }
  if (p.grad_value) {
    store_key_gradient<C>(t.rdV, C::kDropout ? p.kept_scale : 1.f, smem + C::kSmemV, p.grad_value,
                          p.grad_value_strides, p.head_dim_v, task, p);
  }
}

}  // namespace flashmoe::cuda
