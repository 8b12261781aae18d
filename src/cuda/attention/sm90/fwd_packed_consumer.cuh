// A consumer warp of the packed forward pass: 16 rows of queries of the heads of a box, from
// S = Q K^T to O and lse.
#pragma once

#include "cuda/attention/score.cuh"
#include "cuda/attention/sm90/fwd_packed_producer.cuh"
#include "cuda/attention/sm90/packed_rows.cuh"
#include "cuda/attention/sm90/warpgroup.cuh"
#include "cuda/attention/softmax.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/tma/pipeline.cuh"

namespace flashmoe::cuda::sm90 {

template <class C>
class PackedConsumer {
  using Type = typename C::Type;
  using Smem = typename C::Smem;
  static constexpr int kRows = kPackedRows;
  static constexpr int kSteps = C::kDim / 16;                         // of the depth of a head
  static constexpr int kFragments = C::kChunk / 8;                    // of S
  static constexpr bool kHoldsQueries = C::kHeads == 1 && !C::kBias;  // if there are registers
  static constexpr float kHidden = -INFINITY;
  // The bias of 16 rows x kChunk keys, as mma.sync lays out S.
  using ChunkBias = HeadsOfPair<C::kHeads>[C::kBias ? kFragments : 1][4];

 public:
  __device__ __forceinline__ PackedConsumer(Smem& shared, uint32_t smem, int warp,
                                            const Sm90PackedParams& p)
      : shared_(shared), smem_(smem), warp_(warp), p_(p) {}

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (;; tasks_.advance()) {
      tasks_.wait_full(task_slot(tasks_.at()));
      if (tasks_.count() > 0) release_task_before();
      if (!tma::warp_uniform(task().more)) break;
      begin();
      const int key_end = tma::warp_uniform(task().key_end);
#pragma unroll 1
      for (int key = tma::warp_uniform(task().key_begin); key < key_end; key += C::kBlockK) {
        take_keys(key);
      }
      finish();
    }
    if (lane() == 0) ptx::cp_async_bulk_wait_group();
  }

 private:
  __device__ __forceinline__ tma::Slot task_slot(int at) const {
    return C::slot(smem_, C::kTaskBarrier + at);
  }
  __device__ __forceinline__ const PackedTask& task() const { return shared_.tasks[tasks_.at()]; }
  // The bounds of one of the warp's rows.
  __device__ __forceinline__ RowBounds bounds_of(int row) const {
    return shared_.bounds[tasks_.at()][warp_ * kRows + row];
  }
  // Those of the two rows of a fragment that a thread holds. From shared memory each time:
  // registers are few.
  __device__ __forceinline__ RowBounds fragment_bounds(int half) const {
    return bounds_of(lane() / 4 + 8 * half);
  }
  // The warp's rows of Q, and then of O.
  __device__ __forceinline__ uint32_t row_address() const {
    return smem_ + offsetof(Smem, sQ) + tasks_.at() * C::Rows::kBytes + warp_ * kRows * 128;
  }

  // Q's place is free for the task after the next when O of the task before has left it.
  __device__ __forceinline__ void release_task_before() const {
    __syncwarp();  // all lanes have read what is of that task
    if (lane() == 0) {
      ptx::cp_async_bulk_wait_group_read();
      ptx::mbarrier_arrive(task_slot(tasks_.at() ^ 1).empty);
    }
    __syncwarp();  // so that the compiler knows that the warp is converged
  }

  __device__ __forceinline__ void begin() {
    if constexpr (kHoldsQueries) {
#pragma unroll
      for (int i = 0; i < 4; ++i) load_queries(rQ_[i], i);
    }
    first_key_ = tma::warp_uniform(bounds_of(0).begin());
    end_key_ = tma::warp_uniform(bounds_of(kRows - 1).end);
#pragma unroll
    for (int h = 0; h < C::kHeads; ++h) rows_[h] = RowState();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (float& x : rO_[i]) x = 0;
    }
  }
  __device__ __forceinline__ void load_queries(uint32_t (&q)[4], int step) const {
    ptx::ldmatrix_x4(q, (row_address() + packed_lane_offset()) ^ step * 32);
  }

  // A stage of keys, of which the warp takes those that its rows see.
  __device__ __forceinline__ void take_keys(int key) {
    const tma::Slot slot = C::slot(smem_, C::kKeyBarrier + keys_.at());
    keys_.wait_full(slot);
#pragma unroll 1
    for (int i = 0; i < C::kBlockK; i += C::kChunk) {
      if (key + i >= end_key_ || key + i + C::kChunk <= first_key_) continue;
      take_chunk(key + i, keys_.at() * C::Keys::kBytes + i * 128);
    }
    warp_arrive(slot.empty);
    keys_.advance();
  }

  __device__ __forceinline__ void take_chunk(int key, uint32_t offset) {
    const uint32_t where = smem_ + offset + packed_lane_offset();
    uint32_t seen[2];
    bool begins = false;  // whether this is the first chunk that a row sees
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const RowBounds bounds = fragment_bounds(half);
      seen[half] = seen_tokens<C::kChunk>(bounds, key);
      begins |= static_cast<uint32_t>(bounds.begin() - key) < C::kChunk;
    }
    begins = __any_sync(0xffffffffu, begins);
    ChunkBias bias;
    if constexpr (C::kBias) load_bias(bias, seen, key);
