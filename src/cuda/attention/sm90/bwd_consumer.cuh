// The consumers of the sm90 backward pass up to head dim 128: two warpgroups with 64 keys each and
// their dK and dV, and the two threads that send their dQ to the accumulator.
#pragma once

#include "cuda/attention/sm90/bwd_epilogue.cuh"
#include "cuda/attention/sm90/bwd_grad_bias.cuh"
#include "cuda/attention/sm90/bwd_guard.cuh"
#include "cuda/attention/sm90/bwd_scores.cuh"

namespace flashmoe::cuda::sm90 {

// The thread that sends dQ of one warpgroup (small head dims: of all) from shared memory to the
// accumulator, and counts the tasks whose dQ is complete.
template <class C>
__device__ __forceinline__ void store_dq(const typename C::Smem& shared, uint32_t smem,
                                         int warpgroup, const Sm90BwdParams& p) {
  const uint32_t from = smem + offsetof(typename C::Smem, sdQ) + warpgroup * C::kDqBytes;
  const tma::Slot dq = C::slot(smem, C::kDqBarrier + warpgroup);
  constexpr int kParts = kPartsOfBlock / C::kDqParts;  // of one that is sent
  int parity = 0;
  for_each_task<C>(shared, smem, [&](const BwdTask& task) {
    if (C::kSmallDim && p.stores_dq) return;  // consumers store it
    if (zeroes_dq<C>(p)) wait_until_zeroed(task, p);
    for_each_query_tile<C>(task, p, [&](int head, int first) {
      const SumOrder<C> order(task, head, first, p);
      if (p.dq_accum) order.wait();
      ptx::mbarrier_wait(dq.full, parity);
      parity ^= 1;
      if (p.dq_accum) {
        float* const to = dq_accum_part<C>(order.row, warpgroup, p);
        ptx::fence_proxy_async();  // after the sums of others, which wait() has seen
        if (order.stores) {
          ptx::cp_async_bulk_store_evict_last(to, from, C::kDqBytes);
        } else {
          ptx::cp_reduce_async_bulk_add_f32(to, from, C::kDqBytes);
        }
        ptx::cp_async_bulk_commit_group();
        ptx::cp_async_bulk_wait_group_read();
      }
      ptx::mbarrier_arrive(dq.empty);
      if (p.dq_accum && order.counts) {
        ptx::cp_async_bulk_wait_group();
        ptx::fence_proxy_async();
        order.release(kParts);
      }
    });
    if (!p.dq_accum) return;
    ptx::cp_async_bulk_wait_group();  // all dQ of the task is in the accumulator
    ptx::fence_proxy_async();
    add_parts_done<C>(p, task, kParts);
  });
}

template <class C>
class BwdConsumer {
  using Smem = typename C::Smem;
  using Packed = PackedTile<C>;
  static constexpr bool kLateDp = BwdScores<C>::kLateDp;
  // Whether S of the next tile begins with its bias before the warpgroup's turn: above D = 96 there
  // are no registers for it beside P and dS.
  static constexpr bool kEarlyBias = C::kBias && C::kDim <= 96;

 public:
  __device__ __forceinline__ BwdConsumer(Smem& shared, uint32_t smem, int index,
                                         const Sm90BwdParams& p)
      : wg_(shared, smem, index, p) {}

  __device__ __forceinline__ void run() {
    consume_tasks(wg_, [&](const BwdTask& task) { compute(task); });
  }

 private:
  static constexpr bool kDqByRows = C::kDqByRows;
  static constexpr int kDqColumns = C::kDqColumns;
  __device__ __forceinline__ int first_dq_column() const {
    return kDqByRows ? 0 : wg_.index * kDqColumns;
  }

  // One warpgroup issues its MMAs, then the other; the first begins.
  __device__ __forceinline__ void wait_turn() const {
    ptx::mbarrier_wait(wg_.slot(C::kMmaBarrier + wg_.index).full,
                       (wg_.ring.count() + wg_.index + 1) % 2);
  }
  __device__ __forceinline__ void pass_turn() const {
    warp_arrive(wg_.slot(C::kMmaBarrier + 1 - wg_.index).full);
  }

