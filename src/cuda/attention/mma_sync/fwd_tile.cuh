// What the kernels have in common that go through the keys of a tile of queries, which are the
// forward pass and dQ of short sequences: the task of a CTA, its tiles in shared memory, and their
// way there and back.
#pragma once

#include "cuda/attention/bias.cuh"
#include "cuda/attention/params.h"
#include "cuda/attention/score.cuh"
#include "cuda/attention/sequence.cuh"
#include "cuda/attention/softmax.cuh"
#include "cuda/attention/tiles.h"
#include "cuda/tile/copy.cuh"
#include "cuda/tile/dtype.cuh"
#include "cuda/tile/product.cuh"

namespace flashmoe::cuda {

// The block of queries of one CTA. Kept in shared memory: the main loop has no registers to spare
// for what it rarely looks at.
struct FwdTask {
  Sequence seq;
  int batch, head;
  int first_row;
  int split;
  int key_begin, key_end;    // its keys, in blocks of block_k
  int full_begin, full_end;  // of these, blocks that need no mask
  bool plain;                // no block needs more than a mask
  bool contain;              // something not finite may be hidden
  RaggedKind kind;
  const char *key, *value;  // where the sequence's begin
  BiasRows bias;
};

// kRowTensors: the queries alone, or also dO, as the gradient of the queries needs it.
template <class Chip_, class T, FwdTile kTile_, bool kBias_ = false, int kRowTensors = 1>
struct FwdConfig {
  using Chip = Chip_;
  using Type = T;
  static constexpr FwdTile kTile = kTile_;
  static constexpr bool kBias = kBias_, kShort = kTile.for_short();
  static constexpr int kDim = kTile.head_dim, kStages = kTile.stages, kQSteps = kTile.q_steps;
  static constexpr int kBlockQ = kTile.block_q, kBlockK = kTile.block_k;
  static constexpr int kThreads = kTile.threads();
  static constexpr int kRowTiles = kBlockQ / kTile.warps / 16;  // m16 fragments of a warp
  static constexpr int kKeyTiles = kBlockK / 8;                 // n8 fragments of S
  static constexpr int kDimTiles = kDim / 8;                    // n8 fragments of O
  static constexpr int kDimSteps = kDim / 16;                   // k16 steps of Q K^T
  static constexpr int kKeySteps = kBlockK / 16;                // k16 steps of P V
  static constexpr uint32_t kTileBytes = kBlockK * kDim * 2;
  using Layout = Swizzled<kDim>;

  // Byte offsets in shared memory.
  static constexpr uint32_t kSmemQ = 0;
  static constexpr uint32_t kRowBytes = kBlockQ * kDim * 2;
  static constexpr uint32_t kSmemK = kRowTensors * kRowBytes;
  static constexpr uint32_t kSmemV = kSmemK + kStages * kTileBytes;
  using Bias = BiasTile<T, kBlockQ, kBlockK, kThreads>;
  static constexpr uint32_t kSmemBias = kSmemV + kStages * kTileBytes;
  static constexpr uint32_t kSmemTask = kSmemBias + (kBias ? 2 * Bias::kBytes : 0);
  static_assert(kSmemTask + kTaskBytes == kTile.shared_bytes(kBias, kRowTensors));
  static_assert(sizeof(FwdTask) <= kTaskBytes);
  static_assert(kBlockQ % (16 * kTile.warps) == 0 && kBlockK % 16 == 0 && kDim % 16 == 0);
  // With one stage K and V take turns: one arrives while the other is used.
  static constexpr bool kTurns = kStages == 1;
  static constexpr int kAhead = kTurns ? 1 : kStages - 1;  // blocks that are on their way
  static_assert(kStages >= 1 && kSmemK % 128 == 0 && kTileBytes % 128 == 0);
};

// The first row of this warp, in the block.
template <class C>
__device__ __forceinline__ int warp_row() {
  return ptx::opaque_thread() / 32 * (C::kRowTiles * 16);
}

// Where a lane reads fragments, from the beginning of a tile.
template <class C>
struct FwdLanes {
  uint32_t q = lane_rows<typename C::Layout>(0, warp_row<C>(), 0);
  uint32_t k = lane_cols<typename C::Layout>(0, 0, 0);
  uint32_t v = lane_rows<typename C::Layout>(0, 0, 0);
};

// S += Q K^T
template <class C>
__device__ __forceinline__ void add_scores(float (&s)[C::kRowTiles][C::kKeyTiles][4],
                                           const uint32_t (&rQ)[C::kRowTiles][C::kQSteps + 1][4],
                                           uint32_t lane_q, uint32_t lane_k) {
  const AlongA<typename C::Layout> q{lane_q};
  const AlongB<typename C::Layout> k{lane_k};
  // Where Q comes from shared memory: unrolled all the way, the compiler reads it ahead and runs
  // out of registers; not at all costs 8% at D = 128.
  constexpr int kUnroll = C::kQSteps > 0 || C::kRowTiles == 1 ? C::kDimSteps : 4;
#pragma unroll kUnroll
  for (int step = 0; step < C::kDimSteps; ++step) {
    uint32_t a[C::kRowTiles][4];
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
      if (step < C::kQSteps) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[m][i] = rQ[m][step][i];
      } else {
        q.load(a[m], m, step);
      }
    }
#pragma unroll
    for (int n = 0; n < C::kKeyTiles; n += 2) {
      uint32_t b[4];  // two n8 fragments
      k.load(b, n / 2, step);
#pragma unroll
      for (int m = 0; m < C::kRowTiles; ++m) {
        C::Type::mma(s[m][n], a[m], b[0], b[1], s[m][n]);
        C::Type::mma(s[m][n + 1], a[m], b[2], b[3], s[m][n + 1]);
      }
    }
  }
}

