// Attention backward for Hopper, head dims above 128: dK and dV of 64 keys are more than the
// registers of a warpgroup hold beside what else it needs. So one has S, dP and dV, and the next
// dK and dQ of the dS that the first leaves in shared memory:
//
//   warpgroup 1   dV(n) S(n+1) | dP(n+1)         | dV(n+1) ...
//   meanwhile     dS(n)        | P(n+1)          | dS(n+1)
//   warpgroup 2                | dK(n) dQ(n), which leaves  | dK(n+1) ...
//
// And 64 keys add to all of dQ with every block of queries, which is more than the second-level
// cache takes. So two CTAs, a cluster, share a block of 128 keys: each has 64 of them, and half of
// dQ's columns of all 128. They send each other their dS, and have Q and dO copied to both:
//
//   shared memory   sK, sV   64 x D              dK leaves through sV
//                   sQ, sdO  2 stages x 64 x D   with lse and delta; dV leaves through the last dO
//                   sdS      64 x 128            one half from the other CTA
//                   sOther   64 x 128            the other CTA's K: what dQ's columns take of it
//
// There is no room for dQ on its way out: each thread adds its own to the sums. And a warp beside
// the others rounds them, once all are there: attention_bwd_round.cuh.
#pragma once

#include "cuda/attention/sm90/bwd_convert_dq.cuh"
#include "cuda/attention/sm90/bwd_scores.cuh"

namespace flashmoe::cuda::sm90 {

// The thread that waits for the turns of the warpgroup with dQ, which would lose microseconds by
// it, and hands them on.
template <class C>
__device__ __forceinline__ void keep_turns(char* shared, const BwdSlots<C>& slots,
                                           const Sm90BwdParams& p) {
  const Slot sums = slots.sums(1);
  int parity = 0;
  for_each_task_helper<C>(shared, slots, [&](const BwdTask& w) {
    if (!p.dq_accum) return;
    for_each_tile<C>(w, p, [&](int head, int first) {
      const Turn<C> turn(w, head, first, p);
      turn.wait();
      ptx::mbarrier_arrive(sums.empty);
      ptx::mbarrier_wait(sums.full, parity);
      parity ^= 1;
      turn.pass_on();
    });
    ptx::red_release_add(blocks_done(p, w.sequence, w.key_head), 1);
  });
}

// The thread that sends dS to the other CTA. There is room: its second warpgroup, too, has said
// that it is done with the dS before, or there would be no new one here.
template <class C>
__device__ __forceinline__ void send_pairs(char* shared, const BwdSlots<C>& slots) {
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const int rank = ptx::cluster_ctarank();
  const uint32_t from = smem + C::kSmemPairs + rank * C::Pairs::kBlockBytes;
  const uint32_t to = ptx::mapa(from, 1 - rank);
  const uint32_t barrier = ptx::mapa(slots.other_pairs().full, 1 - rank);
  int parity = 0;
  for_each_task_helper<C>(shared, slots, [&](const BwdTask& w) {
#pragma unroll 1
    for (int n = 0; n < w.tiles; ++n) {
      ptx::mbarrier_wait(slots.pairs().full, parity);
      parity ^= 1;
      ptx::mbarrier_arrive_expect_tx(slots.other_pairs().full, C::Pairs::kBlockBytes);
      ptx::cp_async_bulk_cluster(to, from, C::Pairs::kBlockBytes, barrier);
    }
  });
}

// The first warpgroup.
template <class C>
class BwdWideValues : BwdScores<C> {
  using Base = BwdScores<C>;
  using Base::arrive, Base::arrive_everywhere, Base::care_, Base::dp_, Base::kAfter, Base::p_,
      Base::ring_, Base::s_, Base::slots_, Base::smem, Base::stage_, Base::thread;
  using typename Base::Pairs;

 public:
  __device__ __forceinline__ BwdWideValues(char* shared, const BwdSlots<C>& slots,
                                           const Sm90BwdParams& p)
      : Base(shared, slots, 0, p) {}

  __device__ __forceinline__ void run() {
    this->for_each_task([&](const BwdTask& w) { compute(w); });
    if (thread() == 0) ptx::cp_async_bulk_wait_group();
  }

 private:
  // Until the second warpgroups of both CTAs are done with the dS before.
  __device__ __forceinline__ void wait_for_room() {
    ptx::mbarrier_wait(slots_.pairs().empty, pairs_parity_);
    pairs_parity_ ^= 1;
  }
  // dS for them.
  __device__ __forceinline__ void hand_on(const Pairs& pairs) {
    this->store_pairs(pairs, this->first_key());
    ptx::fence_proxy_async_shared();
    arrive(slots_.pairs().full);
  }

