// Attention backward for Hopper. With P = 2^(S - lse):
//
//   dV = P^T dO      dP = dO V^T      dS = P * (dP - delta)      dQ = dS K      dK = dS^T Q
//
// One CTA on each SM, which goes through blocks of keys. Each of two warpgroups has 64 keys, and
// their dK and dV in registers. Queries go by, of all heads of the group:
//
//   shared memory   sK, sV   block_k x D
//                   sQ, sdO  2 stages x block_q x D   in turns, see row_places(); lse and delta
//                   sdS      2 x block_q x block_k
//                   sums     64 x 64 floats for each warpgroup: dQ on its way out
//                   grads    64 x D for each warpgroup: dV and dK on their way out
//                   the task, and barriers: full and empty, for each of these
//
//   products of a warpgroup   dP(n) |       | dV(n) dK(n) dQ(n-1) S(n+1)      | dP(n+1) | ...
//   meanwhile                 P(n)  | dS(n) |                  dQ(n-1) leaves | P(n+1)
//
// The tensor cores of an SM hold eight instructions ahead, and who issues more waits. So the
// warpgroups take turns: while one multiplies, the other finds its P and dS. They are half a block
// apart then, and dQ, which takes the dS of both, comes one block late.
//
// S and dP are computed with a row for each key, so that P and dS are left in the registers as the
// products for dV and dK read them. dQ takes dS from shared memory; the warpgroups share out its
// rows, or where there are 64 only, its columns. It is added to fp32 sums by the copy engine, in
// the accumulators' own order: two warps beside the loading one see to that. The first block of
// keys stores, so that the sums need no zeros, and the others wait for it; or for their turn, where
// sums are deterministic (see find_task()). A first kernel makes lse and delta, a last one rounds
// dQ, head by head as they are done with: attention_bwd_rows.cuh.
//
// Head dims above 128: attention_bwd_wide.cuh.
#pragma once

#include "cuda/attention/sm90/bwd_scores.cuh"
#include "cuda/attention/sm90/bwd_two_cta.cuh"

namespace flashmoe::cuda::sm90 {

// The thread that has dQ of one warpgroup leave shared memory, and counts the tasks that are done.
template <class C>
__device__ __forceinline__ void store_all(char* shared, const BwdSlots<C>& slots, int group,
                                          const Sm90BwdParams& p) {
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const uint32_t from = smem + C::kSmemSums + group * C::kSumBytes;
  const Slot sums = slots.sums(group);
  int parity = 0;
  for_each_task_helper<C>(shared, slots, [&](const BwdTask& w) {
    for_each_tile<C>(w, p, [&](int head, int first) {
      const Turn<C> turn(w, head, first, p);
      if (p.dq_accum) turn.wait();
      ptx::mbarrier_wait(sums.full, parity);
      parity ^= 1;
      if (p.dq_accum) {
        float* const to = query_sums<C>(turn.row, group, p);
        ptx::fence_proxy_async();  // sums by others come before
        if (turn.stores) {
          ptx::cp_async_bulk_store_evict_last(to, from, C::kSumBytes);
        } else {
          ptx::cp_reduce_async_bulk_add_f32(to, from, C::kSumBytes);
        }
        ptx::cp_async_bulk_commit_group();
        ptx::cp_async_bulk_wait_group_read();
      }
      ptx::mbarrier_arrive(sums.empty);
      if (p.dq_accum && turn.passes_on) {
        ptx::cp_async_bulk_wait_group();
        ptx::fence_proxy_async();
        turn.pass_on();
      }
    });
    if (!p.dq_accum) return;
    ptx::cp_async_bulk_wait_group();  // all sums of the task are there: the last kernel may begin
                                      // with them
    ptx::fence_proxy_async();
    ptx::red_release_add(blocks_done(p, w.sequence, w.key_head), 1);
  });
}

// One warpgroup with 64 keys.
template <class C>
class BwdKeys : BwdScores<C> {
  using Base = BwdScores<C>;
  using Base::arrive, Base::care_, Base::dp_, Base::group_, Base::kAfter, Base::p_, Base::ring_,
      Base::s_, Base::slots_, Base::smem, Base::smem_, Base::stage_, Base::thread;
  using typename Base::Pairs;

 public:
  __device__ __forceinline__ BwdKeys(char* shared, const BwdSlots<C>& slots, int group,
                                     const Sm90BwdParams& p)
      : Base(shared, slots, group, p) {}

