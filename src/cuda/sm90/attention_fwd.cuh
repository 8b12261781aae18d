// Attention forward for Hopper: copies by the copy engine, products by warpgroups.
//
// One CTA on each SM, which goes through blocks of queries. Its first warpgroup gives its registers
// away and keeps one thread busy: that one has Q, K and V copied to shared memory, as soon as there
// is room. Each of the others has 64 rows of queries:
//
//   shared memory   sQ   block_q x D            of the block, or of the next one
//                   sO   block_q x D            on its way out; in Q's place where there is no room
//                   sK   stages x block_k x D
//                   sV   stages x block_k x D
//                   the work: which block of queries it is
//                   barriers: full and empty, for Q and each stage of K and V
//
//   warpgroup 1   S(n) O(n+1) |softmax(n)      | S(n-1) O(n)   | ...
//   warpgroup 2               | S(n) O(n+1)    |softmax(n)     | S(n-1) ...
//
// S = Q K^T of a block is on its way together with O += P V of the one before, and the exponentials
// of a warpgroup run under the products of another: they take turns in issuing products. (Both are
// FlashAttention-3's.) P stays in registers. Blocks go from the last to the first, so that those
// that need a mask come first.
#pragma once

#include <type_traits>

#include "cuda/params.h"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/operand.cuh"
#include "cuda/tile/dtype.cuh"
#include "cuda/tile/sequence.cuh"
#include "cuda/tile/softmax.cuh"
#include "cuda/tiles.h"

namespace flashmoe::cuda::sm90 {

// A block of queries, and the blocks of keys that it sees.
struct alignas(8) FwdWork {
  Sequence seq;
  int batch, head, first_row;
  int key_begin, key_end;
};

template <class T, HopperFwdTile kTile_>
struct FwdConfig {
  using Type = T;
  static constexpr bool kBf16 = std::is_same_v<T, Bf16>;
  static constexpr HopperFwdTile kTile = kTile_;
  static constexpr int kDim = kTile.head_dim, kStages = kTile.stages;
  static constexpr int kBlockQ = kTile.block_q, kBlockK = kTile.block_k;
  static constexpr int kGroups = kBlockQ / 64, kThreads = kTile.threads();  // of warps, with rows
  using Rows = Tile<kBlockQ, kDim>;
  using Keys = Tile<kBlockK, kDim>;
  static constexpr bool kSharesOutput = kTile.shares_output();
  static constexpr uint32_t kSmemQ = 0, kSmemO = kSharesOutput ? 0 : Rows::kBytes;
  static constexpr uint32_t kSmemK = kSmemO + Rows::kBytes;
  static constexpr uint32_t kSmemV = kSmemK + kStages * Keys::kBytes;
  static constexpr uint32_t kSmemWork = kSmemV + kStages * Keys::kBytes;
  static constexpr uint32_t kSmemBarriers = kSmemWork + sizeof(FwdWork);
  static_assert(kSmemWork + kBarrierBytes == kTile.shared_bytes());
  static_assert(sizeof(FwdWork) % 8 == 0 && kBlockQ % 64 == 0 && kBlockK % 16 == 0);
  static_assert(sizeof(FwdWork) + (2 + 4 * kStages) * 8 <= kBarrierBytes);
  static_assert(Rows::kBytes % 1024 == 0 && Keys::kBytes % 1024 == 0);
  // An SM has 65,536 registers; what the first warpgroup gives away the others share.
  static constexpr int kLoaderRegisters = kGroups == 3 ? 32 : 40;
  static constexpr int kRegisters = kGroups == 3 ? 160 : 232;
};

// A place in shared memory that is filled and emptied in turns.
struct Slot {
  uint32_t full, empty;  // barriers
};
template <class C>
struct Slots {
  uint32_t barriers;
  __device__ __forceinline__ Slot q() const { return {barriers, barriers + 8}; }
  __device__ __forceinline__ Slot k(int stage) const { return at(stage); }
  __device__ __forceinline__ Slot v(int stage) const { return at(C::kStages + stage); }

