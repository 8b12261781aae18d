// Attention backward for Hopper, head dims above 128: dK and dV of 64 keys are more than the
// registers of a warpgroup hold beside what else it needs. So one has S, dP and dV, and the next
// dK and dQ of the dS that the first leaves in shared memory:
//
//   warpgroup 1   S(n) dP(n) | P(n) | dS(n) | dV(n)   S(n+1) dP(n+1) | P(n+1) ...
//   warpgroup 2                             | dK(n)  dQ(n)  which leaves      | dK(n+1) ...
//
// Tiles have 64 queries and 64 keys:
//
//   shared memory   sK, sV   64 x D              dK leaves through sV
//                   sQ, sdO  2 stages x 64 x D   with lse and delta; dV leaves through the last dO
//                   sdS      2 stages x 64 x 64
//
// There is no room for dQ on its way out: each thread adds its own to the sums.
#pragma once

#include "cuda/sm90/attention_bwd_scores.cuh"

namespace flashmoe::cuda::sm90 {

// The thread that waits for the turns of the warpgroup with dQ, which would lose microseconds by
// it, and hands them on.
template <class C>
__device__ __forceinline__ void keep_turns(char* shared, const BwdSlots<C>& slots,
                                           const HopperBwdParams& p) {
  const Slot sums = slots.sums(1);
  Ring<2> works;
  int parity = 0;
#pragma unroll 1
  for (;; works.advance()) {
    const Slot slot = slots.work(works.at());
    works.wait_full(slot);
    const BwdWork& w = reinterpret_cast<const BwdWork*>(shared + C::kSmemWorks)[works.at()];
    if (w.last) break;
    for_each_tile<C>(w, p, [&](int head, int first) {
      const Turn<C> turn(w, head, first, p);
      turn.wait();
      ptx::mbarrier_arrive(sums.empty);
      ptx::mbarrier_wait(sums.full, parity);
      parity ^= 1;
      turn.pass_on();
    });
    ptx::mbarrier_arrive(slot.empty);
  }
}

// The first warpgroup.
template <class C>
class BwdWideValues : BwdScores<C> {
  using Base = BwdScores<C>;
  using Base::arrive, Base::contain_, Base::dp_, Base::kAfter, Base::keys_parity_, Base::p_,
      Base::ring_, Base::s_, Base::slots_, Base::smem, Base::stage_, Base::thread;
  using typename Base::Pairs;

 public:
  __device__ __forceinline__ BwdWideValues(char* shared, const BwdSlots<C>& slots,
                                           const HopperBwdParams& p)
      : Base(shared, slots, 0, p) {}

  __device__ __forceinline__ void run() {
    this->for_each_work([&](const BwdWork& w) { compute(w); });
    if (thread() == 0) ptx::tma_wait_group();
  }

 private:
  // dS for the other warpgroup.
  __device__ __forceinline__ void hand_on(const Pairs& pairs) {
    this->store_pairs(pairs, 0);
    ptx::fence_proxy_async();
    arrive(slots_.pairs(ring_.at()).full);
  }
  __device__ __forceinline__ void wait_for_room() { ring_.wait_empty(slots_.pairs(ring_.at())); }

  // A block of queries, whose P is there and whose dP is on its way. Then that is so of the next
  // one, if there is kMore.
  template <bool kMore>
  __device__ __forceinline__ void step(const BwdWork& w) {
    if (contain_) return step_contained<kMore>(w);
    const Slot q = slots_.q(ring_.at()), grad_out = slots_.grad_out(ring_.at());
    Pairs p_pairs, ds_pairs;
    this->pack(p_pairs, s_);
    ptx::wgmma_fence();
    this->issue_gradient(dv_, p_pairs, this->stage_grad_out());
    this->template differentiate<1>(p_pairs);
    this->pack(ds_pairs, dp_);
    wait_for_room();
    hand_on(ds_pairs);
    arrive(q.empty);
    if (kMore) {
      this->advance();
      ptx::mbarrier_wait(slots_.q(ring_.at()).full, ring_.parity());
      ptx::wgmma_fence();
      this->issue_scores();
      ptx::wgmma_wait_group<1>(dv_);
      ptx::wgmma_done_with(p_pairs);
      arrive(grad_out.empty);
      if (!kAfter) this->issue_grad_probabilities();
      this->find_probabilities(w);
      if (kAfter) this->issue_grad_probabilities();
    } else {
      ptx::wgmma_wait_group<0>(dv_);
      ptx::wgmma_done_with(p_pairs);
    }
  }
  // The same where a mask hides something not finite; P is where dS will be.
  template <bool kMore>
  __device__ __forceinline__ void step_contained(const BwdWork& w) {
    const Slot q = slots_.q(ring_.at()), grad_out = slots_.grad_out(ring_.at());
    Pairs p_pairs, ds_pairs;
    this->pack(p_pairs, s_);
    this->template differentiate<0>(p_pairs);
    this->pack(ds_pairs, dp_);
    wait_for_room();
    this->add_contained(dv_, p_pairs, w);
    hand_on(ds_pairs);
    arrive(q.empty);
    if (kMore) {
      arrive(grad_out.empty);
      this->advance();
      this->begin_rows(w);
    }
  }