  __device__ __forceinline__ void run() {
    this->for_each_task([&](const BwdTask& w) { compute(w); });
    if (thread() == 0) ptx::cp_async_bulk_wait_group();
  }

 private:
  static constexpr bool kByRows = C::kBlockQ == 64 * C::kGroups;  // how dQ is shared out
  static constexpr int kN = 64;                                   // its columns of a warpgroup

  // One warpgroup multiplies, then the other; the first begins.
  __device__ __forceinline__ void begin_products() const {
    ptx::mbarrier_wait(slots_.products(group_), (ring_.count() + group_ + 1) % 2);
  }
  __device__ __forceinline__ void end_products() const { arrive(slots_.products(1 - group_)); }

  // dS of the block before, by both warpgroups.
  __device__ __forceinline__ uint32_t pairs_before() const { return this->pairs_tile(stage_ + 1); }
  __device__ __forceinline__ void wait_for_pairs_before() const {
    const Ring<2> before(ring_.count() - 1);
    before.wait_full(slots_.pairs(before.at()));
  }

  // dQ = dS K, of the block before.
  __device__ __forceinline__ void issue_query_gradient() {
    const uint32_t sdS = pairs_before() + (kByRows ? group_ * 64 * 128 : 0);
    const uint32_t sK = smem_ + C::kSmemK + (kByRows ? 0 : group_ * C::Keys::kBlockBytes);
    using Wgmma = ptx::Wgmma<C::kBf16, kN>;
    Wgmma::ss_tb_first(dq_, C::Pairs::along(C::Pairs::descriptor(sdS), 0),
                       C::Keys::across(C::Keys::descriptor(sK), 0));
#pragma unroll
    for (int step = 1; step < C::kBlockK / 16; ++step) {
      Wgmma::ss_tb(dq_, C::Pairs::along(C::Pairs::descriptor(sdS), step),
                   C::Keys::across(C::Keys::descriptor(sK), step));
    }
    ptx::wgmma_commit_group();
  }

  // dQ to where the copy engine finds it, of the CTA's block of queries with that number.
  __device__ __forceinline__ void write_sums(uint32_t tile) {
    Ring<1>(tile).wait_empty(slots_.sums(group_));
    const uint32_t to = smem() + C::kSmemSums + group_ * C::kSumBytes + thread() * 16;
#pragma unroll
    for (int i = 0; i < kN / 8; ++i) {
      ptx::st_shared_v4(to + i * 2048,
                        uint4{__float_as_uint(dq_[4 * i]), __float_as_uint(dq_[4 * i + 1]),
                              __float_as_uint(dq_[4 * i + 2]), __float_as_uint(dq_[4 * i + 3])});
    }
  }
  __device__ __forceinline__ void send_sums() {
    ptx::fence_proxy_async_shared();
    arrive(slots_.sums(group_).full);
  }

  // A block of queries, whose P is there and whose dP is on its way. Then that is so of the next
  // one, if there is kMore; and dQ of the one before has left. (For the `first` of a task dQ is
  // computed of whatever lies there, and forgotten: ptxas serialises products that are not always
  // issued. So it does if more than dP is on its way from one step to the next.)
  template <bool kMore>
  __device__ __forceinline__ void step(const BwdTask& w, bool first) {
    if (this->contains()) return step_contained<kMore>(w, first);
    const Slot q = slots_.q(ring_.at()), grad_out = slots_.grad_out(ring_.at());
    const Slot pairs = slots_.pairs(ring_.at());
    Pairs p_pairs, ds_pairs;
    this->pack(p_pairs, s_);
    ptx::wgmma_wait_group<0>(dp_);
    if (!kMore) arrive(slots_.v().empty);
    this->differentiate(p_pairs);
    this->pack(ds_pairs, dp_);
    ring_.wait_empty(pairs);
    this->store_pairs(ds_pairs, this->first_key());
    ptx::fence_proxy_async_shared();
    arrive(pairs.full);
    begin_products();
    ptx::wgmma_keep_alive(p_pairs);  // packed by now, not between the products
    ptx::wgmma_keep_alive(ds_pairs);
    ptx::wgmma_fence();
    this->issue_gradient(dv_, p_pairs, this->stage_grad_out());
    this->issue_gradient(dk_, ds_pairs, this->stage_q());
    wait_for_pairs_before();
    ptx::wgmma_fence();
    issue_query_gradient();
    ptx::wgmma_wait_group<1>(dv_);
    ptx::wgmma_wait_group<1>(dk_);
    ptx::wgmma_keep_alive(p_pairs);
    ptx::wgmma_keep_alive(ds_pairs);
    arrive(grad_out.empty);
    arrive(q.empty);
    this->advance();
    if (kMore) {
      ptx::mbarrier_wait(slots_.q(ring_.at()).full, ring_.parity());
      ptx::wgmma_fence();
      this->issue_scores();
    }
    ptx::wgmma_wait_group<kMore ? 1 : 0>(dq_);
    if (!first) write_sums(ring_.count() - 2);
    if (kMore && !kAfter) this->issue_grad_probabilities();
    end_products();
    if (!first) send_sums_before();
    if (kMore) this->find_probabilities(w);
    if (kMore && kAfter) this->issue_grad_probabilities();
  }
  // Those of the block before; its dS is done with, and the next one's goes to the same place.
  __device__ __forceinline__ void send_sums_before() {
    arrive(slots_.pairs(ring_.at()).empty);
    send_sums();
  }

