// Attention forward with mma.sync, for every chip from Turing on; what differs from chip to chip is
// in Chip and in the tile.
//
//   O = softmax(S) V      S as score.cuh has it      LSE = log of the softmax's denominator
//
// One CTA takes one tile of queries of one (batch, head) and goes through the keys, last tile
// first, so that the tiles that need a mask (the end of the keys, the causal diagonal) come first
// and the loop after them has none.
//
//               keys ->                         shared memory, 16-bit, swizzled:
//            ┌──────┬──────┬──────┐               sQ     block_q x D, and then the output
//   queries  │ full │ full │masked│               sK     stages x block_k x D
//     |      └──────┴──────┴──────┘               sV     stages x block_k x D
//     v        <──────── order                    sBias  2 x block_q x block_k, if there is one
//
// Each warp owns 16 or 32 rows as m16 fragments and all columns: softmax needs no other warp, and P
// goes from the accumulators of S = Q K^T straight into the operands of O += P V. With 32 rows each
// fragment of K and V read from shared memory feeds two MMAs. All warps load and all compute: while
// a tile is computed, the next ones are copied to the other stages; one barrier a tile keeps a
// stage from being overwritten while it is read. With one stage K arrives while V is used and the
// other way round, and there are two barriers.
//
// Head dims that lie between the compiled ones are padded with zeros in shared memory. Where the
// grid would leave most of the chip idle, the keys are split over several CTAs, and fwd_combine.cuh
// makes one result of theirs. Registers: up to 255, so many CTAs on an SM as the tile says. Rate:
// 335 TFLOP/s at D = 64, 328 at D = 256 (H200, 2026-11-15; kernels/sm80.h has the tiles).
#pragma once

#include <type_traits>

#include "cuda/attention/mma_sync/fwd_guard.cuh"
#include "cuda/attention/mma_sync/fwd_store.cuh"
#include "cuda/attention/mma_sync/fwd_tile.cuh"
#include "cuda/attention/softmax.cuh"

namespace flashmoe::cuda {

// Does what few calls need between product and scale: a softcap, or a scale that is not positive.
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

// Moves the references of rows whose maximum outgrew theirs, and their output and sum with them.
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

// What a lane keeps of P, a k16 step at a time: everything.
struct KeepsAll {
  __device__ __forceinline__ void draw(int) {}
  __device__ __forceinline__ void drop(float (&)[4], int, int) const {}
};
// With dropout: Philox draws the pairs of two steps at once.
template <class C>
class KeepsDrawn {
 public:
  __device__ __forceinline__ KeepsDrawn(const FwdTask& task, int first_key,
                                        const AttentionParams& p)
      : task_(task),
        first_key_(first_key),
        p_(p),
        dropout_(task.seed, task.batch, task.head),
        thread_(ptx::opaque_thread()) {}
  __device__ __forceinline__ void draw(int step) {
    if (step % 2 != 0) return;
    drawn_.draw(task_.first_row + warp_row<C>(thread_), first_key_ + 16 * step, thread_ % 32,
                dropout_);
  }
  // Drops what the lane has not kept of tile m of rows, eight keys from 8 `eight` on.
  __device__ __forceinline__ void drop(float (&probability)[4], int m, int eight) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!drawn_.keeps(m, eight % 4, i / 2, i % 2, p_)) probability[i] = 0;
    }
  }

 private:
  const FwdTask& task_;
  const int first_key_;
  const AttentionParams& p_;
  const DropoutOfHead dropout_;
  const int thread_;
  DrawnPairs<(C::kBlockK < 32 ? C::kBlockK : 32), C::kRowTiles> drawn_;
};

// P = 2^(S - reference), O += P V. Exponentials are taken a k16 step at a time, just before the
// product that needs them: they then run under the product before. Sums count what is dropped, too.
template <class C, class Rule, class Keeps = KeepsAll>
__device__ __forceinline__ void accumulate(FwdState<C>& t,
                                           float (&s)[C::kRowTiles][C::kKeyTiles][4],
                                           const Rule& rule, uint32_t lane_v, Keeps keeps = {}) {
  const AcrossB<typename C::Layout> v{lane_v};
  float reference[C::kRowTiles][2], sum[C::kRowTiles][2] = {};
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) reference[m][half] = t.rows[m].finite_reference(half);
  }
