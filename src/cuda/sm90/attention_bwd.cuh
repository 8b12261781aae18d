// Attention backward for Hopper. With P = 2^(S - lse):
//
//   dV = P^T dO      dP = dO V^T      dS = P * (dP - delta)      dQ = dS K      dK = dS^T Q
//
// One CTA on each SM, which goes through blocks of keys. Each of two warpgroups has 64 keys, and
// their dK and dV in registers. Queries go by, of all heads of the group:
//
//   shared memory   sK, sV   block_k x D              dV leaves through its keys' rows of sV
//                   sQ, sdO  2 stages x block_q x D   in turns, see row_places(); lse and delta
//                   sdS      2 x block_q x block_k
//                   sums     64 x 64 floats for each warpgroup: dQ on its way out, then dK
//                   the work, and barriers: full and empty, for each of these
//
//   products of a warpgroup   dP(n) | dV(n) | dK(n) dQ(n) S(n+1) | dP(n+1) | ...
//   meanwhile                 P(n)  | dS(n) | dQ(n) leaves       | P(n+1)
//
// S and dP are computed with a row for each key, so that P and dS are left in the registers as the
// products for dV and dK read them. dQ takes the dS of both warpgroups, from shared memory; they
// share out its rows, or where there are 64 only, its columns. It is added to fp32 sums by the copy
// engine, in the accumulators' own order: two warps beside the loading one see to that. The first
// block of keys stores, so that the sums need no zeros, and the others wait for it; or for their
// turn, where sums are deterministic (see find_work()). A first kernel makes lse and delta, a last
// one rounds dQ: attention_bwd_rows.cuh. Each begins while the one before it ends.
//
// Head dims above 128: attention_bwd_wide.cuh.
#pragma once

#include "cuda/sm90/attention_bwd_scores.cuh"
#include "cuda/sm90/attention_bwd_wide.cuh"

namespace flashmoe::cuda::sm90 {

// The thread that has dQ and dK of one warpgroup leave shared memory.
template <class C>
__device__ __forceinline__ void store_all(char* shared, const BwdSlots<C>& slots, int group,
                                          const HopperBwdParams& p) {
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const uint32_t from = smem + C::kSmemSums + group * C::kSumBytes;
  const Slot sums = slots.sums(group);
  constexpr bool kByRows = C::kBlockQ == 64 * C::kGroups;
  int parity = 0;
  help_works<C>(shared, slots, [&](const BwdWork& w) {
    for_each_tile<C>(w, p, [&](int head, int first) {
      const Turn<C> turn(w, head, first, p);
      if (p.grad_query_sums) turn.wait();
      ptx::mbarrier_wait(sums.full, parity);
      parity ^= 1;
      if (p.grad_query_sums) {
        float* const to = kByRows ? query_sums<C>(turn.row + 64 * group, 0, p)
                                  : query_sums<C>(turn.row, group, p);
        ptx::fence_proxy_async_all();  // sums by others come before
        if (turn.stores) {
          ptx::bulk_store(to, from, C::kSumBytes);
        } else {
          ptx::bulk_add_f32(to, from, C::kSumBytes);
        }
        ptx::tma_commit_group();
        ptx::tma_wait_group_read();
      }
      ptx::mbarrier_arrive(sums.empty);
      if (p.grad_query_sums && turn.passes_on) {
        ptx::tma_wait_group();
        ptx::fence_proxy_async_all();
        turn.pass_on();
      }
    });
    if (w.tiles > 0) {
      ptx::mbarrier_wait(sums.full, parity);
      parity ^= 1;
      const int first_key = w.first_key + 64 * group;
      if (p.grad_key && !ends_within(w, first_key, p)) {
        const int token = static_cast<int>(w.seq.token_k) + first_key;
#pragma unroll
        for (int i = 0; i < C::Grads::kBlocks; ++i) {
          ptx::tma_store(from + i * C::Grads::kBlockBytes, &p.grad_key_map, 64 * i, token,
                         w.key_head, w.batch);
        }
        ptx::tma_commit_group();
        ptx::tma_wait_group_read();
      }
      ptx::mbarrier_arrive(sums.empty);
    }
  });
  ptx::tma_wait_group();
}

// One warpgroup with 64 keys.
template <class C>
class BwdKeys : BwdScores<C> {
  using Base = BwdScores<C>;
  using Base::arrive, Base::contain_, Base::dp_, Base::group_, Base::kAfter, Base::keys_parity_,
      Base::p_, Base::ring_, Base::s_, Base::slots_, Base::smem, Base::smem_, Base::stage_,
      Base::thread;
  using typename Base::Pairs;

