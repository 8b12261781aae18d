// Attention backward for Hopper, head dims above 128: dK and dV of 64 keys are more than the
// registers of a warpgroup hold beside what else it needs. So one has dV, and one dK:
//
//   warpgroup 1   P(n) | dV(n)  S(n+1)       | P(n+1) | dV(n+1) ...
//   warpgroup 2         | dS(n) | dK(n)  dQ(n)  dP(n+1) | dS(n+1) ...
//
// The second has dQ and dP left when the first computes P, and the first dV and S when the second
// computes dS.
//
// Each finds its A operand in its registers, for P goes from one thread to that of the other
// warpgroup which has the same keys and queries. Tiles have 64 queries and 64 keys:
//
//   shared memory   sK, sV   64 x D              dK leaves through sV
//                   sQ, sdO  2 stages x 64 x D   with lse and delta; dV leaves through the last dO
//                   sdS      2 x 64 x 64
//                   sP       64 x 64, as threads have it
//
// (Sharing out columns of dK and dV instead would read 2,688 rather than 2,176 cycles' worth of
// operands from shared memory for 2,560 cycles of products.) There is no room for dQ on its way
// out: each thread adds its own to the sums.
#pragma once

#include "cuda/sm90/attention_bwd_tile.cuh"

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

template <class C, bool kValues>
class BwdWide : BwdGroup<C> {
  using Base = BwdGroup<C>;
  using Base::arrive, Base::contain_, Base::group_, Base::keys_parity_, Base::lane, Base::p_,
      Base::ring_, Base::slots_, Base::smem, Base::stage_, Base::thread;
  using typename Base::Type, typename Base::Pairs;

 public:
  __device__ __forceinline__ BwdWide(char* shared, const BwdSlots<C>& slots, int group,
                                     const HopperBwdParams& p)
      : Base(shared, slots, group, p) {}

  __device__ __forceinline__ void run() {
    this->for_each_work([&](const BwdWork& w) { compute(w); });
    if (thread() == 0) ptx::tma_wait_group();
  }