  // The same where a mask hides something not finite, in this block or in the one before.
  template <bool kMore>
  __device__ __forceinline__ void step_contained(const BwdTask& w, bool first) {
    const Slot q = slots_.q(ring_.at()), grad_out = slots_.grad_out(ring_.at());
    const Slot pairs = slots_.pairs(ring_.at());
    Pairs p_pairs, ds_pairs;
    this->pack(p_pairs, s_);
    ptx::wgmma_wait_group<0>(dp_);
    if (!kMore) arrive(slots_.v().empty);
    this->differentiate(p_pairs);
    this->pack(ds_pairs, dp_);
    ring_.wait_empty(pairs);
    this->add_contained(dv_, p_pairs, w);
    this->store_pairs(ds_pairs, this->first_key());
    ptx::fence_proxy_async_shared();
    this->sync_group();  // dS is there
    arrive(pairs.full);
    this->template multiply_contained<typename C::Rows>(
        dk_, C::kBlockQ,
        [&](int key, int query) { return this->pair_at(w, query, this->first_key() + key); },
        this->stage_q(), 0);
    begin_products();
    if (!first) {
      const int before = this->first() + C::kBlockQ;  // of this head, or the last of the one before
      find_contained_query_gradient(w, before < w.query_end ? before : w.query_begin);
      write_sums(ring_.count() - 1);
    }
    end_products();
    arrive(grad_out.empty);
    arrive(q.empty);
    this->advance();
    if (!first) send_sums_before();
    if (kMore) {
      const bool of_block = care_ & Base::kOfBlock;
      this->begin_rows(w);
      if (of_block) care_ |= Base::kOfBlockBefore;
    }
  }
  // dQ of the block before, from query `first` on.
  __device__ __forceinline__ void find_contained_query_gradient(const BwdTask& w, int first) {
    wait_for_pairs_before();
#pragma unroll
    for (float& x : dq_) x = 0;
    this->template multiply_contained<typename C::Keys>(
        dq_, C::kBlockK,
        [&](int query, int key) {
          return this->pair_at(w, first, pairs_before(), query + (kByRows ? 64 * group_ : 0), key);
        },
        smem() + C::kSmemK, kByRows ? 0 : 64 * group_);
  }

  // By both warpgroups.
  __device__ __forceinline__ bool find_bad_keys(const BwdTask& w) const {
    if (!this->any_mask()) return false;
    if (this->any_unseen(w, w.first_key, C::kBlockK)) {
      ptx::bar_sync(Base::kAgree, C::kGroups * 128);  // they are cleared
    }
    const bool bad =
        this->template any_bad<C::kGroups * 128>(smem() + C::kSmemK, 2 * C::Keys::kBytes);
    return ptx::bar_red_or(Base::kAgree, C::kGroups * 128, bad);
  }