  __device__ __forceinline__ tma::Slot ds_slot() const {
    return wg_.slot(C::kDsBarrier + wg_.ring.at());
  }
  // dS of this tile for both warpgroups, which compute dQ from it one tile later.
  __device__ __forceinline__ void publish_ds(const Packed& rdS) {
    store_ds<C>(wg_, rdS, wg_.first_key());
    ptx::fence_proxy_async_shared();
  }
  // dS as the gradient of a bias by rows, from registers: in fp32 as it was before it was rounded.
  __device__ __forceinline__ void store_bias_gradient(const BwdTask& task, const Packed& rdS) {
    if constexpr (C::kFloatBias) {
      store_ds_registers<C, float>(wg_, task, [&](int i) { return scores_.rdP[i]; });
    } else if constexpr (C::kBiasRows && !C::kMask) {
      store_ds_registers<C, uint16_t>(wg_, task, [&](int i) {
        const uint32_t two = rdS[i / 8][i % 8 / 2];
        return static_cast<uint16_t>(i % 2 ? two >> 16 : two);
      });
    }
  }
  // dS of the tile before, by both warpgroups.
  __device__ __forceinline__ uint32_t previous_ds() const { return wg_.ds_tile(wg_.stage + 1); }
  __device__ __forceinline__ void wait_previous_ds() const {
    const tma::Ring<2> before(wg_.ring.count() - 1);
    before.wait_full(wg_.slot(C::kDsBarrier + before.at()));
  }

  // dQ = dS K of the tile before, or dQ^T = K^T dS^T.
  __device__ __forceinline__ void issue_dq() {
    const uint32_t sdS = previous_ds() + (kDqByRows ? wg_.index * 64 * 128 : 0);
    const uint32_t sK = wg_.smem + offsetof(Smem, sK) +
                        first_dq_column() / 64 * C::Keys::kBlockBytes + first_dq_column() % 64 * 2;
    const uint32_t ds = C::ScoreTile::descriptor(sdS), k = C::Keys::descriptor(sK);
    using Wgmma = ptx::Wgmma<C::kBf16, 2 * C::kDqSums>;
    if constexpr (C::kDqTransposed) {
      Wgmma::ss_ta_first(rdQ_, C::Keys::across(k, 0), C::ScoreTile::along(ds, 0));
    } else {
      Wgmma::ss_tb_first(rdQ_, C::ScoreTile::along(ds, 0), C::Keys::across(k, 0));
    }
#pragma unroll
    for (int step = 1; step < C::kBlockK / 16; ++step) {
      if constexpr (C::kDqTransposed) {
        Wgmma::ss_ta(rdQ_, C::Keys::across(k, step), C::ScoreTile::along(ds, step));
      } else {
        Wgmma::ss_tb(rdQ_, C::ScoreTile::along(ds, step), C::Keys::across(k, step));
      }
    }
    ptx::wgmma_commit_group();
  }
  // dQ to shared memory, of the CTA's tile of queries number `tile`.
  __device__ __forceinline__ void write_dq(uint32_t tile) {
    tma::Ring<1>(tile).wait_empty(wg_.slot(C::kDqBarrier + wg_.index));
    const uint32_t to =
        wg_.opaque_smem() + offsetof(Smem, sdQ) + wg_.index * C::kDqBytes + warpgroup_thread() * 16;
#pragma unroll
    for (int i = 0; i < C::kDqSums / 4; ++i) {
      ptx::st_shared_v4(to + i * 2048,
                        uint4{__float_as_uint(rdQ_[4 * i]), __float_as_uint(rdQ_[4 * i + 1]),
                              __float_as_uint(rdQ_[4 * i + 2]), __float_as_uint(rdQ_[4 * i + 3])});
    }
  }
  // Hands dQ in shared memory to store_dq().
  __device__ __forceinline__ void send_dq() {
    ptx::fence_proxy_async_shared();
    warp_arrive(wg_.slot(C::kDqBarrier + wg_.index).full);
  }
  // Sends dQ of the tile before, and frees its dS, where the next tile's goes.
  __device__ __forceinline__ void send_previous_dq() {
    warp_arrive(ds_slot().empty);
    send_dq();
  }

  // P in 16 bits, and dS from it once dP is there; waits until sdS has room for it. `hidden` is of
  // find_hidden(), with a bias.
  template <bool kMore>
  __device__ __forceinline__ void find_ds(Packed& rP, Packed& rdS, const tma::Slot& ds,
                                          uint32_t hidden = 0) {
    if constexpr (C::kBias) clear_hidden(scores_.rS, hidden);
    pack<C>(rP, scores_.rS);
    ptx::wgmma_wait_group<0>(scores_.rdP);
    if (!kMore) warp_arrive(wg_.slot(C::kVBarrier).empty);  // the last dP was V's last reader
    scores_.differentiate(wg_, rP);
    if constexpr (C::kBias) clear_hidden(scores_.rdP, hidden);
    pack<C>(rdS, scores_.rdP);
    wg_.ring.wait_empty(ds);
  }

