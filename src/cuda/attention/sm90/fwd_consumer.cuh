// A consumer warpgroup of the sm90 forward pass: 64 rows of queries, from S = Q K^T to O.
#pragma once

#include "cuda/attention/sm90/fwd_epilogue.cuh"
#include "cuda/attention/sm90/fwd_softmax.cuh"
#include "cuda/attention/sm90/fwd_warpgroup.cuh"
#include "cuda/ptx/wgmma.cuh"

namespace flashmoe::cuda::sm90 {

template <class C>
class FwdConsumer {
  using Smem = typename C::Smem;
  static constexpr bool kValuesBf16 = std::is_same_v<typename C::ValueType, Bf16>;

 public:
  __device__ __forceinline__ FwdConsumer(Smem& shared, uint32_t smem, int index,
                                         const Sm90FwdParams& p, int team = 0)
      : wg_(shared, smem, index, team, p) {}

  __device__ __forceinline__ void run() {
    wg_.begin_ping_pong();
    while (wg_.take_task()) {
      skip_unseen_keys();
      first_tile();
      for_each_key_tile();
      last_values();
      FwdEpilogue<C>(wg_).store(rO_, softmax_.rows);
      wg_.release_task();
    }
    wg_.end_ping_pong();
    if (warpgroup_thread() == 0) ptx::cp_async_bulk_wait_group();
  }

 private:
  __device__ __forceinline__ typename C::Rule rule() const { return C::rule(wg_); }

  // S = the bias, which issue_scores() adds to.
  __device__ __forceinline__ void start_scores() {
    if constexpr (C::kEarlyBias) {
      wg_.wait_bias();
      softmax_.start_from_bias(wg_);
    }
  }
  // The bias to registers, while S is on its way.
  __device__ __forceinline__ void load_bias() {
    if constexpr (C::kPackedBias) {
      wg_.wait_bias();
      softmax_.load_bias(wg_);
    }
  }
  // The bias is added to S, which is there.
  __device__ __forceinline__ void add_bias() {
    if constexpr (C::kLateBias || C::kPackedBias) softmax_.add_bias(wg_);
  }
  // S = Q K^T, or S += Q K^T where it begins with the bias, of the tile's first kKeys.
  template <int kKeys>
  __device__ __forceinline__ void issue_scores() {
    float(&rS)[kKeys / 2] = reinterpret_cast<float(&)[kKeys / 2]>(softmax_.rS);
    const uint32_t sQ =
        wg_.smem + offsetof(Smem, sQ) + wg_.index * kWarpgroupRows * C::Rows::kRowBytes;
    const uint32_t sK = wg_.smem + offsetof(Smem, sK) + wg_.keys.at() * sizeof(typename C::Keys);
    const uint32_t q = tma::warp_uniform(C::Rows::descriptor(sQ));
    const uint32_t k = tma::warp_uniform(C::Keys::descriptor(sK));
#pragma unroll
    for (int step = 0; step < C::kDim / 16; ++step) {
      ptx::Wgmma<C::kBf16, kKeys>::ss(rS, C::Rows::along(q, step), C::Keys::along(k, step),
                                      C::kEarlyBias || step > 0);
    }
    ptx::wgmma_commit_group();
  }
  // O += P V, of the tile's first kKeys.
  template <int kKeys>
  __device__ __forceinline__ void issue_values(int stage) {
    const uint32_t sV = wg_.smem + offsetof(Smem, sV) + stage * sizeof(typename C::Keys);
    const uint32_t v = tma::warp_uniform(C::Keys::descriptor(sV));
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      ptx::Wgmma<kValuesBf16, C::kDim>::rs_tb(rO_, rP_[step], C::Keys::across(v, step));
    }
    ptx::wgmma_commit_group();
  }
  // Both, S of the next tile and O of the tile before it, of kKeys. Returns the stage of that V.
  template <int kKeys>
  __device__ __forceinline__ int issue_scores_and_values() {
    const tma::Ring<C::kStages> before = wg_.values();
    wg_.keys.advance();
    start_scores();
    wg_.keys.wait_full(wg_.k_slot());
    wg_.wait_turn();
    ptx::wgmma_fence();
    issue_scores<C::kBlockK>();
    before.wait_full(wg_.slot(C::kVBarrier + before.at()));
    ptx::wgmma_fence();
    issue_values<kKeys>(before.at());
    wg_.pass_turn();
    return before.at();
  }

