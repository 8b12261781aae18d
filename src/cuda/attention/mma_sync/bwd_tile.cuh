// What the kernels of the backward pass share: the tile, the task of a CTA, where lanes read and
// write, and the products that end in dQ.
#pragma once

#include <algorithm>
#include <type_traits>

#include "cuda/attention/bias.cuh"
#include "cuda/attention/params.h"
#include "cuda/attention/score.cuh"
#include "cuda/attention/sequence.cuh"
#include "cuda/attention/softmax.cuh"
#include "cuda/attention/tiles.h"
#include "cuda/ptx/shared.cuh"
#include "cuda/tile/copy.cuh"
#include "cuda/tile/dtype.cuh"
#include "cuda/tile/product.cuh"
#include "cuda/tile/swizzle.cuh"

namespace flashmoe::cuda {

// The block of keys of one CTA. Kept in shared memory: the main loop has no registers to spare for
// what it rarely looks at.
struct BwdTask {
  Sequence seq;
  int batch, key_head;
  int key_block;               // which, of the sequence
  int query_begin, query_end;  // the queries that see it, in whole blocks
  int full_begin, full_end;    // of these, blocks that begin here need no mask
  bool plain;                  // no block needs more than a mask
  bool contain;                // something in K or V is not finite
  RaggedKind kind;
  int stored_keys;    // that have a gradient: also those past the sequence's length, which is 0
  int64_t first_row;  // of the sequence in the workspace
  int64_t round_row;  // and where there is room for a round only
  int* turn;          // deterministic: to be passed on
  const char *query, *grad_out;  // where the sequence's begin, of the group's first head
  BiasRows bias, grad_bias;      // of it, too
};

template <class Chip_, class T, BwdTile kTile_, bool kBias_ = false>
struct BwdConfig {
  using Chip = Chip_;
  using Type = T;
  static constexpr BwdTile kTile = kTile_;
  static constexpr bool kBias = kBias_;
  static constexpr int kDim = kTile.head_dim, kStages = kTile.stages;
  static constexpr int kBlockQ = kTile.block_q, kBlockK = kTile.block_k;
  static constexpr int kThreads = kTile.threads();

  // Fragments of a warp: m16 rows, n8 columns. Rows and columns of D are dealt out in turn, 16 at a
  // time, so that chunk numbers never carry (see Swizzled::along).
  static constexpr bool kOwnKeys = kTile.transposed(), kShort = kTile.for_short();
  static constexpr int kScoreRows = kOwnKeys ? 1 : kTile.score_rows;
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
  static_assert(kKeyN % 2 == 0 && kPartN % 2 == 0 && (!kOwnKeys || kKeyCols == 1));

  static constexpr FwdTile kQueryTile = kTile.query_tile();

  using Layout = Swizzled<kDim>;
  using PairLayout = Swizzled<kBlockK>;  // of P and dS: queries x keys
  using OwnLayout = Swizzled<kBlockQ>;   // of dS with own keys: keys x queries
  static constexpr uint32_t kKeyBytes = kBlockK * kDim * 2, kQueryBytes = kBlockQ * kDim * 2;
  static constexpr uint32_t kPairBytes = kBlockQ * kBlockK * 2;
  static constexpr uint32_t kSmemK = 0, kSmemV = kKeyBytes;
  static constexpr uint32_t kSmemQ = 2 * kKeyBytes;
  static constexpr uint32_t kSmemGradOut = kSmemQ + kStages * kQueryBytes;
  static constexpr uint32_t kSmemP = kSmemGradOut + kStages * kQueryBytes;
  static constexpr uint32_t kSmemGradS = kSmemP + (kOwnKeys ? 0 : kPairBytes);
  static constexpr uint32_t kTermBytes = kBlockQ * 8;
  static constexpr uint32_t kSmemTerms = kSmemGradS + kPairBytes;
  using Bias = BiasTile<T, kBlockQ, kBlockK, kThreads>;
  static constexpr uint32_t kSmemBias = kSmemTerms + kStages * kTermBytes;
  static constexpr int kBiasStages = kTile.bias_stages();
  static constexpr uint32_t kSmemTask = kSmemBias + (kBias ? kBiasStages * Bias::kBytes : 0);
  static_assert(kSmemTask + kTaskBytes == kTile.shared_bytes(kBias));
  static_assert(sizeof(BwdTask) <= kTaskBytes);
  // Queries at once with own keys: at D = 32 fewer, which leaves registers for a third CTA.
  static constexpr int kOwnQueries = kDim == 32 || kShort ? 16 : 32;
  static_assert(!kOwnKeys || kBlockQ % kOwnQueries == 0);
  static_assert(kKeyBytes % 128 == 0 && kQueryBytes % 128 == 0 && kPairBytes % 128 == 0);
};

// The row of dK and dV that fragment m of a warp begins with. Read across, rows are dealt out in
// turn.
template <class C>
__device__ __forceinline__ int key_row(int warp_row, int m) {
  return 16 * (C::kOwnKeys ? warp_row * C::kKeyM + m : m * C::kKeyRows + warp_row);
}

// The row of dQ that fragment m of a warp begins with. Read across, rows are dealt out in turn.
template <class C>
__device__ __forceinline__ int query_row(int warp_row, int m) {
  return 16 * (C::kOwnKeys ? m * C::kQueryRows + warp_row : warp_row * C::kQueryM + m);
}

// A block of queries of one head.
struct QueryBlock {
  int head, first;
};

// The bias of its head, and its gradient.
__device__ __forceinline__ BiasRows of_head(const BiasRows& first, const Strides& strides,
                                            const BwdTask& task, const QueryBlock& block,
                                            const AttentionBwdParams& p) {
  BiasRows rows = first;
  rows.data += (block.head - task.key_head * p.group) * strides.head * (rows.is_fp32 ? 4 : 2);
  return rows;
}
__device__ __forceinline__ BiasRows bias_of(const BwdTask& task, const QueryBlock& block,
                                            const AttentionBwdParams& p) {
  return of_head(task.bias, p.bias_strides, task, block, p);
}
// The bias itself: its copy may be overwritten.
__device__ __forceinline__ BiasRows packed_bias_of(const BwdTask& task, const QueryBlock& block,
                                                   const AttentionBwdParams& p) {
  return find_packed_bias(p, task.seq, task.batch, block.head);
}
__device__ __forceinline__ BiasRows grad_bias_of(const BwdTask& task, const QueryBlock& block,
                                                 const AttentionBwdParams& p) {
  return of_head(task.grad_bias, p.grad_bias_strides, task, block, p);
}

// Where the bias of a block is: in a stage as Q and dO are, if there are as many.
template <class C>
__device__ __forceinline__ uint32_t bias_place(uint32_t smem, int stage) {
  return smem + C::kSmemBias + (C::kBiasStages > 1 ? stage : 0) * C::Bias::kBytes;
}

// The queries that see a block of keys: [begin, end), in whole blocks of block_q.
template <class C>
struct QueryRange {
  int begin, end;
  __device__ __forceinline__ QueryRange(const Sequence& seq, int key_block,
                                        const AttentionParams& p) {
    const int first_key = key_block * C::kBlockK;
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
  float gK[C::kKeyM][C::kKeyN][4];  // dK and dV
  float gV[C::kKeyM][C::kKeyN][4];
};

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
  using PairLayout = typename C::PairLayout;
  using OwnLayout = typename C::OwnLayout;
  int thread = ptx::opaque_thread();

