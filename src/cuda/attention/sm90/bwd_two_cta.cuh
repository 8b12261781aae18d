// The consumers of the sm90 backward pass above head dim 128. dK and dV of 64 keys are more than
// the registers of one warpgroup hold beside what else it needs. So consumer 0 has S, dP and dV,
// and consumer 1 makes dK and dQ from the dS that consumer 0 leaves in shared memory:
//
//   consumer 0   dV(n) S(n+1) | dP(n+1)                    | dV(n+1) ...
//   meanwhile    dS(n)        | P(n+1)                     | dS(n+1)
//   consumer 1                | dK(n) dQ(n), which leaves  | dK(n+1) ...
//
// 64 keys alone would add all of dQ for every tile of queries, which is more than L2 takes. So a
// cluster of two CTAs shares a tile of 128 keys. They send each other their dS, and TMA loads Q and
// dO to both:
//
//              CTA 0                             CTA 1
//   keys       0-63: S, dP, dV, dK               64-127: S, dP, dV, dK
//   dQ         half of the columns, 128 keys     the other half, 128 keys
//
// Shared memory is BwdConfig::TwoCtaSmem, 225.5 KB at D = 256. It has no room for dQ on its way
// out: each thread adds its own to the accumulator. Registers of a thread: warpgroup 0 has 40,
// consumer 0 has 240 and consumer 1 has 224. In warpgroup 0 warp 0 is the producer, warp 1 sends
// dS, warp 2 keeps the order of sums, and warp 3 converts dQ of heads that are complete
// (bwd_convert_dq.cuh).
#pragma once

#include "cuda/attention/sm90/bwd_epilogue.cuh"
#include "cuda/attention/sm90/bwd_guard.cuh"
#include "cuda/attention/sm90/bwd_scores.cuh"

namespace flashmoe::cuda::sm90 {

// The thread that waits for the CTA's turn to add to dQ and passes it on: consumer 1 would lose
// microseconds by polling the semaphore.
template <class C>
__device__ __forceinline__ void keep_dq_order(const typename C::Smem& shared, uint32_t smem,
                                              const Sm90BwdParams& p) {
  const tma::Slot turn = C::slot(smem, C::kDqBarrier + 1);
  int parity = 0;
  for_each_task<C>(shared, smem, [&](const BwdTask& task) {
    if (!p.dq_accum) return;
    for_each_query_tile<C>(task, p, [&](int head, int first) {
      const SumOrder<C> order(task, head, first, p);
      order.wait();
      ptx::mbarrier_arrive(turn.empty);
      ptx::mbarrier_wait(turn.full, parity);
      parity ^= 1;
      order.release();
    });
    add_parts_done<C>(p, task, 1);
  });
}

// The thread that sends dS to the other CTA. There is room for it: the other's consumer 1, too, has
// arrived when it was done with the dS before, or there would be no new one here.
template <class C>
__device__ __forceinline__ void send_ds(const typename C::Smem& shared, uint32_t smem) {
  const int rank = ptx::cluster_ctarank();
  const uint32_t from = smem + offsetof(typename C::Smem, sdS) + rank * C::ScoreTile::kBlockBytes;
  const uint32_t to = ptx::mapa(from, 1 - rank);
  const uint32_t peer_ds = C::slot(smem, C::kPeerDsBarrier).full;
  const uint32_t barrier = ptx::mapa(peer_ds, 1 - rank);
  int parity = 0;
  for_each_task<C>(shared, smem, [&](const BwdTask& task) {
#pragma unroll 1
    for (int n = 0; n < task.tiles; ++n) {
      ptx::mbarrier_wait(C::slot(smem, C::kDsBarrier).full, parity);
      parity ^= 1;
      ptx::mbarrier_arrive_expect_tx(peer_ds, C::ScoreTile::kBlockBytes);
      ptx::cp_async_bulk_cluster(to, from, C::ScoreTile::kBlockBytes, barrier);
    }
  });
}

// Consumer 0: S, dP and dV.
template <class C>
class BwdTwoCtaDv {
  using Smem = typename C::Smem;
  using Packed = PackedTile<C>;
  static constexpr bool kLateDp = BwdScores<C>::kLateDp;

 public:
  __device__ __forceinline__ BwdTwoCtaDv(Smem& shared, uint32_t smem, const Sm90BwdParams& p)
      : wg_(shared, smem, 0, p) {}