  // S of the next block of queries, before this one is done with.
  __device__ __forceinline__ void issue_next_scores() {
    Ring<C::kStages> next(ring_.count() + 1);
    next.wait_full(slots_.q(next.at()));
    const uint32_t place = row_places<C>(warp_uniform(next.count() % (2 * C::kStages))).q;
    ptx::wgmma_fence();
    this->issue_pairs(s_, this->smem_ + C::kSmemK, this->smem_ + C::kSmemQ + place);
  }

  // A block of queries, whose P is there and whose dP is on its way. Then that is so of the next
  // one, if there is kMore.
  template <bool kMore>
  __device__ __forceinline__ void step(const BwdTask& w) {
    if (this->contains()) return step_contained<kMore>(w);
    const Slot q = slots_.q(ring_.at()), grad_out = slots_.grad_out(ring_.at());
    Pairs p_pairs, ds_pairs;
    this->pack(p_pairs, s_);
    ptx::wgmma_fence();
    this->issue_gradient(dv_, p_pairs, this->stage_grad_out());
    ptx::wgmma_wait_group<1>(dp_);
    if (kMore && !kAfter) issue_next_scores();
    this->differentiate(p_pairs);
    this->pack(ds_pairs, dp_);
    arrive_everywhere(q.empty);
    if (kMore) this->advance();
    if (kMore && kAfter) {
      ring_.wait_full(slots_.q(ring_.at()));
      ptx::wgmma_fence();
      this->issue_scores();
    }
    wait_for_room();
    hand_on(ds_pairs);
    if (kMore) {
      ptx::wgmma_wait_group<1>(dv_);
      ptx::wgmma_keep_alive(p_pairs);
      arrive_everywhere(grad_out.empty);
      if (!kAfter) this->issue_grad_probabilities();
      this->find_probabilities(w);
      if (kAfter) this->issue_grad_probabilities();
    } else {
      ptx::wgmma_wait_group<0>(dv_);
      ptx::wgmma_keep_alive(p_pairs);
    }
  }
  // The same where a mask hides something not finite; P is where dS will be. What is hidden of dS
  // is zeros, for the other CTA as well, whose warpgroups do not know of this one's V.
  template <bool kMore>
  __device__ __forceinline__ void step_contained(const BwdTask& w) {
    const Slot q = slots_.q(ring_.at()), grad_out = slots_.grad_out(ring_.at());
    Pairs p_pairs, ds_pairs;
    this->pack(p_pairs, s_);
    ptx::wgmma_wait_group<0>(dp_);
    this->differentiate(p_pairs);
    this->mask(dp_, w.seq, w.first_key + this->first_key());
    this->pack(ds_pairs, dp_);
    wait_for_room();
    this->add_contained(dv_, p_pairs, w);
    hand_on(ds_pairs);
    arrive_everywhere(q.empty);
    if (kMore) {
      arrive_everywhere(grad_out.empty);
      this->advance();
      this->begin_rows(w);
    }
  }

  __device__ __forceinline__ void compute(const BwdTask& w) {
    const int first_key = w.first_key + this->first_key();
#pragma unroll
    for (float& x : dv_) x = 0;
    ptx::mbarrier_wait(slots_.k().full, w.keys_parity);
    if (this->any_unseen(w, first_key, 64)) {
      ptx::bar_sync(Base::kAgree, C::kGroups * 128);  // the second warpgroup has cleared K
    }
    ptx::mbarrier_wait(slots_.q(ring_.at()).full, ring_.parity());
    ptx::wgmma_fence();
    this->issue_scores();
    ptx::mbarrier_wait(slots_.v().full, w.keys_parity);
    this->clear_keys(w, first_key, smem() + C::kSmemV, 0);
    if (!kAfter) this->issue_grad_probabilities();
    // Of K nothing reaches dV or dS but where it is seen.
    const bool bad = this->any_mask() && this->group_any_bad(smem() + C::kSmemV, C::Keys::kBytes);
    care_ = bad ? Base::kOfKeys : 0;
    this->find_probabilities(w);
    if (kAfter) this->issue_grad_probabilities();
#pragma unroll 1
    for (int n = 1; n < w.tiles; ++n) step<true>(w);
    step<false>(w);
    arrive(slots_.k().empty);

    const uint32_t from = this->stage_grad_out();
    this->write_gradient(from, C::Grads::kBlockBytes, dv_, 1.f);
    ptx::fence_proxy_async_shared();
    this->sync_group();  // all of it is there
    this->send_gradient(w, p_.grad_value, p_.grad_value_strides, p_.grad_value_map, p_.head_dim_v,
                        from, C::Grads::kBlockBytes, first_key);
    if (thread() == 0) ptx::cp_async_bulk_wait_group_read();
    arrive_everywhere(slots_.grad_out(ring_.at()).empty);
    this->advance();
  }

