// Attention forward with mma.sync, for every chip from Turing on; what differs between them is in
// Chip and in the tile.
//
// One CTA takes one block of queries of one (batch, head) and goes through the keys, last block
// first, so that the blocks that need a mask (the end of the keys, the causal diagonal) come first
// and the loop after them has none.
//
//               keys ->                         shared memory, 16-bit, swizzled:
//            ┌──────┬──────┬──────┐               sQ  block_q x D, and then the output
//   queries  │ full │ full │masked│               sK  stages x block_k x D
//     |      └──────┴──────┴──────┘               sV  stages x block_k x D
//     v        <──────── order                    sBias  2 x block_q x block_k, if there is one
//
// Each warp owns 16 or 32 rows as m16 fragments and all columns: softmax needs no other warp, and P
// goes from the accumulators of S = Q K^T straight into the operands of O += P V. With 32 rows each
// fragment of K and V read from shared memory feeds two products. While a block is computed, the
// next ones are copied to the other stages; one barrier a block keeps a stage from being
// overwritten while it is read. With one stage K and V take turns instead, and there are two.
//
// Head dims between the buckets are padded with zeros in shared memory. Where the grid would leave
// most of the chip idle, the keys are split over several CTAs, and attention_small.cuh adds up.
#pragma once

#include <type_traits>

#include "cuda/attention/bias.cuh"
#include "cuda/attention/params.h"
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

// Whether something not finite is to be contained. At D = 256 there is no register for that: it is
// read in shared memory.
template <class C>
using Contain = std::conditional_t<C::kDim == 256, const bool&, bool>;

// The accumulators of one warp.
template <class C>
struct FwdState {
  uint32_t rQ[C::kRowTiles][C::kQSteps + 1][4];  // one more than used: no array of size 0
  float o[C::kRowTiles][C::kDimTiles][4];
  RowState rows[C::kRowTiles];
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

// What comes between the product and the scale for few calls: a softcap, or a scale that is not
// positive.
template <class C, class Rule>
__device__ __forceinline__ void transform_scores(float (&s)[C::kRowTiles][C::kKeyTiles][4],
                                                 const Rule& rule) {
  rule.transform([&](const auto& transform) {
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
      for (int i = 0; i < C::kKeyTiles * 4; ++i) s[m][i / 4][i % 4] = transform(s[m][i / 4][i % 4]);
    }
  });
}

// -inf where key `first_key` + column is before the first that the row sees, or after the last.
template <class C, Side kSide>
__device__ __forceinline__ void mask_scores(float (&s)[C::kRowTiles][C::kKeyTiles][4], int row,
                                            int first_key, const Sequence& seq,
                                            const AttentionParams& p) {
  for_each_masked<kSide, C::kRowTiles, C::kKeyTiles>(
      row, first_key, seq, p, [&](int m, int n, int i) { s[m][n][i] = -INFINITY; });
}

// A NaN or infinity in V must reach the rows that may see its key and no others, but in a product a
// masked 0 times NaN is NaN. So blocks of queries that turned out not finite are computed a second
// time, with zeros in place of what is not finite in V.
template <class C>
__device__ __forceinline__ void drop_not_finite(uint32_t sV) {
  uint16_t* values = static_cast<uint16_t*>(__cvta_shared_to_generic(sV));
#pragma unroll 1
  for (int i = ptx::opaque_thread(); i < C::kBlockK * C::kDim; i += C::kThreads) {
    if ((values[i] & C::Type::kExponent) == C::Type::kExponent) values[i] = 0;
  }
  __syncthreads();  // the tile is finite
}

// And then what was left out is added to the rows that see it, times `factor`.
template <class C>
__device__ __forceinline__ void add_not_finite(float (&o)[C::kRowTiles][C::kDimTiles][4],
                                               const char* keys, const Strides& strides, int dim,
                                               float factor, const FwdTask& task,
                                               const AttentionParams& p) {
  const Sequence& seq = task.seq;
  const int lane = ptx::opaque_thread() % 32, row = task.first_row + warp_row<C>() + lane / 4;
  const int end = min(task.key_end * C::kBlockK, seq.len_k);
#pragma unroll 1
  for (int key = task.key_begin * C::kBlockK; key < end; ++key) {
    const char* values = keys + int64_t{key} * strides.row_bytes();
#pragma unroll
    for (int d = 0; d < C::kDimTiles; ++d) {
      const int column = 8 * d + lane % 4 * 2, there = dim - column;
      if (there <= 0) continue;
      uint32_t two = *reinterpret_cast<const uint32_t*>(values + column * 2);
      if (there == 1) two &= 0xffff;
      if (!any_not_finite<typename C::Type>(two)) continue;
#pragma unroll
      for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int r = row + 16 * m + 8 * half;
          if (key < seq.begin(r, p) || key >= seq.end(r, p)) continue;
          if (C::kBias && (r >= seq.len_q || hidden<typename C::Type>(task.bias, r, key))) continue;
          o[m][d][2 * half] += factor * infinity_or_nan<typename C::Type>(two & 0xffff);
          o[m][d][2 * half + 1] += factor * infinity_or_nan<typename C::Type>(two >> 16);
        }
      }
    }
  }
}