  __device__ __forceinline__ void run() {
    consume_tasks(wg_, [&](const BwdTask& task) { compute(task); });
  }

 private:
  // Waits until consumers 1 of both CTAs are done with the dS before.
  __device__ __forceinline__ void wait_ds_empty() {
    ptx::mbarrier_wait(wg_.slot(C::kDsBarrier).empty, ds_parity_);
    ds_parity_ ^= 1;
  }
  // dS for consumers 1 of both CTAs.
  __device__ __forceinline__ void publish_ds(const Packed& rdS) {
    store_ds<C>(wg_, rdS, wg_.first_key());
    ptx::fence_proxy_async_shared();
    warp_arrive(wg_.slot(C::kDsBarrier).full);
  }

  // S of the next tile of queries, before this tile is done with.
  __device__ __forceinline__ void issue_next_scores() {
    tma::Ring<C::kStages> next(wg_.ring.count() + 1);
    next.wait_full(wg_.slot(C::kQBarrier + next.at()));
    const uint32_t place = row_places<C>(tma::warp_uniform(next.count() % (2 * C::kStages))).q;
    ptx::wgmma_fence();
    scores_.issue_mma(wg_, scores_.rS, wg_.smem + offsetof(Smem, sK),
                      wg_.smem + offsetof(Smem, sRows) + place);
  }

  // A tile of queries, whose P is there and whose dP is on its way. Afterwards that is so of the
  // next tile, if there is kMore.
  template <bool kMore>
  __device__ __forceinline__ void step(const BwdTask& task) {
    if (wg_.needs_guard()) return step_guarded<kMore>(task);
    const tma::Slot q = wg_.q_slot(), grad_out = wg_.grad_out_slot();
    Packed rP, rdS;
    pack<C>(rP, scores_.rS);
    ptx::wgmma_fence();
    issue_gradient<C>(rdV_, rP, wg_.stage_grad_out());
    ptx::wgmma_wait_group<1>(scores_.rdP);
    if (kMore && !kLateDp) issue_next_scores();
    scores_.differentiate(wg_, rP);
    pack<C>(rdS, scores_.rdP);
    wg_.cluster_arrive(q.empty);
    if (kMore) wg_.advance();
    if (kMore && kLateDp) {
      wg_.ring.wait_full(wg_.q_slot());
      ptx::wgmma_fence();
      scores_.issue_scores(wg_);
    }
    wait_ds_empty();
    publish_ds(rdS);
    if (kMore) {
      ptx::wgmma_wait_group<1>(rdV_);
      ptx::wgmma_keep_alive(rP);
      wg_.cluster_arrive(grad_out.empty);
      if (!kLateDp) scores_.issue_dp(wg_);
      scores_.find_probabilities(wg_, task);
      if (kLateDp) scores_.issue_dp(wg_);
    } else {
      ptx::wgmma_wait_group<0>(rdV_);
      ptx::wgmma_keep_alive(rP);
    }
  }
  // step() where a mask hides something not finite; P passes through the place where dS will be.
  // Hidden numbers of dS become zeros, also for the other CTA, whose consumers know nothing of this
  // CTA's V.
  template <bool kMore>
  __device__ __forceinline__ void step_guarded(const BwdTask& task) {
    const tma::Slot q = wg_.q_slot(), grad_out = wg_.grad_out_slot();
    Packed rP, rdS;
    pack<C>(rP, scores_.rS);
    ptx::wgmma_wait_group<0>(scores_.rdP);
    scores_.differentiate(wg_, rP);
    scores_.mask(wg_, scores_.rdP, task.seq, task.first_key + wg_.first_key());
    pack<C>(rdS, scores_.rdP);
    wait_ds_empty();
    add_dv_guarded<C>(wg_, rdV_, rP, task);
    publish_ds(rdS);
    wg_.cluster_arrive(q.empty);
    if (kMore) {
      wg_.cluster_arrive(grad_out.empty);
      wg_.advance();
      scores_.begin_tile(wg_, task);
    }
  }