  int pairs_parity_ = 1;  // the first turn finds the place empty
  float dv_[C::kDim / 2];
};

// The second.
template <class C>
class BwdWideKeys : BwdGroup<C> {
  using Base = BwdGroup<C>;
  using Base::arrive, Base::arrive_everywhere, Base::care_, Base::group_, Base::p_, Base::part_,
      Base::ring_, Base::slots_, Base::smem, Base::smem_, Base::stage_, Base::thread;

 public:
  __device__ __forceinline__ BwdWideKeys(char* shared, const BwdSlots<C>& slots,
                                         const Sm90BwdParams& p)
      : Base(shared, slots, 1, p) {}

  __device__ __forceinline__ void run() {
    this->for_each_task([&](const BwdTask& w) { compute(w); });
    if (thread() == 0) ptx::cp_async_bulk_wait_group();
  }

 private:
  // dQ of the CTA: see BwdConfig. The second part may be none.
  static constexpr int kFirst = C::kFirst, kSecond = C::kSecond;
  struct QueryGradient {
    float first[kFirst / 2], second[kSecond > 0 ? kSecond / 2 : 1];
  };
  __device__ __forceinline__ int first_column() const { return kFirst * part_; }
  __device__ __forceinline__ int second_column() const { return 128 + kSecond * part_; }

  // dS of one CTA's keys, half a tile.
  __device__ __forceinline__ uint32_t pairs_of(int rank) const {
    return this->anew(this->pairs_tile(0) + rank * C::Pairs::kBlockBytes);
  }

  // dK += dS^T Q
  __device__ __forceinline__ void issue_gradient() {
    const uint32_t sdS = pairs_of(part_), sQ = this->anew(this->stage_q());
#pragma unroll
    for (int step = 0; step < C::kBlockQ / 16; ++step) {
      ptx::Wgmma<C::kBf16, C::kDim>::ss_tatb(dk_, C::Pairs::across(C::Pairs::descriptor(sdS), step),
                                             C::Rows::across(C::Rows::descriptor(sQ), step));
    }
    ptx::wgmma_commit_group();
  }
  // kN columns of dQ = dS K, or with kAdd += dS K, of 64 keys.
  template <int kN, bool kAdd>
  __device__ __forceinline__ void issue_columns(float (&dq)[kN / 2], uint32_t sdS, uint32_t sK) {
    using Wgmma = ptx::Wgmma<C::kBf16, kN>;
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const uint64_t pairs = C::Pairs::along(C::Pairs::descriptor(sdS), step);
      const uint64_t keys = C::Keys::across(C::Keys::descriptor(sK), step);
      if (!kAdd && step == 0) {
        Wgmma::ss_tb_first(dq, pairs, keys);
      } else {
        Wgmma::ss_tb(dq, pairs, keys);
      }
    }
  }
  // The CTA's own keys, and those of the other.
  __device__ __forceinline__ void issue_query_gradient(QueryGradient& dq) {
    const uint32_t sdS = pairs_of(part_), sK = smem_ + C::kSmemK;
    issue_columns<kFirst, false>(dq.first, sdS,
                                 this->anew(sK + first_column() / 64 * C::Keys::kBlockBytes));
    if constexpr (kSecond > 0) {
      issue_columns<kSecond, false>(
          dq.second, sdS, this->anew(sK + 2 * C::Keys::kBlockBytes + second_column() % 64 * 2));
    }
  }
  __device__ __forceinline__ void add_other_query_gradient(QueryGradient& dq) {
    static_assert(C::Other::kBlockBytes == C::Keys::kBlockBytes);
    const uint32_t sdS = pairs_of(1 - part_), sK = smem_ + C::kSmemOther;
    issue_columns<kFirst, true>(dq.first, sdS, this->anew(sK));
    if constexpr (kSecond > 0) {
      issue_columns<kSecond, true>(
          dq.second, sdS, this->anew(sK + C::Other::kBlockBytes + second_column() % 64 * 2));
    }
    ptx::wgmma_commit_group();
  }

