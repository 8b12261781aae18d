// The producer of the sum of a broadcast bias's gradient (bwd_bias_sum.cuh): it finds the steps and
// loads their tiles by TMA.
#pragma once

#include "cuda/attention/mma_sync/bias_sum_steps.cuh"
#include "cuda/attention/sequence.cuh"
#include "cuda/attention/sm90/params.h"
#include "cuda/attention/sm90/warpgroup.cuh"
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
    if (!p_.bias_by_rows) load_bias();
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
#pragma unroll 1
    for (int first = 0; first < Tile::kBlocks; first += C::kBlocksOfSlot) {
      const tma::Slot slot = wait_empty(ring_);
      if (leads()) {
        const SumTile& tile = shared_.tile;
        const int64_t where = offset(p_, p_.bias_strides, tile.batch, tile.head, 0);
        const int row = static_cast<int>(where / p_.bias_strides.row) + tile.first_query;
        ptx::mbarrier_arrive_expect_tx(slot.full, C::kBlocksOfSlot * Tile::kBlockBytes);
#pragma unroll
        for (int i = 0; i < C::kBlocksOfSlot; ++i) {
#pragma unroll
          for (int r = 0; r < C::kBlockQ; r += C::kBoxRows) {
            ptx::tma_load(C::operands(smem_, ring_) + i * Tile::kBlockBytes + r * 128, &p_.bias_map,
                          slot.full, tile.first_key + (first + i) * Tile::kBlockCols, row + r);
          }
        }
      }
      __syncwarp();
      ring_ = ring_.next();
    }
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
        ptx::tma_load(rows + i * C::Rows::kBlockBytes + r * C::Rows::kRowBytes, &row_map, slot.full,
                      64 * i, first_query + r, head, batch);
      }
#pragma unroll
      for (int r = 0; r < C::kBlockK; r += C::kKeyBox) {
        ptx::tma_load(keys + i * C::Keys::kBlockBytes + r * C::Keys::kRowBytes, &key_map, slot.full,
                      64 * i, first_key_ + r, key_head, batch);
      }
    }
  }

  Smem& shared_;
  const uint32_t smem_;
  const Sm90BwdParams& p_;
  const int first_query_, first_key_;
  const int sequence_rows_;  // of a sequence in the workspace: see workspace_row()
  Ring ring_;
};

}  // namespace flashmoe::cuda::sm90
