// dQ of short sequences, and the gradient of their bias:
//
//   dS = P * (dO V^T - delta)      dQ = dS K
//
// One CTA takes one tile of queries of one (batch, head), as the forward pass does, and goes
// through the keys once more: bwd_dq.cuh tells why. Nothing is added up in memory, so the bits are
// always the same.
//
//   shared memory: that of the forward pass, with dO after Q. dS leaves through the bias's stage
//   where the bias has a gradient.
#pragma once

#include "cuda/attention/mma_sync/fwd_guard.cuh"
#include "cuda/attention/mma_sync/fwd_tile.cuh"

namespace flashmoe::cuda {

struct DqTask : FwdTask {
  BiasRows grad_bias;
  int stored_keys;  // keys with a gradient of the bias: also those past the sequence's length
};

// The accumulators of one warp, and its rows' LSE in base 2 and delta.
template <class C>
struct DqState {
  float rdQ[C::kRowTiles][C::kDimTiles][4];
  float2 lse_delta[C::kRowTiles][2];
};

// What a warp holds of S or dP - delta, later of dS.
template <class C>
using DqScores = float[C::kRowTiles][C::kKeyTiles][4];

// Puts dS in place of dP - delta and writes the bias's gradient, pair by pair, for anything that a
// call can ask for.
template <class C>
__device__ __forceinline__ void differentiate_pairs(DqScores<C>& s, DqScores<C>& dp,
                                                    const DqState<C>& t, uint32_t sBias,
                                                    int first_key, const DqTask& task,
                                                    const AttentionBwdParams& p) {
  const int lane = ptx::opaque_thread() % 32;
  const Sequence& seq = task.seq;
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int i = 0; i < C::kKeyTiles * 4; ++i) {
      const int row = warp_row<C>() + 16 * m + i % 4 / 2 * 8 + lane / 4;
      const int key = i / 4 * 8 + lane % 4 * 2 + i % 2;
      const int r = task.first_row + row, j = first_key + key;
      float bias = 0;
      if constexpr (C::kBias) {
        bias = C::Bias::read(sBias, task.bias, row, key, task.first_row, first_key, seq);
      }
      const PairScore pair = ScoreRule(p).pair(s[m][i / 4][i % 4], bias, r, j, seq);
      float& gradient = dp[m][i / 4][i % 4];
      gradient = pair.seen ? pair.probability(t.lse_delta[m][i % 4 / 2].x) * gradient : 0;
      if constexpr (C::kBias) {
        if (p.grad_bias && r < seq.len_q && j < task.stored_keys) {
          write_bias<typename C::Type>(task.grad_bias, r, j, gradient);
        }
      }
      if (pair.seen) gradient *= pair.slope;  // that of a hidden pair may be NaN
    }
  }
}

// Stores the warp's rows of dS as the gradient of the bias, through the bias's stage in shared
// memory.
template <class C>
__device__ __forceinline__ void store_bias_gradient(const DqScores<C>& dS, uint32_t sBias,
                                                    int first_key, const DqTask& task) {
  using Layout = typename C::Bias::Layout;
  constexpr int kChunks = C::kBlockK / 8;
  const int lane = ptx::opaque_thread() % 32, row = warp_row<C>();
  const uint32_t at = sBias + Layout::at(row + lane / 4, 0) + lane % 4 * 4;
  __syncwarp();  // the warp has read the bias of its rows
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int i = 0; i < C::kKeyTiles * 2; ++i) {
      const auto& x = dS[m][i / 2];
      ptx::st_shared_u32(Layout::along(at, i / 2) + (16 * m + 8 * (i % 2)) * Layout::kRowBytes,
                         C::Type::pack(x[i % 2 * 2], x[i % 2 * 2 + 1]));
    }
  }
  __syncwarp();  // a warp stores the rows it wrote
  const BiasRows& grad = task.grad_bias;
  const int rows = min(C::kRowTiles * 16, task.seq.len_q - task.first_row - row);
  if (grad.chunks && task.stored_keys - first_key >= C::kBlockK) {
#pragma unroll 1
    for (int i = lane; i < rows * kChunks; i += 32) {
      const int r = row + i / kChunks, key = first_key + i % kChunks * 8;
      *reinterpret_cast<uint4*>(grad.at(task.first_row + r, key)) =
          ptx::ld_shared_v4(sBias + Layout::at(r, i % kChunks));
    }
    return;
  }
  // One row at a time, a lane for each key.
  static_assert(C::kBlockK == 32);
  char* to = grad.at(task.first_row + row, first_key + lane);
#pragma unroll 4
  for (int r = row; r < row + rows; ++r, to += grad.row * C::Type::kBytes) {
    if (first_key + lane < task.stored_keys) {
      *reinterpret_cast<typename C::Type::Storage*>(to) =
          ptx::ld_shared_u16(sBias + Layout::at_element(r, lane));
    }
  }
}

