// What the kernels share that take a tile of queries and go through its keys, which are the forward
// pass and dQ of short sequences: the task of a CTA, its tiles in shared memory, and their way
// there and back.
#pragma once

#include "cuda/attention/bias.cuh"
#include "cuda/attention/dropout.cuh"
#include "cuda/attention/params.h"
#include "cuda/attention/score.cuh"
#include "cuda/attention/sequence.cuh"
#include "cuda/attention/tiles.h"
#include "cuda/tile/copy.cuh"
#include "cuda/tile/dtype.cuh"
#include "cuda/tile/product.cuh"

namespace flashmoe::cuda {

// The tile of queries of one CTA. Kept in shared memory: the main loop has no registers to spare
// for what it rarely looks at.
struct FwdTask {
  Sequence seq;
  int batch, head;
  int first_row;
  int split;
  int key_begin, key_end;    // its keys, in tiles of block_k
  int full_begin, full_end;  // the tiles of these that need no mask
  bool plain;                // whether no tile needs more than a mask
  bool guarded;              // whether this is the guarded pass; only D = 256 has it here
  RaggedKind kind;
  const char *key, *value;  // the first rows of the sequence
  BiasRows bias;
  uint64_t seed;  // of dropout

  template <class T>
  __device__ __forceinline__ KeyRows keys(const AttentionParams& p) const {
    return key_rows_at<T>(key, p.key_strides);
  }
  template <class T>
  __device__ __forceinline__ KeyRows values(const AttentionParams& p) const {
    return key_rows_at<T>(value, p.value_strides);
  }
};

// kRowTensors counts the tensors with rows of queries: Q alone, or dO as well for dQ. Kernels with
// dropout have room for a bias and look whether there is one.
template <class Chip_, class T, FwdTile kTile_, bool kBias_ = false, int kRowTensors = 1,
          bool kDropout_ = false>
struct FwdConfig {
  using Chip = Chip_;
  using Type = T;
  static constexpr FwdTile kTile = kTile_;
  static constexpr bool kBias = kBias_, kDropout = kDropout_, kShort = kTile.for_short();
  static constexpr int kDim = kTile.head_dim, kStages = kTile.stages, kQSteps = kTile.q_steps;
  static constexpr int kBlockQ = kTile.block_q, kBlockK = kTile.block_k;
  static constexpr int kThreads = kTile.threads();
  static constexpr int kRowTiles = kBlockQ / kTile.warps / 16;  // m16 fragments of a warp
  static constexpr int kKeyTiles = kBlockK / 8;                 // n8 fragments of S
  static constexpr int kDimTiles = kDim / 8;                    // n8 fragments of O
  static constexpr int kDimSteps = kDim / 16;                   // k16 steps of Q K^T
  static constexpr int kKeySteps = kBlockK / 16;                // k16 steps of P V
  static constexpr uint32_t kTileBytes = kBlockK * kDim * T::kBytes;
  using Layout = Swizzled<kDim, T::kBytes>;