// References of the rows that outgrew theirs are moved, and their output and sum with them.
template <class C>
__device__ __forceinline__ void update_references(FwdState<C>& t,
                                                  float (&s)[C::kRowTiles][C::kKeyTiles][4],
                                                  float scale_log2) {
  float top[C::kRowTiles][2];
  bool outgrown = false;
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
    row_maxima(top[m], s[m], scale_log2);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      outgrown |= top[m][half] > t.rows[m].reference[half] + kSlack;
    }
  }
  if (!__any_sync(0xffffffffu, outgrown)) return;
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float& reference = t.rows[m].reference[half];
      // Each row by itself: its bits do not depend on its neighbours.
      const float raised = top[m][half] > reference + kSlack ? top[m][half] : reference;
      const float correction = ptx::ex2_approx_ftz(reference - (raised == -INFINITY ? 0 : raised));
      reference = raised;
      t.rows[m].sum[half] *= correction;
#pragma unroll
      for (int d = 0; d < C::kDimTiles; ++d) {
        t.o[m][d][2 * half] *= correction;
        t.o[m][d][2 * half + 1] *= correction;
      }
    }
  }
}

// P = 2^(S - reference), O += P V. Exponentials are taken a k16 step at a time, just before the
// product that needs them: they then run under the product before.
template <class C, class Rule>
__device__ __forceinline__ void accumulate(FwdState<C>& t,
                                           float (&s)[C::kRowTiles][C::kKeyTiles][4],
                                           const Rule& rule, uint32_t lane_v) {
  const AcrossB<typename C::Layout> v{lane_v};
  float reference[C::kRowTiles][2], sum[C::kRowTiles][2] = {};
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) reference[m][half] = t.rows[m].finite_reference(half);
  }
#pragma unroll
  for (int step = 0; step < C::kKeySteps; ++step) {
    // Accumulator fragments 2 * step and 2 * step + 1 of S are exactly the k16 operand of the next
    // product.
    uint32_t a[C::kRowTiles][4];
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
      auto &left = s[m][2 * step], &right = s[m][2 * step + 1];
      probabilities(left, right, sum[m], rule, reference[m]);
      a[m][0] = C::Type::pack(left[0], left[1]);
      a[m][1] = C::Type::pack(left[2], left[3]);
      a[m][2] = C::Type::pack(right[0], right[1]);
      a[m][3] = C::Type::pack(right[2], right[3]);
    }
#pragma unroll
    for (int d = 0; d < C::kDimTiles; d += 2) {
      uint32_t b[4];
      v.load(b, d / 2, step);
#pragma unroll
      for (int m = 0; m < C::kRowTiles; ++m) {
        C::Type::mma(t.o[m][d], a[m], b[0], b[1], t.o[m][d]);
        C::Type::mma(t.o[m][d + 1], a[m], b[2], b[3], t.o[m][d + 1]);
      }
    }
  }
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) t.rows[m].sum[half] += sum[m][half];
  }
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

// What a bias needs pair by pair: to be added late, which gives scores in base 2, or, already
// added, that what it hides is hidden.
template <class C, class Rule>
__device__ __forceinline__ void each_bias(float (&s)[C::kRowTiles][C::kKeyTiles][4], uint32_t sBias,
                                          int first_key, bool late, const FwdTask& task,
                                          const Rule& rule) {
  const int lane = ptx::opaque_thread() % 32, row = warp_row<C>() + lane / 4;
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int i = 0; i < C::kKeyTiles * 4; ++i) {
      const float bias =
          C::Bias::read(sBias, task.bias, row + 16 * m + i % 4 / 2 * 8,
                        i / 4 * 8 + lane % 4 * 2 + i % 2, task.first_row, first_key, task.seq);
      float& score = s[m][i / 4][i % 4];
      if (late) score = rule.score(score, bias);
      if (bias == -INFINITY) score = bias;  // the score behind a mask may be NaN
    }
  }
}