#pragma unroll
    for (int h = 0; h < C::kHeads; ++h) {
      float s[kFragments][4];
      if (begins || !guess(s, where, seen, bias, h)) {
        scores(s, where + offsetof(Smem, sK), seen, bias, h);
        softmax(s, h);
      }
      values(s, where + offsetof(Smem, sV), h);
    }
  }

  // The bias of a chunk, -inf where a row does not see the key.
  __device__ __forceinline__ void load_bias(ChunkBias& bias, const uint32_t (&seen)[2],
                                            int key) const {
    const BoxOfBias from = bias_of(head_of(task().box, 0), p_.heads, p_);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const PairsOfRow pairs(pairs_of(lane() / 4 + 8 * half), key);
#pragma unroll
      for (int i = 0; i < kFragments * 2; ++i) {
        HeadsOfPair<C::kHeads>& x = bias[i / 2][2 * half + i % 2];
        if (seen[half] >> (i / 2 * 8 + i % 2) & 1) {
          x.load(from, pairs.at(i / 2, i % 2));
        } else {
          x.template hide<Type>();
        }
      }
    }
  }
  // What S begins with: the bias, or 0, and -inf where a row does not see the key.
  __device__ __forceinline__ void start_scores(float (&s)[kFragments][4], const uint32_t (&seen)[2],
                                               const ChunkBias& bias, int h) const {
#pragma unroll
    for (int i = 0; i < kFragments * 4; ++i) {
      float& x = s[i / 4][i % 4];
      if constexpr (C::kBias) {
        x = Type::unpack(bias[i / 4][i % 4].get(h)) * p_.bias_scale;
      } else {
        x = seen[i % 4 / 2] >> (i / 4 * 8 + i % 2) & 1 ? 0.f : kHidden;
      }
    }
  }
  __device__ __forceinline__ PairRow pairs_of(int row) const {
    return shared_.pairs[tasks_.at()][warp_ * kRows + row];
  }

  // S = Q K^T.
  __device__ __forceinline__ void scores(float (&s)[kFragments][4], uint32_t sK,
                                         const uint32_t (&seen)[2], const ChunkBias& bias,
                                         int h) const {
    start_scores(s, seen, bias, h);
#pragma unroll
    for (int step = h * kSteps; step < (h + 1) * kSteps; ++step) {
      uint32_t a[4];
      if constexpr (kHoldsQueries) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = rQ_[step][i];
      } else {
        load_queries(a, step);
      }
#pragma unroll
      for (int n = 0; n < kFragments; n += 2) {
        uint32_t b[4];  // keys 0 to 7 and 8 to 15, of each two halves of the depth
        ptx::ldmatrix_x4(b, (sK ^ step * 32) + n * 8 * 128);
        Type::mma(s[n], a, b[0], b[2], s[n]);
        Type::mma(s[n + 1], a, b[1], b[3], s[n + 1]);
      }
    }
  }

  // P by a guess: against the old references, with no look for a maximum, since few chunks have a
  // score much above those before. Returns whether that is right in the warp: no score is too
  // large, no row sees its first key, and there is no NaN. Each shows in `sum`, except for the
  // second.
  __device__ __forceinline__ bool guess(float (&s)[kFragments][4], uint32_t where,
                                        const uint32_t (&seen)[2], const ChunkBias& bias, int h) {
    constexpr float kMost = 1 << 14;  // of a thread's sum; fp16 holds its terms
    const ScoreRule<Sm90PackedParams> rule(p_);
    RowState& rows = rows_[h];
    float sum[2] = {0, 0};
    bool right = true;
    const float reference[2] = {rows.finite_reference(0), rows.finite_reference(1)};
    scores(s, where + offsetof(Smem, sK), seen, bias, h);
#pragma unroll
    for (int n = 0; n < kFragments; n += 2) probabilities(s[n], s[n + 1], sum, rule, reference);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      right = right && sum[half] <= kMost && !(rows.reference[half] == -INFINITY && seen[half]);
    }
    if (!__all_sync(0xffffffffu, right)) return false;