// Adds one tile of keys, which is in shared memory.
template <class C, Loop kLoop>
__device__ __forceinline__ void dq_step(DqState<C>& t, const FwdLanes<C>& lanes, uint32_t smem,
                                        int stage, const DqTask& task, int first_key, bool guarded,
                                        const AttentionBwdParams& p) {
  constexpr bool kGeneral = kLoop == Loop::kGeneral;
  const uint32_t sQ = smem + C::kSmemQ, sdO = sQ + C::kRowBytes;
  const uint32_t sK = smem + C::kSmemK + stage * C::kTileBytes;
  const uint32_t sV = smem + C::kSmemV + stage * C::kTileBytes;
  const uint32_t sBias = bias_address<C>(smem, first_key / C::kBlockK, task);
  const int row = task.first_row + warp_row<C>();
  // Rows past the end, whole warps of them, would cost as much as the others.
  if (!guarded && row >= task.seq.len_q) return;
  DqScores<C> s, dp;
  constexpr uint32_t kNoQ[C::kRowTiles][1][4] = {};
  if (C::kBias && !kGeneral) {
    C::Bias::start(s, sBias, warp_row<C>(), 0, p.bias_scale);
  } else {
    set_zero(s);
  }
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int i = 0; i < C::kKeyTiles * 4; ++i) dp[m][i / 4][i % 4] = -t.lse_delta[m][i % 4 / 2].y;
  }
  add_scores<C>(s, kNoQ, sQ + ptx::opaque(lanes.q), sK + ptx::opaque(lanes.k));
  add_scores<C>(dp, kNoQ, sdO + ptx::opaque(lanes.q), sV + ptx::opaque(lanes.k));
  if constexpr (kGeneral) {
    differentiate_pairs<C>(s, dp, t, sBias, first_key, task, p);
  } else {
    const ScoreRule rule(p);
    const int tile = first_key / C::kBlockK;
    if (tile >= task.full_end) mask_scores<C, Side::kAfter>(s, row, first_key, task.seq, p);
    if (tile < task.full_begin) mask_scores<C, Side::kBefore>(s, row, first_key, task.seq, p);
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
      for (int i = 0; i < C::kKeyTiles * 4; ++i) {
        rule.differentiate(s[m][i / 4][i % 4], dp[m][i / 4][i % 4], t.lse_delta[m][i % 4 / 2].x);
      }
    }
    if constexpr (C::kBias) {
      if (p.grad_bias) store_bias_gradient<C>(dp, sBias, first_key, task);
    }
  }
  if (kGeneral && guarded) {
    __syncthreads();  // everyone has S
    drop_nonfinite<C>(sK);
  }
  const AcrossB<typename C::Layout> k{sK + ptx::opaque(lanes.v)};
#pragma unroll
  for (int step = 0; step < C::kKeySteps; ++step) {
    uint32_t a[C::kRowTiles][4];
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
      pack_operand<typename C::Type>(a[m], dp[m][2 * step], dp[m][2 * step + 1]);
    }
#pragma unroll
    for (int d = 0; d < C::kDimTiles; d += 2) {
      uint32_t b[4];
      k.load(b, d / 2, step);
#pragma unroll
      for (int m = 0; m < C::kRowTiles; ++m) {
        C::Type::mma(t.rdQ[m][d], a[m], b[0], b[1], t.rdQ[m][d]);
        C::Type::mma(t.rdQ[m][d + 1], a[m], b[2], b[3], t.rdQ[m][d + 1]);
      }
    }
  }
}

// Goes through all tiles of keys of the task.
template <class C, Loop kLoop>
__device__ __forceinline__ void dq_steps(DqState<C>& t, uint32_t smem, const DqTask& task,
                                         bool guarded, const AttentionBwdParams& p) {
  using Chip = typename C::Chip;
  constexpr bool kPartialChunks = kLoop == Loop::kGeneral;
  static_assert(C::kStages == 2);
  const FwdLanes<C> lanes;
#pragma unroll 1
  for (int n = task.key_end - 1; n >= task.key_begin; --n) {
    Chip::template wait<0>();
    __syncthreads();  // tile n is there for everyone, and everyone is done with the one before
    const int stage = (task.key_end - 1 - n) % 2;
    if (n > task.key_begin) {
      load_keys<C, kPartialChunks>(smem, stage ^ 1, n - 1, task, p);
      load_values<C, kPartialChunks>(smem, stage ^ 1, n - 1, task, p);
      if constexpr (C::kBias) load_bias<C>(smem, n - 1, task);
    }
    Chip::commit();
    dq_step<C, kLoop>(t, lanes, smem, stage, task, n * C::kBlockK, guarded, p);
  }
}