// -inf where key `first_key` + column is before the first that the row sees, or after the last.
template <class C, Side kSide>
__device__ __forceinline__ void mask_scores(float (&s)[C::kRowTiles][C::kKeyTiles][4], int row,
                                            int first_key, const Sequence& seq,
                                            const AttentionParams& p) {
  for_each_masked<kSide, C::kRowTiles, C::kKeyTiles>(
      row, first_key, seq, p, [&](int m, int n, int i) { s[m][n][i] = -INFINITY; });
}

// One block of K or V to a stage.
template <class C, bool kMaybeOdd = true>
__device__ __forceinline__ void load_keys(uint32_t smem, int stage, int block, const FwdTask& task,
                                          const AttentionParams& p) {
  load_tile<typename C::Chip, typename C::Layout, C::kBlockK, C::kThreads, kMaybeOdd>(
      smem + C::kSmemK + stage * C::kTileBytes, task.key, p.key_strides.row_bytes(),
      block * C::kBlockK, task.seq.len_k, p.head_dim);
}
template <class C, bool kMaybeOdd = true>
__device__ __forceinline__ void load_values(uint32_t smem, int stage, int block,
                                            const FwdTask& task, const AttentionParams& p) {
  load_tile<typename C::Chip, typename C::Layout, C::kBlockK, C::kThreads, kMaybeOdd>(
      smem + C::kSmemV + stage * C::kTileBytes, task.value, p.value_strides.row_bytes(),
      block * C::kBlockK, task.seq.len_k, p.head_dim_v);
}

// Where the bias of a block of keys is: every other block has the same place.
template <class C>
__device__ __forceinline__ uint32_t bias_place(uint32_t smem, int block, const FwdTask& task) {
  return smem + C::kSmemBias + (task.key_end - 1 - block) % 2 * C::Bias::kBytes;
}

// The bias of a block of keys to its place.
template <class C, bool kMaybeOdd = true>
__device__ __forceinline__ void load_bias(uint32_t smem, int block, const FwdTask& task) {
  if (block < task.key_begin) return;
  C::Bias::template load<typename C::Chip, kMaybeOdd>(bias_place<C>(smem, block, task), task.bias,
                                                      task.first_row, block * C::kBlockK, task.seq);
}

// Rows times factor(m, half) through Q's place in shared memory to 16-byte stores.
template <class C, class Factor>
__device__ __forceinline__ void store_rows(const float (&o)[C::kRowTiles][C::kDimTiles][4],
                                           const Factor& factor, uint32_t smem, char* to,
                                           const Strides& strides, int dim, const FwdTask& task) {
  using Layout = typename C::Layout;
  const int lane = threadIdx.x % 32, row = warp_row<C>();
  const uint32_t shared = smem + C::kSmemQ;
  const uint32_t at = shared + Layout::at(row + lane / 4, 0) + lane % 4 * 4;
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float times = factor(m, half);
#pragma unroll
      for (int d = 0; d < C::kDimTiles; ++d) {
        ptx::st_shared_u32(Layout::along(at, d) + (16 * m + 8 * half) * Layout::kRowBytes,
                           C::Type::pack(o[m][d][2 * half] * times, o[m][d][2 * half + 1] * times));
      }
    }
  }
  __syncwarp();  // a warp stores the rows it wrote
  store_tile<Layout, C::kRowTiles * 16, 32>(shared + row * Layout::kRowBytes, lane, to,
                                            strides.row_bytes(), task.first_row + row,
                                            task.seq.len_q, dim);
}

// Which keys the task's rows see, and what that takes; of those, the share of one of `splits`.
template <class C>
__device__ __forceinline__ void find_keys(FwdTask& task, int splits, const AttentionParams& p) {
  const Sequence& seq = task.seq;
  const int last_row = min(task.first_row + C::kBlockQ, seq.len_q) - 1;
  task.key_begin = seq.begin(task.first_row, p) / C::kBlockK;
  task.key_end = (max(seq.end(last_row, p), 0) + C::kBlockK - 1) / C::kBlockK;
  if (splits > 1) {
    const int share = (max(task.key_end - task.key_begin, 0) + splits - 1) / splits;
    task.key_begin += task.split * share;
    task.key_end = min(task.key_end, task.key_begin + share);
  }
  // All keys are there, and all rows see them.
  task.full_begin = max((seq.begin(last_row, p) + C::kBlockK - 1) / C::kBlockK, task.key_begin);
  task.full_end = min(max(seq.end(task.first_row, p), 0) / C::kBlockK, task.key_end);
  task.plain = !p.softcap_scale && !odd_rows(p.head_dim) && !odd_rows(p.head_dim_v);
  if constexpr (C::kBias) {
    task.bias = find_bias(p, seq, task.batch, task.head);
    task.plain &= plain_bias<C::kShort>(task.bias, p);
  }
  const int key_head = p.group == 1 ? task.head : task.head / p.group;
  task.key = rows_of(p.key, p, p.key_strides, task.batch, key_head, seq.token_k);
  task.value = rows_of(p.value, p, p.value_strides, task.batch, key_head, seq.token_k);
}

}  // namespace flashmoe::cuda