#pragma unroll
  for (int step = 0; step < C::kKeySteps; ++step) {
    keeps.draw(step);
    uint32_t a[C::kRowTiles][4];
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
      auto &left = s[m][2 * step], &right = s[m][2 * step + 1];
      probabilities(left, right, sum[m], rule, reference[m]);
      keeps.drop(left, m, 2 * step);
      keeps.drop(right, m, 2 * step + 1);
      pack_operand<typename C::Type>(a[m], left, right);
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

// Applies the bias pair by pair: adds one that comes late, which gives scores in base 2; and hides
// what it hides, which one that is in the accumulators from the start does only to finite scores.
template <class C, class Rule>
__device__ __forceinline__ void apply_bias_by_pair(float (&s)[C::kRowTiles][C::kKeyTiles][4],
                                                   uint32_t sBias, int first_key, bool bias_is_late,
                                                   const FwdTask& task, const Rule& rule) {
  const int lane = ptx::opaque_thread() % 32, row = warp_row<C>() + lane / 4;
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int i = 0; i < C::kKeyTiles * 4; ++i) {
      const float bias =
          C::Bias::read(sBias, task.bias, row + 16 * m + i % 4 / 2 * 8,
                        i / 4 * 8 + lane % 4 * 2 + i % 2, task.first_row, first_key, task.seq);
      float& score = s[m][i / 4][i % 4];
      if (bias_is_late) score = rule.score(score, bias);
      if (bias == -INFINITY) score = bias;  // the score behind a mask may be NaN
    }
  }
}

// One tile of keys, already in shared memory. `after_scores` is called when K is done with and
// before V is needed.
template <class C, Loop kLoop, class AfterScores>
__device__ __forceinline__ void fwd_step(FwdState<C>& t, const FwdLanes<C>& lanes, uint32_t smem,
                                         int stage, const FwdTask& task, int first_key,
                                         GuardFlag<C> guarded, const AttentionFwdParams& p,
                                         const AfterScores& after_scores) {
  const uint32_t sQ = smem + C::kSmemQ, sK = smem + C::kSmemK + stage * C::kTileBytes;
  const uint32_t sV = smem + C::kSmemV + stage * C::kTileBytes;
  const int row = task.first_row + warp_row<C>();
  // Rows past the end, whole warps of them, would cost as much as the others.
  const bool past_end = !guarded && row >= task.seq.len_q;
  float s[C::kRowTiles][C::kKeyTiles][4];
  constexpr bool kGeneral = kLoop == Loop::kGeneral;
  const uint32_t sBias = bias_address<C>(smem, first_key / C::kBlockK, task);
  const bool bias_is_late = C::kBias && kGeneral && late_bias(p);
  if (!past_end) {
    if (has_bias<C>(p) && !bias_is_late) {
      C::Bias::start(s, sBias, warp_row<C>(), 0, p.bias_scale);
    } else {
      set_zero(s);
    }
    add_scores<C>(s, t.rQ, sQ + ptx::opaque(lanes.q), sK + ptx::opaque(lanes.k));
  }
  after_scores();
  if (past_end) return;
  ScoreRule rule(p);
  if (kGeneral && rule.transforms()) transform_scores<C>(s, rule);
  if constexpr (C::kBias && kGeneral) {
    if (bias_is_late || (guarded && has_bias<C>(p)))
      apply_bias_by_pair<C>(s, sBias, first_key, bias_is_late, task, rule);
  }
  rule.has_bias = bias_is_late;
  if (kLoop != Loop::kPlain) {
    const int tile = first_key / C::kBlockK;
    if (tile >= task.full_end) mask_scores<C, Side::kAfter>(s, row, first_key, task.seq, p);
    if (tile < task.full_begin) mask_scores<C, Side::kBefore>(s, row, first_key, task.seq, p);
  }
  update_references<C>(t, s, rule.scale_log2());
  if (kGeneral && guarded) drop_nonfinite<C>(sV);
  const uint32_t lane_v = sV + ptx::opaque(lanes.v);
  if constexpr (C::kDropout) {
    accumulate<C>(t, s, rule, lane_v, KeepsDrawn<C>(task, first_key, p));
  } else {
    accumulate<C>(t, s, rule, lane_v);
  }
}

// Goes through the tiles of keys from n down to `last`. The first kAhead of them are on their way
// already, and when it returns so are the first of those that follow.
template <class C, Loop kLoop>
__device__ __forceinline__ void fwd_steps(FwdState<C>& t, uint32_t smem, int& n, int last,
                                          const FwdTask& task, GuardFlag<C> guarded,
                                          const AttentionFwdParams& p) {
  using Chip = typename C::Chip;
  constexpr bool kPartialChunks = kLoop == Loop::kGeneral;
  const FwdLanes<C> lanes;
#pragma unroll 1
  for (; n >= last; --n) {
    Chip::template wait<C::kAhead - 1>();
    __syncthreads();  // tile n is there for everyone, and everyone is done with its last stage
    const int coming = n - C::kAhead, stage = (task.key_end - 1 - n) % C::kStages;
    if (C::kOneStage) {
      load_values<C, kPartialChunks>(smem, 0, n, task, p);
    } else if (coming >= task.key_begin) {
      const int to = stage == 0 ? C::kStages - 1 : stage - 1;
      load_keys<C, kPartialChunks>(smem, to, coming, task, p);
      load_values<C, kPartialChunks>(smem, to, coming, task, p);
    }
    if constexpr (C::kBias) load_bias<C, kPartialChunks || C::kShort>(smem, n - 1, task);
    Chip::commit();
    const auto after_scores = [&] {
      if (!C::kOneStage) return;
      Chip::template wait<0>();
      __syncthreads();  // V is there for everyone, and everyone is done with K
      if (coming >= task.key_begin) load_keys<C, kPartialChunks>(smem, 0, coming, task, p);
      Chip::commit();
    };
    fwd_step<C, kLoop>(t, lanes, smem, stage, task, n * C::kBlockK, guarded, p, after_scores);
  }
}

