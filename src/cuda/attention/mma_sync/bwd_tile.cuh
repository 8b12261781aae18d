// What the kernels of the backward pass share: the tile, the task of a CTA, where lanes read and
// write, and the products that end in dQ.
#pragma once

#include <algorithm>
#include <type_traits>

#include "cuda/attention/bias.cuh"
#include "cuda/attention/params.h"
#include "cuda/attention/sequence.cuh"
#include "cuda/attention/softmax.cuh"
#include "cuda/attention/tiles.h"
#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/tile/dtype.cuh"
#include "cuda/tile/product.cuh"
#include "cuda/tile/sums.cuh"
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

// The sums of a part of dQ of one block of queries, in the order of the accumulators.
template <class C>
__device__ __forceinline__ float* query_sums(const BwdTask& task, const QueryBlock& block, int part,
                                             const AttentionBwdParams& p) {
  const int64_t row = block.head * p.dq_accum_rows + task.round_row + block.first;
  const int warp = ptx::opaque_thread() / 32;
  return p.dq_accum + row * C::kDim +
         (warp * C::kQueryParts + part) * (C::kQueryM * C::kPartN * 128);
}

// Deterministic: the blocks of keys take turns in adding to a block of queries. A turn is waited
// for before the barrier in the middle of a block, and passed on after that of the next one, when
// all sums of this one are known to be on their way. Thread 0 looks for its turn at the start of
// the block: the answer takes as long as the first products. (Turns for 128 queries at once need
// fewer fences, but cost more in waiting: 1.5-1.7 of the time for 1.4-1.5.)

// From the last block of keys to the first, or the other way round.
__device__ __forceinline__ bool descending(const AttentionBwdParams& p) {
  return p.right < kNoLimit;
}

// By thread 0.
__device__ __forceinline__ void pass_on_turn(const BwdTask& task) {
  if (threadIdx.x == 0 && task.turn) ptx::st_release(task.turn, task.key_block + 1);
}

template <class C, bool kDeterministic>
class Turn {
 public:
  __device__ __forceinline__ Turn(const BwdTask& task, const QueryBlock& block,
                                  const AttentionBwdParams& p) {
    if (!takes_turns(p)) return;
    const int before = key_block_before(task, p);
    if (before < 0 || before * C::kBlockK >= task.seq.len_k) return;
    const QueryRange<C> queries(task.seq, before, p);
    if (queries.begin <= block.first && block.first < queries.end) {
      seen_ = ptx::ld_acquire(address(task, block, p));
    }
  }
  __device__ __forceinline__ void wait(const BwdTask& task, const QueryBlock& block,
                                       const AttentionBwdParams& p) const {
    if (!takes_turns(p) || seen_ == kAnyones) return;
    int seen = seen_;
    while (seen != key_block_before(task, p) + 1) seen = ptx::ld_acquire(address(task, block, p));
  }
  // The one before.
  __device__ __forceinline__ void pass_on(BwdTask& task, const QueryBlock& block,
                                          const AttentionBwdParams& p) const {
    if (!takes_turns(p)) return;
    pass_on_turn(task);
    task.turn = address(task, block, p);
  }

 private:
  static constexpr int kAnyones = -1;  // nobody adds before

  // With a bias it is asked at run time: half the code to compile.
  static __device__ __forceinline__ bool takes_turns(const AttentionBwdParams& p) {
    return kDeterministic && threadIdx.x == 0 && (!C::kBias || p.deterministic);
  }

  static __device__ __forceinline__ int key_block_before(const BwdTask& task,
                                                         const AttentionBwdParams& p) {
    return task.key_block + (descending(p) ? 1 : -1);
  }
  static __device__ __forceinline__ int* address(const BwdTask& task, const QueryBlock& block,
                                                 const AttentionBwdParams& p) {
    const int64_t row = block.head * p.dq_accum_rows + task.round_row + block.first;
    return p.dq_semaphore + row / C::kBlockQ;
  }

  int seen_ = kAnyones;  // in a register: nobody waits for it before it is needed
};

