// What the kernels of the backward pass share: the tile and its place in shared memory, the task of
// a CTA, and where lanes read and write.
#pragma once

#include <algorithm>
#include <type_traits>

#include "cuda/attention/bias.cuh"
#include "cuda/attention/dropout.cuh"
#include "cuda/attention/params.h"
#include "cuda/attention/score.cuh"
#include "cuda/attention/sequence.cuh"
#include "cuda/attention/tiles.h"
#include "cuda/ptx/shared.cuh"
#include "cuda/tile/copy.cuh"
#include "cuda/tile/dtype.cuh"
#include "cuda/tile/product.cuh"
#include "cuda/tile/swizzle.cuh"

namespace flashmoe::cuda {

// The tile of keys of one CTA. Kept in shared memory: the main loop has no registers to spare for
// what it rarely looks at.
struct BwdTask {
  Sequence seq;
  int batch, key_head;
  int key_tile;                // number of the tile in its sequence
  int query_begin, query_end;  // the queries that see the keys, in whole tiles
  int full_begin, full_end;    // tiles that begin in this range need no mask
  bool plain;                  // whether no tile needs more than a mask
  bool nonfinite_keys;         // whether something in K or V is not finite
  RaggedKind kind;
  int stored_keys;    // keys with a gradient: also those past the sequence's length, where it is 0
  int64_t first_row;  // of the sequence in the workspace
  int64_t slice_row;  // of the sequence in the accumulator of dQ, which may hold a slice only
  int* semaphore;     // deterministic: of the last tile of queries, to be released; or null
  // Of the group's first head.
  const char *query, *grad_out;  // the first rows of the sequence
  BiasRows bias, grad_bias;
  uint64_t seed;  // of dropout
};

// Kernels with dropout have room for a bias and look whether there is one.
template <class Chip_, class T, BwdTile kTile_, bool kBias_ = false, bool kDropout_ = false>
struct BwdConfig {
  using Chip = Chip_;
  using Type = T;
  static constexpr BwdTile kTile = kTile_;
  static constexpr bool kBias = kBias_, kDropout = kDropout_;
  static constexpr int kDim = kTile.head_dim, kStages = kTile.stages;
  static constexpr int kBlockQ = kTile.block_q, kBlockK = kTile.block_k;
  static constexpr int kThreads = kTile.threads();

  // Fragments of a warp: m16 rows, n8 columns. Rows and columns of D are dealt out to warps in
  // turn, 16 at a time, so that chunk numbers never carry (see Swizzled::along).
  static constexpr bool kTransposed = kTile.transposed(), kShort = kTile.for_short();
  static constexpr int kScoreRows = kTransposed ? 1 : kTile.score_rows;
  static constexpr int kScoreCols = kTile.warps / kScoreRows;
  static constexpr int kScoreM = kBlockQ / kScoreRows / 16, kScoreN = kBlockK / kScoreCols / 8;
  static constexpr int kKeyRows = kTile.grad_key_rows, kKeyCols = kTile.warps / kKeyRows;
  static constexpr int kKeyM = kBlockK / kKeyRows / 16, kKeyN = kDim / kKeyCols / 8;
  static constexpr int kQueryRows = kTile.grad_query_rows, kQueryCols = kTile.warps / kQueryRows;
  static constexpr int kQueryM = kBlockQ / kQueryRows / 16, kQueryN = kDim / kQueryCols / 8;
  // The columns of dQ are computed in parts where all at once would take too many registers.
  static constexpr int kQueryParts = kQueryM * kQueryN > 12 ? 2 : 1;
  static constexpr int kPartN = kQueryN / kQueryParts;
  static_assert(kScoreM * 16 * kScoreRows == kBlockQ && kScoreN * 8 * kScoreCols == kBlockK);
  static_assert(kKeyM * 16 * kKeyRows == kBlockK && kKeyN * 8 * kKeyCols == kDim);
  static_assert(kQueryM * 16 * kQueryRows == kBlockQ && kQueryN * 8 * kQueryCols == kDim);
  static_assert(kKeyN % 2 == 0 && kPartN % 2 == 0 && (!kTransposed || kKeyCols == 1));

  static constexpr FwdTile kDqTile = kTile.query_tile();  // of the kernel for dQ