  __device__ __forceinline__ void compute(const BwdTask& task) {
    const Sm90BwdParams& p = wg_.p;
    const int first_key = task.first_key + wg_.first_key();
#pragma unroll
    for (float& x : rdV_) x = 0;
    ptx::mbarrier_wait(wg_.slot(C::kKBarrier).full, task.keys_parity);
    if (any_unseen(wg_, task, first_key, 64)) {
      ptx::bar_sync(C::kAgreeBarrier, C::kWarpgroups * kWarpgroupThreads);  // K is cleared
    }
    ptx::mbarrier_wait(wg_.q_slot().full, wg_.ring.parity());
    ptx::wgmma_fence();
    scores_.issue_scores(wg_);
    ptx::mbarrier_wait(wg_.slot(C::kVBarrier).full, task.keys_parity);
    clear_unseen_keys(wg_, task, first_key, wg_.opaque_smem() + offsetof(Smem, sV), 0);
    if (!kLateDp) scores_.issue_dp(wg_);
    // V alone is looked at: of K nothing reaches dV or dS but where it is seen.
    const bool bad =
        any_mask(p) &&
        warpgroup_any_nonfinite(wg_, wg_.opaque_smem() + offsetof(Smem, sV), C::Keys::kBytes);
    wg_.nonfinite = bad ? wg_.kInKeys : 0;
    scores_.find_probabilities(wg_, task);
    if (kLateDp) scores_.issue_dp(wg_);
#pragma unroll 1
    for (int n = 1; n < task.tiles; ++n) step<true>(task);
    step<false>(task);
    warp_arrive(wg_.slot(C::kKBarrier).empty);

    if (task.part != BwdTask::kWhole) {
      store_part(wg_, rdV_, p.grad_value, p.splits * p.split_tiles + task.part);
    } else {
      // dV leaves through the last dO.
      const uint32_t sGrad = wg_.stage_grad_out();
      write_gradient<C>(sGrad, rdV_, 1.f);
      ptx::fence_proxy_async_shared();
      wg_.sync();  // all of it is there
      store_gradient(wg_, task, p.grad_value, p.grad_value_strides, p.grad_value_map, p.head_dim_v,
                     sGrad, first_key);
      if (warpgroup_thread() == 0) ptx::cp_async_bulk_wait_group_read();
    }
    wg_.cluster_arrive(wg_.grad_out_slot().empty);
    wg_.advance();
  }

  BwdWarpgroup<C> wg_;
  BwdScores<C> scores_;
  int ds_parity_ = 1;  // the first wait finds sdS empty
  float rdV_[C::kDim / 2];
};

// Consumer 1: dK and dQ from the dS that consumers 0 of both CTAs leave in shared memory.
template <class C>
class BwdTwoCtaDkDq {
  using Smem = typename C::Smem;

 public:
  __device__ __forceinline__ BwdTwoCtaDkDq(Smem& shared, uint32_t smem, const Sm90BwdParams& p)
      : wg_(shared, smem, 1, p) {}

  __device__ __forceinline__ void run() {
    consume_tasks(wg_, [&](const BwdTask& task) { compute(task); });
  }

 private:
  // dQ of the CTA: see BwdConfig::kDqFirst. There may be no second part.
  static constexpr int kFirst = C::kDqFirst, kSecond = C::kDqSecond;
  struct DqTile {
    float first[kFirst / 2], second[kSecond > 0 ? kSecond / 2 : 1];
  };
  __device__ __forceinline__ int first_column() const { return kFirst * wg_.part; }
  __device__ __forceinline__ int second_column() const { return 128 + kSecond * wg_.part; }

  // dS of one CTA's keys, half a tile.
  __device__ __forceinline__ uint32_t ds_of(int rank) const {
    return wg_.recompute(wg_.ds_tile(0) + rank * C::ScoreTile::kBlockBytes);
  }

