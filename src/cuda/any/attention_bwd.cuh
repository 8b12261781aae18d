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
//           └─────┘
// What is done with a block is in attention_bwd_block.cuh and attention_bwd_own.cuh. Two barriers a
// block: Q and dO have arrived, P and dS are written.
//
// dQ is added to fp32 sums in the workspace, in the accumulators' own order so that a warp's
// addresses are consecutive; a last kernel (attention_bwd_finish) rounds them. Deterministic: the
// blocks of keys take turns for each block of queries. A first kernel (attention_rows.cuh)
// makes lse and delta of each row, and zeros.
#pragma once

#include <type_traits>

#include "cuda/any/attention_bwd_block.cuh"
#include "cuda/any/attention_bwd_own.cuh"
#include "cuda/tile/copy.cuh"

namespace flashmoe::cuda {

// dK or dV through shared memory to 16-byte stores.
template <class C>
__device__ __forceinline__ void store_key_gradient(float (&acc)[C::kKeyM][C::kKeyN][4], float scale,
                                                   uint32_t shared, void* gradient,
                                                   const Strides& strides, int dim,
                                                   const BwdTask& task,
                                                   const AttentionBwdParams& p) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = warp / C::kKeyCols, col = warp % C::kKeyCols;
#pragma unroll
  for (int m = 0; m < C::kKeyM; ++m) {
#pragma unroll
    for (int n = 0; n < C::kKeyN; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = key_row<C>(row, m) + lane / 4 + 8 * half;
        const int chunk = 2 * (n / 2 * C::kKeyCols + col) + n % 2;
        ptx::st_shared_u32(
            shared + C::Layout::at(r, chunk) + lane % 4 * 4,
            C::Type::pack(acc[m][n][2 * half] * scale, acc[m][n][2 * half + 1] * scale));
      }
    }
  }
  __syncthreads();
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
    fill_rows(const_cast<char*>(to), strides.row_bytes(), seq.len_k, dim, value, task.key_block);
  };
  fill(p.grad_key, p.grad_key_strides, p.head_dim);
  fill(p.grad_value, p.grad_value_strides, p.head_dim_v);
}

// Which block of keys this CTA takes, found by one thread. Deterministic, in the order of tickets:
// who has a later one may wait for who has an earlier one, and that one is at work. Where later
// queries see more keys, the last block of keys goes first: block by block, each then finds the one
// it waits for a step ahead.
template <class C>
__device__ __forceinline__ void find_task(BwdTask& task, const AttentionBwdParams& p) {
  int x = blockIdx.x, y = blockIdx.y, z = blockIdx.z;
  if (p.deterministic) {
    const int ticket = atomicAdd(p.tickets, 1);
    x = ticket % gridDim.x;
    y = ticket / gridDim.x % gridDim.y;
    z = ticket / gridDim.x / gridDim.y;
    if (descending(p)) x = gridDim.x - 1 - x;
  }
  task.key_block = x;
  task.key_head = y;
  task.batch = p.first_batch + z;
  task.turn = nullptr;
  if (task.batch == p.batch) return;
  task.seq = find_sequence(p, task.batch);
  task.stored_keys = p.cu_seqlens_q ? task.seq.len_k : p.len_k;
  task.first_row = workspace_row(p, task.seq, task.batch);
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
                     reinterpret_cast<const char*>(p.row_terms + 2 * row) + thread * 16, true);
  }
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
  if (exists(block)) load_queries<C>(smem, 0, task, block, p);
  Chip::commit();
  set_zero(t.gK);
  set_zero(t.gV);

  int stage = 0;
  bool contain = false;  // a mask turned out not to do for the block
  const auto needs = [&] {
    if (!task.plain || contain) return Needs::kAnything;
    if (block.first >= task.full_begin && block.first < task.full_end) return Needs::kNothing;
    return C::kOwnKeys ? Needs::kAnything : Needs::kMask;
  };
  // The blocks from this one on that need the same.
  const auto run = [&](auto constant) {
    constexpr Needs kNeeds = decltype(constant)::value;
    const auto load_next = [&](int stage) {
      const QueryBlock coming = next<C>(block, task);
      if (exists(coming)) {
        load_queries<C, kNeeds == Needs::kAnything>(smem, stage, task, coming, p);
      }
      Chip::commit();
    };
    do {
      Chip::template wait<0>();
      __syncthreads();  // the block is there for everyone, and everyone is done with the one before
      if (C::kStages > 1) load_next(stage ^ 1);
      const Turn<C, kDeterministic> turn(task, block, p);
      if constexpr (C::kOwnKeys) {
        contain = !bwd_block_own<C, kNeeds>(t, smem, stage, task, block, p, turn);
      } else {
        contain = !bwd_block<C, kNeeds>(t, smem, stage, task, block, p, turn);
      }
      if (contain) break;
      if (C::kStages == 1) {
        __syncthreads();  // everyone is done with Q and dO
        load_next(0);
      }
      block = next<C>(block, task);
      if (C::kStages > 1) stage ^= 1;
    } while (exists(block) && needs() == kNeeds);
  };