  using Layout = Swizzled<kDim, T::kBytes>;
  using PackedLayout = Swizzled<kBlockK, T::kBytes>;      // of P and dS: queries x keys
  using TransposedLayout = Swizzled<kBlockQ, T::kBytes>;  // of dS: keys x queries
  static constexpr uint32_t kKeyBytes = kBlockK * kDim * T::kBytes;
  static constexpr uint32_t kQueryBytes = kBlockQ * kDim * T::kBytes;
  static constexpr uint32_t kPackedBytes = kBlockQ * kBlockK * T::kBytes;
  static constexpr uint32_t kSmemK = 0, kSmemV = kKeyBytes;
  static constexpr uint32_t kSmemQ = 2 * kKeyBytes;
  static constexpr uint32_t kSmemdO = kSmemQ + kStages * kQueryBytes;
  static constexpr uint32_t kSmemP = kSmemdO + kStages * kQueryBytes;
  static constexpr uint32_t kSmemdS = kSmemP + (kTransposed ? 0 : kPackedBytes);
  static constexpr uint32_t kLseDeltaBytes = kBlockQ * 8;
  static constexpr uint32_t kSmemLseDelta = kSmemdS + kPackedBytes;
  using Bias = BiasTile<T, kBlockQ, kBlockK, kThreads, kDropout>;
  static constexpr uint32_t kSmemBias = kSmemLseDelta + kStages * kLseDeltaBytes;
  static constexpr int kBiasStages = kTile.bias_stages();
  static constexpr uint32_t kSmemTask = kSmemBias + (kBias ? kBiasStages * Bias::kBytes : 0);
  static_assert(kSmemTask + kTaskBytes == kTile.shared_bytes(kBias));
  static_assert(sizeof(BwdTask) <= kTaskBytes);
  // Transposed, S has as many queries at once: at D = 32 fewer, which leaves registers for a third
  // CTA, and with dropout those that a block of Philox is for.
  static constexpr int kQueriesAtOnce = kDim == 32 || kShort || kDropout ? 16 : 32;
  static_assert(!kTransposed || kBlockQ % kQueriesAtOnce == 0);
  static_assert(kKeyBytes % 128 == 0 && kQueryBytes % 128 == 0 && kPackedBytes % 128 == 0);
};

// Whether there is a bias.
template <class C>
__device__ __forceinline__ bool has_bias(const AttentionBwdParams& p) {
  return C::kBias && (!C::kDropout || p.bias);
}

// The row of dK and dV that fragment m of a warp begins with. Rows that are read across are dealt
// out to warps in turn.
template <class C>
__device__ __forceinline__ int key_row(int warp_row, int m) {
  return 16 * (C::kTransposed ? warp_row * C::kKeyM + m : m * C::kKeyRows + warp_row);
}

// The row of dQ that fragment m of a warp begins with, as key_row().
template <class C>
__device__ __forceinline__ int query_row(int warp_row, int m) {
  return 16 * (C::kTransposed ? m * C::kQueryRows + warp_row : warp_row * C::kQueryM + m);
}

// A tile of queries of one head.
struct QueryTile {
  int head, first;
};

// The rows of a head, from those of the group's first head.
__device__ __forceinline__ BiasRows of_head(const BiasRows& first, const Strides& strides,
                                            const BwdTask& task, const QueryTile& tile,
                                            const AttentionBwdParams& p) {
  BiasRows rows = first;
  rows.data += (tile.head - task.key_head * p.group) * strides.head * rows.element_bytes();
  return rows;
}
// The bias of the tile's head.
__device__ __forceinline__ BiasRows bias_of(const BwdTask& task, const QueryTile& tile,
                                            const AttentionBwdParams& p) {
  return of_head(task.bias, p.bias_strides, task, tile, p);
}
// The bias of the tile's head as the caller gave it: the copy may be overwritten.
__device__ __forceinline__ BiasRows packed_bias_of(const BwdTask& task, const QueryTile& tile,
                                                   const AttentionBwdParams& p) {
  return find_packed_bias(p, task.seq, task.batch, tile.head);
}
// The bias's gradient of the tile's head.
__device__ __forceinline__ BiasRows grad_bias_of(const BwdTask& task, const QueryTile& tile,
                                                 const AttentionBwdParams& p) {
  return of_head(task.grad_bias, p.grad_bias_strides, task, tile, p);
}

// Where the bias of a tile lies: in the stage of its Q and dO, if the bias has as many stages.
template <class C>
__device__ __forceinline__ uint32_t bias_address(uint32_t smem, int stage) {
  return smem + C::kSmemBias + (C::kBiasStages > 1 ? stage : 0) * C::Bias::kBytes;
}

// The queries that see a tile of keys: [begin, end), in whole tiles of block_q.
template <class C>
struct QueryRange {
  int begin, end;
  __device__ __forceinline__ QueryRange(const Sequence& seq, int key_tile,
                                        const AttentionParams& p) {
    const int first_key = key_tile * C::kBlockK;
    const int last_key = min(first_key + C::kBlockK, seq.len_k) - 1;
    // Row i sees key j when i + shift - left <= j <= i + shift + right.
    const int first = max(first_key - seq.shift - p.right, 0);
    const int last = min(last_key - seq.shift + p.left, seq.len_q - 1);
    begin = first / C::kBlockQ * C::kBlockQ;
    end = last < first || last_key < first_key ? begin : (last / C::kBlockQ + 1) * C::kBlockQ;
  }
};

// The accumulators of one warp.
template <class C>
struct BwdState {
  float rdK[C::kKeyM][C::kKeyN][4];
  float rdV[C::kKeyM][C::kKeyN][4];
};

// The query and the key that a warp's part of S begins with.
template <class C>
__device__ __forceinline__ int score_row(int thread) {
  return thread / 32 / C::kScoreCols * (C::kScoreM * 16);
}
template <class C>
__device__ __forceinline__ int score_col(int thread) {
  return thread / 32 % C::kScoreCols * (C::kScoreN * 8);
}

// Where a lane reads and writes fragments, from the beginning of a tile. Computed where they are
// used: kept over the main loop they would cost registers that it does not have.
template <class C>
struct BwdLanes {
  using Layout = typename C::Layout;
  using PackedLayout = typename C::PackedLayout;
  using TransposedLayout = typename C::TransposedLayout;
  int thread = ptx::opaque_thread();

