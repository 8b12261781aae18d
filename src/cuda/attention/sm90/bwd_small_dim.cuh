// The consumers of the sm90 backward pass with a bias up to head dim 32: warpgroups with 64 keys
// each and their dK and dV.
//
// MMAs are short at such head dims, and most of the time goes to P, dS and waiting. So a consumer
// does one thing after the other, with as few registers as that takes, and there are twice as many
// of them as elsewhere, in one CTA or in two: one's waits are another's instructions.
//
//   MMAs of a consumer   S(n) |      | dP(n) dV(n) |       | dK(n), of one consumer dQ(n-1) |
//   meanwhile                 | P(n) |             | dS(n) |                                |
//
// dQ of a tile takes the dS of all consumers from shared memory. One consumer computes it, each in
// its turn, one tile late: dS is read once, where consumers that shared the columns of dQ would
// each read all of it.
#pragma once

#include "cuda/attention/sm90/bwd_epilogue.cuh"
#include "cuda/attention/sm90/bwd_guard.cuh"
#include "cuda/attention/sm90/bwd_scores.cuh"

namespace flashmoe::cuda::sm90 {

template <class C>
class BwdSmallDimConsumer {
  using Smem = typename C::Smem;
  using Packed = PackedTile<C>;

 public:
  __device__ __forceinline__ BwdSmallDimConsumer(Smem& shared, uint32_t smem, int index,
                                                 const Sm90BwdParams& p)
      : wg_(shared, smem, index, p) {}

  __device__ __forceinline__ void run() {
    consume_tasks(wg_, [&](const BwdTask& task) { compute(task); });
  }

 private:
  // Whether dQ of the CTA's tile of queries number `tile` is this consumer's.
  __device__ __forceinline__ bool has_dq(uint32_t tile) const {
    return tile % C::kWarpgroups == wg_.index;
  }
  __device__ __forceinline__ tma::Slot ds_slot(const tma::Ring<2>& tile) const {
    return wg_.slot(C::kDsBarrier + tile.at());
  }
  __device__ __forceinline__ tma::Ring<2> previous() const {
    return tma::Ring<2>(wg_.ring.count() - 1);
  }
  __device__ __forceinline__ uint32_t previous_ds() const { return wg_.ds_tile(wg_.stage + 1); }

  // S, and P in place of it. Sets kInPreviousTile where the tile before had kInTile.
  __device__ __forceinline__ void find_probabilities(const BwdTask& task) {
    const bool before = wg_.nonfinite & wg_.kInTile;
    scores_.start_from_bias(wg_, wg_.ring);
    ptx::mbarrier_wait(wg_.q_slot().full, wg_.ring.parity());
    ptx::wgmma_fence();
    scores_.issue_scores(wg_);
    scores_.find_probabilities(wg_, task);
    if (before) wg_.nonfinite = tma::warp_uniform(wg_.nonfinite | wg_.kInPreviousTile);
  }

  // dS to shared memory, where the tile of two before is done with.
  __device__ __forceinline__ void publish_ds(const Packed& rdS) {
    wg_.ring.wait_empty(ds_slot(tma::Ring<2>(wg_.ring.count())));
    store_ds<C>(wg_, rdS, wg_.first_key());
    ptx::fence_proxy_async_shared();
  }

