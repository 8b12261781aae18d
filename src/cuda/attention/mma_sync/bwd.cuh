// Attention backward with mma.sync, for every chip from Turing on. With P = 2^(S - lse):
//
//   dV = P^T dO      dP = dO V^T      dS = P * (dP - delta)      dQ = dS K      dK = dS^T Q
//
// One CTA takes one block of keys of one (batch, key head), keeps its K and V in shared memory and
// its dK and dV in registers, and goes through the queries that see it, of all heads of the group:
//
//            keys            shared memory, 16-bit, swizzled:
//           ┌─────┐            sK, sV   block_k x D          stay; dK and dV leave through them
//   queries │  i  │            sQ, sdO  stages x block_q x D  block i, and the next on its way
//     |     ├─────┤            sP, sdS  block_q x block_k
//     v     │ i+1 │            sTerms   stages x block_q         lse and delta of the rows
//           └─────┘            sBias    one or two x block_q x block_k, if there is one
// What is done with a block is in attention_bwd_block.cuh and attention_bwd_own.cuh. Two barriers a
// block: Q and dO have arrived, P and dS are written.
//
// dQ is added to fp32 sums in the workspace, in the accumulators' own order so that a warp's
// addresses are consecutive; a last kernel (attention_bwd_dq) rounds them. Deterministic: the
// blocks of keys take turns for each block of queries. A first kernel (attention_small.cuh)
// makes lse and delta of each row, and zeros.
#pragma once

#include <type_traits>

#include "cuda/attention/mma_sync/bwd_block.cuh"
#include "cuda/attention/mma_sync/bwd_transposed.cuh"
#include "cuda/tile/copy.cuh"

namespace flashmoe::cuda {

// dK or dV through shared memory to 16-byte stores.
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
      shared, threadIdx.x, const_cast<char*>(to), strides.row_bytes(), task.key_block * C::kBlockK,
      task.stored_keys, dim);
}

template <class C>
__device__ __forceinline__ void fill_key_gradients(const BwdTask& task, uint16_t value,
                                                   const AttentionBwdParams& p) {
  const Sequence& seq = task.seq;
  const auto fill = [&](void* gradient, const Strides& strides, int dim) {
    if (!gradient) return;
    const char* to = rows_of(gradient, p, strides, task.batch, task.key_head, seq.token_k);
    const int first = task.key_block * C::kBlockK;
    fill_rows(const_cast<char*>(to), strides.row_bytes(), first,
              min(first + C::kBlockK, task.stored_keys), dim, value);
  };
  fill(p.grad_key, p.grad_key_strides, p.head_dim);
  fill(p.grad_value, p.grad_value_strides, p.head_dim_v);
}

// The bias's gradient where no query sees the keys of the block, or where lengths are wrong: rows
// before query_begin and from query_end on.
template <class C>
__device__ __forceinline__ void fill_bias_gradient(const BwdTask& task, float value,
                                                   const AttentionBwdParams& p) {
  const int first_key = task.key_block * C::kBlockK;
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

// Which block of keys this CTA takes, found by one thread. Deterministic, in the order of tickets:
// who has a later one may wait for who has an earlier one, and that one is at work. Where later
// queries see more keys, the last block of keys goes first: block by block, each then finds the one
// it waits for a step ahead.
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
  task.turn = nullptr;
  task.contain = false;
  if (p.blocks) {  // in the order of the list, block by block
    const RaggedBlock block = p.blocks[x / p.heads];
    y = x % p.heads;
    x = block.block;
    task.seq = find_sequence(block);
    task.batch = block.sequence;
    task.kind = block.kind;
    task.stored_keys = task.seq.len_k;
  } else {
    task.batch = p.first_batch + z;
    task.seq = find_sequence(p, task.batch);
    task.kind = task.seq.valid ? RaggedKind::kBlock : RaggedKind::kInvalid;
    task.stored_keys = p.len_k;
  }
  task.key_block = x;
  task.key_head = p.first_head + y;
  if (task.kind == RaggedKind::kEmpty) return;
  task.first_row = workspace_row(p, task.seq, task.batch);
  task.round_row = task.first_row - round_rows(p);
  const QueryRange<C> queries(task.seq, x, p);
  task.query_begin = queries.begin;
  task.query_end = queries.end;
  // All keys of the block are there, the first query of a block sees the last of them, and the last
  // query the first.
  const int first_key = x * C::kBlockK, last_key = first_key + C::kBlockK - 1;
  task.full_begin = last_key < task.seq.len_k ? last_key - task.seq.shift - p.right : kNoLimit;
  task.full_end = first_key - task.seq.shift + p.left - C::kBlockQ + 2;
  task.plain = !p.softcap_scale && !odd_rows(p.head_dim) && !odd_rows(p.head_dim_v);
  const int head = task.key_head * p.group;
  if constexpr (C::kBias) {
    task.bias = find_bias(p, task.seq, task.batch, head);
    task.bias.chunks &= p.group == 1 || p.bias_strides.head % 8 == 0;
    task.plain &= plain_bias<C::kShort>(task.bias, p);
    task.grad_bias = find_grad_bias(p, task.seq, task.batch, head);
    task.grad_bias.chunks &= p.group == 1 || p.grad_bias_strides.head % 8 == 0;
  }
  task.query = rows_of(p.query, p, p.query_strides, task.batch, head, task.seq.token_q);
  task.grad_out = rows_of(p.grad_out, p, p.grad_out_strides, task.batch, head, task.seq.token_q);
}