 public:
  __device__ __forceinline__ BwdKeys(char* shared, const BwdSlots<C>& slots, int group,
                                     const HopperBwdParams& p)
      : Base(shared, slots, group, p) {}

  __device__ __forceinline__ void run() {
    this->for_each_work([&](const BwdWork& w) { compute(w); });
    if (thread() == 0) ptx::tma_wait_group();
  }

 private:
  static constexpr bool kByRows = C::kBlockQ == 64 * C::kGroups;  // how dQ is shared out
  static constexpr int kN = 64;                                   // its columns of a warpgroup

  // dQ = dS K
  __device__ __forceinline__ void issue_query_gradient() {
    const uint32_t sdS = this->pairs_tile(stage_) + (kByRows ? group_ * 64 * 128 : 0);
    const uint32_t sK = smem_ + C::kSmemK + (kByRows ? 0 : group_ * C::Keys::kBlockBytes);
    using Wgmma = ptx::Wgmma<C::kBf16, kN>;
    Wgmma::across_first(dq_, C::Pairs::along(C::Pairs::descriptor(sdS), 0),
                        C::Keys::across(C::Keys::descriptor(sK), 0));
#pragma unroll
    for (int step = 1; step < C::kBlockK / 16; ++step) {
      Wgmma::across(dq_, C::Pairs::along(C::Pairs::descriptor(sdS), step),
                    C::Keys::across(C::Keys::descriptor(sK), step));
    }
    ptx::wgmma_commit_group();
  }

  // dQ to where the copy engine finds it.
  __device__ __forceinline__ void write_sums() {
    const Slot sums = slots_.sums(group_);
    ptx::mbarrier_wait(sums.empty, sums_parity_);
    sums_parity_ ^= 1;
    const uint32_t to = smem() + C::kSmemSums + group_ * C::kSumBytes + thread() * 16;
#pragma unroll
    for (int i = 0; i < kN / 8; ++i) {
      ptx::st_shared_v4(to + i * 2048,
                        uint4{__float_as_uint(dq_[4 * i]), __float_as_uint(dq_[4 * i + 1]),
                              __float_as_uint(dq_[4 * i + 2]), __float_as_uint(dq_[4 * i + 3])});
    }
  }
  __device__ __forceinline__ void send_sums() {
    ptx::fence_proxy_async();
    arrive(slots_.sums(group_).full);
  }

