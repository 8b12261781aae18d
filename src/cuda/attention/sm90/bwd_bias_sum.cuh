// The gradient of a bias that was broadcast, for Hopper: dBias = sum of P * (dP - delta) over the
// batches and heads that shared it, by TMA and wgmma. mma_sync/bias_sum.cuh is the same for other
// chips and has what this one needs not: biases without queries or keys of their own, and ragged
// batches.
//
// One CTA takes one tile of the gradient, 128 queries x 128 keys, and goes through the steps, the
// (batch, head) that share it, in a fixed order (mma_sync/bias_sum_steps.cuh). Where there are few
// tiles, several CTAs share the steps of one (split), leave their sums in the workspace, and a
// second launch adds those up in their order.
//
//         keys: half 0          half 1
//             +--------------+--------------+
//   queries   |   64 x 64    |   64 x 64    |  consumer 0: their sums and bias are in registers
//   128       +--------------+--------------+
//             |   64 x 64    |   64 x 64    |  consumer 1
//             +--------------+--------------+
//
//   MMAs of a consumer   dP(n, 0) S(n, 1) | dP(n, 1) S(n+1, 0) | dP(n+1, 0) S(n+1, 1) | ...
//   meanwhile            P(n, 0)          | P(n, 1)            | P(n+1, 0)
//   then                 sum(0) += dS     | sum(1) += dS       | ...           dS = P (dP - delta)
//
// So S of a half is there when its exponentials begin, and dP when they end, with S of both halves
// and dP of one in registers. The bias is added to finished scores, by the FMA that subtracts lse.
// Shared memory is a ring of slots. The bias takes the first, and leaves it for registers; then
// each step takes two: Q with K, and dO with V, lse and delta. At the end the tile in fp32 takes
// the place of the ring.
//
// Registers of a thread: warpgroup 0, whose warp 0 is the producer, has 40, consumers 232. Shared
// memory: BiasSumConfig::Smem, 198.5 KB (6 slots) up to D = 64, 195.5 KB (3 slots) above.
#pragma once

#include <cstddef>
#include <type_traits>

#include "cuda/attention/bias.cuh"
#include "cuda/attention/mma_sync/bias_sum_steps.cuh"
#include "cuda/attention/score.cuh"
#include "cuda/attention/sequence.cuh"
#include "cuda/attention/sm90/params.h"
#include "cuda/attention/sm90/tiles.h"
#include "cuda/attention/sm90/warpgroup.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/tile/dtype.cuh"
#include "cuda/tma/operand.cuh"
#include "cuda/tma/pipeline.cuh"

namespace flashmoe::cuda::sm90 {

// What consumers are to know of a step. The producer writes it with Q and K.
struct alignas(8) SumStep {
  int len_k;
  int flags;
  // kPlain: all queries see all keys. kInvalid: the sequence's length is wrong, and its results are
  // NaN. kLast: there is no step any more; its slot holds nothing.
  static constexpr int kPlain = 1, kInvalid = 2, kLast = 4;
};

// A place in the ring of kSlots slots.
template <int kSlots>
struct SumRing {
  int at = 0, parity = 0;

  __device__ __forceinline__ SumRing next() const {
    return at + 1 == kSlots ? SumRing{0, parity ^ 1} : SumRing{at + 1, parity};
  }
};

template <class T, Sm90BiasSumTile kTile_>
struct BiasSumConfig {
  using Type = T;
  static constexpr bool kBf16 = std::is_same_v<T, Bf16>;
  static constexpr Sm90BiasSumTile kTile = kTile_;
  static constexpr int kDim = kTile.head_dim, kSlots = kTile.slots;
  static constexpr int kBlockQ = kTile.block_q, kBlockK = kTile.block_k;
  static constexpr int kWarpgroups = 2, kConsumerThreads = kWarpgroups * kWarpgroupThreads;
  static constexpr int kHalfKeys = 64, kCount = kHalfKeys / 2;  // accumulators of a half
  static_assert(kBlockQ == kWarpgroups * kWarpgroupRows && kBlockK == 2 * kHalfKeys);
  using Ring = SumRing<kSlots>;
  using Rows = tma::Tile<kBlockQ, kDim>;          // Q or dO
  using Keys = tma::Tile<kBlockK, kDim>;          // K or V
  using ScoreTile = tma::Tile<kBlockQ, kBlockK>;  // the bias
  static constexpr int kBoxRows = kTile.kBoxRows;
  static constexpr uint32_t kLseDeltaBytes = kBlockQ * 8;
  static constexpr int kPitch = kBlockK * 4 + 16;  // of the tile in fp32, in bytes