// Accumulates O over all keys of the task.
template <class C>
__device__ __forceinline__ void fwd_keys(FwdState<C>& t, uint32_t smem, const FwdTask& task,
                                         GuardFlag<C> guarded, const AttentionFwdParams& p) {
  using Layout = typename C::Layout;
  using Chip = typename C::Chip;
  const uint32_t sQ = smem + C::kSmemQ;
  const char* gQ = rows_of(p.query, p, p.query_strides, task.batch, task.head, task.seq.token_q);
  load_tile<Chip, Layout, C::kBlockQ, C::kThreads>(sQ, Rows{gQ, p.query_strides.row_bytes()},
                                                   task.first_row, task.seq.len_q, p.head_dim);
  if constexpr (C::kBias) load_bias<C>(smem, task.key_end - 1, task);
#pragma unroll
  for (int ahead = 0; ahead < C::kAhead; ++ahead) {
    const int tile = task.key_end - 1 - ahead;
    if (tile >= task.key_begin) {
      load_keys<C>(smem, ahead, tile, task, p);
      if (!C::kOneStage) load_values<C>(smem, ahead, tile, task, p);
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
  if (!task.plain || guarded) {
    fwd_steps<C, Loop::kGeneral>(t, smem, n, task.key_begin, task, guarded, p);
    return;
  }
  if constexpr (C::kShort) {  // one loop for all: its code is run through once
    fwd_steps<C, Loop::kMasked>(t, smem, n, task.key_begin, task, false, p);
    return;
  }
  // Masked tiles, full ones, and masked ones again where the window ends on the left.
  const bool some_full = task.full_begin < task.full_end;
#pragma unroll 1
  while (n >= task.key_begin) {
    if (some_full && n < task.full_end && n >= task.full_begin) {
      fwd_steps<C, Loop::kPlain>(t, smem, n, task.full_begin, task, false, p);
    } else {
      const int last = some_full && n >= task.full_end ? task.full_end : task.key_begin;
      fwd_steps<C, Loop::kMasked>(t, smem, n, last, task, false, p);
    }
  }
}

// Finds the tile of queries of this CTA and its keys, by one thread.
template <class C>
__device__ __forceinline__ void find_task(FwdTask& task, const AttentionFwdParams& p) {
  Sequence seq;
  if (p.blocks) {
    const RaggedBlock slot = p.blocks[blockIdx.x / p.heads];
    task.batch = slot.sequence;
    task.head = p.first_head + blockIdx.x % p.heads;
    task.kind = slot.kind;
    task.first_row = slot.block * C::kBlockQ;
    seq = find_sequence(slot);
  } else {
    task.batch = p.first_batch + blockIdx.z;
    task.head = blockIdx.y;
    seq = find_sequence(p, task.batch);
    if (p.one_query) {
      seq.step = 0;
      seq.shift = seq.len_k - 1;
    }
    task.kind = seq.valid ? RaggedKind::kBlock : RaggedKind::kInvalid;
    // Tiles of one head follow each other, so that its keys stay in L2; where later rows see more
    // keys, the tile with the most comes first.
    int tile = blockIdx.x, tiles = gridDim.x;
    if (p.splits > 1) {
      task.split = tile % p.splits;
      tile /= p.splits;
      tiles /= p.splits;
    }
    task.first_row = (p.right < kNoLimit ? tiles - 1 - tile : tile) * C::kBlockQ;
  }
  task.seq = seq;
  if (C::kDim == 256) task.guarded = false;
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
  // Whether a tile may have keys that some rows see and others do not, or that none sees.
  const bool masked = C::kBias || p.left < kNoLimit || (p.right < kNoLimit && !p.one_query);
  bool here = false;
  std::conditional_t<C::kDim == 256, bool&, bool> guarded =
      *(C::kDim == 256 ? &task.guarded : &here);
  while (true) {
    fwd_keys<C>(t, smem, task, guarded, p);
    // Q arrived, even if there was no key to wait for, and no warp reads it any more.
    C::Chip::template wait<0>();
    if (!__syncthreads_or(masked && !all_finite(t.o)) || guarded) break;
    if (C::kDim == 256) __syncthreads();  // everyone has looked
    if (C::kDim != 256 || threadIdx.x == 0) guarded = true;
    if (C::kDim == 256) __syncthreads();  // everyone knows
  }
  if (guarded) {
    add_nonfinite<C>(t.o, task.template values<typename C::Type>(p), p.head_dim_v, 1, task, p);
  }
  if (p.splits > 1) {
    store_partial<C>(t, task, p);
  } else {
    store_output<C>(t, smem, task, p);
  }
}

}  // namespace flashmoe::cuda
