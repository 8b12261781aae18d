// A consumer warp of the packed backward pass: 16 rows of a tile of queries or keys, of the heads
// of a box, from S and dP to their gradients. bwd_packed.cuh has the names.
#pragma once

#include "cuda/attention/score.cuh"
#include "cuda/attention/sm90/bwd_packed_guard.cuh"
#include "cuda/attention/sm90/bwd_packed_producer.cuh"
#include "cuda/attention/sm90/packed_rows.cuh"
#include "cuda/attention/sm90/warpgroup.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/tma/pipeline.cuh"

namespace flashmoe::cuda::sm90 {

template <class C>
class PackedBwdConsumer {
  using Type = typename C::Type;
  using Smem = typename C::Smem;
  static constexpr int kRows = kPackedRows;
  static constexpr int kSteps = C::kDim / 16;       // of the depth of a head
  static constexpr int kFragments = C::kChunk / 8;  // of S and dP
  // Whether X stays in registers. Beside two gradients and the bias of several heads it does not.
  template <bool kKeys>
  static constexpr bool kHolds = !(C::kBias && kKeys && C::kHeads > 1);

  // S or dP, then P or dS: rows x kChunk tokens of the other side.
  using Scores = float[kFragments][4];
  // The bias of such a chunk, or its gradient.
  using ChunkBias = HeadsOfPair<C::kHeads>[C::kBias ? kFragments : 1][4];
  // What a warp has of one task.
  template <bool kKeys>
  struct State {
    int first, end;                            // the tokens of the other side that its rows see
    uint32_t rX[kHolds<kKeys> ? 2 : 1][4][4];  // X1 and X2 as mma.sync reads them
    float gradients[kKeys ? 2 : 1][8][4];  // of X1 and X2, as mma.sync lays out its accumulators
  };

 public:
  __device__ __forceinline__ PackedBwdConsumer(Smem& shared, uint32_t smem, int warp,
                                               const Sm90PackedBwdParams& p)
      : shared_(shared), smem_(smem), warp_(warp), p_(p) {}

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (;; tasks_.advance()) {
      tasks_.wait_full(task_slot(tasks_.at()));
      if (tasks_.count() > 0) release_task_before();
      if (!tma::warp_uniform(task().more)) break;
      if (tma::warp_uniform(task().keys)) {
        take_task<true>();
      } else {
        take_task<false>();
      }
    }
    if (lane() == 0) ptx::cp_async_bulk_wait_group();
  }

 private:
  __device__ __forceinline__ tma::Slot task_slot(int at) const {
    return C::slot(smem_, C::kTaskBarrier + at);
  }
  __device__ __forceinline__ const PackedBwdTask& task() const {
    return shared_.tasks[tasks_.at()];
  }
  // The bounds of one of the warp's rows, and those of the two rows of a fragment that a thread
  // holds. From shared memory each time: registers are few.
  __device__ __forceinline__ RowBounds bounds_of(int row) const {
    return shared_.bounds[tasks_.at()][warp_ * kRows + row];
  }
  __device__ __forceinline__ RowBounds fragment_bounds(int half) const {
    return bounds_of(lane() / 4 + 8 * half);
  }
  __device__ __forceinline__ PairRow pairs_of(int row) const {
    return shared_.pairs[tasks_.at()][warp_ * kRows + row];
  }
  // The warp's rows of X1 or X2, and then of their gradients.
  __device__ __forceinline__ uint32_t row_address(int which) const {
    return smem_ + offsetof(Smem, sX) + (2 * tasks_.at() + which) * C::Rows::kBytes +
           warp_ * kRows * 128;
  }
  __device__ __forceinline__ void load_rows(uint32_t (&x)[4], int which, int step) const {
    ptx::ldmatrix_x4(x, (row_address(which) + packed_lane_offset()) ^ step * 32);
  }

  // The tile's place is free for the task after the next when the gradients of the task before have
  // left it.
  __device__ __forceinline__ void release_task_before() const {
    __syncwarp();  // all lanes have read what is of that task
    if (lane() == 0) {
      ptx::cp_async_bulk_wait_group_read();
      ptx::mbarrier_arrive(task_slot(tasks_.at() ^ 1).empty);
    }
    __syncwarp();  // so that the compiler knows that the warp is converged
  }

