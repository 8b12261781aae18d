// The producer of the packed backward pass: one thread that takes tasks from the counter and loads
// tiles, bounds, and the stages of the other side by TMA as soon as there is room, also across
// tasks.
#pragma once

#include "cuda/attention/sm90/packed_rows.cuh"
#include "cuda/attention/sm90/params.h"
#include "cuda/ptx/grid.cuh"
#include "cuda/tma/pipeline.cuh"

namespace flashmoe::cuda::sm90 {

// A tile of queries or of keys, of the heads of one box.
struct PackedBwdTask {
  int first_row = 0;       // token
  int box = 0;             // of heads
  int keys = false;        // whether rows are keys
  int begin = 0, end = 0;  // the tokens of the other side that any row sees, or that see it
  int more = false;        // false: there is no task any more
};

// The task of a number. The tasks of a tile follow each other, those of its keys first, which are
// the longer ones. After the last tile of the shorter side come those of the other side alone.
__device__ __forceinline__ PackedBwdTask find_packed_task(int number, int block,
                                                          const Sm90PackedBwdParams& p) {
  const auto &q = p.query_side, &k = p.key_side;
  PackedBwdTask task;
  task.more = number < p.num_tasks;
  if (!task.more) return task;
  const int of_both = q.boxes + k.boxes, tiles = min(q.tiles, k.tiles);
  int tile = number / of_both;
  if (tile < tiles) {
    task.box = number % of_both;
    task.keys = task.box < k.boxes;
    if (!task.keys) task.box -= k.boxes;
  } else {
    task.keys = k.tiles > q.tiles;
    const int boxes = task.keys ? k.boxes : q.boxes, rest = number - tiles * of_both;
    tile = tiles + rest / boxes;
    task.box = rest % boxes;
  }
  task.first_row = tile * block;
  // Even, as LSE and delta are copied in chunks of 16 bytes.
  const RowBounds* rows = (task.keys ? p.key_bounds : p.query_bounds) + task.first_row;
  task.begin = stage_begin(rows[0].begin() & ~1, task.keys ? p.pitch_q : p.pitch_k);
  task.end = rows[block - 1].end;
  return task;
}

template <class C>
class PackedBwdProducer {
  using Smem = typename C::Smem;

 public:
  __device__ __forceinline__ PackedBwdProducer(Smem& shared, uint32_t smem,
                                               const Sm90PackedBwdParams& p)
      : shared_(shared), smem_(smem), p_(p) {}

  __device__ __forceinline__ void run() {
    for (const TensorMap* map : {&p_.query_map, &p_.key_map, &p_.value_map, &p_.grad_out_map}) {
      ptx::prefetch_tensormap(map);
    }
    PackedBwdTask task = find_packed_task(take(), C::kBlockQ, p_);
    tma::Ring<2> tasks;
#pragma unroll 1
    for (;; tasks.advance()) {
      const tma::Slot slot = C::slot(smem_, C::kTaskBarrier + tasks.at());
      tasks.wait_empty(slot);
      shared_.tasks[tasks.at()] = task;
      if (!task.more) {
        ptx::mbarrier_arrive(slot.full);
        return;
      }
      load_rows(slot, tasks.at(), task);
      // The next task is found while there is something to wait for: the counter and the bounds
      // take a while to answer.
      const int number = take();
      PackedBwdTask next;
      bool found = false;
      // The query heads that share a key head follow each other.
      const int rounds = task.keys ? p_.group : 1;
#pragma unroll 1
      for (int round = 0; round < rounds; ++round) {
#pragma unroll 1
        for (int token = task.begin; token < task.end; token += C::kBlockK) {
          load_stage(token, round, task);
          if (!found) next = find_packed_task(number, C::kBlockQ, p_);
          found = true;
        }
      }
      if (!found) next = find_packed_task(number, C::kBlockQ, p_);
      task = next;
    }
  }

 private:
  __device__ __forceinline__ int take() const { return atomicAdd(p_.tile_counter, 1); }

  // Without grad_out zeros are loaded: what is beyond the end of a tensor.
  __device__ __forceinline__ int grad_out_token(int token) const {
    return p_.grad_out ? token : kNoLimit;
  }
  // LSE and delta of kCount queries of each head of a box.
  template <int kCount>
  __device__ __forceinline__ void load_lse_delta(uint32_t to, uint32_t barrier, int head,
                                                 int token) const {
    const float2* from = reinterpret_cast<const float2*>(p_.lse_delta) + head * p_.rows + token;
#pragma unroll
    for (int h = 0; h < C::kHeads; ++h) {
      ptx::cp_async_bulk_load(to + h * kCount * 8, from + h * p_.rows, kCount * 8, barrier);
    }
  }