  template <int kCount>
  __device__ __forceinline__ void add_columns(const float (&dq)[kCount], float* sums, int column,
                                              bool stores) const {
    if (!p_.dq_accum) return;
    float* const to = sums + column / 64 * (64 * 64) + column % 64 / 8 * 512 + thread() * 4;
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
  // The turn to add to the sums of a block, and that of who comes next: see keep_turns().
  __device__ __forceinline__ void wait_turn() {
    if (!p_.dq_accum) return;
    ptx::mbarrier_wait(slots_.sums(group_).empty, turns_parity_);
    turns_parity_ ^= 1;
  }
  __device__ __forceinline__ void pass_turn() const {
    if (p_.dq_accum) arrive(slots_.sums(group_).full);  // all are on their way
  }

  // A block of queries.
  __device__ __forceinline__ void step(const BwdTask& w) {
    const Slot q = slots_.q(ring_.at());
    // What is known of the rows came with dO. That Q is there is known by dS: the next but one may
    // have come since.
    ring_.wait_full(slots_.grad_out(ring_.at()));
    this->look_at_rows();
    const auto [row, first, flags] = this->rows();
    const bool stores = flags & BwdRows::kStores;
    float* const sums = query_sums<C>(row, 0, p_);
    ptx::mbarrier_wait(slots_.pairs().full, pairs_parity_);
    if (this->contains()) {
      step_contained(w, sums, stores);
    } else {
      QueryGradient dq;
      ptx::wgmma_fence();
      issue_gradient();
      issue_query_gradient(dq);
      ptx::mbarrier_wait(slots_.other_pairs().full, pairs_parity_);
      ptx::wgmma_fence();
      add_other_query_gradient(dq);
      ptx::wgmma_wait_group<1>(dk_);
      arrive_everywhere(q.empty);
      ptx::wgmma_wait_group<0>(dq.first);
      if constexpr (kSecond > 0) ptx::wgmma_wait_group<0>(dq.second);
      arrive_everywhere(slots_.pairs().empty);
      wait_turn();
      add_columns(dq.first, sums, first_column(), stores);
      if constexpr (kSecond > 0) add_columns(dq.second, sums, second_column(), stores);
      pass_turn();
    }
    pairs_parity_ ^= 1;
    this->advance();
  }
  // The same where a mask hides something not finite.
  __device__ __forceinline__ void step_contained(const BwdTask& w, float* sums, bool stores) {
    const auto pairs_of = [&](int rank) {
      return [&, rank](int query, int key) { return this->pair_at(w, query, 64 * rank + key); };
    };
    const auto own = pairs_of(part_), other = pairs_of(1 - part_);
    this->template multiply_contained<typename C::Rows>(
        dk_, C::kBlockQ, [&](int key, int query) { return own(query, key); }, this->stage_q(), 0);
    ptx::mbarrier_wait(slots_.other_pairs().full, pairs_parity_);
    wait_turn();
#pragma unroll 1
    for (int part = 0; part < 4; ++part) {  // of 32 columns
      const bool second = 32 * part >= kFirst;
      const int at = 32 * part % kFirst;
      if (second && at >= kSecond) break;
      float dq[16] = {};
      const int column = (second ? second_column() : first_column()) + at;
      this->template multiply_contained<typename C::Keys>(dq, 64, own, smem() + C::kSmemK, column);
      this->template multiply_contained<typename C::Other>(dq, 64, other, smem() + C::kSmemOther,
                                                           second ? 64 + column % 64 : at);
      add_columns(dq, sums, column, stores);
    }
    pass_turn();
    arrive_everywhere(slots_.q(ring_.at()).empty);
    arrive_everywhere(slots_.pairs().empty);
  }

  __device__ __forceinline__ void compute(const BwdTask& w) {
    const int own = w.first_key + this->first_key(), other = w.first_key + 64 - this->first_key();
#pragma unroll
    for (float& x : dk_) x = 0;
    ptx::mbarrier_wait(slots_.k().full, w.keys_parity);
    if (this->any_unseen(w, own, 64)) {
      this->clear_keys(w, own, smem() + C::kSmemK, 0);
      ptx::bar_arrive(Base::kAgree, C::kGroups * 128);
    }
    ptx::mbarrier_wait(slots_.other_k().full, w.keys_parity);
    this->template clear_keys<typename C::Other>(w, other, smem() + C::kSmemOther, 0);
    // Of V nothing reaches dK or dQ: see BwdWideValues::step_contained().
    const bool bad =
        this->any_mask() && (this->group_any_bad(smem() + C::kSmemK, C::Keys::kBytes) ||
                             this->group_any_bad(smem() + C::kSmemOther, C::Other::kBytes));
    care_ = bad ? Base::kOfKeys : 0;
#pragma unroll 1
    for (int n = 0; n < w.tiles; ++n) step(w);
    arrive(slots_.k().empty);
    arrive(slots_.other_k().empty);

    // V is done with: the last dS came after that.
    const uint32_t from = smem() + C::kSmemV;
    this->write_gradient(from, C::Grads::kBlockBytes, dk_, p_.scale);
    ptx::fence_proxy_async_shared();
    this->sync_group();  // all of it is there
    this->send_gradient(w, p_.grad_key, p_.grad_key_strides, p_.grad_key_map, p_.head_dim, from,
                        C::Grads::kBlockBytes, own);
    if (thread() == 0) ptx::cp_async_bulk_wait_group_read();
    arrive(slots_.v().empty);
  }

  int pairs_parity_ = 0, turns_parity_ = 0;
  float dk_[C::kDim / 2];
};

}  // namespace flashmoe::cuda::sm90