  // A tile of queries: dV and dK of it, and dQ of the tile before if it is the consumer's turn.
  // Returns whether it was the task's last.
  __device__ __forceinline__ bool step(const BwdTask& task) {
    find_probabilities(task);
    Packed rP, rdS;
    pack<C>(rP, scores_.rS);
    if (wg_.nonfinite & wg_.kInTile) {
      add_guarded(task, rP);
    } else {
      scores_.issue_dp(wg_);
      issue_gradient<C>(rdV_, rP, wg_.stage_grad_out());
      ptx::wgmma_wait_group<1>(scores_.rdP);
      scores_.differentiate(wg_, rP);
      pack<C>(rdS, scores_.rdP);
      publish_ds(rdS);
      warp_arrive(ds_slot(tma::Ring<2>(wg_.ring.count())).full);
      ptx::wgmma_fence();
      issue_gradient<C>(rdK_, rdS, wg_.stage_q());
      ptx::wgmma_wait_group<0>(rdV_);
      ptx::wgmma_wait_group<0>(rdK_);
      ptx::wgmma_keep_alive(rP);
      ptx::wgmma_keep_alive(rdS);
    }
    const uint32_t tile = wg_.ring.count();
    const bool last = tile == task.last_tile;
    if (last) warp_arrive(wg_.slot(C::kVBarrier).empty);  // the last dP was V's last reader
    const auto before = wg_.tile_before(task);
    warp_arrive(wg_.grad_out_slot().empty);
    warp_arrive(wg_.q_slot().empty);
    // Of a task's first tile, the tile before is another task's, whose dQ is done.
    if (tile != task.first_tile && has_dq(tile - 1)) {
      add_dq(task, wg_.nonfinite & wg_.kInPreviousTile, before.first, before.head);
    }
    wg_.advance();
    return last;
  }

  // dV and dK where a mask or the bias hides something not finite in the tile.
  __device__ __forceinline__ void add_guarded(const BwdTask& task, Packed& rP) {
    const void* const bias = bias_of(wg_, task, wg_.head());
    const uint32_t hidden = find_hidden(wg_, task, bias);
    Packed rdS;
    clear_hidden(rP, hidden);
    scores_.issue_dp(wg_);
    ptx::wgmma_wait_group<0>(scores_.rdP);
    scores_.differentiate(wg_, rP);
    pack<C>(rdS, scores_.rdP);
    clear_hidden(rdS, hidden);
    wg_.ring.wait_empty(ds_slot(tma::Ring<2>(wg_.ring.count())));
    add_dv_guarded<C>(wg_, rdV_, rP, task, bias);
    publish_ds(rdS);
    wg_.sync();  // the warpgroup's dS is there
    multiply_guarded<C, typename C::Rows>(
        rdK_, C::kBlockQ,
        [&](int key, int query) { return ds_at(wg_, task, query, wg_.first_key() + key, bias); },
        wg_.stage_q(), 0);
    // Only now: of a task's last tile other consumers' dV and dK go over dS as soon as dQ is there.
    warp_arrive(ds_slot(tma::Ring<2>(wg_.ring.count())).full);
  }

  using QuerySums = float[C::kDqColumns / 2];