  __device__ __forceinline__ void init() const {
    for (int i = 0; i < 1 + 2 * C::kStages; ++i) {
      ptx::mbarrier_init(barriers + 16 * i, 1);
      ptx::mbarrier_init(barriers + 16 * i + 8, C::kGroups);
    }
    ptx::fence_mbarrier_init();
  }

 private:
  __device__ __forceinline__ Slot at(int i) const {
    return {barriers + 16 * (1 + i), barriers + 16 * (1 + i) + 8};
  }
};

// Which stage a block of keys has, and how often it was filled before.
template <class C>
struct Ring {
  int stage = 0, parity = 0;
  __device__ __forceinline__ Ring next() const {
    return stage + 1 == C::kStages ? Ring{0, parity ^ 1} : Ring{stage + 1, parity};
  }
};

// Number `number` of all blocks. Heads go together as far as the second-level cache holds their
// keys, and of these the blocks that see most go first.
template <class C>
__device__ __forceinline__ FwdWork find_work(int number, const HopperFwdParams& p) {
  const int heads = p.heads * p.batch, together = p.heads_together;
  const int first = number / (p.query_blocks * together) * together;
  const int count = min(together, heads - first);
  const int rest = number - first * p.query_blocks;
  int block = rest / count;
  if (p.right < kNoLimit) block = p.query_blocks - 1 - block;
  FwdWork w;
  const int index = first + rest % count;
  w.head = index % p.heads;
  w.batch = index / p.heads;
  w.first_row = block * C::kBlockQ;
  w.seq = find_sequence(p, w.batch);
  const int last_row = min(w.first_row + C::kBlockQ, w.seq.len_q) - 1;
  w.key_begin = w.seq.begin(w.first_row, p) / C::kBlockK;
  w.key_end = (max(w.seq.end(last_row, p), 0) + C::kBlockK - 1) / C::kBlockK;
  w.key_end = w.seq.valid ? max(w.key_end, w.key_begin) : w.key_begin;
  return w;
}

// f(number) for the blocks of this CTA: forth and back through the list, so that who had the
// longest of one round has the shortest of the next.
template <class F>
__device__ __forceinline__ void for_each_work(const HopperFwdParams& p, const F& f) {
  const int ctas = gridDim.x, cta = blockIdx.x;
#pragma unroll 1
  for (int round = 0; round * ctas < p.works; ++round) {
    const int number = round * ctas + (round % 2 ? ctas - 1 - cta : cta);
    if (number < p.works) f(number);
  }
}

// The thread that fills shared memory. It also finds out what the others are to work on: that
// takes divisions, for which they would have to wait.
template <class C>
__device__ __forceinline__ void load_all(char* shared, const Slots<C>& slots,
                                         const HopperFwdParams& p) {
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const auto fill = [&](const Slot& slot, uint32_t to, const TensorMap& map, auto tile, int row,
                        int head, int batch) {
    using Tile = decltype(tile);
    ptx::mbarrier_arrive_expect_tx(slot.full, Tile::kBytes);
#pragma unroll
    for (int i = 0; i < Tile::kBlocks; ++i) {
      ptx::tma_load(smem + to + i * Tile::kBlockBytes, &map, slot.full, 64 * i, row, head, batch);
    }
  };
  Ring<C> ring;
  int q_parity = 1;  // the first turn finds every place empty
  for_each_work(p, [&](int number) {
    const FwdWork w = find_work<C>(number, p);
    const int key_head = w.head / p.group;
    ptx::mbarrier_wait(slots.q().empty, q_parity);
    *reinterpret_cast<FwdWork*>(shared + C::kSmemWork) = w;
    fill(slots.q(), C::kSmemQ, p.query_map, typename C::Rows(), w.first_row, w.head, w.batch);
    for (int n = w.key_end - 1; n >= w.key_begin; --n, ring = ring.next()) {
      const uint32_t at = ring.stage * C::Keys::kBytes;
      const Slot k = slots.k(ring.stage), v = slots.v(ring.stage);
      ptx::mbarrier_wait(k.empty, ring.parity ^ 1);
      fill(k, C::kSmemK + at, p.key_map, typename C::Keys(), n * C::kBlockK, key_head, w.batch);
      ptx::mbarrier_wait(v.empty, ring.parity ^ 1);
      fill(v, C::kSmemV + at, p.value_map, typename C::Keys(), n * C::kBlockK, key_head, w.batch);
    }
    q_parity ^= 1;
  });
}

// One warpgroup with 64 rows.
template <class C>
class FwdRows {
 public:
  __device__ __forceinline__ FwdRows(const char* shared, const Slots<C>& slots, int group,
                                     const HopperFwdParams& p)
      : smem_(static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
        found_(*reinterpret_cast<const FwdWork*>(shared + C::kSmemWork)),
        slots_(slots),
        p_(p),
        group_(group),
        thread_(threadIdx.x % 128) {}

  __device__ __forceinline__ void run() {
    if (C::kGroups > 1 && group_ == C::kGroups - 1) ptx::bar_arrive(kTurn, kTwoGroups);
    for_each_work(p_, [&](int) {
      ptx::mbarrier_wait(slots_.q().full, q_parity_);
      work_ = found_;
      first_row_ = work_.first_row + group_ * 64;
      compute();
      store();
      q_parity_ ^= 1;
    });
    if (C::kGroups > 1 && group_ == 0) ptx::bar_sync(kTurn, kTwoGroups);  // the last one's
    if (thread_ == 0) ptx::tma_wait_group();
  }

 private:
  static constexpr int kTurn = 1, kStore = kTurn + C::kGroups, kTwoGroups = 256;
  using Type = typename C::Type;

  // Rows that a thread holds: row() and row() + 8 of the warpgroup's.
  __device__ __forceinline__ int lane() const { return thread_ % 32; }
  __device__ __forceinline__ int row() const { return thread_ / 32 * 16 + lane() / 4; }

  __device__ __forceinline__ void wait_turn() const {
    if (C::kGroups > 1) ptx::bar_sync(kTurn + group_, kTwoGroups);
  }
  __device__ __forceinline__ void pass_turn() const {
    if (C::kGroups > 1) ptx::bar_arrive(kTurn + (group_ + 1) % C::kGroups, kTwoGroups);
  }
  __device__ __forceinline__ void release(const Slot& slot) const {
    if (thread_ == 0) ptx::mbarrier_arrive(slot.empty);
  }

  __device__ __forceinline__ void issue_scores(int stage) {
    const uint32_t sK = smem_ + C::kSmemK + stage * C::Keys::kBytes;
#pragma unroll
    for (int step = 0; step < C::kDim / 16; ++step) {
      ptx::Wgmma<C::kBf16, C::kBlockK>::shared(s_,
                                               C::Rows::along(smem_ + C::kSmemQ, group_ * 64, step),
                                               C::Keys::along(sK, 0, step), step > 0);
    }
    ptx::wgmma_commit_group();
  }
  __device__ __forceinline__ void issue_values(int stage) {
    const uint32_t sV = smem_ + C::kSmemV + stage * C::Keys::kBytes;
#pragma unroll
    for (int step = 0; step < C::kBlockK / 16; ++step) {
      ptx::Wgmma<C::kBf16, C::kDim>::registers(o_, pairs_[step], C::Keys::across(sV, step));
    }
    ptx::wgmma_commit_group();
  }

  // -inf for the keys of block n that a row does not see.
  __device__ __forceinline__ void mask(int n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = first_row_ + row() + 8 * half, first = n * C::kBlockK + lane() % 4 * 2;
      const int begin = work_.seq.begin(r, p_) - first, end = work_.seq.end(r, p_) - first;
#pragma unroll
      for (int i = 0; i < C::kBlockK / 4; ++i) {
        const int key = i / 2 * 8 + i % 2;
        if (key < begin || key >= end) s_[i / 2 * 4 + 2 * half + i % 2] = -INFINITY;
      }
    }
  }