#pragma unroll 1
  while (exists(block)) {
    const Needs here = needs();
    if (here == Needs::kNothing) {
      run(std::integral_constant<Needs, Needs::kNothing>());
    } else if (here == Needs::kAnything) {
      run(std::integral_constant<Needs, Needs::kAnything>());
    } else if constexpr (!C::kOwnKeys) {
      run(std::integral_constant<Needs, Needs::kMask>());
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
  const Sequence& seq = task.seq;
  if (threadIdx.x == 0) find_task<C>(task, p);
  __syncthreads();
  if (task.batch == p.batch) {
    BwdTask rest = task;
    rest.seq = find_rest(p);
    rest.batch = 0;
    fill_key_gradients<C>(rest, 0, p);
    return;
  }
  if (!seq.valid) {
    fill_key_gradients<C>(task, C::Type::kNan, p);
    return;
  }
  if (task.key_block * C::kBlockK >= task.stored_keys) return;

  BwdState<C> t;
  if (p.deterministic) {
    bwd_queries<C, true>(t, smem, task, p);
  } else {
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

// dQ from its sums: one CTA for each block of queries of one (batch, head).
template <class C>
__device__ __forceinline__ void attention_bwd_finish(const AttentionBwdParams& p) {
  extern __shared__ __align__(1024) char shared[];
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  BwdTask task;
  task.batch = p.first_batch + blockIdx.z;
  const bool rest = task.batch == p.batch;
  task.seq = rest ? find_rest(p) : find_sequence(p, task.batch);
  if (rest) task.batch = 0;
  const Sequence& seq = task.seq;
  const QueryBlock block{static_cast<int>(blockIdx.y), static_cast<int>(blockIdx.x) * C::kBlockQ};
  char* to = const_cast<char*>(
      rows_of(p.grad_query, p, p.grad_query_strides, task.batch, block.head, seq.token_q));
  const int row_bytes = p.grad_query_strides.row_bytes();
  if (rest || !seq.valid) {
    fill_rows(to, row_bytes, seq.len_q, p.head_dim, rest ? 0 : C::Type::kNan, blockIdx.x);
    return;
  }
  if (block.first >= seq.len_q) return;
  task.first_row = workspace_row(p, seq, task.batch);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = warp / C::kQueryCols, col = warp % C::kQueryCols;
#pragma unroll
  for (int m = 0; m < C::kQueryM; ++m) {
#pragma unroll
    for (int n = 0; n < C::kQueryN; ++n) {
      float x[4];
      read_sums(x, query_sums<C>(task, block, n / C::kPartN, p), m * C::kPartN + n % C::kPartN);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = query_row<C>(row, m) + lane / 4 + 8 * half;
        const int chunk = 2 * (n / 2 * C::kQueryCols + col) + n % 2;
        ptx::st_shared_u32(smem + C::Layout::at(r, chunk) + lane % 4 * 4,
                           C::Type::pack(x[2 * half] * p.scale, x[2 * half + 1] * p.scale));
      }
    }
  }
  __syncthreads();
  store_tile<typename C::Layout, C::kBlockQ, C::kThreads>(smem, threadIdx.x, to, row_bytes,
                                                          block.first, seq.len_q, p.head_dim);
}

}  // namespace flashmoe::cuda
