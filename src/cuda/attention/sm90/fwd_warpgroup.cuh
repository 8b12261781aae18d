// What a consumer warpgroup of the sm90 forward pass knows: its task, its place in the pipeline and
// its turn in the ping-pong.
#pragma once

#include "cuda/attention/sm90/fwd_scheduler.cuh"
#include "cuda/attention/sm90/warpgroup.cuh"
#include "cuda/tma/pipeline.cuh"

namespace flashmoe::cuda::sm90 {

struct NoRing {};  // V has K's

template <class C>
struct FwdWarpgroup {
  typename C::Smem& shared;
  const uint32_t smem;  // the same as an address in shared memory
  const Sm90FwdParams& p;
  const int index;  // of the consumers, or of those of its team
  const int team;   // 0 where there is one
  tma::Ring<2> tasks;
  tma::Ring<C::kKeyStages> keys;  // the stage of K
  // And that of V, which is used a step later: where there are as many, K's of a step before.
  static constexpr bool kOwnValues = C::kKeyStages != C::kStages;
  [[no_unique_address]] std::conditional_t<kOwnValues, tma::Ring<C::kStages>, NoRing> own_values;
  int block;  // the tile of keys that is next
  [[no_unique_address]] typename C::TaskScales scales;

  __device__ __forceinline__ FwdWarpgroup(typename C::Smem& shared, uint32_t smem, int index,
                                          int team, const Sm90FwdParams& p)
      : shared(shared), smem(smem), p(p), index(index), team(team) {}

  __device__ __forceinline__ tma::Slot slot(int barrier) const { return C::slot(smem, barrier); }
  __device__ __forceinline__ tma::Slot k_slot() const { return slot(C::kKBarrier + keys.at()); }
  __device__ __forceinline__ tma::Ring<C::kStages> values() const {
    if constexpr (kOwnValues) {
      return own_values;
    } else {
      return keys;
    }
  }
  // On to the next tile's V, where that has a ring of its own.
  __device__ __forceinline__ void advance_values() {
    if constexpr (kOwnValues) own_values.advance();
  }
  __device__ __forceinline__ tma::Slot bias_slot() const {
    return slot(C::kBiasBarrier + keys.at());
  }
  __device__ __forceinline__ void release(const tma::Slot& slot) const { warp_arrive(slot.empty); }
  // The bias of the tile of keys that is next.
  __device__ __forceinline__ uint32_t bias_tile() const {
    using Tile = typename C::BiasTile;
    if constexpr (C::kBiasStays) {
      return C::bias_at(smem, team) + block * static_cast<uint32_t>(sizeof(Tile));
    } else if constexpr (C::kBias) {
      return smem + offsetof(typename C::Smem, sBias) + keys.at() * sizeof(Tile);
    }
    return 0;
  }
  __device__ __forceinline__ void wait_bias() const {
    if constexpr (C::kBiasStays) {
      ptx::mbarrier_wait(C::bias_full(smem, team, block), reload(task().bias_parity));
    } else {
      keys.wait_full(bias_slot());
    }
  }

  __device__ __forceinline__ const FwdTask& task() const { return shared.tasks[tasks.at()]; }
  // Loads a number of the task from shared memory each time: registers are few.
  static __device__ __forceinline__ int reload(const int& x) {
    return *const_cast<const volatile int*>(&x);
  }
  // The first of the warpgroup's rows, in the sequence.
  __device__ __forceinline__ int first_row() const {
    return task().first_row + index * kWarpgroupRows;
  }
  // The two rows of the accumulators that a thread holds, in the sequence.
  __device__ __forceinline__ int fragment_row(int half) const {
    return first_row() + warpgroup_warp() * 16 + (lane() >> 2) + 8 * half;
  }
  // The query of a row: 2^pack heads may share a tile.
  __device__ __forceinline__ int query(int row) const { return row >> p.pack; }
  __device__ __forceinline__ int head(int row) const {
    return (task().head << p.pack) + (row & ((1 << p.pack) - 1));
  }
  __device__ __forceinline__ bool needs_mask() const {
    return block >= reload(task().unmasked_end[index]) ||
           block < reload(task().unmasked_begin[index]);
  }

  // Where the Q of task number `count` is, of this CTA's.
  __device__ __forceinline__ int q_stage(uint32_t count) const {
    return C::kQStages > 1 ? ptx::opaque(count) % C::kQStages : 0;
  }
  __device__ __forceinline__ uint32_t queries(uint32_t count) const {
    return smem + offsetof(typename C::Smem, sQ) + q_stage(count) * sizeof(typename C::Rows);
  }
  __device__ __forceinline__ void wait_queries(uint32_t count) const {
    tma::Ring<C::kQStages>(count).wait_full(slot(C::kQBarrier + q_stage(count)));
  }
  // All threads of the warpgroup.
  __device__ __forceinline__ void sync() const {
    ptx::bar_sync(epilogue_barrier(), kWarpgroupThreads);
  }
  __device__ __forceinline__ int epilogue_barrier() const {
    return C::kEpilogueBarrier + team * C::kWarpgroups + index;
  }

  // Waits for the next task and returns whether there is one.
  __device__ __forceinline__ bool take_task() {
    tasks.wait_full(slot(C::kTaskBarrier + tasks.at()));
    const FwdTask& task = this->task();
    if (!tma::warp_uniform(task.more)) return false;
    begin_task();
    if constexpr (requires { C::kFp8; }) scales = C::find_scales(task.head / p.group, p);
    return true;
  }
  __device__ __forceinline__ void begin_task() {
    block = tma::warp_uniform(reload(task().warpgroup_end[index])) - 1;
  }
  // Each thread arrives for itself: each has read the task for itself.
  __device__ __forceinline__ void release_task() {
    ptx::mbarrier_arrive(slot(C::kTaskBarrier + tasks.at()).empty);
    __syncwarp();  // so that the compiler knows in the next task that the warp is converged
    tasks.advance();
  }

  // The place of the task before's Q is not needed any more: its O has left from there.
  __device__ __forceinline__ void release_output() const {
    if (warpgroup_thread() == 0) ptx::cp_async_bulk_wait_group_read();
    release(slot(C::kQBarrier + q_stage(tasks.count() - 1)));
  }

  // Ping-pong: warpgroups issue MMAs one after the other, so that the softmax of one runs under the
  // MMAs of another. begin() and end() enclose all tasks: the last warpgroup makes it the first's
  // turn, and the first waits for the turn that is left over.
  __device__ __forceinline__ void begin_ping_pong() const {
    if (C::kTakesTurns && index == C::kWarpgroups - 1) {
      ptx::bar_arrive(C::kPingPong, C::kPingPongThreads);
    }
  }
  __device__ __forceinline__ void wait_turn() const {
    if (C::kTakesTurns) ptx::bar_sync(C::kPingPong + index, C::kPingPongThreads);
  }
  __device__ __forceinline__ void pass_turn() const {
    if (C::kTakesTurns) {
      ptx::bar_arrive(C::kPingPong + (index + 1) % C::kWarpgroups, C::kPingPongThreads);
    }
  }
  __device__ __forceinline__ void end_ping_pong() const {
    if (C::kTakesTurns && index == 0) ptx::bar_sync(C::kPingPong, C::kPingPongThreads);
  }

  // Where a row of the task begins in a tensor, in elements.
  __device__ __forceinline__ int64_t row_offset(const Strides& strides, int row) const {
    const FwdTask& task = this->task();
    return offset(p, strides, task.batch, head(row), task.seq.token_q) + query(row) * strides.row;
  }
};

}  // namespace flashmoe::cuda::sm90
