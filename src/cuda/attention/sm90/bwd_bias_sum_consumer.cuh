// A consumer of the sum of a broadcast bias's gradient (bwd_bias_sum.cuh): from S and dP to the
// sums in registers, and to memory.
#pragma once

#include "cuda/attention/bias.cuh"
#include "cuda/attention/score.cuh"
#include "cuda/attention/sm90/bwd_bias_sum_producer.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/wgmma.cuh"

namespace flashmoe::cuda::sm90 {

// A consumer: the sum of 64 queries x 128 keys.
template <class C>
class BiasSumConsumer {
  using Smem = typename C::Smem;
  using Type = typename C::Type;
  using Ring = typename C::Ring;
  static constexpr int kCount = C::kCount;

 public:
  __device__ __forceinline__ BiasSumConsumer(Smem& shared, uint32_t smem, int index,
                                             const Sm90BwdParams& p)
      : shared_(shared), smem_(smem), index_(index), p_(p) {}

  __device__ __forceinline__ void run() {
    if (p_.bias_sum_last) {
      add_splits();
    } else {
      if (p_.bias_by_rows) {
        read_bias_rows();
      } else {
        read_bias();
      }
#pragma unroll 1
      for (bool guarded = false;; guarded = true) {
        add_steps(guarded);
        // Something not finite may be hidden: the steps are added once more, guarded.
        const bool again =
            !guarded && ptx::bar_red_or(C::kVerdictBarrier, C::kVerdictThreads, !all_finite());
        if (!tma::warp_uniform(again)) break;
      }
      if (p_.bias_sum_splits > 1) return store_split();
      // Both consumers are done with the ring.
      ptx::bar_sync(C::kConsumerBarrier, C::kConsumerThreads);
    }
    store_tile();
  }

 private:
  __device__ __forceinline__ int thread() const { return ptx::opaque_thread() - kWarpgroupThreads; }
  // The thread's first row of the tile.
  __device__ __forceinline__ int tile_row() const {
    return index_ * kWarpgroupRows + fragment_row();
  }
  __device__ __forceinline__ void wait_full(const Ring& ring) const {
    ptx::mbarrier_wait(C::slot(smem_, ring).full, ring.parity);
  }
  __device__ __forceinline__ void release(const Ring& ring) const {
    warp_arrive(C::slot(smem_, ring).empty);
  }
  // The step whose Q and K are in a slot.
  __device__ __forceinline__ SumStep step_at(const Ring& ring) const {
    const SumStep& step = shared_.steps[ring.at];
    return {tma::warp_uniform(step.len_k), tma::warp_uniform(step.flags)};
  }

  // The bias from the first slots to registers.
  __device__ __forceinline__ void read_bias() {
    using Tile = typename C::ScoreTile;
    const uint32_t at =
        Tile::at(index_ * kWarpgroupRows + warpgroup_warp() * 16 + lane() % 16, lane() / 16 * 8);
#pragma unroll
    for (int block = 0; block < Tile::kBlocks; ++block) {
      const int of_slot = block % C::kBlocksOfSlot;
      if (of_slot == 0) wait_full(ring_);
      const uint32_t from = C::operands(smem_, ring_) + of_slot * Tile::kBlockBytes + at;
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        uint32_t x[4];  // keys 0 to 7 and 8 to 15, of each rows 0 to 7 and 8 to 15
        ptx::ldmatrix_x4(x, from ^ n * 32);
#pragma unroll
        for (int i = 0; i < 4; ++i) bias_[block][n * 4 + i] = x[i];
      }
      if (of_slot < C::kBlocksOfSlot - 1) continue;
      release(ring_);
      ring_ = ring_.next();
    }
  }