  struct Operands {
    Rows rows;
    Keys keys;
  };
  struct Smem {
    Operands operands[kSlots];
    float lse_delta[kSlots][2 * kBlockQ];  // of slots with dO
    SumTile tile;
    SumStep steps[kSlots];  // of slots with Q
    // One for each slot, a tma::Slot. full: the producer's thread whose step it is, which also
    // expects the bytes of TMA; consumers wait. empty: warps of both consumers; the producer waits.
    tma::Slot::Barriers barriers[kSlots];
  };
  static_assert(offsetof(Smem, tile) + kBarrierBytes == kTile.shared_bytes());
  static_assert(sizeof(Smem) <= kTile.shared_bytes() && kTile.shared_bytes() <= kSm90SharedBytes);
  static_assert(sizeof(ScoreTile) <= sizeof(Operands));
  static_assert(kBlockQ * kPitch <= kSlots * sizeof(Operands));

  // Named barriers (0 is __syncthreads()).
  enum NamedBarrier : int {
    kConsumerBarrier = 1,  // all threads of both consumers
    kVerdictBarrier = 2,   // these and the producer's warp: whether the steps are added once more
  };
  static constexpr int kVerdictThreads = kConsumerThreads + 32;

  // `smem` is the address of the CTA's Smem.
  static __device__ __forceinline__ tma::Slot slot(uint32_t smem, const Ring& ring) {
    return tma::Slot(smem + offsetof(Smem, barriers) + ring.at * sizeof(tma::Slot::Barriers));
  }
  static __device__ __forceinline__ uint32_t operands(uint32_t smem, const Ring& ring) {
    return smem + ring.at * sizeof(Operands);
  }
  static __device__ __forceinline__ void init_barriers(uint32_t smem) {
    for (int i = 0; i < kSlots; ++i) slot(smem, {i, 0}).init(1, kWarpgroups * kWarpgroupWarps);
    ptx::fence_mbarrier_init();
  }

  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  static_assert(kProducerRegisters + kWarpgroups * kConsumerRegisters <=
                (kWarpgroups + 1) * registers_at_first(kWarpgroups + 1));
};

// Which tile of the gradient the CTA has, and which of its splits.
struct SumShare {
  int tile, split;
  __device__ __forceinline__ explicit SumShare(const Sm90BwdParams& p) {
    const int splits = p.bias_sum_last ? 1 : p.bias_sum_splits;
    tile = blockIdx.x / splits;
    split = blockIdx.x % splits;
  }
};

// The producer: one warp. Its lanes find a step each, 32 at once, for that takes divisions and a
// length from memory; then lane 0 loads what one step after the other reads.
template <class C>
class BiasSumProducer {
  using Smem = typename C::Smem;
  using Ring = typename C::Ring;

 public:
  __device__ __forceinline__ BiasSumProducer(Smem& shared, uint32_t smem, const Sm90BwdParams& p)
      : shared_(shared),
        smem_(smem),
        p_(p),
        first_query_(shared.tile.first_query),
        first_key_(shared.tile.first_key),
        sequence_rows_((p.len_q + p.block_q - 1) / p.block_q * p.block_q) {}

  __device__ __forceinline__ void run() {
    const SharedSteps<C> steps(p_, nullptr);
    const int split = SumShare(p_).split;
    const int64_t count = steps.count();
    const int begin = static_cast<int>(count * split / p_.bias_sum_splits);
    const int end = static_cast<int>(count * (split + 1) / p_.bias_sum_splits);
    load_bias();
#pragma unroll 1
    for (bool again = false;; again = true) {
      load_steps(steps, begin, end);
      const bool verdict = !again && ptx::bar_red_or(C::kVerdictBarrier, C::kVerdictThreads, false);
      if (!tma::warp_uniform(verdict)) break;
    }
  }