  __device__ __forceinline__ void compute(const BwdWork& w) {
#pragma unroll
    for (float& x : dv_) x = 0;
    ptx::mbarrier_wait(slots_.k().full, keys_parity_);
    this->clear_keys(w, smem() + C::kSmemK, 0);
    ptx::mbarrier_wait(slots_.q(ring_.at()).full, ring_.parity());
    ptx::wgmma_fence();
    this->issue_scores();
    ptx::mbarrier_wait(slots_.v().full, keys_parity_);
    this->clear_keys(w, smem() + C::kSmemV, 0);
    if (!kAfter) this->issue_grad_probabilities();
    this->bad_keys_ = this->find_bad_keys(w);
    keys_parity_ ^= 1;
    this->find_probabilities(w);
    if (kAfter) this->issue_grad_probabilities();
#pragma unroll 1
    for (int n = 1; n < w.tiles; ++n) step<true>(w);
    step<false>(w);
    arrive(slots_.k().empty);

    const uint32_t from = this->stage_grad_out();
    this->write_gradient(from, C::Grads::kBlockBytes, dv_, 1.f);
    ptx::fence_proxy_async();
    this->sync_group();  // all of it is there
    this->send_gradient(w, p_.grad_value, p_.grad_value_strides, p_.grad_value_map, p_.head_dim_v,
                        from, C::Grads::kBlockBytes, w.first_key);
    if (thread() == 0) ptx::tma_wait_group_read();
    arrive(slots_.grad_out(ring_.at()).empty);
    this->advance();
  }

  float dv_[C::kDim / 2];
};

// The second.
template <class C>
class BwdWideKeys : BwdGroup<C> {
  using Base = BwdGroup<C>;
  using Base::arrive, Base::contain_, Base::group_, Base::keys_parity_, Base::p_, Base::ring_,
      Base::slots_, Base::smem, Base::stage_, Base::thread;

 public:
  __device__ __forceinline__ BwdWideKeys(char* shared, const BwdSlots<C>& slots,
                                         const HopperBwdParams& p)
      : Base(shared, slots, 1, p) {}

  __device__ __forceinline__ void run() {
    this->for_each_work([&](const BwdWork& w) { compute(w); });
    if (thread() == 0) ptx::tma_wait_group();
  }

 private:
  static constexpr int kBlocks = C::kSumDim / 64;  // of columns of dQ