  // A block of queries, whose P is there and whose dP is on its way. Then that is so of the next
  // one, if there is kMore; if not, this one's dQ is on its way. (At the end of a step nothing else
  // may be: ptxas does not follow from one to the next which products are done, and serialises all
  // of them. Nor are there registers for S, dP and dQ at once.)
  template <bool kMore>
  __device__ __forceinline__ void step(const BwdWork& w) {
    if (contain_) return step_contained<kMore>(w);
    const Slot q = slots_.q(ring_.at()), grad_out = slots_.grad_out(ring_.at());
    Pairs p_pairs, ds_pairs;
    this->pack(p_pairs, s_);
    ptx::wgmma_fence();
    this->issue_gradient(dv_, p_pairs, this->stage_grad_out());
    ptx::wgmma_wait_group<1>(dp_);
    this->differentiate(p_pairs);
    this->pack(ds_pairs, dp_);
    const auto issue_key_gradient = [&] {
      ptx::wgmma_fence();
      this->issue_gradient(dk_, ds_pairs, this->stage_q());
    };
    // To issue it takes until the product before is done, and what comes after it waits as well:
    // the store, if it is long, comes first.
    if (!kByRows) issue_key_gradient();
    this->store_pairs(ds_pairs, this->first_key());
    ptx::fence_proxy_async();
    arrive(slots_.pairs().full);
    if (kByRows) issue_key_gradient();
    ptx::mbarrier_wait(slots_.pairs().full, stage_ % 2);  // dS of both warpgroups
    ptx::wgmma_fence();
    issue_query_gradient();
    ptx::wgmma_wait_group<1>(dv_);
    ptx::wgmma_wait_group<1>(dk_);
    ptx::wgmma_done_with(p_pairs);
    ptx::wgmma_done_with(ds_pairs);
    arrive(grad_out.empty);
    arrive(q.empty);
    this->advance();
    if (kMore) {
      ptx::mbarrier_wait(slots_.q(ring_.at()).full, ring_.parity());
      ptx::wgmma_fence();
      this->issue_scores();
      ptx::wgmma_wait_group<1>(dq_);
      write_sums();
      if (!kAfter) this->issue_grad_probabilities();
      // Not at once: it waits until they are written.
      if (!kByRows) send_sums();
      this->find_probabilities(w);
      if (kByRows) send_sums();
      if (kAfter) this->issue_grad_probabilities();
    }
  }

  // The same where a mask hides something not finite.
  template <bool kMore>
  __device__ __forceinline__ void step_contained(const BwdWork& w) {
    const Slot q = slots_.q(ring_.at()), grad_out = slots_.grad_out(ring_.at());
    Pairs p_pairs, ds_pairs;
    const auto mine = [&](int key, int query) {
      return this->pair_at(w, query, this->first_key() + key);
    };
    this->pack(p_pairs, s_);
    ptx::wgmma_wait_group<0>(dp_);
    this->differentiate(p_pairs);
    this->pack(ds_pairs, dp_);
    this->add_contained(dv_, p_pairs, w);
    this->store_pairs(ds_pairs, this->first_key());
    arrive(slots_.pairs().full);
    ptx::mbarrier_wait(slots_.pairs().full, stage_ % 2);  // dS of both warpgroups
    this->template multiply_contained<typename C::Rows>(dk_, C::kBlockQ, mine, this->stage_q(), 0);
#pragma unroll
    for (float& x : dq_) x = 0;
    this->template multiply_contained<typename C::Keys>(
        dq_, C::kBlockK,
        [&](int query, int key) {
          return this->pair_at(w, query + (kByRows ? 64 * group_ : 0), key);
        },
        smem() + C::kSmemK, kByRows ? 0 : 64 * group_);
    arrive(grad_out.empty);
    arrive(q.empty);
    this->advance();
    if (kMore) {
      write_sums();
      send_sums();
      this->begin_rows(w);
    }
  }

  // By both warpgroups.
  __device__ __forceinline__ bool find_bad_keys(const BwdWork& w) const {
    if (!this->any_mask()) return false;
    if (this->any_unseen(w, w.first_key, C::kBlockK)) {
      ptx::bar_sync(Base::kAgree, C::kGroups * 128);  // they are cleared
    }
    const bool bad =
        this->template any_bad<C::kGroups * 128>(smem() + C::kSmemK, 2 * C::Keys::kBytes);
    return ptx::bar_any(Base::kAgree, C::kGroups * 128, bad);
  }