// Accumulates dQ over all keys of the task.
template <class C>
__device__ __forceinline__ void dq_keys(DqState<C>& t, uint32_t smem, const DqTask& task,
                                        bool guarded, const AttentionBwdParams& p) {
  using Chip = typename C::Chip;
  const auto load = [&](uint32_t to, const void* tensor, const Strides& strides, int len, int dim) {
    load_tile<Chip, typename C::Layout, C::kBlockQ, C::kThreads>(
        smem + to,
        Rows{rows_of(tensor, p, strides, task.batch, task.head, task.seq.token_q),
             strides.row_bytes()},
        task.first_row, len, dim);
  };
  load(C::kSmemQ, p.query, p.query_strides, task.seq.len_q, p.head_dim);
  load(C::kSmemQ + C::kRowBytes, p.grad_out, p.grad_out_strides, p.grad_out ? task.seq.len_q : 0,
       p.head_dim_v);
  const int last = task.key_end - 1;
  if (last >= task.key_begin) {
    load_keys<C>(smem, 0, last, task, p);
    load_values<C>(smem, 0, last, task, p);
    if constexpr (C::kBias) load_bias<C>(smem, last, task);
  }
  Chip::commit();
  set_zero(t.rdQ);
  if (!task.plain || guarded) {
    dq_steps<C, Loop::kGeneral>(t, smem, task, guarded, p);
  } else {
    dq_steps<C, Loop::kMasked>(t, smem, task, false, p);
  }
}

// Sets the gradient of the bias of keys that the tile does not see to 0.
template <class C>
__device__ __forceinline__ void clear_bias_gradient(const DqTask& task) {
  const int first = task.key_begin * C::kBlockK, end = max(task.key_end * C::kBlockK, first);
  if (first == 0 && end >= task.stored_keys) return;
  for (int row = task.first_row; row < min(task.first_row + C::kBlockQ, task.seq.len_q); ++row) {
    for (int key = threadIdx.x; key < task.stored_keys; key += C::kThreads) {
      if (key < first || key >= end) write_bias<typename C::Type>(task.grad_bias, row, key, 0);
    }
  }
}

template <class C>
__device__ __forceinline__ void find_task(DqTask& task, const AttentionBwdParams& p) {
  const QueryRows rows = find_query_rows(p);
  task.seq = rows.seq;
  task.kind = rows.kind;
  task.batch = rows.batch;
  task.head = rows.head;
  task.first_row = rows.first;
  if (task.kind != RaggedKind::kBlock) return;
  find_keys<C>(task, 1, p);
  task.plain &= p.scale_log2 > 0;  // times which the -inf of a mask stays -inf
  task.stored_keys = p.blocks ? task.seq.len_k : p.len_k;
  if constexpr (C::kBias) {
    task.grad_bias = find_grad_bias(p, task.seq, task.batch, task.head);
  }
}

// The kernel: see find_query_rows() for the grid.
template <class C>
__device__ __forceinline__ void attention_bwd_dq_short(const AttentionBwdParams& p) {
  extern __shared__ __align__(1024) char shared[];
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  static_assert(sizeof(DqTask) <= kTaskBytes);
  DqTask& task = *reinterpret_cast<DqTask*>(shared + C::kSmemTask);
  if (threadIdx.x == 0) find_task<C>(task, p);
  __syncthreads();
  if (task.kind == RaggedKind::kEmpty || task.first_row >= task.seq.len_q) return;
  char* to = const_cast<char*>(
      rows_of(p.grad_query, p, p.grad_query_strides, task.batch, task.head, task.seq.token_q));
  if (task.kind != RaggedKind::kBlock) {
    if (!p.grad_query) return;
    fill_rows(to, p.grad_query_strides.row_bytes(), task.first_row,
              min(task.first_row + C::kBlockQ, task.seq.len_q), p.head_dim,
              task.kind == RaggedKind::kRest ? 0 : C::Type::kNan);
    return;
  }
  if constexpr (C::kBias) {
    if (p.grad_bias) clear_bias_gradient<C>(task);
  }

  DqState<C> t;
  const int lane = threadIdx.x % 32;
  const auto* lse_delta = reinterpret_cast<const float2*>(p.lse_delta) + task.head * p.rows +
                          workspace_row(p, task.seq, task.batch) + task.first_row;
#pragma unroll
  for (int i = 0; i < C::kRowTiles * 2; ++i) {
    t.lse_delta[i / 2][i % 2] = lse_delta[warp_row<C>() + 8 * i + lane / 4];
  }
  // Whether a tile may have keys that some rows see and others do not, or that none sees.
  const bool masked = C::kBias || p.left < kNoLimit || p.right < kNoLimit;
  bool guarded = false;
  while (true) {
    dq_keys<C>(t, smem, task, guarded, p);
    // Q and dO arrived, even if there was no key to wait for, and no warp reads them any more.
    C::Chip::template wait<0>();
    if (!__syncthreads_or(masked && !all_finite(t.rdQ)) || guarded) break;
    guarded = true;
    if constexpr (C::kBias) {
      if (threadIdx.x == 0) task.bias = find_packed_bias(p, task.seq, task.batch, task.head);
      __syncthreads();  // everyone reads the caller's bias
    }
  }
  if (!p.grad_query) return;
  // What a row sees of K that is not finite makes its dQ NaN: the score is not finite, and its
  // probability is NaN or 0, and 0 times infinity is NaN.
  if (guarded)
    add_nonfinite<C>(t.rdQ, task.template keys<typename C::Type>(p), p.head_dim, 0, task, p);
  store_rows<C>(
      t.rdQ, [&](int, int) { return p.scale; }, smem, to, p.grad_query_strides, p.head_dim, task);
}

}  // namespace flashmoe::cuda
