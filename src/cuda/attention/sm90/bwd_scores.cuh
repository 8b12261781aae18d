// A warpgroup that has S and dP of 64 keys, and makes P and dS of them.
#pragma once

#include "cuda/attention/sm90/bwd_warpgroup.cuh"

namespace flashmoe::cuda::sm90 {

template <class C>
class BwdScores : protected BwdGroup<C> {
  using Base = BwdGroup<C>;

 protected:
  using Base::Base, Base::p_, Base::ring_, Base::slots_, Base::smem_;
  using typename Base::Type, typename Base::Pairs;

  // Whether dP is issued after P is found: beside a softcap there are no registers for both.
  static constexpr bool kAfter = C::kTile.general_score;

  // S = K Q^T, or dP = V dO^T
  __device__ __forceinline__ void issue_pairs(float (&sums)[C::kBlockQ / 2], uint32_t keys,
                                              uint32_t rows) {
    using Wgmma = ptx::Wgmma<C::kBf16, C::kBlockQ>;
    keys = this->anew(keys + this->first_row() * 128);
    rows = this->anew(rows);
    Wgmma::ss_first(sums, C::Keys::along(C::Keys::descriptor(keys), 0),
                    C::Rows::along(C::Rows::descriptor(rows), 0));
#pragma unroll
    for (int step = 1; step < C::kDim / 16; ++step) {
      Wgmma::ss(sums, C::Keys::along(C::Keys::descriptor(keys), step),
                C::Rows::along(C::Rows::descriptor(rows), step), true);
    }
    ptx::wgmma_commit_group();
  }
  __device__ __forceinline__ void issue_scores() {
    issue_pairs(s_, smem_ + C::kSmemK, this->stage_q());
  }
  __device__ __forceinline__ void issue_grad_probabilities() {
    if (!kAfter) ring_.wait_full(slots_.grad_out(ring_.at()));
    ptx::wgmma_fence();
    issue_pairs(dp_, smem_ + C::kSmemV, this->stage_grad_out());
  }
  // dV += P dO, or dK += dS Q
  __device__ __forceinline__ void issue_gradient(float (&sums)[C::kDim / 2], const Pairs& pairs,
                                                 uint32_t rows) {
    rows = this->anew(rows);
#pragma unroll
    for (int step = 0; step < C::kBlockQ / 16; ++step) {
      ptx::Wgmma<C::kBf16, C::kDim>::rs_tb(sums, pairs[step],
                                           C::Rows::across(C::Rows::descriptor(rows), step));
    }
    ptx::wgmma_commit_group();
  }
  // P in place of S, while dP is on its way.
  __device__ __forceinline__ void find_probabilities(const BwdTask& w) {
    if (kAfter) ring_.wait_full(slots_.grad_out(ring_.at()));
    const bool masked = this->look_at_rows();
    ptx::wgmma_wait_group<kAfter ? 0 : 1>(s_);
    this->probabilities(s_, slopes_);
    if (masked) this->mask(s_, w.seq, w.first_key + this->first_key());
  }
  // dS in place of dP. P is taken as it was rounded: in fp32 it would be 64 registers more at
  // D = 64.
  __device__ __forceinline__ void differentiate(const Pairs& pairs) {
    const uint32_t terms = this->stage_terms();
#pragma unroll
    for (int i = 0; i < C::kBlockQ / 8; ++i) {
      const float2 delta = this->two_terms(terms + 64 * i + 4);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t both = pairs[i / 2][i % 2 * 2 + j / 2];
        const float p = Type::unpack(static_cast<uint16_t>(j % 2 ? both >> 16 : both));
        dp_[4 * i + j] = (dp_[4 * i + j] - (j % 2 ? delta.y : delta.x)) * p;
        if (C::kTile.general_score && p_.softcap_scale) {
          const uint32_t slopes = slopes_[i / 2][i % 2 * 2 + j / 2];
          dp_[4 * i + j] *= Type::unpack(static_cast<uint16_t>(j % 2 ? slopes >> 16 : slopes));
        }
      }
    }
  }

  // A block of queries from its beginning: P is there then, and dP on its way.
  __device__ __forceinline__ void begin_rows(const BwdTask& w) {
    ptx::mbarrier_wait(slots_.q(ring_.at()).full, ring_.parity());
    ptx::wgmma_fence();
    issue_scores();
    if (!kAfter) issue_grad_probabilities();
    find_probabilities(w);
    if (kAfter) issue_grad_probabilities();
  }
  // dV where a mask hides something not finite; P is for so long where dS will be.
  __device__ __forceinline__ void add_contained(float (&dv)[C::kDim / 2], const Pairs& pairs,
                                                const BwdTask& w) {
    this->store_pairs(pairs, this->first_key());
    this->sync_group();  // P is there
    this->template multiply_contained<typename C::Rows>(
        dv, C::kBlockQ,
        [&](int key, int query) { return this->pair_at(w, query, this->first_key() + key); },
        this->stage_grad_out(), 0);
    this->sync_group();  // and done with
  }

  float s_[C::kBlockQ / 2], dp_[C::kBlockQ / 2];  // then P and dS; as wgmma lays them out
  Pairs slopes_;                                  // of a softcap
};

}  // namespace flashmoe::cuda::sm90