  __device__ __forceinline__ void compute(const BwdWork& w) {
    const int first_key = w.first_key + this->first_key();
#pragma unroll
    for (int i = 0; i < C::kDim / 2; ++i) dk_[i] = dv_[i] = 0;
    ptx::mbarrier_wait(slots_.k().full, keys_parity_);
    this->clear_keys(w, first_key, smem() + C::kSmemK, this->first_row());
    ptx::mbarrier_wait(slots_.q(ring_.at()).full, ring_.parity());
    ptx::wgmma_fence();
    this->issue_scores();
    ptx::mbarrier_wait(slots_.v().full, keys_parity_);
    this->clear_keys(w, first_key, smem() + C::kSmemV, this->first_row());
    if (!kAfter) this->issue_grad_probabilities();
    this->bad_keys_ = find_bad_keys(w);
    keys_parity_ ^= 1;
    this->find_probabilities(w);
    if (kAfter) this->issue_grad_probabilities();
#pragma unroll 1
    for (int n = 1; n < w.tiles; ++n) step<true>(w);
    step<false>(w);
    store(w, first_key);
  }

  // dV and dK, and the last dQ, which is still on its way.
  __device__ __forceinline__ void store(const BwdWork& w, int first_key) {
    const uint32_t sV = smem() + C::kSmemV + group_ * 64 * 128;
    this->write_gradient(sV, C::Keys::kBlockBytes, dv_, 1.f);
    ptx::fence_proxy_async();
    this->sync_group();  // dV is there
    this->send_gradient(w, p_.grad_value, p_.grad_value_strides, p_.grad_value_map, p_.head_dim_v,
                        sV, C::Keys::kBlockBytes, first_key);
    ptx::wgmma_wait_group<0>(dq_);
    arrive(slots_.k().empty);
    write_sums();
    send_sums();
    if (thread() == 0) ptx::tma_wait_group_read();
    arrive(slots_.v().empty);

    const Slot sums = slots_.sums(group_);
    ptx::mbarrier_wait(sums.empty, sums_parity_);
    sums_parity_ ^= 1;
    const uint32_t to = smem() + C::kSmemSums + group_ * C::kSumBytes;
    this->write_gradient(to, C::Grads::kBlockBytes, dk_, p_.scale);
    if (ends_within(w, first_key, p_)) {
      this->sync_group();  // dK is there
      this->send_gradient(w, p_.grad_key, p_.grad_key_strides, p_.grad_key_map, p_.head_dim, to,
                          C::Grads::kBlockBytes, first_key);
    }
    ptx::fence_proxy_async();
    arrive(sums.full);
  }

  int sums_parity_ = 1;  // the first turn finds the place empty
  float dk_[C::kDim / 2], dv_[C::kDim / 2], dq_[kN / 2];
};

template <class C>
__device__ __forceinline__ void attention_bwd(const HopperBwdParams& p) {
  extern __shared__ __align__(1024) char shared[];
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const BwdSlots<C> slots{smem + C::kSmemBarriers};
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) slots.init();
  ptx::grid_wait();  // for lse and delta
  ptx::grid_launch_next();
  // The barriers are there.
  if constexpr (C::kCluster == 1) {
    __syncthreads();
  } else {
    ptx::cluster_sync();
  }
  if (group == 0) {
    ptx::setmaxnreg_dec<C::kLoaderRegisters>();
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    if (threadIdx.x % 32 == 0) {
      if (warp == 0) load_all<C>(shared, slots, p);
      if constexpr (C::kWide) {
        if (warp == 1) send_pairs<C>(shared, slots);
        if (warp == 2) keep_turns<C>(shared, slots, p);
      } else {
        if (warp == 1 || warp == 2) store_all<C>(shared, slots, warp - 1, p);
      }
    }
  } else {
    if constexpr (!C::kWide) {
      ptx::setmaxnreg_inc<C::kRegisters>();
      BwdKeys<C>(shared, slots, group - 1, p).run();
    } else if (group == 1) {
      ptx::setmaxnreg_inc<C::kRegisters>();
      BwdWideValues<C>(shared, slots, p).run();
    } else {
      ptx::setmaxnreg_inc<C::kSecondRegisters>();
      BwdWideKeys<C>(shared, slots, p).run();
    }
  }
  if constexpr (C::kCluster > 1) ptx::cluster_sync();  // nobody needs the other's shared memory
}

}  // namespace flashmoe::cuda::sm90