  // Probabilities in place of scores. Where a maximum has outgrown its reference, `correction_` is
  // what the output is yet to be multiplied with.
  template <bool kFirst>
  __device__ __forceinline__ void softmax() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = s_[2 * half];
#pragma unroll
      for (int i = 0; i < C::kBlockK / 8; ++i) {
        top = fmaxf(top, fmaxf(s_[4 * i + 2 * half], s_[4 * i + 2 * half + 1]));
      }
      top = quad_max(top) * p_.scale_log2;
      const float before = rows_.reference[half];
      if (kFirst || top > before + kSlack) rows_.reference[half] = top;
      const float reference = rows_.finite_reference(half);
      correction_[half] = kFirst ? 1.f : ptx::ex2_approx_ftz(before - reference);
      float sum = 0;
#pragma unroll
      for (int i = 0; i < C::kBlockK / 4; ++i) {
        float& x = s_[i / 2 * 4 + 2 * half + i % 2];
        x = ptx::ex2_approx_ftz(x * p_.scale_log2 - reference);
        sum += x;
      }
      rows_.sum[half] = kFirst ? sum : rows_.sum[half] * correction_[half] + sum;
    }
  }
  __device__ __forceinline__ void correct_output() {
    if (!__any_sync(0xffffffffu, correction_[0] != 1 || correction_[1] != 1)) return;
#pragma unroll
    for (int i = 0; i < C::kDim / 2; ++i) o_[i] *= correction_[i % 4 / 2];
  }
  __device__ __forceinline__ void pack_pairs() {
#pragma unroll
    for (int i = 0; i < C::kBlockK / 4; ++i) {
      pairs_[i / 4][i % 4] = Type::pack(s_[2 * i], s_[2 * i + 1]);
    }
  }

  // S of block n, and O of the block before it.
  template <bool kMasked>
  __device__ __forceinline__ void step(int n) {
    const Ring<C> before = ring_;
    ring_ = ring_.next();
    ptx::mbarrier_wait(slots_.k(ring_.stage).full, ring_.parity);
    wait_turn();
    ptx::wgmma_fence();
    issue_scores(ring_.stage);
    ptx::mbarrier_wait(slots_.v(before.stage).full, before.parity);
    ptx::wgmma_fence();
    issue_values(before.stage);
    pass_turn();
    ptx::wgmma_wait_group<1>(s_);
    release(slots_.k(ring_.stage));
    if (kMasked) mask(n);
    softmax<false>();
    ptx::wgmma_wait_group<0>(o_);
    release(slots_.v(before.stage));
    correct_output();
    pack_pairs();
  }

  // O and the sums of all keys of the work.
  __device__ __forceinline__ void compute() {
#pragma unroll
    for (float& x : o_) x = 0;
    rows_ = RowState();
    // Of these 64 rows: blocks [full_begin, full_end) need no mask.
    const int full_begin = (work_.seq.begin(first_row_ + 63, p_) + C::kBlockK - 1) / C::kBlockK;
    const int full_end = max(work_.seq.end(first_row_, p_), 0) / C::kBlockK;
    int n = work_.key_end - 1;
    if (n >= work_.key_begin) {
      ptx::mbarrier_wait(slots_.k(ring_.stage).full, ring_.parity);
      wait_turn();
      ptx::wgmma_fence();
      issue_scores(ring_.stage);
      pass_turn();
      ptx::wgmma_wait_group<0>(s_);
      release(slots_.k(ring_.stage));
      if (n >= full_end || n < full_begin) mask(n);
      softmax<true>();
      pack_pairs();
#pragma unroll 1
      for (--n; n >= max(work_.key_begin, full_end); --n) step<true>(n);
#pragma unroll 1
      for (; n >= max(work_.key_begin, full_begin); --n) step<false>(n);
#pragma unroll 1
      for (; n >= work_.key_begin; --n) step<true>(n);
    } else {
      ptx::bar_sync(kStore + group_, 128);  // everyone knows the work
    }
    if (!C::kSharesOutput) release(slots_.q());
    if (work_.key_end > work_.key_begin) {
      ptx::mbarrier_wait(slots_.v(ring_.stage).full, ring_.parity);
      ptx::wgmma_fence();
      issue_values(ring_.stage);
      ptx::wgmma_wait_group<0>(o_);
      release(slots_.v(ring_.stage));
      ring_ = ring_.next();
    }
  }

  // O / sum through shared memory to the copy engine, and lse.
  __device__ __forceinline__ void store() {
    const Sequence& seq = work_.seq;
    const uint32_t sO = smem_ + C::kSmemO;
    float inverse[2];
    bool finite[2] = {true, true};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = quad_sum(rows_.sum[half]);
      inverse[half] = sum == 0 ? 0.f : 1.f / sum;  // 0: no key allowed
      const float lse = sum == 0 ? -INFINITY : (rows_.reference[half] + __log2f(sum)) * kLn2;
      write_lse(first_row_ + row() + 8 * half, lse, lane() % 4 == 0);
    }