// The block of queries after this one: the next of its head, or the first of the next head.
template <class C>
__device__ __forceinline__ QueryBlock next(const QueryBlock& block, const BwdTask& task) {
  const int first = block.first + C::kBlockQ;
  return first < task.query_end ? QueryBlock{block.head, first}
                                : QueryBlock{block.head + 1, task.query_begin};
}

// One block of queries of Q and dO to a stage.
template <class C, bool kMaybeOdd = true>
__device__ __forceinline__ void load_queries(uint32_t smem, int stage, const BwdTask& task,
                                             const QueryBlock& block, const AttentionBwdParams& p) {
  const int head = block.head - task.key_head * p.group;
  const auto load = [&](uint32_t to, const char* from, const Strides& strides, int len, int dim) {
    load_tile<typename C::Chip, typename C::Layout, C::kBlockQ, C::kThreads, kMaybeOdd>(
        smem + to + stage * C::kQueryBytes, from + head * strides.head * 2, strides.row_bytes(),
        block.first, len, dim);
  };
  load(C::kSmemQ, task.query, p.query_strides, task.seq.len_q, p.head_dim);
  load(C::kSmemGradOut, task.grad_out, p.grad_out_strides, p.grad_out ? task.seq.len_q : 0,
       p.head_dim_v);
  const int thread = ptx::opaque_thread();
  if (thread < C::kBlockQ / 2) {
    const int64_t row = block.head * p.rows + task.first_row + block.first;
    C::Chip::copy_16(smem + C::kSmemTerms + stage * C::kTermBytes + thread * 16,
                     reinterpret_cast<const char*>(p.lse_delta + 2 * row) + thread * 16, true);
  }
}

// And of the bias.
template <class C, bool kMaybeOdd = true>
__device__ __forceinline__ void load_bias(uint32_t smem, int stage, const BwdTask& task,
                                          const QueryBlock& block, const AttentionBwdParams& p) {
  C::Bias::template load<typename C::Chip, kMaybeOdd>(bias_place<C>(smem, stage),
                                                      bias_of(task, block, p), block.first,
                                                      task.key_block * C::kBlockK, task.seq);
}

template <class C>
__device__ __forceinline__ void load_keys(uint32_t smem, const BwdTask& task,
                                          const AttentionBwdParams& p) {
  const auto load = [&](uint32_t to, const void* tensor, const Strides& strides, int dim) {
    load_tile<typename C::Chip, typename C::Layout, C::kBlockK, C::kThreads>(
        smem + to, rows_of(tensor, p, strides, task.batch, task.key_head, task.seq.token_k),
        strides.row_bytes(), task.key_block * C::kBlockK, task.seq.len_k, dim);
  };
  load(C::kSmemK, p.key, p.key_strides, p.head_dim);
  load(C::kSmemV, p.value, p.value_strides, p.head_dim_v);
}