  // The tile, the bounds of its rows, and of queries LSE and delta.
  __device__ __forceinline__ void load_rows(const tma::Slot& slot, int at,
                                            const PackedBwdTask& task) const {
    constexpr int kBoundsBytes = C::kBlockQ * sizeof(RowBounds);
    constexpr int kLseDeltaBytes = C::kHeads * C::kBlockQ * 8;
    constexpr int kPairsBytes = C::kBias ? C::kBlockQ * sizeof(PairRow) : 0;
    const int head = task.box * C::kHeads, row = task.first_row;
    const uint32_t to = smem_ + offsetof(Smem, sX) + at * 2 * C::Rows::kBytes;
    ptx::mbarrier_arrive_expect_tx(slot.full, 2 * C::Rows::kBytes + kBoundsBytes + kPairsBytes +
                                                  (task.keys ? 0 : kLseDeltaBytes));
    if constexpr (C::kBias) {
      ptx::cp_async_bulk_load(smem_ + offsetof(Smem, pairs) + at * kPairsBytes,
                              (task.keys ? p_.key_pairs : p_.query_pairs) + row, kPairsBytes,
                              slot.full);
    }
    const TensorMap& first = task.keys ? p_.key_map : p_.query_map;
    const TensorMap& second = task.keys ? p_.value_map : p_.grad_out_map;
    const int pitch = task.keys ? p_.pitch_k : p_.pitch_q;
#pragma unroll 1
    for (int i = 0; i < C::kBlockQ; i += C::kBlockK) {
      const int token = row + i, second_token = task.keys ? token : grad_out_token(token);
      TokenBox<C>(head, token, pitch).load(to + i * 128, first, slot.full);
      TokenBox<C>(head, second_token, pitch)
          .load(to + C::Rows::kBytes + i * 128, second, slot.full);
    }
    ptx::cp_async_bulk_load(smem_ + offsetof(Smem, bounds) + at * kBoundsBytes,
                            (task.keys ? p_.key_bounds : p_.query_bounds) + row, kBoundsBytes,
                            slot.full);
    if (!task.keys) {
      load_lse_delta<C::kBlockQ>(smem_ + offsetof(Smem, row_lse_delta) + at * kLseDeltaBytes,
                                 slot.full, head, row);
    }
  }

  // The tokens of the other side from `token` on. `round`: which of the query heads that share the
  // key head.
  __device__ __forceinline__ void load_stage(int token, int round, const PackedBwdTask& task) {
    constexpr int kLseDeltaBytes = C::kHeads * C::kBlockK * 8;
    const int at = stages_.at();
    const tma::Slot slot = C::slot(smem_, C::kStageBarrier + at);
    const uint32_t to = smem_ + offsetof(Smem, sY) + at * 2 * C::Stage::kBytes;
    stages_.wait_empty(slot);
    if (task.keys) {
      const int head = C::kHeads > 1 ? task.box * C::kHeads : task.box * p_.group + round;
      ptx::mbarrier_arrive_expect_tx(slot.full, 2 * C::Stage::kBytes + kLseDeltaBytes);
      TokenBox<C>(head, token, p_.pitch_q).load(to, p_.query_map, slot.full);
      TokenBox<C>(head, grad_out_token(token), p_.pitch_q)
          .load(to + C::Stage::kBytes, p_.grad_out_map, slot.full);
      load_lse_delta<C::kBlockK>(smem_ + offsetof(Smem, stage_lse_delta) + at * kLseDeltaBytes,
                                 slot.full, head, token);
    } else {
      const int head = C::kHeads > 1 ? task.box * C::kHeads : task.box / p_.group;
      ptx::mbarrier_arrive_expect_tx(slot.full, 2 * C::Stage::kBytes);
      const TokenBox<C> tokens(head, token, p_.pitch_k);
      tokens.load(to, p_.key_map, slot.full);
      tokens.load(to + C::Stage::kBytes, p_.value_map, slot.full);
    }
    stages_.advance();
  }

  Smem& shared_;
  const uint32_t smem_;
  const Sm90PackedBwdParams& p_;
  tma::Ring<C::kStages> stages_;
};

}  // namespace flashmoe::cuda::sm90