#pragma unroll
    for (int half = 0; half < 2; ++half) rows.sum[half] += sum[half];
    return true;
  }

  // P in place of S. Where a row's maximum has outgrown its reference by kSlack, the reference
  // moves and O is brought to it.
  __device__ __forceinline__ void softmax(float (&s)[kFragments][4], int h) {
    const ScoreRule<Sm90PackedParams> rule(p_);
    RowState& rows = rows_[h];
    float top[2], reference[2], correction[2], sum[2] = {0, 0};
    row_maxima(top, s, rule.scale_log2());
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float before = rows.reference[half];
      if (top[half] > before + kSlack) rows.reference[half] = top[half];
      reference[half] = rows.finite_reference(half);
      correction[half] = ptx::ex2_approx_ftz(before - reference[half]);
    }
#pragma unroll
    for (int n = 0; n < kFragments; n += 2) probabilities(s[n], s[n + 1], sum, rule, reference);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows.sum[half] = rows.sum[half] * correction[half] + sum[half];
    }
    if (__any_sync(0xffffffffu, correction[0] != 1 || correction[1] != 1)) {
#pragma unroll
      for (int i = 0; i < 2 * kSteps * 4; ++i) {
        rO_[2 * kSteps * h + i / 4][i % 4] *= correction[i % 4 / 2];
      }
    }
  }

  // O += P V
  __device__ __forceinline__ void values(const float (&s)[kFragments][4], uint32_t sV, int h) {
#pragma unroll
    for (int n = 0; n < kFragments; n += 2) {
      const uint32_t a[4] = {Type::pack(s[n][0], s[n][1]), Type::pack(s[n][2], s[n][3]),
                             Type::pack(s[n + 1][0], s[n + 1][1]),
                             Type::pack(s[n + 1][2], s[n + 1][3])};
#pragma unroll
      for (int step = h * kSteps; step < (h + 1) * kSteps; ++step) {
        uint32_t b[4];  // keys 0 to 7 and 8 to 15, of each two halves of the columns
        ptx::ldmatrix_x4_trans(b, (sV ^ step * 32) + n * 8 * 128);
        Type::mma(rO_[2 * step], a, b[0], b[1], rO_[2 * step]);
        Type::mma(rO_[2 * step + 1], a, b[2], b[3], rO_[2 * step + 1]);
      }
    }
  }

  // O / sum to TMA, and lse.
  __device__ __forceinline__ void finish() const {
    const int token = task().first_row + warp_ * kRows, box = task().box;
    const uint32_t to = row_address() + packed_lane_offset();
    float lse[C::kHeads][2];
    __syncwarp();  // all lanes have read Q
#pragma unroll
    for (int h = 0; h < C::kHeads; ++h) {
      float inverse[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const RowEnd end = end_row(quad_sum(rows_[h].sum[half]), rows_[h].reference[half],
                                   sink_of_row(fragment_bounds(half), head_of(box, h)));
        inverse[half] = __fdividef(end.share, end.sum);
        lse[h][half] = end.lse;
        if (!fragment_bounds(half).valid()) inverse[half] = lse[h][half] = NAN;
      }
#pragma unroll
      for (int step = h * kSteps; step < (h + 1) * kSteps; ++step) {
        uint32_t x[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float(&o)[4] = rO_[2 * step + j / 2];
          x[j] = Type::pack(o[j % 2 * 2] * inverse[j % 2], o[j % 2 * 2 + 1] * inverse[j % 2]);
        }
        ptx::stmatrix_x4(to ^ step * 32, x);
      }
    }
    ptx::fence_proxy_async_shared();
    __syncwarp();  // the warp's rows are in shared memory
    if (lane() == 0) {
      TokenBox<C>(box * C::kHeads, token, p_.pitch_q).store(row_address(), p_.out_map);
      ptx::cp_async_bulk_commit_group();
    }
    // lse after the fence, which would wait for its stores.
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float* const to = lane() % 4 ? nullptr : find_lse(token + lane() / 4 + 8 * half, box);
#pragma unroll
      for (int h = 0; h < C::kHeads; ++h) {
        if (to && head_of(box, h) < p_.heads) to[h * p_.lse_strides.head] = lse[h][half];
      }
    }
    guard_rows(box, token);
  }

  __device__ __forceinline__ int head_of(int box, int h) const { return box * C::kHeads + h; }
  // Tokens of no sequence have none; nor have heads of a box that there are not.
  __device__ __forceinline__ float sink_of_row(const RowBounds& bounds, int head) const {
    if (!p_.sinks || bounds.is_rest() || head >= p_.heads) return -INFINITY;
    return sink_of<Type>(p_, head);
  }
  __device__ __forceinline__ bool exists(const TokenPlace& at) const {
    return is_token(at, p_.pitch_q ? p_.len_q : static_cast<int>(p_.ragged.query.tokens), p_);
  }
  // Where lse of a token and of the first head of a box goes; null: nowhere.
  __device__ __forceinline__ float* find_lse(int token, int box) const {
    const TokenPlace at(token, p_.pitch_q);
    if (!p_.lse || !exists(at)) return nullptr;
    return p_.lse + token_offset(p_.lse_strides, at, head_of(box, 0), p_);
  }

  // A probability of 0 times a hidden NaN is NaN, and so is -inf plus a hidden infinity: rows of O
  // that are not finite are recomputed.
  __device__ __forceinline__ void guard_rows(int box, int token) const {
    uint32_t bad = 0;  // a bit for each head of the lane's first row, and of its second
#pragma unroll
    for (int h = 0; h < C::kHeads; ++h) {
      float zero[2] = {0, 0};
#pragma unroll
      for (int i = 0; i < 2 * kSteps * 4; ++i) {
        zero[i % 4 / 2] += rO_[2 * kSteps * h + i / 4][i % 4] * 0.f;
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
    __syncwarp();  // TMA has written O
#pragma unroll 1
    for (int i = 0; i < kRows * C::kHeads; ++i) {
      const int row = i / C::kHeads, h = i % C::kHeads;
      const uint32_t of_row = __shfl_sync(0xffffffffu, bad, row % 8 * 4) >> (row / 8 * 8);
      const TokenPlace at(token + row, p_.pitch_q);
      if ((of_row >> h & 1) && exists(at) && head_of(box, h) < p_.heads) {
        recompute_row(at, head_of(box, h), bounds_of(row), row);
      }
    }
  }

  // A row key by key, from the keys that it sees. Slow, and rarely needed.
  __device__ __forceinline__ void recompute_row(const TokenPlace& at, int head,
                                                const RowBounds& bounds, int row) const {
    constexpr int kColumns = (C::kDim + 31) / 32;  // of a lane
    const auto row_of = [&](const void* tensor, const Strides& strides, const TokenPlace& at,
                            int head) {
      return static_cast<const uint16_t*>(tensor) + mapped_offset(strides, at, head, p_);
    };
    const auto number = [](const uint16_t* row, int column, int dim) {
      return column < dim ? Type::unpack(row[column]) : 0.f;
    };
    const int key_head = head / p_.group;
    const uint16_t* q = row_of(p_.query, p_.query_strides, at, head);
    float o[kColumns] = {}, reference = -INFINITY, sum = 0;
#pragma unroll 1
    for (int key = bounds.begin(); key < bounds.end; ++key) {
      const TokenPlace of_key(key, p_.pitch_k);
      const uint16_t* k = row_of(p_.key, p_.key_strides, of_key, key_head);
      const uint16_t* v = row_of(p_.value, p_.value_strides, of_key, key_head);
      float s = 0;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const int c = lane() + 32 * j;
        s += number(q, c, p_.head_dim) * number(k, c, p_.head_dim);
      }
      const ScoreRule<Sm90PackedParams> rule(p_);
      if constexpr (C::kBias) {
        const PairRow pairs = pairs_of(row);
        const float bias =
            Type::unpack(*bias_of(head, p_.heads, p_).at(pairs.first + key * pairs.step));
        if (bias == -INFINITY) continue;  // hides the key
        s = rule.score(warp_sum(s), bias);
      } else {
        s = rule.score(warp_sum(s));
      }
      const float raised = fmaxf(reference, s);
      const float finite = raised == -INFINITY ? 0.f : raised;
      const float correction = ptx::ex2_approx_ftz(reference - finite);
      const float weight = ptx::ex2_approx_ftz(s - finite);
      reference = raised;
      sum = sum * correction + weight;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        o[j] = o[j] * correction + weight * number(v, lane() + 32 * j, p_.head_dim_v);
      }
    }
    const RowEnd end = end_row(sum, reference, sink_of_row(bounds, head));
    const float inverse = __fdividef(end.share, end.sum);
    if (lane() == 0 && p_.lse) p_.lse[token_offset(p_.lse_strides, at, head, p_)] = end.lse;
    uint16_t* const out = const_cast<uint16_t*>(row_of(p_.out, p_.out_strides, at, head));
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const int column = lane() + 32 * j;
      const uint32_t rounded = Type::pack(o[j] * inverse, 0) & 0xffff;
      if (column < p_.head_dim_v) out[column] = static_cast<uint16_t>(rounded);
    }
  }

  Smem& shared_;
  const uint32_t smem_;
  const int warp_;
  const Sm90PackedParams& p_;
  tma::Ring<2> tasks_;
  tma::Ring<C::kStages> keys_;
  int first_key_, end_key_;  // that rows of the warp see
  uint32_t rQ_[4][4];        // as mma.sync reads it, where it is held
  float rO_[8][4];           // as mma.sync lays out its accumulators
  RowState rows_[C::kHeads];
};

}  // namespace flashmoe::cuda::sm90