  // dK += dS^T Q
  __device__ __forceinline__ void issue_dk() {
    const uint32_t sdS = ds_of(wg_.part), sQ = wg_.recompute(wg_.stage_q());
#pragma unroll
    for (int step = 0; step < C::kBlockQ / 16; ++step) {
      ptx::Wgmma<C::kBf16, C::kDim>::ss_tatb(
          rdK_, C::ScoreTile::across(C::ScoreTile::descriptor(sdS), step),
          C::Rows::across(C::Rows::descriptor(sQ), step));
    }
    ptx::wgmma_commit_group();
  }
  // kN columns of dQ = dS K of 64 keys, or with kAdd of dQ += dS K.
  template <int kN, bool kAdd>
  __device__ __forceinline__ void issue_dq_columns(float (&dq)[kN / 2], uint32_t sdS, uint32_t sK) {
    using Wgmma = ptx::Wgmma<C::kBf16, kN>;
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const uint64_t ds = C::ScoreTile::along(C::ScoreTile::descriptor(sdS), step);
      const uint64_t keys = C::Keys::across(C::Keys::descriptor(sK), step);
      if (!kAdd && step == 0) {
        Wgmma::ss_tb_first(dq, ds, keys);
      } else {
        Wgmma::ss_tb(dq, ds, keys);
      }
    }
  }
  // dQ of the CTA's own keys, then of the other CTA's.
  __device__ __forceinline__ void issue_own_dq(DqTile& dq) {
    const uint32_t sdS = ds_of(wg_.part), sK = wg_.smem + offsetof(Smem, sK);
    issue_dq_columns<kFirst, false>(dq.first, sdS,
                                    wg_.recompute(sK + first_column() / 64 * C::Keys::kBlockBytes));
    if constexpr (kSecond > 0) {
      issue_dq_columns<kSecond, false>(
          dq.second, sdS, wg_.recompute(sK + 2 * C::Keys::kBlockBytes + second_column() % 64 * 2));
    }
  }
  __device__ __forceinline__ void issue_peer_dq(DqTile& dq) {
    static_assert(C::PeerKeys::kBlockBytes == C::Keys::kBlockBytes);
    const uint32_t sdS = ds_of(1 - wg_.part), sK = wg_.smem + offsetof(Smem, sPeerK);
    issue_dq_columns<kFirst, true>(dq.first, sdS, wg_.recompute(sK));
    if constexpr (kSecond > 0) {
      issue_dq_columns<kSecond, true>(
          dq.second, sdS, wg_.recompute(sK + C::PeerKeys::kBlockBytes + second_column() % 64 * 2));
    }
    ptx::wgmma_commit_group();
  }