  template <bool kKeys>
  __device__ __forceinline__ void take_task() {
    State<kKeys> state;
    begin(state);
    const int rounds = kKeys ? p_.group : 1;
#pragma unroll 1
    for (int round = 0; round < rounds; ++round) {
      // The task is read from shared memory each time: registers are few.
#pragma unroll 1
      for (int token = tma::warp_uniform(task().begin); token < tma::warp_uniform(task().end);
           token += C::kBlockK) {
        take_stage(state, token);
      }
    }
    finish(state);
  }

  template <bool kKeys>
  __device__ __forceinline__ void begin(State<kKeys>& state) const {
    state.first = tma::warp_uniform(bounds_of(0).begin());
    state.end = tma::warp_uniform(bounds_of(kRows - 1).end);
    if constexpr (kHolds<kKeys>) {
#pragma unroll
      for (int i = 0; i < 8; ++i) load_rows(state.rX[i / 4][i % 4], i / 4, i % 4);
    }
#pragma unroll
    for (auto& gradient : state.gradients) {
#pragma unroll
      for (int i = 0; i < 8 * 4; ++i) gradient[i / 4][i % 4] = 0;
    }
  }

  // A stage of the other side, of which the warp takes what its rows see.
  template <bool kKeys>
  __device__ __forceinline__ void take_stage(State<kKeys>& state, int token) {
    const tma::Slot slot = C::slot(smem_, C::kStageBarrier + stages_.at());
    stages_.wait_full(slot);
#pragma unroll 1
    for (int i = 0; i < C::kBlockK; i += C::kChunk) {
      if (token + i >= state.end || token + i + C::kChunk <= state.first) continue;
      take_chunk(state, token + i, i);
    }
    warp_arrive(slot.empty);
    stages_.advance();
  }

  // The tokens from `token` on, which are in the stage from row `at` on.
  template <bool kKeys>
  __device__ __forceinline__ void take_chunk(State<kKeys>& state, int token, int at) const {
    const uint32_t sY = smem_ + offsetof(Smem, sY) + stages_.at() * 2 * C::Stage::kBytes + at * 128;
    const uint32_t along = sY + packed_right_offset(), across = sY + packed_lane_offset();
    uint32_t seen[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      seen[half] = seen_tokens<C::kChunk>(fragment_bounds(half), token);
    }
    const auto sees = [&](int half, int n, int i) { return seen[half] >> (n * 8 + i) & 1; };
    // f(where in S, number of the pair), where a row sees the token.
    struct InFragment {
      int n, i;
    };
    const auto for_each_pair = [&](const auto& f) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const PairsOfRow pairs(pairs_of(lane() / 4 + 8 * half), token);
#pragma unroll
        for (int i = 0; i < kFragments * 2; ++i) {
          if (!sees(half, i / 2, i % 2)) continue;
          f(InFragment{i / 2, 2 * half + i % 2}, pairs.at(i / 2, i % 2));
        }
      }
    };
    ChunkBias bias, gradient;
    if constexpr (C::kBias) {
      const BoxOfBias from = bias_of(task().box * C::kHeads, p_.heads_q, p_);
#pragma unroll
      for (int i = 0; i < kFragments * 4; ++i) bias[i / 4][i % 4].template hide<Type>();
      for_each_pair([&](auto at, uint32_t pair) { bias[at.n][at.i].load(from, pair); });
    }