 private:
  __device__ __forceinline__ static bool leads() { return threadIdx.x == 0; }
  __device__ __forceinline__ tma::Slot wait_empty(const Ring& ring) const {
    const tma::Slot slot = C::slot(smem_, ring);
    ptx::mbarrier_wait(slot.empty, ring.parity ^ 1);  // the first round finds all slots empty
    return slot;
  }

  __device__ __forceinline__ void load_bias() {
    using Tile = typename C::ScoreTile;
    const tma::Slot slot = wait_empty(ring_);
    if (leads()) {
      const SumTile& tile = shared_.tile;
      const int64_t where = offset(p_, p_.bias_strides, tile.batch, tile.head, 0);
      const int row = static_cast<int>(where / p_.bias_strides.row) + tile.first_query;
      ptx::mbarrier_arrive_expect_tx(slot.full, Tile::kBytes);
#pragma unroll
      for (int i = 0; i < Tile::kBlocks; ++i) {
#pragma unroll
        for (int r = 0; r < C::kBlockQ; r += C::kBoxRows) {
          ptx::tma_load(C::operands(smem_, ring_) + i * Tile::kBlockBytes + r * 128, &p_.bias_map,
                        slot.full, tile.first_key + i * Tile::kBlockCols, row + r);
        }
      }
    }
    __syncwarp();
    ring_ = ring_.next();
  }

  // Loads the steps [begin, end), as far as queries see keys there, and tells where they end.
  __device__ __forceinline__ void load_steps(const SharedSteps<C>& steps, int begin, int end) {
#pragma unroll 1
    for (int first = begin; first < end; first += 32) {
      const int number = first + static_cast<int>(threadIdx.x);
      int batch = 0, head = 0, key_head = 0;
      SumStep step{0, 0};
      bool seen = false;
      if (number < end) {
        const StepPlace place = steps.place(number, shared_.tile, p_);
        const BiasStep found = steps.find(number, shared_.tile, p_);
        batch = place.batch;
        head = place.head;
        key_head = head / p_.group;
        step.len_k = found.seq.len_k;
        step.flags =
            (found.plain ? SumStep::kPlain : 0) | (found.seq.valid ? 0 : SumStep::kInvalid);
        seen = found.seen;
      }
      __syncwarp();
#pragma unroll 1
      for (uint32_t left = __ballot_sync(0xffffffffu, seen); left; left &= left - 1) {
        const int turn = __ffs(left) - 1;
        const auto of_turn = [&](int x) { return __shfl_sync(0xffffffffu, x, turn); };
        load_step({of_turn(step.len_k), of_turn(step.flags)}, of_turn(batch), of_turn(head),
                  of_turn(key_head));
      }
    }
    const tma::Slot slot = wait_empty(ring_);
    if (leads()) {
      shared_.steps[ring_.at] = {0, SumStep::kLast};
      ptx::mbarrier_arrive(slot.full);
    }
    __syncwarp();
    ring_ = ring_.next();
  }

  __device__ __forceinline__ void load_step(const SumStep& step, int batch, int head,
                                            int key_head) {
    const tma::Slot scores = wait_empty(ring_);
    if (leads()) {
      shared_.steps[ring_.at] = step;
      ptx::mbarrier_arrive_expect_tx(scores.full, sizeof(typename C::Operands));
      load_operands(scores, p_.query_map, p_.key_map, first_query_, head, key_head, batch);
    }
    __syncwarp();
    ring_ = ring_.next();

    const tma::Slot gradients = wait_empty(ring_);
    if (leads()) {
      // The workspace has whole tiles of block_q rows. Of rows past the end nothing is stored, so
      // they may have anything for lse and delta.
      const int bytes = min(sequence_rows_ - first_query_, C::kBlockQ) * 8;
      const int64_t row = head * p_.rows + int64_t{batch} * sequence_rows_ + first_query_;
      ptx::mbarrier_arrive_expect_tx(gradients.full, sizeof(typename C::Operands) + bytes);
      load_operands(gradients, p_.grad_out_map, p_.value_map, p_.grad_out ? first_query_ : kNoLimit,
                    head, key_head, batch);
      ptx::cp_async_bulk_load(smem_ + offsetof(Smem, lse_delta) + ring_.at * C::kLseDeltaBytes,
                              p_.lse_delta + 2 * row, bytes, gradients.full);
    }
    __syncwarp();
    ring_ = ring_.next();
  }