// dK and dV of all queries of the task, and its share of their dQ.
template <class C, bool kDeterministic>
__device__ __forceinline__ void bwd_queries(BwdState<C>& t, uint32_t smem, BwdTask& task,
                                            const AttentionBwdParams& p) {
  using Chip = typename C::Chip;
  load_keys<C>(smem, task, p);
  QueryBlock block{task.key_head * p.group, task.query_begin};
  const auto exists = [&](const QueryBlock& b) {
    return task.query_begin < task.query_end && b.head < (task.key_head + 1) * p.group;
  };
  if (exists(block)) {
    load_queries<C>(smem, 0, task, block, p);
    if constexpr (C::kBias) load_bias<C>(smem, 0, task, block, p);
  }
  Chip::commit();
  set_zero(t.gK);
  set_zero(t.gV);
  if constexpr (C::kOwnKeys) {
    if (own_idle<C>(task)) clear_own_pairs<C>(smem + C::kSmemGradS);
  }

  int stage = 0;
  bool contain = false;  // a mask turned out not to do for the block
  if (C::kBias || (task.plain && (p.left < kNoLimit || p.right < kNoLimit))) {
    Chip::template wait<0>();
    __syncthreads();  // K and V are there
    if (__syncthreads_or(keys_not_finite<C>(smem))) {
      if (threadIdx.x == 0) {
        task.plain = false;
        task.contain = true;
      }
      __syncthreads();  // everyone knows
    }
  }
  const auto needs = [&] {
    if (!task.plain || contain) return Loop::kGeneral;
    const bool full = block.first >= task.full_begin && block.first < task.full_end;
    return full && !C::kShort ? Loop::kPlain : Loop::kMasked;
  };
  // The blocks from this one on that need the same.
  const auto run = [&](auto constant) {
    constexpr Loop kLoop = decltype(constant)::value;
    constexpr bool kMaybeOdd = kLoop == Loop::kGeneral;
    const auto load_next = [&](int stage) {
      const QueryBlock coming = next<C>(block, task);
      if (exists(coming)) {
        load_queries<C, kMaybeOdd>(smem, stage, task, coming, p);
        if constexpr (C::kBias && C::kBiasStages > 1) {
          load_bias<C, kMaybeOdd || C::kShort>(smem, stage, task, coming, p);
        }
      }
      Chip::commit();
    };
    do {
      Chip::template wait<0>();
      __syncthreads();  // the block is there for everyone, and everyone is done with the one before
      if (C::kStages > 1) load_next(stage ^ 1);
      const auto between = [&] {
        if constexpr (C::kBias && C::kBiasStages == 1) {
          const QueryBlock coming = next<C>(block, task);
          if (exists(coming)) load_bias<C, kMaybeOdd || C::kShort>(smem, 0, task, coming, p);
          Chip::commit();
        }
      };
      const Turn<C, kDeterministic> turn(task, block, p);
      if constexpr (C::kOwnKeys) {
        contain = !bwd_block_own<C, kLoop>(t, smem, stage, task, block, p, turn, between);
      } else {
        contain = !bwd_block<C, kLoop>(t, smem, stage, task, block, p, turn, between);
      }
      if (contain) break;
      if (C::kStages == 1) {
        __syncthreads();  // everyone is done with Q and dO
        load_next(0);
      }
      block = next<C>(block, task);
      if (C::kStages > 1) stage ^= 1;
    } while (exists(block) && needs() == kLoop);
  };
#pragma unroll 1
  while (exists(block)) {
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
  if (kDeterministic) pass_on_turn(task);
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
  if (task.key_block * C::kBlockK >= task.stored_keys) return;
  if constexpr (C::kBias && !C::kShort) {
    if (p.grad_bias) fill_bias_gradient<C>(task, 0, p);
  }

  BwdState<C> t;
  if constexpr (C::kShort) {  // nobody adds to anything
    bwd_queries<C, false>(t, smem, task, p);
  } else if (C::kBias || p.deterministic) {
    bwd_queries<C, true>(t, smem, task, p);
  } else if constexpr (!C::kBias) {
    bwd_queries<C, false>(t, smem, task, p);
  }
  if (p.grad_key) {
    store_key_gradient<C>(t.gK, p.scale, smem + C::kSmemK, p.grad_key, p.grad_key_strides,
                          p.head_dim, task, p);
  }
  if (p.grad_value) {
    store_key_gradient<C>(t.gV, 1.f, smem + C::kSmemV, p.grad_value, p.grad_value_strides,
                          p.head_dim_v, task, p);
  }
}

}  // namespace flashmoe::cuda
