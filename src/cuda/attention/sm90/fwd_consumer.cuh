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
    if constexpr (C::kJoinsTasks) {
      if (wg_.take_task()) run_joined();
    } else {
      while (wg_.take_task()) {
        skip_unseen_keys();
        first_scores();
        first_softmax_of_seen_keys();
        for_each_key_tile();
        last_values();
        const FwdEpilogue<C> epilogue(wg_);
        epilogue.store(rO_, epilogue.end_rows(softmax_.rows));
        wg_.release_task();
      }
    }
    wg_.end_ping_pong();
    if (warpgroup_thread() == 0) ptx::cp_async_bulk_wait_group();
  }

 private:
  // Tasks without a pause of the tensor cores between them: S of a task's first tile is issued with
  // the last O of the task before, which leaves while others multiply.
  __device__ __forceinline__ void run_joined() {
    skip_unseen_keys();
    first_scores();
    for (;;) {
      first_softmax_of_seen_keys();
      if (wg_.tasks.count() > 0) wg_.release_output();
      for_each_key_tile();
      const tma::Ring<C::kStages> last = wg_.values();
      const Next next = issue_values_and_next_scores(last);
      const FwdEpilogue<C> epilogue(wg_);
      const auto ends = epilogue.end_rows(softmax_.rows);
      ptx::wgmma_wait_group<1>(rO_);
      wg_.release(wg_.slot(C::kVBarrier + last.at()));
      epilogue.store(rO_, ends);
      ptx::wgmma_wait_group<0>(softmax_.rS);
      wg_.release_task();
      if (next == Next::kNone) return;
      wg_.begin_task();
      if (next == Next::kSkipsKeys) {
        skip_unseen_keys();
        first_scores();
      }
    }
  }
  // What follows a task. Where there are tiles of keys that only other warpgroups see, they are
  // passed by before the first S.
  enum class Next { kNone, kSkipsKeys, kJoined };

  // O of a task's last tile, whose V is in stage `last`, and S of the next task's first. (Where no
  // S can be issued yet, one of whatever lies in shared memory is, and is dropped: ptxas serialises
  // MMAs that are not always issued.)
  __device__ __forceinline__ Next issue_values_and_next_scores(const tma::Ring<C::kStages>& last) {
    last.wait_full(wg_.slot(C::kVBarrier + last.at()));
    ptx::wgmma_fence();
    issue_values(last.at());
    wg_.keys.advance();
    wg_.advance_values();

    const tma::Ring<2> next_task(wg_.tasks.count() + 1);
    next_task.wait_full(wg_.slot(C::kTaskBarrier + next_task.at()));
    const FwdTask& task = wg_.shared.tasks[next_task.at()];
    const int end = wg_.reload(task.warpgroup_end[wg_.index]);
    const bool more = tma::warp_uniform(wg_.reload(task.more));
    const bool joined = more && tma::warp_uniform(end == wg_.reload(task.key_end));
    if (joined) {
      wg_.keys.wait_full(wg_.k_slot());
      wg_.wait_queries(next_task.count());
      wg_.wait_turn();
    } else {
      wg_.sync();  // all warps have their last S: its Q gives way to O
    }
    ptx::wgmma_fence();
    issue_scores(next_task.count());
    if (joined) wg_.pass_turn();
    return joined ? Next::kJoined : more ? Next::kSkipsKeys : Next::kNone;
  }

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
  // S = Q K^T, or S += Q K^T where it begins with the bias, of task number `task`.
  __device__ __forceinline__ void issue_scores(uint32_t task) {
    const uint32_t sQ = wg_.queries(task) + wg_.index * kWarpgroupRows * C::Rows::kRowBytes;
    const uint32_t sK = wg_.smem + offsetof(Smem, sK) + wg_.keys.at() * sizeof(typename C::Keys);
    const uint32_t q = tma::warp_uniform(C::Rows::descriptor(sQ));
    const uint32_t k = tma::warp_uniform(C::Keys::descriptor(sK));
#pragma unroll
    for (int step = 0; step < C::kDim / 16; ++step) {
      ptx::Wgmma<C::kBf16, C::kBlockK>::ss(softmax_.rS, C::Rows::along(q, step),
                                           C::Keys::along(k, step), C::kEarlyBias || step > 0);
    }
    ptx::wgmma_commit_group();
  }
  // O += P V.
  __device__ __forceinline__ void issue_values(int stage) {
    const uint32_t sV = wg_.smem + offsetof(Smem, sV) + stage * sizeof(typename C::Keys);
    const uint32_t v = tma::warp_uniform(C::Keys::descriptor(sV));
#pragma unroll
    for (int step = 0; step < C::kBlockK / 16; ++step) {
      ptx::Wgmma<kValuesBf16, C::kDim>::rs_tb(rO_, rP_[step], C::Keys::across(v, step));
    }
    ptx::wgmma_commit_group();
  }
  // Both, S of the next tile and O of the tile before it. Returns the stage of that V.
  __device__ __forceinline__ int issue_scores_and_values() {
    const tma::Ring<C::kStages> before = wg_.values();
    wg_.keys.advance();
    start_scores();
    wg_.keys.wait_full(wg_.k_slot());
    wg_.wait_turn();
    ptx::wgmma_fence();
    issue_scores(wg_.tasks.count());
    before.wait_full(wg_.slot(C::kVBarrier + before.at()));
    ptx::wgmma_fence();
    issue_values(before.at());
    wg_.pass_turn();
    return before.at();
  }

  // S of a tile is there: its K is not needed any more, nor is Q after the last tile (but where
  // it gives way to O).
  __device__ __forceinline__ void release_scores() {
    wg_.release(wg_.k_slot());
    if (C::kJoinsTasks || wg_.block > wg_.reload(wg_.task().key_begin)) return;
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

  __device__ __forceinline__ void first_softmax_of_seen_keys() {
    if constexpr (C::kHalfSoftmax) {
      if (tma::warp_uniform(wg_.reload(wg_.task().half_first[wg_.index]))) {
        first_softmax<C::kBlockK / 2>();
        return clear_second_half();
      }
    }
    first_softmax<C::kBlockK>();
  }
  // P of keys that are not seen.
  __device__ __forceinline__ void clear_second_half() {
#pragma unroll
    for (int i = C::kBlockK / 32; i < C::kBlockK / 16; ++i) {
      for (uint32_t& two : rP_[i]) two = 0;
    }
  }
  __device__ __forceinline__ void first_scores() {
    start_scores();
    wg_.wait_queries(wg_.tasks.count());
    wg_.keys.wait_full(wg_.k_slot());
    wg_.wait_turn();
    ptx::wgmma_fence();
    issue_scores(wg_.tasks.count());
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

  // A later tile: its S and softmax, and O of the tile before.
  template <bool kMasked>
  __device__ __forceinline__ void step() {
    const int before = issue_scores_and_values();
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
    const auto uniform = [&](const int& x) { return tma::warp_uniform(wg_.reload(x)); };
    const FwdTask& task = wg_.task();
    const int begin = uniform(task.key_begin),
              unmasked_begin = uniform(task.unmasked_begin[wg_.index]),
              unmasked_end = uniform(task.unmasked_end[wg_.index]);
#pragma unroll 1
    while (wg_.block >= unmasked_end) step<true>();
#pragma unroll 1
    while (wg_.block >= unmasked_begin) step<false>();
#pragma unroll 1
    while (wg_.block >= begin) step<true>();
  }

  // O of the last tile; then O is whole.
  __device__ __forceinline__ void last_values() {
    const tma::Ring<C::kStages> values = wg_.values();
    const int last = values.at();
    values.wait_full(wg_.slot(C::kVBarrier + last));
    wg_.keys.advance();
    wg_.advance_values();
    ptx::wgmma_fence();
    issue_values(last);
    ptx::wgmma_wait_group<0>(rO_);
    wg_.release(wg_.slot(C::kVBarrier + last));
  }

  FwdWarpgroup<C> wg_;
  FwdSoftmax<C> softmax_;
  float rO_[C::kDim / 2];            // as wgmma lays out its accumulators
  uint32_t rP_[C::kBlockK / 16][4];  // P as wgmma reads it, two numbers in a register
};

}  // namespace flashmoe::cuda::sm90