  // Q and K, or dO and V.
  __device__ __forceinline__ void load_operands(const tma::Slot& slot, const TensorMap& row_map,
                                                const TensorMap& key_map, int first_query, int head,
                                                int key_head, int batch) const {
    const uint32_t rows = C::operands(smem_, ring_);
    const uint32_t keys = rows + offsetof(typename C::Operands, keys);
#pragma unroll
    for (int i = 0; i < C::Rows::kBlocks; ++i) {
#pragma unroll
      for (int r = 0; r < C::kBlockQ; r += C::kBoxRows) {
        ptx::tma_load(rows + i * C::Rows::kBlockBytes + r * 128, &row_map, slot.full, 64 * i,
                      first_query + r, head, batch);
      }
      ptx::tma_load(keys + i * C::Keys::kBlockBytes, &key_map, slot.full, 64 * i, first_key_,
                    key_head, batch);
    }
  }

  Smem& shared_;
  const uint32_t smem_;
  const Sm90BwdParams& p_;
  const int first_query_, first_key_;
  const int sequence_rows_;  // of a sequence in the workspace: see workspace_row()
  Ring ring_;
};

// A consumer: the sum of 64 queries x 128 keys.
template <class C>
class BiasSumConsumer {
  using Smem = typename C::Smem;
  using Type = typename C::Type;
  using Ring = typename C::Ring;
  static constexpr int kCount = C::kCount;

 public:
  __device__ __forceinline__ BiasSumConsumer(Smem& shared, uint32_t smem, int index,
                                             const Sm90BwdParams& p)
      : shared_(shared), smem_(smem), index_(index), p_(p) {}

  __device__ __forceinline__ void run() {
    if (p_.bias_sum_last) {
      add_splits();
    } else {
      read_bias();
#pragma unroll 1
      for (bool guarded = false;; guarded = true) {
        add_steps(guarded);
        // Something not finite may be hidden: the steps are added once more, guarded.
        const bool again =
            !guarded && ptx::bar_red_or(C::kVerdictBarrier, C::kVerdictThreads, !all_finite());
        if (!tma::warp_uniform(again)) break;
      }
      if (p_.bias_sum_splits > 1) return store_split();
      // Both consumers are done with the ring.
      ptx::bar_sync(C::kConsumerBarrier, C::kConsumerThreads);
    }
    store_tile();
  }

 private:
  __device__ __forceinline__ int thread() const { return ptx::opaque_thread() - kWarpgroupThreads; }
  // The thread's first row of the tile.
  __device__ __forceinline__ int tile_row() const {
    return index_ * kWarpgroupRows + fragment_row();
  }
  __device__ __forceinline__ void wait_full(const Ring& ring) const {
    ptx::mbarrier_wait(C::slot(smem_, ring).full, ring.parity);
  }
  __device__ __forceinline__ void release(const Ring& ring) const {
    warp_arrive(C::slot(smem_, ring).empty);
  }
  // The step whose Q and K are in a slot.
  __device__ __forceinline__ SumStep step_at(const Ring& ring) const {
    const SumStep& step = shared_.steps[ring.at];
    return {tma::warp_uniform(step.len_k), tma::warp_uniform(step.flags)};
  }

  // The bias from the first slot to registers.
  __device__ __forceinline__ void read_bias() {
    using Tile = typename C::ScoreTile;
    wait_full(ring_);
    const uint32_t from =
        C::operands(smem_, ring_) +
        Tile::at(index_ * kWarpgroupRows + warpgroup_warp() * 16 + lane() % 16, lane() / 16 * 8);
#pragma unroll
    for (int n = 0; n < C::kBlockK / 16; ++n) {
      uint32_t x[4];  // keys 0 to 7 and 8 to 15, of each rows 0 to 7 and 8 to 15
      ptx::ldmatrix_x4(x, (from ^ n % 4 * 32) + n / 4 * Tile::kBlockBytes);
#pragma unroll
      for (int i = 0; i < 4; ++i) bias_[n / 4][n % 4 * 4 + i] = x[i];
    }
    release(ring_);
    ring_ = ring_.next();
  }