  // A tile of queries, whose P is there and whose dP is on its way. Afterwards that is so of the
  // next tile, if there is kMore, and dQ of the tile before has left. (For the `first` of a task,
  // dQ is computed from whatever lies in sdS and dropped: ptxas serialises MMAs that are not always
  // issued. It also does so if more than dP is on its way from one step to the next.)
  template <bool kMore>
  __device__ __forceinline__ void step(const BwdTask& task, bool first) {
    if (wg_.needs_guard()) return step_guarded<kMore>(task, first);
    const tma::Slot q = wg_.q_slot(), grad_out = wg_.grad_out_slot(), ds = ds_slot();
    Packed rP, rdS;
    find_ds<kMore>(rP, rdS, ds);
    publish_ds(rdS);
    warp_arrive(ds.full);
    store_bias_gradient(task, rdS);
    if constexpr (kMore && kEarlyBias) scores_.start_from_bias(wg_, wg_.next_tile());

    // dV and dK of this tile and dQ of the tile before, in the warpgroup's turn.
    wait_turn();
    ptx::wgmma_keep_alive(rP);  // packed by now, and not between the MMAs
    ptx::wgmma_keep_alive(rdS);
    ptx::wgmma_fence();
    issue_gradient<C>(rdV_, rP, wg_.stage_grad_out());
    issue_gradient<C>(rdK_, rdS, wg_.stage_q());
    wait_previous_ds();
    ptx::wgmma_fence();
    issue_dq();
    ptx::wgmma_wait_group<1>(rdV_);
    ptx::wgmma_wait_group<1>(rdK_);
    ptx::wgmma_keep_alive(rP);
    ptx::wgmma_keep_alive(rdS);
    warp_arrive(grad_out.empty);
    warp_arrive(q.empty);

    // S and dP of the next tile, still in the turn; dQ leaves its registers in between.
    wg_.advance();
    if (kMore) {
      if constexpr (C::kBias && !kEarlyBias) scores_.start_from_bias(wg_, wg_.ring);
      ptx::mbarrier_wait(wg_.q_slot().full, wg_.ring.parity());
      ptx::wgmma_fence();
      scores_.issue_scores(wg_);
    }
    ptx::wgmma_wait_group<kMore ? 1 : 0>(rdQ_);
    if (!first) write_dq(wg_.ring.count() - 2);
    if (kMore && !kLateDp) scores_.issue_dp(wg_);
    pass_turn();

    // P of the next tile, in the other warpgroup's turn.
    if (!first) send_previous_dq();
    if (kMore) scores_.find_probabilities(wg_, task);
    if (kMore && kLateDp) scores_.issue_dp(wg_);
  }

  // Under a causal mask the first queries that see a tile of keys see the first 64 of these alone.
  // How many tiles of queries come last that see none of the warpgroup's keys: there is at least
  // one that does before them.
  __device__ __forceinline__ int hidden_tiles(const BwdTask& task) const {
    if (!C::kSkipsHidden || task.ascending) return 0;
    const int last_row = task.query_begin + C::kBlockQ - 1;
    const bool hidden = task.seq.end(last_row, wg_.p) <= task.first_key + wg_.first_key();
    return hidden && last_row + 1 < task.query_end ? wg_.p.group : 0;
  }
  // One of these: dS is 0, and dQ of the tile before leaves.
  __device__ __forceinline__ void step_hidden(const BwdTask& task) {
    const tma::Slot q = wg_.q_slot(), grad_out = wg_.grad_out_slot(), ds = ds_slot();
    const bool guarded_before = wg_.needs_guard();
    ptx::mbarrier_wait(q.full, wg_.ring.parity());
    ptx::mbarrier_wait(grad_out.full, wg_.ring.parity());
    wg_.inspect_query_tile(task);
    wg_.ring.wait_empty(ds);
    constexpr Packed kZeros = {};
    publish_ds(kZeros);
    warp_arrive(ds.full);
    wait_turn();
    if (guarded_before) {
      const auto before = wg_.tile_before(task);
      find_dq_guarded(task, before.first, before.head);
    } else {
      find_dq();
    }
    write_dq(wg_.ring.count() - 1);
    pass_turn();
    warp_arrive(grad_out.empty);
    warp_arrive(q.empty);
    wg_.advance();
    send_previous_dq();
  }