  // S of a tile is there: its K is not needed any more, nor is Q after the last tile.
  __device__ __forceinline__ void release_scores() {
    wg_.release(wg_.k_slot());
    if (wg_.block > wg_.reload(wg_.task().key_begin)) return;
    wg_.release(wg_.slot(C::kQBarrier));
  }
  // P of a tile is there: its bias is not needed any more.
  __device__ __forceinline__ void release_bias() {
    if constexpr (C::kBias && !C::kBiasStays) wg_.release(wg_.bias_slot());
  }
  template <int kKeys = C::kBlockK>
  __device__ __forceinline__ void pack_probabilities() {
#pragma unroll
    for (int i = 0; i < kKeys / 4; ++i) {
      rP_[i / 4][i % 4] = C::ValueType::pack(softmax_.rS[2 * i], softmax_.rS[2 * i + 1]);
    }
  }
  __device__ __forceinline__ void correct_output() {
#pragma unroll
    for (int i = 0; i < C::kDim / 2; ++i) rO_[i] *= softmax_.correction[i % 4 / 2];
  }

  // The softmax of a tile, which runs under O of the tile before; then waits for that O and brings
  // it to the new reference.
  __device__ __forceinline__ void softmax_and_correct() {
    softmax_.template step<false>(rule());
    const bool corrects = softmax_.correction[0] != 1 || softmax_.correction[1] != 1;
    const float sum = softmax_.rows.sum[0] + softmax_.rows.sum[1];
    const bool any = __any_sync(0xffffffffu, corrects || !(sum >= 0));
    ptx::wgmma_wait_all_after(any, rO_);
    if (any) correct_output();
  }
  __device__ __forceinline__ void guess_softmax() {
    float sum[2] = {0, 0};
    const bool failed = softmax_.guess(sum, rule());
    ptx::wgmma_wait_all_after(failed, rO_);
    if (failed) {
      softmax_.recompute_scores(wg_);
      softmax_.template step<false>(rule());
      correct_output();
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) softmax_.rows.sum[half] += sum[half];
    }
  }

  // Passes by tiles of keys that other warpgroups see and none of this one's rows does.
  __device__ __forceinline__ void skip_unseen_keys() {
#pragma unroll 1
    for (int n = wg_.reload(wg_.task().key_end) - 1; tma::warp_uniform(n) > wg_.block; --n) {
      const tma::Ring<C::kStages> values = wg_.values();
      const tma::Slot k = wg_.k_slot(), v = wg_.slot(C::kVBarrier + values.at());
      wg_.keys.wait_full(k);
      wg_.wait_turn();
      wg_.pass_turn();
      values.wait_full(v);
      constexpr bool kBiasPasses = C::kBias && !C::kBiasStays;
      if (kBiasPasses) wg_.keys.wait_full(wg_.bias_slot());
      if (lane() == 0) {
        ptx::mbarrier_arrive(k.empty);
        ptx::mbarrier_arrive(v.empty);
        if (kBiasPasses) ptx::mbarrier_arrive(wg_.bias_slot().empty);
      }
      wg_.keys.advance();
      wg_.advance_values();
    }
  }

  // The first tile of a task; the second too where half of the first was enough.
  __device__ __forceinline__ void first_tile() {
    if constexpr (C::kHalfTiles) {
      constexpr int kHalf = C::kBlockK / 2;
      if (tma::warp_uniform(wg_.reload(wg_.task().half_first[wg_.index]))) {
        first_scores<kHalf>();
        first_softmax<kHalf>();
        if (wg_.block >= tma::warp_uniform(wg_.reload(wg_.task().key_begin))) {
          step<false, kHalf>();
        } else {
#pragma unroll
          for (int i = 0; i < kHalf / 4; ++i) rP_[kHalf / 16 + i / 4][i % 4] = 0;
        }
        return;
      }
    }
    first_scores<C::kBlockK>();
    first_softmax<C::kBlockK>();
  }
  template <int kKeys>
  __device__ __forceinline__ void first_scores() {
    start_scores();
    ptx::mbarrier_wait(wg_.slot(C::kQBarrier).full, wg_.tasks.count() % 2);
    wg_.keys.wait_full(wg_.k_slot());
    wg_.wait_turn();
    ptx::wgmma_fence();
    issue_scores<kKeys>();
    wg_.pass_turn();
    load_bias();
    ptx::wgmma_wait_group<0>(softmax_.rS);
  }
  template <int kKeys>
  __device__ __forceinline__ void first_softmax() {
    release_scores();
    if (C::kTile.general_score) softmax_.transform(rule());
    if (C::kLateBias) wg_.keys.wait_full(wg_.bias_slot());
    add_bias();
    if (wg_.needs_mask()) softmax_.template mask<kKeys>(wg_);
    softmax_.template step<true, kKeys>(rule());
    release_bias();
    pack_probabilities<kKeys>();
    --wg_.block;
#pragma unroll
    for (float& x : rO_) x = 0;
  }

  // A later tile: its S and softmax, and O of the tile before, of kKeys.
  template <bool kMasked, int kKeys = C::kBlockK>
  __device__ __forceinline__ void step() {
    const int before = issue_scores_and_values<kKeys>();
    load_bias();
    if constexpr (C::kLateBias) {
      wg_.keys.wait_full(wg_.bias_slot());
      if (!kMasked) softmax_.prepare_bias(wg_);
    }
    ptx::wgmma_wait_group<1>(softmax_.rS);
    if (kMasked || C::kTile.general_score) {
      release_scores();
      if (C::kTile.general_score) softmax_.transform(rule());
      add_bias();
      if (kMasked) softmax_.template mask<C::kBlockK>(wg_);
      softmax_and_correct();
    } else {
      guess_softmax();
      release_scores();
    }
    release_bias();
    wg_.release(wg_.slot(C::kVBarrier + before));
    wg_.advance_values();
    pack_probabilities();
    --wg_.block;
  }
  // All tiles but the first, from the last to the first: masked ones at either end.
  __device__ __forceinline__ void for_each_key_tile() {
    const auto from = [&](const int& first) {
      return wg_.block >= tma::warp_uniform(wg_.reload(first));
    };
#pragma unroll 1
    while (from(wg_.task().unmasked_end[wg_.index])) step<true>();
#pragma unroll 1
    while (from(wg_.task().unmasked_begin[wg_.index])) step<false>();
#pragma unroll 1
    while (from(wg_.task().key_begin)) step<true>();
  }

  // O of the last tile; then O is whole.
  __device__ __forceinline__ void last_values() {
    const tma::Ring<C::kStages> values = wg_.values();
    const int last = values.at();
    values.wait_full(wg_.slot(C::kVBarrier + last));
    wg_.keys.advance();
    wg_.advance_values();
    ptx::wgmma_fence();
    issue_values<C::kBlockK>(last);
    ptx::wgmma_wait_group<0>(rO_);
    wg_.release(wg_.slot(C::kVBarrier + last));
  }

  FwdWarpgroup<C> wg_;
  FwdSoftmax<C> softmax_;
  float rO_[C::kDim / 2];            // as wgmma lays out its accumulators
  uint32_t rP_[C::kBlockK / 16][4];  // P as wgmma reads it, two numbers in a register
};

}  // namespace flashmoe::cuda::sm90