  // Q and dO, and K and V, for S and dP; the other way round with own keys.
  __device__ __forceinline__ uint32_t score_left() const {
    return lane_rows<Layout>(0, C::kOwnKeys ? score_col<C>(thread) : score_row<C>(thread), 0);
  }
  __device__ __forceinline__ uint32_t score_right() const {
    return lane_cols<Layout>(0, C::kOwnKeys ? 0 : score_col<C>(thread), 0);
  }
  // P and dS, as they are written.
  __device__ __forceinline__ uint32_t pairs() const {
    const int row = thread % 32 / 4, col = score_col<C>(thread);
    return thread % 4 * 4 + (C::kOwnKeys ? OwnLayout::at(col + row, 0)
                                         : PairLayout::at(score_row<C>(thread) + row, col / 8));
  }
  // P and dS across, and dO and Q, for dV and dK.
  __device__ __forceinline__ uint32_t key_left() const {
    return lane_cols<PairLayout>(0, 0, 2 * (thread / 32 / C::kKeyCols));
  }
  __device__ __forceinline__ uint32_t key_right() const {
    return lane_rows<Layout>(0, 0, 2 * (thread / 32 % C::kKeyCols));
  }
  // dS and K, for dQ.
  __device__ __forceinline__ uint32_t query_left() const {
    const int row = thread / 32 / C::kQueryCols;
    return C::kOwnKeys ? lane_cols<OwnLayout>(0, 0, 2 * row)
                       : lane_rows<PairLayout>(0, row * (C::kQueryM * 16), 0);
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

// P and dS of one pair in place of S and dP, of any call with a bias. (query, key) is in the block;
// the bias's gradient is written.
template <class C>
__device__ __forceinline__ void differentiate_any(float& s, float& dp, float2 term, int query,
                                                  int key, uint32_t sBias, const BwdTask& task,
                                                  const QueryBlock& block,
                                                  const AttentionBwdParams& p) {
  const int first_key = task.key_block * C::kBlockK;
  const int row = block.first + query, column = first_key + key;
  const float bias =
      C::Bias::read(sBias, bias_of(task, block, p), query, key, block.first, first_key, task.seq);
  const PairScore pair = ScoreRule(p).pair(s, bias, row, column, task.seq);
  s = pair.probability(term.x);
  dp = pair.seen ? (dp - (term.x == INFINITY ? 0 : term.y)) * s : 0;
  if (!C::kShort && p.grad_bias && row < task.seq.len_q && column < task.stored_keys) {
    write_bias<typename C::Type>(grad_bias_of(task, block, p), row, column, dp);
  }
  dp *= pair.slope;
}

// How far the steps of a product are unrolled. What few calls need has no registers for more, nor
// have own keys at D = 64 with a mask or before Hopper.
template <class C, Loop kLoop, int kSteps>
inline constexpr int kUnroll = kLoop == Loop::kGeneral ||
                                       (C::kOwnKeys && (kLoop == Loop::kMasked || !ptx::kHopper))
                                   ? std::min(kSteps, 2)
                                   : std::min(kSteps, C::kBias ? 4 : 8);

}  // namespace flashmoe::cuda