  // S = Q K^T or dP = dO V^T, of the operands in a slot and half of their keys.
  __device__ __forceinline__ void issue(float (&x)[kCount], const Ring& ring, int half) {
    using Wgmma = ptx::Wgmma<C::kBf16, C::kHalfKeys>;
    const uint32_t from = C::operands(smem_, ring);
    const uint32_t rows = C::Rows::descriptor(from + index_ * kWarpgroupRows * 128);
    const uint32_t keys =
        C::Keys::descriptor(from + static_cast<uint32_t>(offsetof(typename C::Operands, keys)) +
                            half * C::kHalfKeys * 128);
    Wgmma::ss_first(x, C::Rows::along(rows, 0), C::Keys::along(keys, 0));
#pragma unroll
    for (int step = 1; step < C::kDim / 16; ++step) {
      Wgmma::ss(x, C::Rows::along(rows, step), C::Keys::along(keys, step), true);
    }
    ptx::wgmma_commit_group();
  }

  // lse and delta of the thread's two rows.
  __device__ __forceinline__ void load_lse_delta(float2 (&two)[2], const Ring& ring) const {
    const uint32_t from =
        smem_ + offsetof(Smem, lse_delta) + (ring.at * C::kBlockQ + tile_row()) * 8;
    two[0] = ptx::ld_shared_v2_f32(from);
    two[1] = ptx::ld_shared_v2_f32(from + 8 * 8);
  }
  // The bias of accumulator i. (One that stayed unpacked would take twice the registers.)
  __device__ __forceinline__ float bias(int half, int i) const {
    const uint32_t two = ptx::opaque(bias_[half][i / 2]);
    return Type::unpack(static_cast<uint16_t>(i % 2 ? two >> 16 : two));
  }