  // The bias from memory to registers, where its rows begin anywhere: once for all steps.
  __device__ __forceinline__ void read_bias_rows() {
    const SumTile& tile = shared_.tile;
    const int query = tile.first_query + tile_row(), key = tile.first_key + fragment_column();
    const int64_t stride = p_.bias_strides.row;
    const uint16_t* const from = static_cast<const uint16_t*>(p_.bias) +
                                 offset(p_, p_.bias_strides, tile.batch, tile.head, 0) +
                                 query * stride + key;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int row = i % 4 / 2 * 8, column = half * C::kHalfKeys + i / 4 * 8 + i % 2;
        const bool exists = query + row < p_.len_q && key + column < p_.len_k;
        const uint32_t x = exists ? from[row * stride + column] : 0;
        bias_[half][i / 2] = i % 2 ? bias_[half][i / 2] | x << 16 : x;
      }
    }
  }

  // S = Q K^T or dP = dO V^T, of the operands in a slot and half of their keys.
  __device__ __forceinline__ void issue(float (&x)[kCount], const Ring& ring, int half) {
    using Wgmma = ptx::Wgmma<C::kBf16, C::kHalfKeys>;
    const uint32_t from = C::operands(smem_, ring);
    const uint32_t rows = C::Rows::descriptor(from + index_ * kWarpgroupRows * C::Rows::kRowBytes);
    const uint32_t keys =
        C::Keys::descriptor(from + static_cast<uint32_t>(offsetof(typename C::Operands, keys)) +
                            half * C::kHalfKeys * C::Keys::kRowBytes);
    Wgmma::ss_first(x, C::Rows::along(rows, 0), C::Keys::along(keys, 0));
#pragma unroll
    for (int step = 1; step < C::kDim / 16; ++step) {
      Wgmma::ss(x, C::Rows::along(rows, step), C::Keys::along(keys, step), true);
    }
    ptx::wgmma_commit_group();
  }

  // lse and delta of the thread's two rows.
  __device__ __forceinline__ void load_lse_delta(float2 (&two)[2], const Ring& ring) const {
    const uint32_t from =
        smem_ + offsetof(Smem, lse_delta) + (ring.at * C::kBlockQ + tile_row()) * 8;
    two[0] = ptx::ld_shared_v2_f32(from);
    two[1] = ptx::ld_shared_v2_f32(from + 8 * 8);
  }
  // The bias of accumulator i. (One that stayed unpacked would take twice the registers.)
  __device__ __forceinline__ float bias(int half, int i) const {
    const uint32_t two = ptx::opaque(bias_[half][i / 2]);
    return Type::unpack(static_cast<uint16_t>(i % 2 ? two >> 16 : two));
  }

  // P in place of S.
  __device__ __forceinline__ void exponentiate(int half, const float2 (&lse_delta)[2]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float rest = bias(half, i) * kLog2e - lse_delta[i % 4 / 2].x;
      rS_[half][i] = ptx::ex2_approx_ftz(rS_[half][i] * p_.scale_log2 + rest);
    }
  }
  __device__ __forceinline__ void add_plain(int half, const float2 (&lse_delta)[2]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      sums_[half][i] = fmaf(rS_[half][i], rdP_[i] - lse_delta[i % 4 / 2].y, sums_[half][i]);
    }
  }
  // P in place of S, and kHidden where a mask or the bias hides the key from the row: what such
  // pairs have that is not finite does not count.
  static constexpr float kHidden = -1;
  __device__ __forceinline__ void exponentiate_seen(int half, const float2 (&lse_delta)[2],
                                                    const SumStep& step) {
    Sequence seq;
    seq.len_q = p_.len_q;
    seq.len_k = step.len_k;
    seq.shift = seq.len_k - seq.len_q;
    const bool valid = !(step.flags & SumStep::kInvalid);
    const ScoreRule<Sm90BwdParams> rule(p_);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = shared_.tile.first_query + tile_row() + 8 * r;
      const int first = shared_.tile.first_key + half * C::kHalfKeys + fragment_column();
      const int begin = seq.begin(row, p_) - first;
      // A row that sees nothing has an lse of +inf.
      const int end = valid && lse_delta[r].x != INFINITY ? seq.end(row, p_) - first : -kNoLimit;
#pragma unroll
      for (int j = 0; j < kCount / 2; ++j) {
        const int key = j / 2 * 8 + j % 2;
        float& x = rS_[half][j / 2 * 4 + 2 * r + j % 2];
        const float b = bias(half, j / 2 * 4 + 2 * r + j % 2);
        const float score = rule.score(x, b);
        const bool seen = key >= begin && key < end && b != -INFINITY && score != -INFINITY;
        x = seen ? ptx::ex2_approx_ftz(score - lse_delta[r].x) : kHidden;
      }
    }
  }
  // NOTE: the sum is chosen and not what is added to it, or else the compiler adds after the branch
  // that add_plain() is in, and that has no FMA then.
  __device__ __forceinline__ void add_seen(int half, const float2 (&lse_delta)[2],
                                           const SumStep& step) {
    const float hidden = step.flags & SumStep::kInvalid ? NAN : 0.f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      float& sum = sums_[half][i];
      const float with = fmaf(rS_[half][i], rdP_[i] - lse_delta[i % 4 / 2].y, sum);
      sum = rS_[half][i] == kHidden ? sum + hidden : with;
    }
  }

  // Half of a step's keys, whose S is there: dP, P and the sum. S of the other half, of this step
  // or the next, is on its way then; its Q and K are in `scores`.
  template <int kHalf>
  __device__ __forceinline__ void add_half(const SumStep& step, bool plain, const Ring& gradients,
                                           const Ring& scores) {
    ptx::wgmma_fence();
    issue(rdP_, gradients, kHalf);
    issue(rS_[1 - kHalf], scores, 1 - kHalf);
    float2 lse_delta[2];
    load_lse_delta(lse_delta, gradients);
    if (plain) {
      exponentiate(kHalf, lse_delta);
    } else {
      exponentiate_seen(kHalf, lse_delta, step);
    }
    ptx::wgmma_wait_group<1>(rdP_);
    if (kHalf == 1) release(gradients);
    if (plain) {
      add_plain(kHalf, lse_delta);
    } else {
      add_seen(kHalf, lse_delta, step);
    }
  }

  // Sums all steps, guarded or not, from 0.
  // NOTE: ptxas serialises MMAs that are not always issued. So S of the next step's first half is
  // issued after the last step too, from whatever lies in the slot.
  __device__ __forceinline__ void add_steps(bool guarded) {
#pragma unroll
    for (int i = 0; i < 2 * kCount; ++i) sums_[i / kCount][i % kCount] = 0;
    wait_full(ring_);
    SumStep step = step_at(ring_);
    ptx::wgmma_fence();
    issue(rS_[0], ring_, 0);
#pragma unroll 1
    while (!(step.flags & SumStep::kLast)) {
      const Ring gradients = ring_.next(), next = gradients.next();
      const bool plain = step.flags & SumStep::kPlain && !guarded;
      wait_full(gradients);
      ptx::wgmma_wait_group<0>(rS_[0]);
      add_half<0>(step, plain, gradients, ring_);
      ptx::wgmma_wait_group<0>(rS_[1]);
      release(ring_);
      wait_full(next);
      const SumStep next_step = step_at(next);
      add_half<1>(step, plain, gradients, next);
      step = next_step;
      ring_ = next;
    }
    ptx::wgmma_wait_group<0>(rS_[0]);
    release(ring_);
    ring_ = ring_.next();
  }

  // f(sum, row, key) for all of the thread's sums; row and key are counted from its first.
  template <class F>
  __device__ __forceinline__ void for_each_sum(const F& f) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        f(sums_[half][i], i % 4 / 2 * 8, half * C::kHalfKeys + i / 4 * 8 + i % 2);
      }
    }
  }
  // Whether the thread's sums are finite. Those past the end of queries or keys do not matter.
  __device__ __forceinline__ bool all_finite() {
    const int rows = p_.len_q - shared_.tile.first_query - tile_row();
    const int keys = p_.len_k - shared_.tile.first_key - fragment_column();
    bool finite = true;
    for_each_sum([&](float sum, int row, int key) {
      if (row < rows && key < keys) finite &= static_cast<bool>(isfinite(sum));
    });
    return finite;
  }

  // Where a split leaves its sums, in the order of the registers.
  __device__ __forceinline__ float4* split_sums(int split) const {
    const int tiles = gridDim.x / (p_.bias_sum_last ? 1 : p_.bias_sum_splits);
    const int64_t at = (int64_t{blockIdx.z} * gridDim.y + blockIdx.y) * tiles + SumShare(p_).tile;
    return reinterpret_cast<float4*>(p_.bias_sums) + thread() +
           (at * p_.bias_sum_splits + split) * (C::kBlockQ * C::kBlockK / 4);
  }
  __device__ __forceinline__ void store_split() const {
    float4* to = split_sums(SumShare(p_).split);
#pragma unroll
    for (int j = 0; j < 2 * kCount / 4; ++j) {
      const float* sum = &sums_[j / (kCount / 4)][j % (kCount / 4) * 4];
      to[j * C::kConsumerThreads] = {sum[0], sum[1], sum[2], sum[3]};
    }
  }
  __device__ __forceinline__ void add_splits() {
#pragma unroll
    for (int i = 0; i < 2 * kCount; ++i) sums_[i / kCount][i % kCount] = 0;
#pragma unroll 1
    for (int split = 0; split < p_.bias_sum_splits; ++split) {
      const float4* from = split_sums(split);
#pragma unroll
      for (int j = 0; j < 2 * kCount / 4; ++j) {
        const float4 x = from[j * C::kConsumerThreads];
        float* sum = &sums_[j / (kCount / 4)][j % (kCount / 4) * 4];
        sum[0] += x.x, sum[1] += x.y, sum[2] += x.z, sum[3] += x.w;
      }
    }
  }

  // Stores the tile through shared memory, so that neighbouring threads write neighbouring numbers.
  __device__ __forceinline__ void store_tile() {
    const uint32_t to = smem_ + tile_row() * C::kPitch + fragment_column() * 4;
    for_each_sum([&](float sum, int row, int key) {
      ptx::st_shared_f32(to + row * C::kPitch + key * 4, sum);
    });
    ptx::bar_sync(C::kConsumerBarrier, C::kConsumerThreads);  // the tile is written
    const SumTile& tile = shared_.tile;
    const BiasRows grad = find_grad_bias(p_, {}, tile.batch, tile.head);
    const int rows = min(C::kBlockQ, tile.len_q - tile.first_query);
    const int keys = min(C::kBlockK, tile.len_k - tile.first_key);
    if (grad.chunks) {
      constexpr int kChunks = C::kBlockK / 8;
#pragma unroll 1
      for (int i = thread(); i < rows * kChunks; i += C::kConsumerThreads) {
        const int row = i / kChunks, key = i % kChunks * 8;
        if (key >= keys) continue;
        const uint32_t from = smem_ + row * C::kPitch + key * 4;
        const float4 x = ptx::ld_shared_v4_f32(from), y = ptx::ld_shared_v4_f32(from + 16);
        store_eight(grad, tile.first_query + row, tile.first_key + key, keys - key,
                    {Type::pack(x.x, x.y), Type::pack(x.z, x.w), Type::pack(y.x, y.y),
                     Type::pack(y.z, y.w)});
      }
      return;
    }
    const bool across = grad.row == 1;
#pragma unroll 1
    for (int i = thread(); i < C::kBlockQ * C::kBlockK; i += C::kConsumerThreads) {
      const int row = across ? i % C::kBlockQ : i / C::kBlockK;
      const int key = across ? i / C::kBlockQ : i % C::kBlockK;
      if (row >= rows || key >= keys) continue;
      write_bias<Type>(grad, tile.first_query + row, tile.first_key + key,
                       ptx::ld_shared_f32(smem_ + row * C::kPitch + key * 4));
    }
  }

  Smem& shared_;
  const uint32_t smem_;
  const int index_;  // of the consumers
  const Sm90BwdParams& p_;
  Ring ring_;  // where Q and K of the step are
  // Of each half of the keys, as wgmma lays out its accumulators. dP is of one half at a time.
  float sums_[2][kCount], rS_[2][kCount], rdP_[kCount];
  uint32_t bias_[2][kCount / 2];  // two numbers in a register
};

}  // namespace flashmoe::cuda::sm90