  // The operands of S and dP: Q and dO left, K and V right; transposed the other way round.
  __device__ __forceinline__ uint32_t score_left() const {
    return lane_rows<Layout>(0, C::kTransposed ? score_col<C>(thread) : score_row<C>(thread), 0);
  }
  __device__ __forceinline__ uint32_t score_right() const {
    return lane_cols<Layout>(0, C::kTransposed ? 0 : score_col<C>(thread), 0);
  }
  // P and dS as they are written.
  __device__ __forceinline__ uint32_t packed() const {
    const int row = thread % 32 / 4, col = score_col<C>(thread);
    return thread % 4 * 4 + (C::kTransposed
                                 ? TransposedLayout::at(col + row, 0)
                                 : PackedLayout::at(score_row<C>(thread) + row, col / 8));
  }
  // The operands of dV and dK: P and dS left, read across; dO and Q right.
  __device__ __forceinline__ uint32_t key_left() const {
    return lane_cols<PackedLayout>(0, 0, 2 * (thread / 32 / C::kKeyCols));
  }
  __device__ __forceinline__ uint32_t key_right() const {
    return lane_rows<Layout>(0, 0, 2 * (thread / 32 % C::kKeyCols));
  }
  // The operands of dQ: dS left, K right.
  __device__ __forceinline__ uint32_t query_left() const {
    const int row = thread / 32 / C::kQueryCols;
    return C::kTransposed ? lane_cols<TransposedLayout>(0, 0, 2 * row)
                          : lane_rows<PackedLayout>(0, row * (C::kQueryM * 16), 0);
  }
  __device__ __forceinline__ uint32_t query_right() const {
    return lane_rows<Layout>(0, 0, 2 * (thread / 32 % C::kQueryCols));
  }
};

// Fragment n of those that begin at `row`, times `scale`, as 16-bit rows in shared memory: dK, dV
// or dQ of warp `col` of the kCols that share out the columns.
template <class C, int kCols>
__device__ __forceinline__ void store_fragment(uint32_t shared, int row, int n, int col,
                                               const float (&x)[4], float scale) {
  const int lane = threadIdx.x % 32, chunk = 2 * (n / 2 * kCols + col) + n % 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    ptx::st_shared_u32(shared + C::Layout::at(row + lane / 4 + 8 * half, chunk) + lane % 4 * 4,
                       C::Type::pack(x[2 * half] * scale, x[2 * half + 1] * scale));
  }
}

// Puts P and dS of one pair in place of S and dP and writes the bias's gradient, for any call with
// a bias. (query, key) counts from the tile's corner.
template <class C>
__device__ __forceinline__ void differentiate_pair(float& s, float& dp, float2 lse_delta, bool kept,
                                                   int query, int key, uint32_t sBias,
                                                   const BwdTask& task, const QueryTile& tile,
                                                   const AttentionBwdParams& p) {
  const int first_key = task.key_tile * C::kBlockK;
  const int row = tile.first + query, column = first_key + key;
  const float bias =
      C::Bias::read(sBias, bias_of(task, tile, p), query, key, tile.first, first_key, task.seq);
  const PairScore pair = ScoreRule(p).pair(s, bias, row, column, task.seq);
  s = pair.probability(lse_delta.x);
  const float delta = lse_delta.x == INFINITY ? 0 : lse_delta.y;
  dp = pair.seen ? minus_delta<C::kDropout>(dp, delta, kept, p) * s : 0;
  if (!kept) s = kDroppedProbability;
  if (!C::kShort && p.grad_bias && row < task.seq.len_q && column < task.stored_keys) {
    write_bias<typename C::Type>(grad_bias_of(task, tile, p), row, column, dp);
  }
  dp *= pair.slope;
}

// What the pairs of a tile have in common for dropout.
template <class C>
__device__ __forceinline__ DropoutOfHead dropout_of(const BwdTask& task, const QueryTile& tile) {
  return DropoutOfHead(C::kDropout ? task.seed : 0, task.batch, tile.head);
}

// How far the steps of a product are unrolled. The general loop has no registers for more, nor have
// transposed scores at D = 64 with a mask or before Hopper.
template <class C, Loop kLoop, int kSteps>
inline constexpr int kUnroll = kLoop == Loop::kGeneral ||
                                       (C::kTransposed && (kLoop == Loop::kMasked || !ptx::kHopper))
                                   ? std::min(kSteps, 2)
                                   : std::min(kSteps, C::kBias ? 4 : 8);

}  // namespace flashmoe::cuda