#pragma unroll
    for (int i = 0; i < C::kDim / 2; ++i) finite[i % 4 / 2] &= isfinite(o_[i]);
    if (!C::kSharesOutput) {
      if (thread_ == 0) ptx::tma_wait_group_read();
      ptx::bar_sync(kStore + group_, 128);  // the output before has left
    }
    const int r = group_ * 64 + thread_ / 32 * 16 + lane() % 16;
#pragma unroll
    for (int i = 0; i < C::kDim / 16; ++i) {
      uint32_t x[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float times = inverse[j % 2];
        x[j] = Type::pack(o_[8 * i + 2 * j] * times, o_[8 * i + 2 * j + 1] * times);
      }
      ptx::stmatrix_x4(sO + C::Rows::at(r, 16 * i + lane() / 16 * 8), x);
    }
    // Where something hidden may have got through.
    const bool hides = p_.left < kNoLimit || p_.right < kNoLimit || p_.key_lengths;
    const uint32_t upper = __ballot_sync(0xffffffffu, !seq.valid || (hides && !finite[0]));
    const uint32_t lower = __ballot_sync(0xffffffffu, !seq.valid || (hides && !finite[1]));
    if (upper | lower) store_again(sO, upper, lower);
    ptx::fence_proxy_async();
    ptx::bar_sync(kStore + group_, 128);  // the output is there
    if (thread_ == 0) {
#pragma unroll
      for (int i = 0; i < C::Rows::kBlocks; ++i) {
        ptx::tma_store(sO + i * C::Rows::kBlockBytes + group_ * 64 * 128, &p_.out_map, 64 * i,
                       first_row_, work_.head, work_.batch);
      }
      ptx::tma_commit_group();
      if (C::kSharesOutput) {
        ptx::tma_wait_group_read();
        ptx::mbarrier_arrive(slots_.q().empty);
      }
    }
  }
  __device__ __forceinline__ void write_lse(int r, float lse, bool mine) const {
    if (!p_.lse || !mine || r >= work_.seq.len_q) return;
    p_.lse[offset(p_, p_.lse_strides, work_.batch, work_.head, 0) + r * p_.lse_strides.row] = lse;
  }

  // Rows of the warp once more, key by key, from what each really sees: a probability of 0 times a
  // hidden NaN is NaN. `upper` has four bits for each of the first eight rows, `lower` for the
  // others. Slow, and rarely needed. Wrong lengths give NaN everywhere.
  __device__ void store_again(uint32_t sO, uint32_t upper, uint32_t lower) const {
    constexpr int kEach = (C::kDim + 31) / 32;  // columns of a lane
    __syncwarp();                               // the rows are written
    const auto number = [&](const void* tensor, const Strides& strides, int head, int at, int dim,
                            int column) {
      if (column >= dim) return 0.f;
      const char* rows = rows_of(tensor, p_, strides, work_.batch, head, 0);
      return Type::unpack(reinterpret_cast<const uint16_t*>(rows + at * strides.row * 2)[column]);
    };
    const int key_head = work_.head / p_.group;
#pragma unroll 1
    for (int i = 0; i < 16; ++i) {
      const int r = first_row_ + thread_ / 32 * 16 + i;
      if (r >= work_.seq.len_q) break;
      if (((i < 8 ? upper : lower) >> (i % 8 * 4) & 0xf) == 0) continue;
      float o[kEach] = {}, reference = -INFINITY, sum = 0;
      const int end = work_.seq.valid ? work_.seq.end(r, p_) : 0;
#pragma unroll 1
      for (int key = work_.seq.begin(r, p_); key < end; ++key) {
        float s = 0;
        for (int c = lane(); c < p_.head_dim; c += 32) {
          s += number(p_.query, p_.query_strides, work_.head, r, p_.head_dim, c) *
               number(p_.key, p_.key_strides, key_head, key, p_.head_dim, c);
        }
        s = warp_sum(s) * p_.scale_log2;
        const float raised = fmaxf(reference, s);
        const float finite = raised == -INFINITY ? 0.f : raised;
        const float correction = ptx::ex2_approx_ftz(reference - finite);
        const float weight = ptx::ex2_approx_ftz(s - finite);
        reference = raised;
        sum = sum * correction + weight;
#pragma unroll
        for (int j = 0; j < kEach; ++j) {
          o[j] = o[j] * correction + weight * number(p_.value, p_.value_strides, key_head, key,
                                                     p_.head_dim_v, lane() + 32 * j);
        }
      }
      float inverse = sum == 0 ? 0.f : 1.f / sum;
      float lse = sum == 0 ? -INFINITY : (reference + __log2f(sum)) * kLn2;
      if (!work_.seq.valid) inverse = lse = NAN;
      write_lse(r, lse, lane() == 0);
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const int column = lane() + 32 * j;
        if (column >= C::kDim) break;
        const uint32_t at = sO + C::Rows::at(r - work_.first_row, column);
        const uint32_t rounded = Type::pack(o[j] * inverse, 0) & 0xffff;
        *static_cast<uint16_t*>(__cvta_shared_to_generic(at)) = static_cast<uint16_t>(rounded);
      }
    }
  }

  const uint32_t smem_;
  const FwdWork& found_;  // by the loading thread
  const Slots<C> slots_;
  const HopperFwdParams& p_;
  const int group_, thread_;
  int q_parity_ = 0;
  Ring<C> ring_;
  FwdWork work_;
  int first_row_;
  float s_[C::kBlockK / 2], o_[C::kDim / 2];  // scores and output, as wgmma lays them out
  uint32_t pairs_[C::kBlockK / 16][4];        // probabilities, two in a register
  RowState rows_;
  float correction_[2];
};

template <class C>
__device__ __forceinline__ void attention_fwd(const HopperFwdParams& p) {
  extern __shared__ __align__(1024) char shared[];
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const Slots<C> slots{smem + C::kSmemBarriers};
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) slots.init();
  __syncthreads();  // the barriers are there
  if (group == 0) {
    ptx::setmaxnreg_dec<C::kLoaderRegisters>();
    if (threadIdx.x == 0) {
      for (const TensorMap* map : {&p.query_map, &p.key_map, &p.value_map, &p.out_map}) {
        ptx::prefetch_tensormap(map);
      }
      load_all<C>(shared, slots, p);
    }
  } else {
    ptx::setmaxnreg_inc<C::kRegisters>();
    FwdRows<C>(shared, slots, group - 1, p).run();
  }
}

}  // namespace flashmoe::cuda::sm90