// A NaN or infinity in Q, K, V or dO must not reach what does not see it, but in a product a 0 of P
// or dS times NaN is NaN. What is known of the rows of a block, lse in base 2 and delta, shows
// whether there is one in Q or dO (see attention_bwd_preprocess), K and V are looked at when a CTA
// begins. Blocks that have one are left to the loop for anything. Every warp finds the same.
template <class C>
__device__ __forceinline__ bool terms_not_finite(uint32_t sTerms) {
  static_assert(C::kBlockQ <= 64);
  const int lane = ptx::opaque_thread() % 32;
  float4 two = {0, 0, 0, 0};
  if (lane < C::kBlockQ / 2) two = ptx::ld_shared_v4_f32(sTerms + lane * 16);
  const auto not_finite = [](float lse, float delta) {
    return isnan(lse) || !(fabsf(delta) < INFINITY);
  };
  return __any_sync(0xffffffffu, not_finite(two.x, two.y) || not_finite(two.z, two.w));
}
// Where a pair may be hidden: by a mask, or by a bias.
template <class C, Loop kLoop>
__device__ __forceinline__ constexpr bool may_contain() {
  return kLoop == Loop::kMasked || (C::kBias && kLoop == Loop::kPlain);
}
template <class C>
__device__ __forceinline__ bool keys_not_finite(uint32_t smem) {
  float zero = 0;
#pragma unroll 1
  for (uint32_t i = ptx::opaque_thread() * 16; i < 2 * C::kKeyBytes; i += C::kThreads * 16) {
    const uint4 eight = ptx::ld_shared_v4(smem + C::kSmemK + i);
    for (uint32_t two : {eight.x, eight.y, eight.z, eight.w}) {
      zero += C::Type::unpack(two & 0xffff) * 0.f + C::Type::unpack(two >> 16) * 0.f;
    }
  }
  return !(zero == 0);
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

// dQ = dS K, added to its sums a part of the columns at a time; product(acc, part) computes it.
template <class C>
using QueryPart = float[C::kQueryM][C::kPartN][4];

template <class C, class Product>
__device__ __forceinline__ void add_query_gradient(const BwdTask& task, const QueryBlock& block,
                                                   const AttentionBwdParams& p,
                                                   const Product& product) {
#pragma unroll 1
  for (int part = 0; part < C::kQueryParts; ++part) {
    QueryPart<C> acc;
    set_zero(acc);
    product(acc, part);
    if (p.grad_query) add_sums(query_sums<C>(task, block, part, p), acc);
  }
}

template <class C, Loop kLoop>
__device__ __forceinline__ void query_gradient(QueryPart<C>& acc, int part, uint32_t left_lane,
                                               uint32_t right_lane) {
  using Left = std::conditional_t<C::kOwnKeys, AcrossA<typename C::OwnLayout, C::kQueryRows>,
                                  AlongA<typename C::PairLayout>>;
  // A part is a whole number of the groups that chunks are mixed in.
  constexpr int kPartChunks = C::kQueryCols * C::kPartN;
  static_assert(C::kQueryParts == 1 || kPartChunks % C::Layout::kGroup == 0);
  const AcrossB<typename C::Layout, C::kQueryCols> right{right_lane + part * kPartChunks * 16};
  multiply<typename C::Type, C::kBlockK / 16, kUnroll<C, kLoop, C::kBlockK / 16>>(
      acc, Left{left_lane}, right);
}

// The same two products for a block with something not finite behind its mask, where a 0 of P or dS
// must not meet it: pair by pair, masked ones left out. Slow, and rarely needed.
template <class C>
struct ContainedProducts {
  const Sequence& seq;
  int first_query, first_key;
  const AttentionBwdParams& p;
  BiasRows bias;

  __device__ __forceinline__ bool allowed(int query, int key) const {
    const int row = first_query + query, column = first_key + key;
    if (column < seq.begin(row, p) || column >= seq.end(row, p)) return false;
    return !C::kBias || (row < seq.len_q && !hidden<typename C::Type>(bias, row, column));
  }
  static __device__ __forceinline__ float pair(uint32_t tile, int query, int key) {
    if constexpr (C::kOwnKeys) return number<typename C::OwnLayout>(tile, key, query);
    return number<typename C::PairLayout>(tile, query, key);
  }
  template <class Layout>
  static __device__ __forceinline__ float number(uint32_t tile, int row, int col) {
    return C::Type::unpack(ptx::ld_shared_u16(tile + Layout::at(row, col / 8) + col % 8 * 2));
  }

  // Of the queries [begin, end) of the block.
  __device__ __forceinline__ void accumulate_key(float (&acc)[C::kKeyM][C::kKeyN][4],
                                                 uint32_t pairs, uint32_t rows, int begin,
                                                 int end) const {
    const int thread = ptx::opaque_thread(), warp = thread / 32, lane = thread % 32;
    const int row = warp / C::kKeyCols, col = warp % C::kKeyCols;
#pragma unroll 1
    for (int query = begin; query < end; ++query) {
      add_one(
          acc,
          [&](int m, int half) {
            const int key = key_row<C>(row, m) + lane / 4 + 8 * half;
            return Factor{allowed(query, key), pair(pairs, query, key)};
          },
          [&](int n, int c) {
            const int column = 16 * (n / 2 * C::kKeyCols + col) + n % 2 * 8 + lane % 4 * 2 + c;
            return number<typename C::Layout>(rows, query, column);
          });
    }
  }
  __device__ __forceinline__ void query_gradient(QueryPart<C>& acc, int part, uint32_t sdS,
                                                 uint32_t sK) const {
    const int thread = ptx::opaque_thread(), warp = thread / 32, lane = thread % 32;
    const int row = warp / C::kQueryCols, col = warp % C::kQueryCols;
#pragma unroll 1
    for (int key = 0; key < C::kBlockK; ++key) {
      add_one(
          acc,
          [&](int m, int half) {
            const int query = query_row<C>(row, m) + lane / 4 + 8 * half;
            return Factor{allowed(query, key), pair(sdS, query, key)};
          },
          [&](int n, int c) {
            const int pair = (part * C::kPartN + n) / 2;
            const int column = 16 * (pair * C::kQueryCols + col) + n % 2 * 8 + lane % 4 * 2 + c;
            return number<typename C::Layout>(sK, key, column);
          });
    }
  }

  // One step of the depth: the products of a column of the left with a row of the right.
  struct Factor {
    bool allowed;
    float value;
  };
  template <int kM, int kN, class Left, class Right>
  static __device__ __forceinline__ void add_one(float (&acc)[kM][kN][4], const Left& left,
                                                 const Right& right) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Factor factor = left(m, half);
        if (!factor.allowed) continue;
#pragma unroll
        for (int n = 0; n < kN; ++n) {
          acc[m][n][2 * half] += factor.value * right(n, 0);
          acc[m][n][2 * half + 1] += factor.value * right(n, 1);
        }
      }
    }
  }
};

}  // namespace flashmoe::cuda