// One block of keys, already in shared memory. `between` is called when the keys are done with and
// before the values are needed.
template <class C, Loop kLoop, class Between>
__device__ __forceinline__ void fwd_block(FwdState<C>& t, const FwdLanes<C>& lanes, uint32_t smem,
                                          int stage, const FwdTask& task, int first_key,
                                          Contain<C> contain, const AttentionFwdParams& p,
                                          const Between& between) {
  const uint32_t sQ = smem + C::kSmemQ, sK = smem + C::kSmemK + stage * C::kTileBytes;
  const uint32_t sV = smem + C::kSmemV + stage * C::kTileBytes;
  const int row = task.first_row + warp_row<C>();
  // Rows past the end, whole warps of them, would cost as much as the others.
  const bool idle = !contain && row >= task.seq.len_q;
  float s[C::kRowTiles][C::kKeyTiles][4];
  constexpr bool kGeneral = kLoop == Loop::kGeneral;
  const uint32_t sBias = bias_place<C>(smem, first_key / C::kBlockK, task);
  const bool late = C::kBias && kGeneral && late_bias(p);  // it comes after other things
  if (!idle) {
    if (C::kBias && !late) {
      C::Bias::start(s, sBias, warp_row<C>(), 0, p.bias_scale);
    } else {
      set_zero(s);
    }
    add_scores<C>(s, t.rQ, sQ + ptx::opaque(lanes.q), sK + ptx::opaque(lanes.k));
  }
  between();
  if (idle) return;
  ScoreRule rule(p);
  if (kGeneral && rule.transforms()) transform_scores<C>(s, rule);
  if constexpr (C::kBias && kGeneral) {
    if (late || contain) each_bias<C>(s, sBias, first_key, late, task, rule);
  }
  rule.has_bias = late;
  if (kLoop != Loop::kPlain) {
    const int block = first_key / C::kBlockK;
    if (block >= task.full_end) mask_scores<C, Side::kAfter>(s, row, first_key, task.seq, p);
    if (block < task.full_begin) mask_scores<C, Side::kBefore>(s, row, first_key, task.seq, p);
  }
  update_references<C>(t, s, rule.scale_log2());
  if (kGeneral && contain) drop_not_finite<C>(sV);
  accumulate<C>(t, s, rule, sV + ptx::opaque(lanes.v));
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

// The blocks of keys from n down to `last`. The first of them are on their way already, as the
// first of what comes after them are when it returns.
template <class C, Loop kLoop>
__device__ __forceinline__ void fwd_blocks(FwdState<C>& t, uint32_t smem, int& n, int last,
                                           const FwdTask& task, Contain<C> contain,
                                           const AttentionFwdParams& p) {
  using Chip = typename C::Chip;
  constexpr bool kMaybeOdd = kLoop == Loop::kGeneral;
  const FwdLanes<C> lanes;
#pragma unroll 1
  for (; n >= last; --n) {
    Chip::template wait<C::kAhead - 1>();
    __syncthreads();  // block n is there for everyone, and everyone is done with the stage before
    const int coming = n - C::kAhead, stage = (task.key_end - 1 - n) % C::kStages;
    if (C::kTurns) {
      load_values<C, kMaybeOdd>(smem, 0, n, task, p);
    } else if (coming >= task.key_begin) {
      const int to = stage == 0 ? C::kStages - 1 : stage - 1;
      load_keys<C, kMaybeOdd>(smem, to, coming, task, p);
      load_values<C, kMaybeOdd>(smem, to, coming, task, p);
    }
    if constexpr (C::kBias) load_bias<C, kMaybeOdd || C::kShort>(smem, n - 1, task);
    Chip::commit();
    const auto between = [&] {
      if (!C::kTurns) return;
      Chip::template wait<0>();
      __syncthreads();  // V is there for everyone, and everyone is done with K
      if (coming >= task.key_begin) load_keys<C, kMaybeOdd>(smem, 0, coming, task, p);
      Chip::commit();
    };
    fwd_block<C, kLoop>(t, lanes, smem, stage, task, n * C::kBlockK, contain, p, between);
  }
}

// O of all the keys of the task.
template <class C>
__device__ __forceinline__ void fwd_keys(FwdState<C>& t, uint32_t smem, const FwdTask& task,
                                         Contain<C> contain, const AttentionFwdParams& p) {
  using Layout = typename C::Layout;
  using Chip = typename C::Chip;
  const uint32_t sQ = smem + C::kSmemQ;
  const char* gQ = rows_of(p.query, p, p.query_strides, task.batch, task.head, task.seq.token_q);
  load_tile<Chip, Layout, C::kBlockQ, C::kThreads>(sQ, gQ, p.query_strides.row_bytes(),
                                                   task.first_row, task.seq.len_q, p.head_dim);
  if constexpr (C::kBias) load_bias<C>(smem, task.key_end - 1, task);
#pragma unroll
  for (int ahead = 0; ahead < C::kAhead; ++ahead) {
    const int block = task.key_end - 1 - ahead;
    if (block >= task.key_begin) {
      load_keys<C>(smem, ahead, block, task, p);
      if (!C::kTurns) load_values<C>(smem, ahead, block, task, p);
    }
    Chip::commit();
  }
  set_zero(t.o);
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) t.rows[m] = RowState();
  if (C::kQSteps > 0) {
    Chip::template wait<0>();
    __syncthreads();
    const AlongA<Layout> q{sQ + FwdLanes<C>().q};
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
      for (int step = 0; step < C::kQSteps; ++step) q.load(t.rQ[m][step], m, step);
    }
  }

  int n = task.key_end - 1;
  if (!task.plain || contain) {
    fwd_blocks<C, Loop::kGeneral>(t, smem, n, task.key_begin, task, contain, p);
    return;
  }
  if constexpr (C::kShort) {  // one loop for all: its code is run through once
    fwd_blocks<C, Loop::kMasked>(t, smem, n, task.key_begin, task, false, p);
    return;
  }
  // Masked blocks, full ones, and masked ones again where the window ends on the left.
  const bool some_full = task.full_begin < task.full_end;