  // dK += dS^T Q
  __device__ __forceinline__ void issue_gradient() {
    const uint32_t sdS = this->anew(this->pairs_tile(stage_)), sQ = this->anew(this->stage_q());
#pragma unroll
    for (int step = 0; step < C::kBlockQ / 16; ++step) {
      ptx::Wgmma<C::kBf16, C::kDim>::both_across(dk_,
                                                 C::Pairs::across(C::Pairs::descriptor(sdS), step),
                                                 C::Rows::across(C::Rows::descriptor(sQ), step));
    }
    ptx::wgmma_commit_group();
  }
  // dQ = dS K, of one block of columns.
  __device__ __forceinline__ void issue_query_gradient(float (&dq)[32], int block) {
    const uint32_t sdS = this->anew(this->pairs_tile(stage_));
    const uint32_t sK = this->anew(this->smem_ + C::kSmemK + block * C::Keys::kBlockBytes);
    using Wgmma = ptx::Wgmma<C::kBf16, 64>;
    Wgmma::across_first(dq, C::Pairs::along(C::Pairs::descriptor(sdS), 0),
                        C::Keys::across(C::Keys::descriptor(sK), 0));
#pragma unroll
    for (int step = 1; step < C::kBlockK / 16; ++step) {
      Wgmma::across(dq, C::Pairs::along(C::Pairs::descriptor(sdS), step),
                    C::Keys::across(C::Keys::descriptor(sK), step));
    }
    ptx::wgmma_commit_group();
  }
  __device__ __forceinline__ void add_sums(const float (&dq)[32], float* sums, int block,
                                           bool stores) const {
    if (!p_.grad_query_sums) return;
    float* const to = sums + block * (64 * 64) + thread() * 4;
    if (stores) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        *reinterpret_cast<float4*>(to + i * 512) =
            float4{dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]};
      }
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float four[4] = {dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]};
        ptx::red_add_v4_f32(to + i * 512, four);
      }
    }
  }

  // The turn to add to the sums of a block, and that of who comes next: see keep_turns().
  __device__ __forceinline__ void wait_turn() {
    if (!p_.grad_query_sums) return;
    ptx::mbarrier_wait(slots_.sums(group_).empty, turns_parity_);
    turns_parity_ ^= 1;
  }
  __device__ __forceinline__ void pass_turn() const {
    if (p_.grad_query_sums) arrive(slots_.sums(group_).full);  // all are on their way
  }

  // A block of queries. dQ goes two blocks of columns at a time.
  __device__ __forceinline__ void step(const BwdWork& w) {
    const Slot q = slots_.q(ring_.at()), pairs = slots_.pairs(ring_.at());
    ring_.wait_full(q);
    this->look_at_rows(0);
    const auto [row, first, flags] = this->rows();
    const bool stores = flags & BwdRows::kStores;
    float* const sums = query_sums<C>(row, 0, p_);
    ring_.wait_full(pairs);
    if (contain_) {
      step_contained(w, sums, stores);
    } else {
      float dq[2][32];
      ptx::wgmma_fence();
      issue_gradient();
      issue_query_gradient(dq[0], 0);
      issue_query_gradient(dq[1], 1);
      ptx::wgmma_wait_group<2>(dk_);
      arrive(q.empty);
      wait_turn();
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        float(&these)[32] = dq[block % 2];
        if (block + 1 < kBlocks) {
          ptx::wgmma_wait_group<1>(these);
        } else {
          ptx::wgmma_wait_group<0>(these);
          arrive(pairs.empty);
        }
        add_sums(these, sums, block, stores);
        if (block + 2 < kBlocks) {
          ptx::wgmma_fence();
          issue_query_gradient(these, block + 2);
        }
      }
      pass_turn();
    }
    this->advance();
  }
  // The same where a mask hides something not finite.
  __device__ __forceinline__ void step_contained(const BwdWork& w, float* sums, bool stores) {
    this->template multiply_contained<typename C::Rows>(
        dk_, C::kBlockQ, [&](int key, int query) { return this->pair_at(w, query, key); },
        this->stage_q(), 0);
    wait_turn();
#pragma unroll 1
    for (int block = 0; block < kBlocks; ++block) {
      float dq[32] = {};
      this->template multiply_contained<typename C::Keys>(
          dq, C::kBlockK, [&](int query, int key) { return this->pair_at(w, query, key); },
          smem() + C::kSmemK, 64 * block);
      add_sums(dq, sums, block, stores);
    }
    pass_turn();
    arrive(slots_.q(ring_.at()).empty);
    arrive(slots_.pairs(ring_.at()).empty);
  }

  __device__ __forceinline__ void compute(const BwdWork& w) {
#pragma unroll
    for (float& x : dk_) x = 0;
    ptx::mbarrier_wait(slots_.k().full, keys_parity_);
    ptx::mbarrier_wait(slots_.v().full, keys_parity_);
    this->bad_keys_ = this->find_bad_keys(w);
    keys_parity_ ^= 1;
#pragma unroll 1
    for (int n = 0; n < w.tiles; ++n) step(w);
    arrive(slots_.k().empty);

    // V is done with: the last dS came after that.
    const uint32_t from = smem() + C::kSmemV;
    this->write_gradient(from, C::Grads::kBlockBytes, dk_, p_.scale);
    ptx::fence_proxy_async();
    this->sync_group();  // all of it is there
    this->send_gradient(w, p_.grad_key, p_.grad_key_strides, p_.grad_key_map, p_.head_dim, from,
                        C::Grads::kBlockBytes, w.first_key);
    if (thread() == 0) ptx::tma_wait_group_read();
    arrive(slots_.v().empty);
  }

  int turns_parity_ = 0;
  float dk_[C::kDim / 2];
};

}  // namespace flashmoe::cuda::sm90