  // step() where a mask hides something not finite, in this tile or in the tile before.
  template <bool kMore>
  __device__ __forceinline__ void step_guarded(const BwdTask& task, bool first) {
    const tma::Slot q = wg_.q_slot(), grad_out = wg_.grad_out_slot(), ds = ds_slot();
    const void* const bias = bias_of(wg_, task, wg_.head());
    Packed rP, rdS;
    find_ds<kMore>(rP, rdS, ds, find_hidden(wg_, task, bias));
    add_dv_guarded<C>(wg_, rdV_, rP, task, bias);
    publish_ds(rdS);
    wg_.sync();  // the warpgroup's dS is there
    warp_arrive(ds.full);
    store_bias_gradient(task, rdS);
    multiply_guarded<C, typename C::Rows>(
        rdK_, C::kBlockQ,
        [&](int key, int query) { return ds_at(wg_, task, query, wg_.first_key() + key, bias); },
        wg_.stage_q(), 0);
    wait_turn();
    if (!first) {
      const auto before = wg_.tile_before(task);
      find_dq_guarded(task, before.first, before.head);
      write_dq(wg_.ring.count() - 1);
    }
    pass_turn();
    warp_arrive(grad_out.empty);
    warp_arrive(q.empty);
    wg_.advance();
    if (!first) send_previous_dq();
    if (kMore) {
      const bool in_tile = wg_.nonfinite & wg_.kInTile;
      scores_.begin_tile(wg_, task);
      if (in_tile) wg_.nonfinite |= wg_.kInPreviousTile;
    }
  }
  // dQ of the tile before.
  __device__ __forceinline__ void find_dq() {
    wait_previous_ds();
    ptx::wgmma_fence();
    issue_dq();
    ptx::wgmma_wait_group<0>(rdQ_);
  }
  // The same of head `head` (which is looked at with a bias only) from query `first`
  // on.
  __device__ __forceinline__ void find_dq_guarded(const BwdTask& task, int first, int head) {
    const void* const bias = bias_of(wg_, task, head);
    wait_previous_ds();
#pragma unroll
    for (float& x : rdQ_) x = 0;
    const auto ds = [&](int query, int key) {
      return ds_at(wg_, task, first, previous_ds(), query + (kDqByRows ? 64 * wg_.index : 0), key,
                   bias);
    };
    multiply_guarded<C, typename C::Keys, C::kDqTransposed>(
        rdQ_, C::kBlockK, ds, wg_.opaque_smem() + offsetof(Smem, sK), first_dq_column());
  }

  __device__ __forceinline__ void compute(const BwdTask& task) {
    const int first_key = task.first_key + wg_.first_key();
#pragma unroll
    for (int i = 0; i < C::kDim / 2; ++i) rdK_[i] = rdV_[i] = 0;
    ptx::mbarrier_wait(wg_.slot(C::kKBarrier).full, task.keys_parity);
    clear_unseen_keys(wg_, task, first_key, wg_.opaque_smem() + offsetof(Smem, sK),
                      wg_.first_row());
    if constexpr (C::kBias) scores_.start_from_bias(wg_, wg_.ring);
    if constexpr (C::kKeySteps > 0) scores_.load_keys(wg_);
    ptx::mbarrier_wait(wg_.q_slot().full, wg_.ring.parity());
    ptx::wgmma_fence();
    scores_.issue_scores(wg_);
    ptx::mbarrier_wait(wg_.slot(C::kVBarrier).full, task.keys_parity);
    clear_unseen_keys(wg_, task, first_key, wg_.opaque_smem() + offsetof(Smem, sV),
                      wg_.first_row());
    if (!kLateDp) scores_.issue_dp(wg_);
    // Where dV and dK leave through sdS, nonfinite_keys() lets both consumers know that it is free.
    if (!C::kOwnGrads && warpgroup_thread() == 0) ptx::cp_async_bulk_wait_group_read();
    wg_.nonfinite = !C::kLooksBeside && nonfinite_keys(wg_, task) ? wg_.kInKeys : 0;
    scores_.find_probabilities(wg_, task);
    if (kLateDp) scores_.issue_dp(wg_);
    const int hidden = hidden_tiles(task);
#pragma unroll 1
    while (wg_.ring.count() + hidden != task.last_tile) {
      step<true>(task, wg_.ring.count() == task.first_tile);
    }
    step<false>(task, task.first_tile + hidden == task.last_tile);
    if (C::kSkipsHidden && hidden > 0) {
      if (C::kOwnGrads) send_grad_value(wg_, task, rdV_);
#pragma unroll 1
      for (int i = 0; i < hidden; ++i) step_hidden(task);
    }
    finish(task, C::kOwnGrads && hidden > 0);
  }

  // The last dQ, dV unless it was sent, and dK.
  __device__ __forceinline__ void finish(const BwdTask& task, bool sent_dv) {
    if (wg_.needs_guard()) {
      find_dq_guarded(task, query_tile_with<C>(task, 0), (task.key_head + 1) * wg_.p.group - 1);
    } else {
      find_dq();
    }
    warp_arrive(wg_.slot(C::kKBarrier).empty);
    warp_arrive(wg_.slot(C::kDsBarrier + tma::Ring<2>(wg_.ring.count() - 1).at()).empty);
    if (!C::kOwnGrads) wait_grads(wg_);
    if (!sent_dv) send_grad_value(wg_, task, rdV_);
    write_dq(wg_.ring.count() - 1);
    send_dq();
    send_grad_key(wg_, task, rdK_);
  }
  BwdWarpgroup<C> wg_;
  BwdScores<C> scores_;
  float rdK_[C::kDim / 2], rdV_[C::kDim / 2], rdQ_[C::kDqSums];
};

}  // namespace flashmoe::cuda::sm90