  // dQ of the tile before, of head `head` from query `first` on: to store_dq(), or to memory where
  // it is complete.
  __device__ __forceinline__ void add_dq(const BwdTask& task, bool guarded, int first, int head) {
    QuerySums rdQ;
    if (guarded) {
      find_dq_guarded(rdQ, task, first, head);
    } else {
      find_dq(rdQ);
    }
    if (wg_.p.stores_dq) {
      warp_arrive(ds_slot(previous()).empty);
      store_dq_rows<C>(rdQ, task, head, first, wg_.p);
    } else {
      send_dq(rdQ);
    }
  }
  // dQ = dS K of the tile before.
  __device__ __forceinline__ void find_dq(QuerySums& rdQ) {
    using Wgmma = ptx::Wgmma<C::kBf16, C::kDqColumns>;
    const uint32_t sdS = previous_ds(), sK = wg_.smem + offsetof(Smem, sK);
    previous().wait_full(ds_slot(previous()));
    ptx::wgmma_fence();
    Wgmma::ss_tb_first(rdQ, C::ScoreTile::along(C::ScoreTile::descriptor(sdS), 0),
                       C::Keys::across(C::Keys::descriptor(sK), 0));
#pragma unroll
    for (int step = 1; step < C::kBlockK / 16; ++step) {
      Wgmma::ss_tb(rdQ, C::ScoreTile::along(C::ScoreTile::descriptor(sdS), step),
                   C::Keys::across(C::Keys::descriptor(sK), step));
    }
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>(rdQ);
  }
  // The same where something not finite is hidden in the tile before.
  __device__ __forceinline__ void find_dq_guarded(QuerySums& rdQ, const BwdTask& task, int first,
                                                  int head) {
    const void* const bias = bias_of(wg_, task, head);
    previous().wait_full(ds_slot(previous()));
#pragma unroll
    for (float& x : rdQ) x = 0;
    multiply_guarded<C, typename C::Keys>(
        rdQ, C::kBlockK,
        [&](int query, int key) {
          return ds_at(wg_, task, first, previous_ds(), query, key, bias);
        },
        wg_.opaque_smem() + offsetof(Smem, sK), 0);
  }
  // dQ of the tile before through shared memory to store_dq(). Its dS is freed after that: so dQ of
  // a tile is written only when that of the tile before was, of a task's last tile as well, which
  // no dS comes after that would have waited for it.
  __device__ __forceinline__ void send_dq(const QuerySums& rdQ) {
    const tma::Slot dq = wg_.slot(C::kDqBarrier);
    wg_.ring.wait_empty(ds_slot(tma::Ring<2>(wg_.ring.count())));
    tma::Ring<1>(previous().count()).wait_empty(dq);
    const uint32_t to = wg_.opaque_smem() + offsetof(Smem, sdQ) + warpgroup_thread() * 16;
#pragma unroll
    for (int i = 0; i < C::kDqColumns / 8; ++i) {
      ptx::st_shared_v4(to + i * 2048,
                        uint4{__float_as_uint(rdQ[4 * i]), __float_as_uint(rdQ[4 * i + 1]),
                              __float_as_uint(rdQ[4 * i + 2]), __float_as_uint(rdQ[4 * i + 3])});
    }
    ptx::fence_proxy_async_shared();
    warp_arrive(dq.full);
    warp_arrive(ds_slot(previous()).empty);
  }

  __device__ __forceinline__ void compute(const BwdTask& task) {
    const int first_key = task.first_key + wg_.first_key();
#pragma unroll
    for (int i = 0; i < C::kDim / 2; ++i) rdK_[i] = rdV_[i] = 0;
    ptx::mbarrier_wait(wg_.slot(C::kKBarrier).full, task.keys_parity);
    ptx::mbarrier_wait(wg_.slot(C::kVBarrier).full, task.keys_parity);
    for (const uint32_t at : {offsetof(Smem, sK), offsetof(Smem, sV)}) {
      clear_unseen_keys(wg_, task, first_key, wg_.opaque_smem() + at, wg_.first_row());
    }
    // dV and dK of the task before have left sdS: nonfinite_keys() lets all consumers know.
    if (warpgroup_thread() == 0) ptx::cp_async_bulk_wait_group_read();
    wg_.nonfinite = nonfinite_keys(wg_, task) ? wg_.kInKeys : 0;
#pragma unroll 1
    while (!step(task)) {
    }
    finish(task);
  }

  // The last dQ, dV and dK.
  __device__ __forceinline__ void finish(const BwdTask& task) {
    if (has_dq(wg_.ring.count() - 1)) {
      add_dq(task, wg_.nonfinite & wg_.kInTile, task.query_begin,
             (task.key_head + 1) * wg_.p.group - 1);
    }
    warp_arrive(wg_.slot(C::kKBarrier).empty);
    wait_grads(wg_);
    send_grad_value(wg_, task, rdV_);
    send_grad_key(wg_, task, rdK_);
  }

  BwdWarpgroup<C> wg_;
  BwdScores<C> scores_;
  float rdK_[C::kDim / 2], rdV_[C::kDim / 2];
};

}  // namespace flashmoe::cuda::sm90