#pragma unroll
    for (int h = 0; h < C::kHeads; ++h) {
      Scores s, dp;
      float lse[kFragments][4];
      find_lse_delta<kKeys>(lse, dp, at, h);
      // What S begins with: the bias, or 0, and -inf where a row does not see the token.
#pragma unroll
      for (int i = 0; i < kFragments * 4; ++i) {
        float& x = s[i / 4][i % 4];
        if constexpr (C::kBias) {
          x = Type::unpack(bias[i / 4][i % 4].get(h)) * p_.bias_scale;
        } else {
          x = sees(i % 4 / 2, i / 4, i % 2) ? 0.f : -INFINITY;
        }
      }
#pragma unroll
      for (int step = h * kSteps; step < (h + 1) * kSteps; ++step) {
        multiply(s, state, 0, step, along);
        multiply(dp, state, 1, step, along);
      }
      const ScoreRule<Sm90PackedBwdParams> rule(p_);
#pragma unroll
      for (int i = 0; i < kFragments * 4; ++i) {
        rule.differentiate(s[i / 4][i % 4], dp[i / 4][i % 4], lse[i / 4][i % 4]);
      }
      if constexpr (C::kBias && !kKeys) {
#pragma unroll
        for (int i = 0; i < kFragments * 4; ++i) {
          gradient[i / 4][i % 4].set(h, Type::pack(dp[i / 4][i % 4], 0) & 0xffff);
        }
      }
      if constexpr (kKeys) accumulate(state.gradients[1], s, across + C::Stage::kBytes, h);
      accumulate(state.gradients[0], dp, across, h);
    }
    if (C::kBias && !kKeys && p_.grad_bias) {
      const BoxOfBias to = grad_bias_of(task().box * C::kHeads, p_);
      for_each_pair([&](auto at, uint32_t pair) { gradient[at.n][at.i].store(to, pair); });
    }
  }

  // LSE of each number of S, and -delta, which dP begins with.
  template <bool kKeys>
  __device__ __forceinline__ void find_lse_delta(float (&lse)[kFragments][4], Scores& minus_delta,
                                                 int at, int h) const {
    const auto put = [&](int n, int i, float of_lse, float of_delta) {
      lse[n][i] = of_lse;
      minus_delta[n][i] = of_delta;
    };
    if constexpr (kKeys) {
      const uint32_t from = smem_ + offsetof(Smem, stage_lse_delta) +
                            (stages_.at() * C::kHeads + h) * C::kBlockK * 8 +
                            (at + lane() % 4 * 2) * 8;
#pragma unroll
      for (int n = 0; n < kFragments; ++n) {
        const float4 two = ptx::ld_shared_v4_f32(from + n * 8 * 8);
#pragma unroll
        for (int i = 0; i < 4; ++i) put(n, i, i % 2 ? two.z : two.x, i % 2 ? two.w : two.y);
      }
    } else {
      const uint32_t from = smem_ + offsetof(Smem, row_lse_delta) +
                            (tasks_.at() * C::kHeads + h) * C::kBlockQ * 8 +
                            (warp_ * kRows + lane() / 4) * 8;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 row = ptx::ld_shared_v2_f32(from + half * 8 * 8);
#pragma unroll
        for (int i = 0; i < kFragments * 2; ++i) put(i / 2, 2 * half + i % 2, row.x, row.y);
      }
    }
  }

  // acc += X Y^T, 16 columns of each.
  template <bool kKeys>
  __device__ __forceinline__ void multiply(Scores& acc, const State<kKeys>& state, int which,
                                           int step, uint32_t sY) const {
    uint32_t a[4], b[4];  // b: two halves of the depth of tokens 0 to 7, then of 8 to 15
    if constexpr (kHolds<kKeys>) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = state.rX[which][step][i];
    } else {
      load_rows(a, which, step);
    }
    static_assert(kFragments == 2);
    ptx::ldmatrix_x4(b, (sY ^ step * 32) + which * C::Stage::kBytes);
    Type::mma(acc[0], a, b[0], b[1], acc[0]);
    Type::mma(acc[1], a, b[2], b[3], acc[1]);
  }

  // acc += x Y: P or dS, of the head's columns.
  __device__ __forceinline__ void accumulate(float (&acc)[8][4], const Scores& x, uint32_t sY,
                                             int h) const {
    const uint32_t a[4] = {Type::pack(x[0][0], x[0][1]), Type::pack(x[0][2], x[0][3]),
                           Type::pack(x[1][0], x[1][1]), Type::pack(x[1][2], x[1][3])};
#pragma unroll
    for (int step = h * kSteps; step < (h + 1) * kSteps; ++step) {
      uint32_t b[4];  // tokens 0 to 7 and 8 to 15, of each two halves of the columns
      ptx::ldmatrix_x4_trans(b, sY ^ step * 32);
      Type::mma(acc[2 * step], a, b[0], b[1], acc[2 * step]);
      Type::mma(acc[2 * step + 1], a, b[2], b[3], acc[2 * step + 1]);
    }
  }

  // Gradients to TMA.
  template <bool kKeys>
  __device__ __forceinline__ void finish(const State<kKeys>& state) const {
    const int token = task().first_row + warp_ * kRows, box = task().box;
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) factor[half] = fragment_bounds(half).valid() ? 1.f : NAN;
    __syncwarp();  // all lanes have read X