 private:
  // S = K Q^T, or dP = V dO^T
  __device__ __forceinline__ void issue_pairs() {
    const uint32_t keys = same(smem() + (kValues ? C::kSmemK : C::kSmemV));
    const uint32_t rows = same(kValues ? this->stage_q() : this->stage_grad_out());
    using Wgmma = ptx::Wgmma<C::kBf16, C::kBlockQ>;
    Wgmma::shared_first(s_, C::Keys::along(C::Keys::descriptor(keys), 0),
                        C::Rows::along(C::Rows::descriptor(rows), 0));
#pragma unroll
    for (int step = 1; step < C::kDim / 16; ++step) {
      Wgmma::shared(s_, C::Keys::along(C::Keys::descriptor(keys), step),
                    C::Rows::along(C::Rows::descriptor(rows), step), true);
    }
    ptx::wgmma_commit_group();
  }
  // dV += P dO, or dK += dS Q
  __device__ __forceinline__ void issue_gradient(const Pairs& pairs) {
    const uint32_t rows = same(kValues ? this->stage_grad_out() : this->stage_q());
#pragma unroll
    for (int step = 0; step < C::kBlockQ / 16; ++step) {
      ptx::Wgmma<C::kBf16, C::kDim>::registers(sums_, pairs[step],
                                               C::Rows::across(C::Rows::descriptor(rows), step));
    }
    ptx::wgmma_commit_group();
  }
  // dQ = dS K, of one block of columns.
  __device__ __forceinline__ void issue_query_gradient(float (&dq)[32], int block, uint32_t stage) {
    const uint32_t sdS = same(this->pairs_tile(stage));
    const uint32_t sK = same(smem() + C::kSmemK + block * C::Keys::kBlockBytes);
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

  __device__ __forceinline__ void write_pairs(uint32_t to, const Pairs& pairs) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      ptx::st_shared_v4(to + i * 2048, uint4{pairs[i][0], pairs[i][1], pairs[i][2], pairs[i][3]});
    }
  }
  // P and dS in the registers, as the products want them; P for the other warpgroup as well, with a
  // softcap multiplied with its derivative.
  __device__ __forceinline__ void find_pairs(const BwdWork& w, bool masked, Pairs& pairs) {
    const uint32_t sP = smem() + C::kSmemSums + thread() * 16;
    if constexpr (kValues) {
      Pairs slopes;
      this->probabilities(s_, slopes);
      if (masked) this->mask(s_, w.seq, w.first_key);
      this->pack(pairs, s_);
      if (C::kTile.any_score && p_.softcap_scale) {
#pragma unroll
        for (int i = 0; i < C::kBlockQ / 4; ++i) {
          uint32_t& two = slopes[i / 4][i % 4];
          two = Type::pack(s_[2 * i] * Type::unpack(two & 0xffff),
                           s_[2 * i + 1] * Type::unpack(static_cast<uint16_t>(two >> 16)));
        }
      }
      this->wait_pairs(stage_ ^ 1);  // P before it was read
      if (C::kTile.any_score && p_.softcap_scale) {
        write_pairs(sP, slopes);
      } else {
        write_pairs(sP, pairs);
      }
      arrive(slots_.probabilities());
    } else {
      const uint32_t terms = this->stage_terms();
      ptx::mbarrier_wait(slots_.probabilities(), stage_);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint4 p = ptx::ld_shared_v4(sP + i * 2048);
        const uint32_t p_pairs[4] = {p.x, p.y, p.z, p.w};
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float2 delta = this->two_terms(terms + 64 * (2 * i + j) + 4);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const uint32_t both = p_pairs[2 * j + half];
            const float* const dp = s_ + 8 * i + 4 * j + 2 * half;
            pairs[i][2 * j + half] =
                Type::pack((dp[0] - delta.x) * Type::unpack(both & 0xffff),
                           (dp[1] - delta.y) * Type::unpack(static_cast<uint16_t>(both >> 16)));
          }
        }
      }
      this->store_pairs(pairs, 0);
      ptx::fence_proxy_async();
      arrive(slots_.pairs());
    }
  }

  // The turn to add to the sums of a block, and that of who comes next.
  // See keep_turns().
  __device__ __forceinline__ void wait_turn() {
    if (!p_.grad_query_sums) return;
    ptx::mbarrier_wait(slots_.sums(group_).empty, turns_parity_);
    turns_parity_ ^= 1;
  }
  __device__ __forceinline__ void pass_turn() const {
    if (!p_.grad_query_sums) return;
    arrive(slots_.sums(group_).full);
  }

  __device__ __forceinline__ void issue_next_pairs() {
    const Slot next = kValues ? slots_.q(ring_.at()) : slots_.grad_out(ring_.at());
    ptx::mbarrier_wait(next.full, ring_.parity());
    ptx::wgmma_fence();
    issue_pairs();
  }

  // A block of queries, whose S or dP is there. Then that of the next one is, if there is kMore.
  template <bool kMore>
  __device__ __forceinline__ void step(const BwdWork& w) {
    const Slot q = slots_.q(ring_.at()), grad_out = slots_.grad_out(ring_.at());
    Pairs pairs;
    if (!kValues) {
      arrive(grad_out.empty);
      ptx::mbarrier_wait(q.full, ring_.parity());
    }
    find_pairs(w, this->look_at_rows(0), pairs);
    if (kValues) {
      arrive(q.empty);
      ptx::mbarrier_wait(grad_out.full, ring_.parity());
    }
    if (contain_) return finish_contained<kMore>(w, pairs);
    ptx::wgmma_fence();
    issue_gradient(pairs);
    if constexpr (kValues) {
      if (kMore) {
        this->advance();
        issue_next_pairs();
      }
      ptx::wgmma_wait_group<kMore ? 1 : 0>(sums_);
      ptx::wgmma_done_with(pairs);
      if (kMore) arrive(grad_out.empty);  // the last dO is where dV goes
      if (kMore) ptx::wgmma_wait_group<0>(s_);
    } else {
      add_query_gradient<kMore>(q, pairs);
    }
  }
  // dQ, two blocks of columns at a time, while dK is on its way.
  template <bool kMore>
  __device__ __forceinline__ void add_query_gradient(const Slot& q, const Pairs& pairs) {
    constexpr int kBlocks = C::kSumDim / 64;
    const uint32_t stage = stage_;
    const auto [row, first, flags] = this->rows();
    float* const sums = query_sums<C>(row, 0, p_);
    float dq[2][32];
    this->wait_pairs(stage_);  // dS is there
    ptx::wgmma_fence();
    issue_query_gradient(dq[0], 0, stage);
    issue_query_gradient(dq[1], 1, stage);
    ptx::wgmma_wait_group<2>(sums_);
    ptx::wgmma_done_with(pairs);
    arrive(q.empty);
    wait_turn();
    if (kMore) this->advance();
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      float(&these)[32] = dq[block % 2];
      if (kMore || block + 1 < kBlocks) {
        ptx::wgmma_wait_group<1>(these);
      } else {
        ptx::wgmma_wait_group<0>(these);
      }
      add_sums(these, sums, block, flags & BwdRows::kStores);
      if (block + 2 < kBlocks) {
        ptx::wgmma_fence();
        issue_query_gradient(these, block + 2, stage);
      } else if (kMore && block + 2 == kBlocks) {
        issue_next_pairs();
      }
    }
    pass_turn();
    if (kMore) ptx::wgmma_wait_group<0>(s_);
  }

  // The products of a block where a mask hides something not finite.
  template <bool kMore>
  __device__ __forceinline__ void finish_contained(const BwdWork& w, const Pairs& pairs) {
    this->wait_pairs(stage_);  // dS is there
    if (kValues && C::kTile.any_score) {
      write_pairs(smem() + C::kSmemSums + thread() * 16, pairs);  // P itself
      this->sync_group();
    }
    const auto pair = [&](int key, int query) {
      if (!kValues) return this->pair_at(w, query, key);
      // P, where find_pairs() has put it.
      const int owner = key / 16 * 32 + key % 8 * 4 + query % 8 / 2;
      const uint32_t at = query / 16 * 2048 + owner * 16 + query / 8 % 2 * 8 + key / 8 % 2 * 4;
      const uint16_t p = ptx::ld_shared_u16(smem() + C::kSmemSums + at + query % 2 * 2);
      return typename Base::Factor{this->sees(w, query, key), Type::unpack(p)};
    };
    this->template multiply_contained<typename C::Rows>(
        sums_, C::kBlockQ, pair, kValues ? this->stage_grad_out() : this->stage_q(), 0);
    if constexpr (!kValues) {
      const auto [row, first, flags] = this->rows();
      float* const sums = query_sums<C>(row, 0, p_);
      wait_turn();
#pragma unroll 1
      for (int block = 0; block < C::kSumDim / 64; ++block) {
        float dq[32] = {};
        this->template multiply_contained<typename C::Keys>(
            dq, C::kBlockK, [&](int query, int key) { return this->pair_at(w, query, key); },
            smem() + C::kSmemK, 64 * block);
        add_sums(dq, sums, block, flags & BwdRows::kStores);
      }
      pass_turn();
    }
    this->sync_group();  // everyone has read P: it is written again
    const Slot slot = kValues ? slots_.grad_out(ring_.at()) : slots_.q(ring_.at());
    if (!kValues || kMore) arrive(slot.empty);
    if (kMore) {
      this->advance();
      issue_next_pairs();
      ptx::wgmma_wait_group<0>(s_);
    }
  }

  __device__ __forceinline__ void compute(const BwdWork& w) {
#pragma unroll
    for (float& x : sums_) x = 0;
    ptx::mbarrier_wait(slots_.k().full, keys_parity_);
    if (kValues) {
      this->clear_keys(w, smem() + C::kSmemK, 0);
      ptx::mbarrier_wait(slots_.q(ring_.at()).full, ring_.parity());
    } else {
      ptx::mbarrier_wait(slots_.v().full, keys_parity_);
      this->clear_keys(w, smem() + C::kSmemV, 0);
      ptx::mbarrier_wait(slots_.grad_out(ring_.at()).full, ring_.parity());
    }
    ptx::wgmma_fence();
    issue_pairs();
    if (kValues) ptx::mbarrier_wait(slots_.v().full, keys_parity_);
    this->bad_keys_ = this->find_bad_keys(w);
    ptx::wgmma_wait_group<0>(s_);
    keys_parity_ ^= 1;
#pragma unroll 1
    for (int n = 1; n < w.tiles; ++n) step<true>(w);
    step<false>(w);
    arrive(slots_.k().empty);
    store(w);
    this->advance();
  }

  // dV through the last dO, dK through V.
  __device__ __forceinline__ void store(const BwdWork& w) {
    // dV goes where the last dO is, which the other warpgroup reads for dP: dS is written after
    // that.
    if (kValues) this->wait_pairs(stage_);
    const uint32_t from = kValues ? this->stage_grad_out() : smem() + C::kSmemV;
    this->write_gradient(from, C::Grads::kBlockBytes, sums_, kValues ? 1.f : p_.scale);
    ptx::fence_proxy_async();
    this->sync_group();  // all of it is there
    if constexpr (kValues) {
      this->send_gradient(w, p_.grad_value, p_.grad_value_strides, p_.grad_value_map, p_.head_dim_v,
                          from, C::Grads::kBlockBytes, w.first_key);
    } else {
      this->send_gradient(w, p_.grad_key, p_.grad_key_strides, p_.grad_key_map, p_.head_dim, from,
                          C::Grads::kBlockBytes, w.first_key);
    }
    if (thread() == 0) ptx::tma_wait_group_read();
    arrive(kValues ? slots_.grad_out(ring_.at()).empty : slots_.v().empty);
  }

  int turns_parity_ = 0;
  float s_[C::kBlockQ / 2];  // or dP; as wgmma lays them out
  float sums_[C::kDim / 2];  // dV, or dK
};

}  // namespace flashmoe::cuda::sm90