#pragma unroll 1
  while (n >= task.key_begin) {
    if (some_full && n < task.full_end && n >= task.full_begin) {
      fwd_blocks<C, Loop::kPlain>(t, smem, n, task.full_begin, task, false, p);
    } else {
      const int last = some_full && n >= task.full_end ? task.full_end : task.key_begin;
      fwd_blocks<C, Loop::kMasked>(t, smem, n, last, task, false, p);
    }
  }
}

// What a row's sum and reference come to.
struct RowResult {
  float inverse, lse;  // of the sum; in base 2
};
__device__ __forceinline__ RowResult row_result(const RowState& state, int half) {
  const float sum = quad_sum(state.sum[half]);
  if (sum == 0) return {0.f, -INFINITY};  // no key allowed; a NaN is not 0
  return {1.f / sum, state.reference[half] + __log2f(sum)};
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

// O / sum, and lse.
template <class C>
__device__ __forceinline__ void store_output(const FwdState<C>& t, uint32_t smem,
                                             const FwdTask& task, const AttentionFwdParams& p) {
  const Sequence& seq = task.seq;
  const int lane = threadIdx.x % 32;
  float* gLse =
      p.lse ? p.lse + offset(p, p.lse_strides, task.batch, task.head, seq.token_q) : nullptr;
  const auto inverse = [&](int m, int half) {
    const RowResult result = row_result(t.rows[m], half);
    const int r = task.first_row + warp_row<C>() + 16 * m + 8 * half + lane / 4;
    if (gLse && lane % 4 == 0 && r < seq.len_q) gLse[r * p.lse_strides.row] = result.lse * kLn2;
    return result.inverse;
  };
  const char* gO = rows_of(p.out, p, p.out_strides, task.batch, task.head, seq.token_q);
  store_rows<C>(t.o, inverse, smem, const_cast<char*>(gO), p.out_strides, p.head_dim_v, task);
}

// The result of one split, in fp32, to where the combining kernel looks for it.
template <class C>
__device__ __forceinline__ void store_partial(FwdState<C>& t, const FwdTask& task,
                                              const AttentionFwdParams& p) {
  const int lane = threadIdx.x % 32;
  const int64_t first =
      ((int64_t{task.split} * p.batch + task.batch) * gridDim.y + task.head) * p.len_q;
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const RowResult result = row_result(t.rows[m], half);
      const int r = task.first_row + warp_row<C>() + 16 * m + 8 * half + lane / 4;
      if (r >= task.seq.len_q) continue;
      float2* to = reinterpret_cast<float2*>(p.partial_out + (first + r) * C::kDim) + lane % 4;
#pragma unroll
      for (int d = 0; d < C::kDimTiles; ++d) {
        to[4 * d] = {t.o[m][d][2 * half] * result.inverse,
                     t.o[m][d][2 * half + 1] * result.inverse};
      }
      if (lane % 4 == 0) p.partial_lse[first + r] = result.lse;
    }
  }
}