#pragma unroll
    for (int which = 0; which < 1 + kKeys; ++which) {
      const uint32_t to = row_address(which) + packed_lane_offset();
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        uint32_t x[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float(&g)[4] = state.gradients[which][2 * step + j / 2];
          const float times = which == 0 ? factor[j % 2] * p_.scale : factor[j % 2];
          x[j] = Type::pack(g[j % 2 * 2] * times, g[j % 2 * 2 + 1] * times);
        }
        ptx::stmatrix_x4(to ^ step * 32, x);
      }
    }
    ptx::fence_proxy_async_shared();
    __syncwarp();  // the warp's rows are in shared memory
    if (lane() == 0) {
      const TokenBox<C> tokens(box * C::kHeads, token, kKeys ? p_.pitch_k : p_.pitch_q);
      if (kKeys ? p_.grad_key : p_.grad_query) {
        tokens.store(row_address(0), kKeys ? p_.grad_key_map : p_.grad_query_map);
      }
      if (kKeys && p_.grad_value) tokens.store(row_address(1), p_.grad_value_map);
      ptx::cp_async_bulk_commit_group();
    }
    guard_rows(state, box, token);
  }

  // A hidden 0 of P or dS times NaN is NaN, and so is -inf plus a hidden infinity: rows with a
  // gradient that is not finite are recomputed.
  template <bool kKeys>
  __device__ __forceinline__ void guard_rows(const State<kKeys>& state, int box, int token) const {
    uint32_t bad = 0;  // a bit for each head of the lane's first row, and of its second
#pragma unroll
    for (int h = 0; h < C::kHeads; ++h) {
      float zero[2] = {0, 0};
#pragma unroll
      for (const auto& gradient : state.gradients) {
#pragma unroll
        for (int i = 0; i < 2 * kSteps * 4; ++i) {
          zero[i % 4 / 2] += gradient[2 * kSteps * h + i / 4][i % 4] * 0.f;
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (!(zero[half] == 0) && fragment_bounds(half).valid()) bad |= 1u << (8 * half + h);
      }
    }
    if (!__any_sync(0xffffffffu, bad)) return;
    bad |= __shfl_xor_sync(0xffffffffu, bad, 1);
    bad |= __shfl_xor_sync(0xffffffffu, bad, 2);
    if (lane() == 0) ptx::cp_async_bulk_wait_group();
    __syncwarp();  // TMA has written the gradients
    const PackedRowGuard<Type, kKeys, C::kBias> guard(p_);
#pragma unroll 1
    for (int i = 0; i < kRows * C::kHeads; ++i) {
      const int row = i / C::kHeads, h = i % C::kHeads;
      const uint32_t of_row = __shfl_sync(0xffffffffu, bad, row % 8 * 4) >> (row / 8 * 8);
      if (of_row >> h & 1) {
        PairRow pairs{};
        if constexpr (C::kBias) pairs = pairs_of(row);
        guard.recompute(token + row, box * C::kHeads + h, bounds_of(row), pairs);
      }
    }
  }

  Smem& shared_;
  const uint32_t smem_;
  const int warp_;
  const Sm90PackedBwdParams& p_;
  tma::Ring<2> tasks_;
  tma::Ring<C::kStages> stages_;
};

}  // namespace flashmoe::cuda::sm90
