// The producer of the packed forward pass: one thread that takes tasks from the counter, and loads
// Q, K, V and the bounds of the rows by TMA as soon as a stage is empty, also across tasks.
#pragma once

#include "cuda/attention/sm90/packed_rows.cuh"
#include "cuda/attention/sm90/params.h"
#include "cuda/ptx/grid.cuh"
#include "cuda/tma/pipeline.cuh"

namespace flashmoe::cuda::sm90 {

// A tile of queries, of the heads of one box.
struct PackedTask {
  int first_row = 0;               // token
  int box = 0;                     // of heads
  int key_begin = 0, key_end = 0;  // the keys that any row sees
  int more = false;                // false: there is no task any more
};

template <class C>
class PackedProducer {
  using Smem = typename C::Smem;
  struct Range {
    int begin = 0, end = 0;
  };

 public:
  __device__ __forceinline__ PackedProducer(Smem& shared, uint32_t smem, const Sm90PackedParams& p)
      : shared_(shared), smem_(smem), p_(p) {}

  __device__ __forceinline__ void run() {
    for (const TensorMap* map : {&p_.query_map, &p_.key_map, &p_.value_map, &p_.out_map}) {
      ptx::prefetch_tensormap(map);
    }
    ptx::griddepcontrol_wait();  // for the bounds and the counter
    int number = take();
    Range range = find_range(number);
    tma::Ring<2> tasks;
#pragma unroll 1
    for (;; tasks.advance()) {
      PackedTask& task = shared_.tasks[tasks.at()];
      const tma::Slot slot = C::slot(smem_, C::kTaskBarrier + tasks.at());
      tasks.wait_empty(slot);
      task.more = number < p_.num_tasks;
      if (!task.more) {
        ptx::mbarrier_arrive(slot.full);
        return;
      }
      const int box = number % p_.boxes, row = number / p_.boxes * C::kBlockQ;
      task.first_row = row;
      task.box = box;
      task.key_begin = range.begin;
      task.key_end = range.end;
      load_queries(slot, tasks.at(), row, box);
      const int next = take();  // early: the counter takes a while to answer
      Range next_range;
#pragma unroll 1
      for (int key = range.begin; key < range.end; key += C::kBlockK) {
        load_keys(key, box);
        if (key == range.begin) next_range = find_range(next);
      }
      if (range.begin >= range.end) next_range = find_range(next);
      number = next;
      range = next_range;
    }
  }

 private:
  __device__ __forceinline__ int take() const { return atomicAdd(p_.ragged.tile_counter, 1); }

  // The keys that the rows of a task see: see RowBounds.
  __device__ __forceinline__ Range find_range(int number) const {
    if (number >= p_.num_tasks) return {};
    const RowBounds* rows = p_.bounds + number / p_.boxes * C::kBlockQ;
    return {stage_begin(rows[0].begin(), p_.pitch_k), rows[C::kBlockQ - 1].end};
  }

  __device__ __forceinline__ void load_queries(const tma::Slot& slot, int at, int row,
                                               int box) const {
    constexpr int kBoundsBytes = C::kBlockQ * sizeof(RowBounds);
    constexpr int kPairsBytes = C::kBias ? C::kBlockQ * sizeof(PairRow) : 0;
    ptx::mbarrier_arrive_expect_tx(slot.full, C::Rows::kBytes + kBoundsBytes + kPairsBytes);
    if constexpr (C::kBias) {
      ptx::cp_async_bulk_load(smem_ + offsetof(Smem, pairs) + at * kPairsBytes, p_.pairs + row,
                              kPairsBytes, slot.full);
    }
#pragma unroll 1
    for (int i = 0; i < C::kBlockQ; i += kPackedChunk) {
      TokenBox<C>(box * C::kHeads, row + i, p_.pitch_q)
          .load(smem_ + offsetof(Smem, sQ) + at * C::Rows::kBytes + i * 128, p_.query_map,
                slot.full);
    }
    ptx::cp_async_bulk_load(smem_ + offsetof(Smem, bounds) + at * kBoundsBytes, p_.bounds + row,
                            kBoundsBytes, slot.full);
  }

  // The keys and values from `key` on.
  __device__ __forceinline__ void load_keys(int key, int box) {
    const int at = keys_.at(), key_head = C::kHeads > 1 ? box * C::kHeads : box / p_.group;
    const tma::Slot slot = C::slot(smem_, C::kKeyBarrier + at);
    const uint32_t to = smem_ + at * C::Keys::kBytes;
    keys_.wait_empty(slot);
    ptx::mbarrier_arrive_expect_tx(slot.full, 2 * C::Keys::kBytes);
    const TokenBox<C> tokens(key_head, key, p_.pitch_k);
    tokens.load(to + offsetof(Smem, sK), p_.key_map, slot.full);
    tokens.load(to + offsetof(Smem, sV), p_.value_map, slot.full);
    keys_.advance();
  }

  Smem& shared_;
  const uint32_t smem_;
  const Sm90PackedParams& p_;
  tma::Ring<C::kStages> keys_;
};

}  // namespace flashmoe::cuda::sm90