  __device__ __forceinline__ void compute(const BwdTask& w) {
    const int first_key = w.first_key + this->first_key();
#pragma unroll
    for (int i = 0; i < C::kDim / 2; ++i) dk_[i] = dv_[i] = 0;
    ptx::mbarrier_wait(slots_.k().full, w.keys_parity);
    this->clear_keys(w, first_key, smem() + C::kSmemK, this->first_row());
    ptx::mbarrier_wait(slots_.q(ring_.at()).full, ring_.parity());
    ptx::wgmma_fence();
    this->issue_scores();
    ptx::mbarrier_wait(slots_.v().full, w.keys_parity);
    this->clear_keys(w, first_key, smem() + C::kSmemV, this->first_row());
    if (!kAfter) this->issue_grad_probabilities();
    care_ = find_bad_keys(w) ? Base::kOfKeys : 0;
    this->find_probabilities(w);
    if (kAfter) this->issue_grad_probabilities();
#pragma unroll 1
    while (ring_.count() != w.last_tile) step<true>(w, ring_.count() == w.first_tile);
    step<false>(w, w.first_tile == w.last_tile);
    store(w);
  }

  // dV and dK, and the last dQ.
  __device__ __forceinline__ void store(const BwdTask& w) {
    if (this->contains()) {
      find_contained_query_gradient(w, w.query_begin);
    } else {
      wait_for_pairs_before();
      ptx::wgmma_fence();
      issue_query_gradient();
      ptx::wgmma_wait_group<0>(dq_);
    }
    arrive(slots_.k().empty);
    arrive(slots_.pairs(Ring<2>(ring_.count() - 1).at()).empty);
    leave(w, dv_, 1.f, p_.grad_value, p_.grad_value_strides, p_.grad_value_map, p_.head_dim_v);
    write_sums(ring_.count() - 1);
    send_sums();
    leave(w, dk_, p_.scale, p_.grad_key, p_.grad_key_strides, p_.grad_key_map, p_.head_dim);
  }
  // One of them, through shared memory.
  __device__ __forceinline__ void leave(const BwdTask& w, const float (&x)[C::kDim / 2],
                                        float times, const void* gradient, const Strides& strides,
                                        const TensorMap& map, int dim) {
    const uint32_t grads = smem() + C::kSmemGrads + group_ * C::Grads::kBytes;
    if (thread() == 0) ptx::cp_async_bulk_wait_group_read();
    this->sync_group();  // what was there has left
    this->write_gradient(grads, C::Grads::kBlockBytes, x, times);
    ptx::fence_proxy_async_shared();
    this->sync_group();  // it is there
    this->send_gradient(w, gradient, strides, map, dim, grads, C::Grads::kBlockBytes,
                        w.first_key + this->first_key());
  }

  float dk_[C::kDim / 2], dv_[C::kDim / 2], dq_[kN / 2];
};

template <class C>
__device__ __forceinline__ void attention_bwd(const Sm90BwdParams& p) {
  extern __shared__ __align__(1024) char shared[];
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const BwdSlots<C> slots{smem + C::kSmemBarriers};
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) slots.init();
  ptx::griddepcontrol_wait();  // for lse and delta
  ptx::griddepcontrol_launch_dependents();
  // The barriers are there.
  if constexpr (C::kCluster == 1) {
    __syncthreads();
  } else {
    ptx::barrier_cluster_sync();
  }
  if (group == 0) {
    ptx::setmaxnreg_dec<C::kLoaderRegisters>();
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    if (C::kTwoCta && warp == 3) round_all<C, 2>(p);
    if (threadIdx.x % 32 == 0) {
      if (warp == 0) load_all<C>(shared, slots, p);
      if constexpr (C::kTwoCta) {
        if (warp == 1) send_pairs<C>(shared, slots);
        if (warp == 2) keep_turns<C>(shared, slots, p);
      } else {
        if (warp == 1 || warp == 2) store_all<C>(shared, slots, warp - 1, p);
      }
    }
  } else {
    if constexpr (!C::kTwoCta) {
      ptx::setmaxnreg_inc<C::kRegisters>();
      BwdKeys<C>(shared, slots, group - 1, p).run();
    } else if (group == 1) {
      ptx::setmaxnreg_inc<C::kRegisters>();
      BwdWideValues<C>(shared, slots, p).run();
    } else {
      ptx::setmaxnreg_inc<C::kSecondRegisters>();
      BwdWideKeys<C>(shared, slots, p).run();
    }
    if constexpr (C::kTwoCta) round_all<C, 4>(p);
  }
  if constexpr (C::kCluster > 1)
    ptx::barrier_cluster_sync();  // nobody needs the other's shared memory
}

}  // namespace flashmoe::cuda::sm90