  // P in place of S.
  __device__ __forceinline__ void exponentiate(int half, const float2 (&lse_delta)[2]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float rest = bias(half, i) * kLog2e - lse_delta[i % 4 / 2].x;
      rS_[half][i] = ptx::ex2_approx_ftz(rS_[half][i] * p_.scale_log2 + rest);
    }
  }
  __device__ __forceinline__ void add_plain(int half, const float2 (&lse_delta)[2]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      sums_[half][i] = fmaf(rS_[half][i], rdP_[i] - lse_delta[i % 4 / 2].y, sums_[half][i]);
    }
  }
  // P in place of S, and kHidden where a mask or the bias hides the key from the row: what such
  // pairs have that is not finite does not count.
  static constexpr float kHidden = -1;
  __device__ __forceinline__ void exponentiate_seen(int half, const float2 (&lse_delta)[2],
                                                    const SumStep& step) {
    Sequence seq;
    seq.len_q = p_.len_q;
    seq.len_k = step.len_k;
    seq.shift = seq.len_k - seq.len_q;
    const bool valid = !(step.flags & SumStep::kInvalid);
    const ScoreRule<Sm90BwdParams> rule(p_);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = shared_.tile.first_query + tile_row() + 8 * r;
      const int first = shared_.tile.first_key + half * C::kHalfKeys + fragment_column();
      const int begin = seq.begin(row, p_) - first;
      // A row that sees nothing has an lse of +inf.
      const int end = valid && lse_delta[r].x != INFINITY ? seq.end(row, p_) - first : -kNoLimit;
#pragma unroll
      for (int j = 0; j < kCount / 2; ++j) {
        const int key = j / 2 * 8 + j % 2;
        float& x = rS_[half][j / 2 * 4 + 2 * r + j % 2];
        const float b = bias(half, j / 2 * 4 + 2 * r + j % 2);
        const float score = rule.score(x, b);
        const bool seen = key >= begin && key < end && b != -INFINITY && score != -INFINITY;
        x = seen ? ptx::ex2_approx_ftz(score - lse_delta[r].x) : kHidden;
      }
    }
  }
  // NOTE: the sum is chosen and not what is added to it, or else the compiler adds after the branch
  // that add_plain() is in, and that has no FMA then.
  __device__ __forceinline__ void add_seen(int half, const float2 (&lse_delta)[2],
                                           const SumStep& step) {
    const float hidden = step.flags & SumStep::kInvalid ? NAN : 0.f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      float& sum = sums_[half][i];
      const float with = fmaf(rS_[half][i], rdP_[i] - lse_delta[i % 4 / 2].y, sum);
      sum = rS_[half][i] == kHidden ? sum + hidden : with;
    }
  }

  // Half of a step's keys, whose S is there: dP, P and the sum. S of the other half, of this step
  // or the next, is on its way then; its Q and K are in `scores`.
  template <int kHalf>
  __device__ __forceinline__ void add_half(const SumStep& step, bool plain, const Ring& gradients,
                                           const Ring& scores) {
    ptx::wgmma_fence();
    issue(rdP_, gradients, kHalf);
    issue(rS_[1 - kHalf], scores, 1 - kHalf);
    float2 lse_delta[2];
    load_lse_delta(lse_delta, gradients);
    if (plain) {
      exponentiate(kHalf, lse_delta);
    } else {
      exponentiate_seen(kHalf, lse_delta, step);
    }
    ptx::wgmma_wait_group<1>(rdP_);
    if (kHalf == 1) release(gradients);
    if (plain) {
      add_plain(kHalf, lse_delta);
    } else {
      add_seen(kHalf, lse_delta, step);
    }
  }

  // Sums all steps, guarded or not, from 0.
  // NOTE: ptxas serialises MMAs that are not always issued. So S of the next step's first half is
  // issued after the last step too, from whatever lies in the slot.
  __device__ __forceinline__ void add_steps(bool guarded) {
#pragma unroll
    for (int i = 0; i < 2 * kCount; ++i) sums_[i / kCount][i % kCount] = 0;
    wait_full(ring_);
    SumStep step = step_at(ring_);
    ptx::wgmma_fence();
    issue(rS_[0], ring_, 0);
#pragma unroll 1
    while (!(step.flags & SumStep::kLast)) {
      const Ring gradients = ring_.next(), next = gradients.next();
      const bool plain = step.flags & SumStep::kPlain && !guarded;
      wait_full(gradients);
      ptx::wgmma_wait_group<0>(rS_[0]);
      add_half<0>(step, plain, gradients, ring_);
      ptx::wgmma_wait_group<0>(rS_[1]);
      release(ring_);
      wait_full(next);
      const SumStep next_step = step_at(next);
      add_half<1>(step, plain, gradients, next);
      step = next_step;
      ring_ = next;
    }
    ptx::wgmma_wait_group<0>(rS_[0]);
    release(ring_);
    ring_ = ring_.next();
  }

  // f(sum, row, key) for all of the thread's sums; row and key are counted from its first.
  template <class F>
  __device__ __forceinline__ void for_each_sum(const F& f) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        f(sums_[half][i], i % 4 / 2 * 8, half * C::kHalfKeys + i / 4 * 8 + i % 2);
      }
    }
  }
  // Whether the thread's sums are finite. Those past the end of queries or keys do not matter.
  __device__ __forceinline__ bool all_finite() {
    const int rows = p_.len_q - shared_.tile.first_query - tile_row();
    const int keys = p_.len_k - shared_.tile.first_key - fragment_column();
    bool finite = true;
    for_each_sum([&](float sum, int row, int key) {
      if (row < rows && key < keys) finite &= static_cast<bool>(isfinite(sum));
    });
    return finite;
  }

  // Where a split leaves its sums, in the order of the registers.
  __device__ __forceinline__ float4* split_sums(int split) const {
    const int tiles = gridDim.x / (p_.bias_sum_last ? 1 : p_.bias_sum_splits);
    const int64_t at = (int64_t{blockIdx.z} * gridDim.y + blockIdx.y) * tiles + SumShare(p_).tile;
    return reinterpret_cast<float4*>(p_.bias_sums) + thread() +
           (at * p_.bias_sum_splits + split) * (C::kBlockQ * C::kBlockK / 4);
  }
  __device__ __forceinline__ void store_split() const {
    float4* to = split_sums(SumShare(p_).split);
#pragma unroll
    for (int j = 0; j < 2 * kCount / 4; ++j) {
      const float* sum = &sums_[j / (kCount / 4)][j % (kCount / 4) * 4];
      to[j * C::kConsumerThreads] = {sum[0], sum[1], sum[2], sum[3]};
    }
  }
  __device__ __forceinline__ void add_splits() {
#pragma unroll
    for (int i = 0; i < 2 * kCount; ++i) sums_[i / kCount][i % kCount] = 0;
#pragma unroll 1
    for (int split = 0; split < p_.bias_sum_splits; ++split) {
      const float4* from = split_sums(split);
#pragma unroll
      for (int j = 0; j < 2 * kCount / 4; ++j) {
        const float4 x = from[j * C::kConsumerThreads];
        float* sum = &sums_[j / (kCount / 4)][j % (kCount / 4) * 4];
        sum[0] += x.x, sum[1] += x.y, sum[2] += x.z, sum[3] += x.w;
      }
    }
  }

  // Stores the tile through shared memory, so that neighbouring threads write neighbouring numbers.
  __device__ __forceinline__ void store_tile() {
    const uint32_t to = smem_ + tile_row() * C::kPitch + fragment_column() * 4;
    for_each_sum([&](float sum, int row, int key) {
      ptx::st_shared_f32(to + row * C::kPitch + key * 4, sum);
    });
    ptx::bar_sync(C::kConsumerBarrier, C::kConsumerThreads);  // the tile is written
    const SumTile& tile = shared_.tile;
    const BiasRows grad = find_grad_bias(p_, {}, tile.batch, tile.head);
    const int rows = min(C::kBlockQ, tile.len_q - tile.first_query);
    const int keys = min(C::kBlockK, tile.len_k - tile.first_key);
    if (grad.chunks) {
      constexpr int kChunks = C::kBlockK / 8;
#pragma unroll 1
      for (int i = thread(); i < rows * kChunks; i += C::kConsumerThreads) {
        const int row = i / kChunks, key = i % kChunks * 8;
        if (key >= keys) continue;
        const uint32_t from = smem_ + row * C::kPitch + key * 4;
        const float4 x = ptx::ld_shared_v4_f32(from), y = ptx::ld_shared_v4_f32(from + 16);
        store_eight(grad, tile.first_query + row, tile.first_key + key, keys - key,
                    {Type::pack(x.x, x.y), Type::pack(x.z, x.w), Type::pack(y.x, y.y),
                     Type::pack(y.z, y.w)});
      }
      return;
    }
    const bool across = grad.row == 1;
#pragma unroll 1
    for (int i = thread(); i < C::kBlockQ * C::kBlockK; i += C::kConsumerThreads) {
      const int row = across ? i % C::kBlockQ : i / C::kBlockK;
      const int key = across ? i / C::kBlockQ : i % C::kBlockK;
      if (row >= rows || key >= keys) continue;
      write_bias<Type>(grad, tile.first_query + row, tile.first_key + key,
                       ptx::ld_shared_f32(smem_ + row * C::kPitch + key * 4));
    }
  }

  Smem& shared_;
  const uint32_t smem_;
  const int index_;  // of the consumers
  const Sm90BwdParams& p_;
  Ring ring_;  // where Q and K of the step are
  // Of each half of the keys, as wgmma lays out its accumulators. dP is of one half at a time.
  float sums_[2][kCount], rS_[2][kCount], rdP_[kCount];
  uint32_t bias_[2][kCount / 2];  // two numbers in a register
};

// The grid is (tiles of the gradient x splits, its heads, its batches); the last of the two
// launches of a split sum has one CTA for each tile, and adds up what the splits left.
template <class C>
__device__ __forceinline__ void attention_bwd_bias_sum(const Sm90BwdParams& p) {
  extern __shared__ __align__(1024) char shared_memory[];
  auto& shared = *reinterpret_cast<typename C::Smem*>(shared_memory);
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared_memory));
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroupThreads, 0);
  if (threadIdx.x == 0) {
    C::init_barriers(smem);
    shared.tile = SharedSteps<C>(p, nullptr).tile(SumShare(p).tile, p);
  }
  __syncthreads();  // the barriers are initialised, and the tile is known
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<C::kProducerRegisters>();
    if (threadIdx.x < 32 && !p.bias_sum_last) BiasSumProducer<C>(shared, smem, p).run();
  } else {
    ptx::setmaxnreg_inc<C::kConsumerRegisters>();
    BiasSumConsumer<C>(shared, smem, warpgroup - 1, p).run();
  }
}

}  // namespace flashmoe::cuda::sm90