  // Columns of dQ to the accumulator, from `column` on.
  template <int kCount>
  __device__ __forceinline__ void add_columns(const float (&dq)[kCount], float* accum, int column,
                                              bool stores) const {
    if (!wg_.p.dq_accum) return;
    float* const to =
        accum + column / 64 * (64 * 64) + column % 64 / 8 * 512 + warpgroup_thread() * 4;
    if (stores) {
#pragma unroll
      for (int i = 0; i < kCount / 4; ++i) {
        *reinterpret_cast<float4*>(to + i * 512) =
            float4{dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]};
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount / 4; ++i) {
        const float four[4] = {dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]};
        ptx::red_add_v4_f32(to + i * 512, four);
      }
    }
  }
  // The CTA's turn to add to the dQ of a tile of queries: see keep_dq_order().
  __device__ __forceinline__ void wait_turn() {
    if (!wg_.p.dq_accum) return;
    ptx::mbarrier_wait(wg_.slot(C::kDqBarrier + 1).empty, turn_parity_);
    turn_parity_ ^= 1;
  }
  __device__ __forceinline__ void pass_turn() const {
    if (wg_.p.dq_accum) warp_arrive(wg_.slot(C::kDqBarrier + 1).full);  // all additions are issued
  }

  // A tile of queries.
  __device__ __forceinline__ void step(const BwdTask& task) {
    const tma::Slot q = wg_.q_slot();
    // QueryTileInfo came with dO. That Q is there follows from dS, and its barrier is not waited
    // for: the next Q but one may have come since.
    wg_.ring.wait_full(wg_.grad_out_slot());
    wg_.inspect_query_tile(task);
    const auto [row, first, flags] = wg_.query_tile();
    const bool stores = flags & QueryTileInfo::kStores;
    float* const accum = dq_accum_part<C>(row, 0, wg_.p);
    ptx::mbarrier_wait(wg_.slot(C::kDsBarrier).full, ds_parity_);
    if (wg_.needs_guard()) {
      step_guarded(task, accum, stores);
    } else {
      DqTile dq;
      ptx::wgmma_fence();
      issue_dk();
      issue_own_dq(dq);
      ptx::mbarrier_wait(wg_.slot(C::kPeerDsBarrier).full, ds_parity_);
      ptx::wgmma_fence();
      issue_peer_dq(dq);
      ptx::wgmma_wait_group<1>(rdK_);
      wg_.cluster_arrive(q.empty);
      ptx::wgmma_wait_group<0>(dq.first);
      if constexpr (kSecond > 0) ptx::wgmma_wait_group<0>(dq.second);
      wg_.cluster_arrive(wg_.slot(C::kDsBarrier).empty);
      wait_turn();
      add_columns(dq.first, accum, first_column(), stores);
      if constexpr (kSecond > 0) add_columns(dq.second, accum, second_column(), stores);
      pass_turn();
    }
    ds_parity_ ^= 1;
    wg_.advance();
  }
  // step() where a mask hides something not finite.
  __device__ __forceinline__ void step_guarded(const BwdTask& task, float* accum, bool stores) {
    const auto ds_of = [&](int rank) {
      return [&, rank](int query, int key) { return ds_at(wg_, task, query, 64 * rank + key); };
    };
    const auto own = ds_of(wg_.part), peer = ds_of(1 - wg_.part);
    multiply_guarded<C, typename C::Rows>(
        rdK_, C::kBlockQ, [&](int key, int query) { return own(query, key); }, wg_.stage_q(), 0);
    ptx::mbarrier_wait(wg_.slot(C::kPeerDsBarrier).full, ds_parity_);
    wait_turn();
#pragma unroll 1
    for (int part = 0; part < 4; ++part) {  // of 32 columns
      const bool second = 32 * part >= kFirst;
      const int at = 32 * part % kFirst;
      if (second && at >= kSecond) break;
      float dq[16] = {};
      const int column = (second ? second_column() : first_column()) + at;
      multiply_guarded<C, typename C::Keys>(dq, 64, own, wg_.opaque_smem() + offsetof(Smem, sK),
                                            column);
      multiply_guarded<C, typename C::PeerKeys>(
          dq, 64, peer, wg_.opaque_smem() + offsetof(Smem, sPeerK), second ? 64 + column % 64 : at);
      add_columns(dq, accum, column, stores);
    }
    pass_turn();
    wg_.cluster_arrive(wg_.q_slot().empty);
    wg_.cluster_arrive(wg_.slot(C::kDsBarrier).empty);
  }

  __device__ __forceinline__ void compute(const BwdTask& task) {
    const Sm90BwdParams& p = wg_.p;
    const int own = task.first_key + wg_.first_key(), peer = task.first_key + 64 - wg_.first_key();
#pragma unroll
    for (float& x : rdK_) x = 0;
    ptx::mbarrier_wait(wg_.slot(C::kKBarrier).full, task.keys_parity);
    if (any_unseen(wg_, task, own, 64)) {
      clear_unseen_keys(wg_, task, own, wg_.opaque_smem() + offsetof(Smem, sK), 0);
      ptx::bar_arrive(C::kAgreeBarrier, C::kWarpgroups * kWarpgroupThreads);
    }
    ptx::mbarrier_wait(wg_.slot(C::kPeerKBarrier).full, task.keys_parity);
    clear_unseen_keys<C, typename C::PeerKeys>(wg_, task, peer,
                                               wg_.opaque_smem() + offsetof(Smem, sPeerK), 0);
    // K alone is looked at: of V nothing reaches dK or dQ, see BwdTwoCtaDv::step_guarded().
    const bool bad =
        any_mask(p) &&
        (warpgroup_any_nonfinite(wg_, wg_.opaque_smem() + offsetof(Smem, sK), C::Keys::kBytes) ||
         warpgroup_any_nonfinite(wg_, wg_.opaque_smem() + offsetof(Smem, sPeerK),
                                 C::PeerKeys::kBytes));
    wg_.nonfinite = bad ? wg_.kInKeys : 0;
#pragma unroll 1
    for (int n = 0; n < task.tiles; ++n) step(task);
    warp_arrive(wg_.slot(C::kKBarrier).empty);
    warp_arrive(wg_.slot(C::kPeerKBarrier).empty);

    if (task.part != BwdTask::kWhole) {
      store_part(wg_, rdK_, p.grad_key, task.part);
    } else {
      // dK leaves through sV: V is done with, since the last dS came after that.
      const uint32_t sGrad = wg_.opaque_smem() + offsetof(Smem, sV);
      write_gradient<C>(sGrad, rdK_, p.scale);
      ptx::fence_proxy_async_shared();
      wg_.sync();  // all of it is there
      store_gradient(wg_, task, p.grad_key, p.grad_key_strides, p.grad_key_map, p.head_dim, sGrad,
                     own);
      if (warpgroup_thread() == 0) ptx::cp_async_bulk_wait_group_read();
    }
    warp_arrive(wg_.slot(C::kVBarrier).empty);
  }

  BwdWarpgroup<C> wg_;
  int ds_parity_ = 0, turn_parity_ = 0;
  float rdK_[C::kDim / 2];
};

}  // namespace flashmoe::cuda::sm90