  // Byte offsets in shared memory.
  static constexpr uint32_t kSmemQ = 0;
  static constexpr uint32_t kRowBytes = kBlockQ * kDim * T::kBytes;
  static constexpr uint32_t kSmemK = kRowTensors * kRowBytes;
  static constexpr uint32_t kSmemV = kSmemK + kStages * kTileBytes;
  using Bias = BiasTile<T, kBlockQ, kBlockK, kThreads, kDropout>;
  static constexpr uint32_t kSmemBias = kSmemV + kStages * kTileBytes;
  static constexpr uint32_t kSmemTask = kSmemBias + (kBias ? 2 * Bias::kBytes : 0);
  static_assert(kSmemTask + kTaskBytes == kTile.shared_bytes(kBias, kRowTensors));
  static_assert(sizeof(FwdTask) <= kTaskBytes);
  static_assert(kBlockQ % (16 * kTile.warps) == 0 && kBlockK % 16 == 0 && kDim % 16 == 0);
  // With one stage K arrives while V is used, and the other way round.
  static constexpr bool kOneStage = kStages == 1;
  static constexpr int kAhead = kOneStage ? 1 : kStages - 1;  // tiles that are on their way
  static_assert(kStages >= 1 && kSmemK % 128 == 0 && kTileBytes % 128 == 0);
};

// Whether there is a bias.
template <class C>
__device__ __forceinline__ bool has_bias(const AttentionParams& p) {
  return C::kBias && (!C::kDropout || p.bias);
}

// The first row of this warp in the tile.
template <class C>
__device__ __forceinline__ int warp_row(int thread = ptx::opaque_thread()) {
  return thread / 32 * (C::kRowTiles * 16);
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

// Sets scores to -inf where the key is before the first that the row sees, or after the last.
template <class C, Side kSide>
__device__ __forceinline__ void mask_scores(float (&s)[C::kRowTiles][C::kKeyTiles][4], int row,
                                            int first_key, const Sequence& seq,
                                            const AttentionParams& p) {
  for_each_masked<kSide, C::kRowTiles, C::kKeyTiles>(
      row, first_key, seq, p, [&](int m, int n, int i) { s[m][n][i] = -INFINITY; });
}

// Loads a tile of K or V to a stage.
template <class C, bool kPartialChunks = true>
__device__ __forceinline__ void load_keys(uint32_t smem, int stage, int tile, const FwdTask& task,
                                          const AttentionParams& p) {
  load_tile<typename C::Chip, typename C::Layout, C::kBlockK, C::kThreads, kPartialChunks>(
      smem + C::kSmemK + stage * C::kTileBytes, task.template keys<typename C::Type>(p),
      tile * C::kBlockK, task.seq.len_k, p.head_dim);
}
template <class C, bool kPartialChunks = true>
__device__ __forceinline__ void load_values(uint32_t smem, int stage, int tile, const FwdTask& task,
                                            const AttentionParams& p) {
  load_tile<typename C::Chip, typename C::Layout, C::kBlockK, C::kThreads, kPartialChunks>(
      smem + C::kSmemV + stage * C::kTileBytes, task.template values<typename C::Type>(p),
      tile * C::kBlockK, task.seq.len_k, p.head_dim_v);
}

// Where the bias of a tile of keys lies: it has two stages.
template <class C>
__device__ __forceinline__ uint32_t bias_address(uint32_t smem, int tile, const FwdTask& task) {
  return smem + C::kSmemBias + (task.key_end - 1 - tile) % 2 * C::Bias::kBytes;
}

// Loads the bias of a tile of keys.
template <class C, bool kPartialChunks = true>
__device__ __forceinline__ void load_bias(uint32_t smem, int tile, const FwdTask& task) {
  if (tile < task.key_begin) return;
  C::Bias::template load<typename C::Chip, kPartialChunks>(
      bias_address<C>(smem, tile, task), task.bias, task.first_row, tile * C::kBlockK, task.seq);
}

// Stores the warp's rows of O or dQ, times factor(m, half), rounded: through Q's place in shared
// memory to 16-byte stores.
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

// Finds the keys that the task's rows see, or one split's share of them, and what their tiles need.
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
  // In full tiles all keys exist, and all rows see them.
  task.full_begin = max((seq.begin(last_row, p) + C::kBlockK - 1) / C::kBlockK, task.key_begin);
  task.full_end = min(max(seq.end(task.first_row, p), 0) / C::kBlockK, task.key_end);
  task.plain = !p.softcap_scale && !has_partial_chunk<typename C::Type>(p.head_dim) &&
               !has_partial_chunk<typename C::Type>(p.head_dim_v);
  if constexpr (C::kBias) {
    task.bias = find_bias(p, seq, task.batch, task.head);
    task.plain &= plain_bias<C::kShort>(task.bias, p);
  }
  if constexpr (C::kDropout) task.seed = read_seed(p);
  const int key_head = p.group == 1 ? task.head : task.head / p.group;
  using Type = typename C::Type;
  task.key = find_key_rows<Type>(p.key, p, p.key_strides, task.batch, key_head, seq).data;
  task.value = find_key_rows<Type>(p.value, p, p.value_strides, task.batch, key_head, seq).data;
}

}  // namespace flashmoe::cuda