// Rows that have no keys to look at: results of one value.
template <class C>
__device__ __forceinline__ void fill_output(const FwdTask& task, uint16_t out, float lse,
                                            const AttentionFwdParams& p) {
  const Sequence& seq = task.seq;
  const int end = min(task.first_row + C::kBlockQ, seq.len_q);
  const char* gO = rows_of(p.out, p, p.out_strides, task.batch, task.head, seq.token_q);
  fill_rows(const_cast<char*>(gO), p.out_strides.row_bytes(), task.first_row, end, p.head_dim_v,
            out);
  if (!p.lse) return;
  float* gLse = p.lse + offset(p, p.lse_strides, task.batch, task.head, seq.token_q);
  for (int row = task.first_row + threadIdx.x; row < end; row += C::kThreads) {
    gLse[row * p.lse_strides.row] = lse;
  }
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

// Which block of queries this CTA takes, and which keys; found by one thread.
template <class C>
__device__ __forceinline__ void find_task(FwdTask& task, const AttentionFwdParams& p) {
  Sequence seq;
  if (p.blocks) {
    const RaggedBlock block = p.blocks[blockIdx.x / p.heads];
    task.batch = block.sequence;
    task.head = p.first_head + blockIdx.x % p.heads;
    task.kind = block.kind;
    task.first_row = block.block * C::kBlockQ;
    seq = find_sequence(block);
  } else {
    task.batch = p.first_batch + blockIdx.z;
    task.head = blockIdx.y;
    seq = find_sequence(p, task.batch);
    if (p.one_query) {
      seq.step = 0;
      seq.shift = seq.len_k - 1;
    }
    task.kind = seq.valid ? RaggedKind::kBlock : RaggedKind::kInvalid;
    // Query blocks of one head follow each other, so that its keys stay in the second-level cache;
    // where later rows see more keys, the block with the most comes first.
    int block = blockIdx.x, blocks = gridDim.x;
    if (p.splits > 1) {
      task.split = block % p.splits;
      block /= p.splits;
      blocks /= p.splits;
    }
    task.first_row = (p.right < kNoLimit ? blocks - 1 - block : block) * C::kBlockQ;
  }
  task.seq = seq;
  if (C::kDim == 256) task.contain = false;
  if (task.kind != RaggedKind::kBlock) return;
  find_keys<C>(task, p.splits, p);
  task.plain &= p.sign == 1;
}

template <class C>
__device__ __forceinline__ void attention_fwd(const AttentionFwdParams& p) {
  extern __shared__ __align__(1024) char shared[];
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  FwdTask& task = *reinterpret_cast<FwdTask*>(shared + C::kSmemTask);
  if (threadIdx.x == 0) find_task<C>(task, p);
  __syncthreads();
  if (task.kind == RaggedKind::kEmpty) return;
  if (task.kind != RaggedKind::kBlock) {
    const bool rest = task.kind == RaggedKind::kRest;
    if (p.splits == 1) fill_output<C>(task, rest ? 0 : C::Type::kNan, rest ? -INFINITY : NAN, p);
    return;
  }
  if (task.first_row >= task.seq.len_q) return;

  FwdState<C> t;
  // Whether a block may have keys that some rows see and others do not, or that none sees.
  const bool masked = C::kBias || p.left < kNoLimit || (p.right < kNoLimit && !p.one_query);
  bool here = false;
  std::conditional_t<C::kDim == 256, bool&, bool> contain =
      *(C::kDim == 256 ? &task.contain : &here);
  while (true) {
    fwd_keys<C>(t, smem, task, contain, p);
    // Q arrived, even if there was no key to wait for, and no warp still reads it.
    C::Chip::template wait<0>();
    bool finite = true;
    if (masked) {
#pragma unroll
      for (int i = 0; i < C::kRowTiles * C::kDimTiles * 4; ++i) {
        finite &= isfinite(t.o[i / 4 / C::kDimTiles][i / 4 % C::kDimTiles][i % 4]);
      }
    }
    if (!__syncthreads_or(!finite) || contain) break;
    if (C::kDim == 256) __syncthreads();  // everyone has looked
    if (C::kDim != 256 || threadIdx.x == 0) contain = true;
    if (C::kDim == 256) __syncthreads();  // everyone knows
  }
  if (contain) {
    add_not_finite<C>(t.o, task.value, p.value_strides, p.head_dim_v, 1, task, p);
  }
  if (p.splits > 1) {
    store_partial<C>(t, task, p);
  } else {
    store_output<C>(t, smem, task, p);
  }
}

}  // namespace flashmoe::cuda
