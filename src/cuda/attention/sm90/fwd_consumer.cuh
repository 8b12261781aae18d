// What the warpgroups of attention_fwd.cuh do that have rows of queries.
#pragma once

#include <type_traits>

#include "cuda/attention/sequence.cuh"
#include "cuda/attention/sm90/params.h"
#include "cuda/attention/sm90/tiles.h"
#include "cuda/attention/softmax.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/special_registers.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/tile/dtype.cuh"
#include "cuda/tma/operand.cuh"
#include "cuda/tma/pipeline.cuh"

namespace flashmoe::cuda::sm90 {

using tma::fill, tma::Ring, tma::Slot, tma::Tile, tma::warp_uniform;

// A block of queries, and the blocks of keys that it sees.
struct alignas(8) FwdTask {
  Sequence seq;
  int batch = 0, head = 0, first_row = 0;
  int key_begin = 0, key_end = 0;
  int end[3] = {};                           // those that rows of a warpgroup see
  int full_begin[3] = {}, full_end[3] = {};  // and that need no mask
  int more = false;                          // or that there is none
  int64_t lse = 0;                           // where that of its head begins

  // Of the block, as the tensor maps count.
  __device__ __forceinline__ int first_token(const Sm90FwdParams& p) const {
    return static_cast<int>(seq.token_q) + (first_row >> p.pack);
  }
};

template <class T, Sm90FwdTile kTile_>
struct FwdConfig {
  using Type = T;
  static constexpr bool kBf16 = std::is_same_v<T, Bf16>;
  static constexpr Sm90FwdTile kTile = kTile_;
  static constexpr int kDim = kTile.head_dim, kStages = kTile.stages;
  static constexpr int kBlockQ = kTile.block_q, kBlockK = kTile.block_k;
  static constexpr int kOutStages = kTile.out_stages();
  static constexpr int kGroups = kBlockQ / 64;  // of warps, with rows
  using Rows = Tile<kBlockQ, kDim>;
  using Keys = Tile<kBlockK, kDim>;
  using Out = Tile<kBlockQ, 64>;
  static constexpr uint32_t kSmemQ = 0;
  static constexpr uint32_t kSmemK = Rows::kBytes;
  static constexpr uint32_t kSmemV = kSmemK + kStages * Keys::kBytes;
  static constexpr uint32_t kSmemO = kSmemV + kStages * Keys::kBytes;
  static constexpr uint32_t kSmemTasks = kSmemO + kOutStages * Out::kBytes;
  static constexpr uint32_t kSmemBarriers = kSmemTasks + 2 * sizeof(FwdTask);
  static constexpr int kSlots = 3 + 2 * kStages;
  static_assert(kSmemTasks + kBarrierBytes == kTile.shared_bytes());
  static_assert(2 * sizeof(FwdTask) + kSlots * sizeof(Slot::Barriers) <= kBarrierBytes);
  static_assert(sizeof(FwdTask) % 8 == 0 && kBlockQ % 64 == 0 && kBlockK % 16 == 0);
  static_assert(Rows::kBytes % 1024 == 0 && Keys::kBytes % 1024 == 0);
  static constexpr int kLoaderRegisters = kGroups == 3 ? 32 : 40;
  static constexpr int kRegisters = kGroups == 3 ? 160 : 232;
  static_assert(kLoaderRegisters + kGroups * kRegisters <=
                (kGroups + 1) * registers_at_first(kGroups + 1));

  static __device__ __forceinline__ FwdTask* task(char* shared, int i) {
    return reinterpret_cast<FwdTask*>(shared + kSmemTasks) + i;
  }
};

template <class C>
struct FwdSlots {
  uint32_t barriers;
  __device__ __forceinline__ Slot task(int i) const { return at(i); }
  __device__ __forceinline__ Slot q() const { return at(2); }
  __device__ __forceinline__ Slot k(int i) const { return at(3 + i); }
  __device__ __forceinline__ Slot v(int i) const { return at(3 + C::kStages + i); }

  // Works are read, and so done with, by each thread for itself; tiles by warps.
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < C::kSlots; ++i) at(i).init(1, (i < 2 ? 128 : 4) * C::kGroups);
    ptx::fence_mbarrier_init();
  }

 private:
  __device__ __forceinline__ Slot at(int i) const {
    return Slot(barriers + i * sizeof(Slot::Barriers));
  }
};

// One warpgroup with 64 rows.
template <class C>
class FwdRows {
 public:
  __device__ __forceinline__ FwdRows(char* shared, int group, const Sm90FwdParams& p)
      : shared_(shared),
        smem_(static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
        slots_{smem_ + C::kSmemBarriers},
        p_(p),
        group_(group) {}

  __device__ __forceinline__ void run() {
    if (C::kGroups > 1 && group_ == C::kGroups - 1) ptx::bar_arrive(kTurn, kTwoGroups);
    while (take()) {
      skip();
      begin();
      first_softmax();
      go_through_keys();
      finish();
      store();
      ptx::mbarrier_arrive(slots_.task(tasks_.at()).empty);
      __syncwarp();  // so that the compiler knows it of the next task as well
      tasks_.advance();
    }
    if (C::kGroups > 1 && group_ == 0) ptx::bar_sync(kTurn, kTwoGroups);  // the last one's
    if (thread() == 0) ptx::cp_async_bulk_wait_group();
  }

 private:
  static constexpr int kTurn = 1, kStore = kTurn + C::kGroups, kTwoGroups = 256;
  using Type = typename C::Type;

  __device__ __forceinline__ int thread() const {
    return static_cast<uint32_t>(ptx::opaque_thread()) % 128;
  }
  __device__ __forceinline__ int warp() const { return thread() >> 5; }
  __device__ __forceinline__ int lane() const { return thread() & 31; }
  // Rows that a thread holds: row() and row() + 8 of the warpgroup's.
  __device__ __forceinline__ int row() const { return warp() * 16 + (lane() >> 2); }
  __device__ __forceinline__ int first_row() const { return task().first_row + group_ * 64; }
  __device__ __forceinline__ const FwdTask& task() const { return *C::task(shared_, tasks_.at()); }
  // Each time anew: registers are few.
  static __device__ __forceinline__ int read(const int& x) {
    return *const_cast<const volatile int*>(&x);
  }
  // The query of a row of the task.
  __device__ __forceinline__ int query(int row) const { return row >> p_.pack; }

  __device__ __forceinline__ void wait_turn() const {
    if (C::kGroups > 1) ptx::bar_sync(kTurn + group_, kTwoGroups);
  }
  __device__ __forceinline__ void pass_turn() const {
    if (C::kGroups > 1) ptx::bar_arrive(kTurn + (group_ + 1) % C::kGroups, kTwoGroups);
  }
  __device__ __forceinline__ void release(const Slot& slot) const {
    __syncwarp();
    if (lane() == 0) ptx::mbarrier_arrive(slot.empty);
  }

  // The next task, or false.
  __device__ __forceinline__ bool take() {
    tasks_.wait_full(slots_.task(tasks_.at()));
    const FwdTask& w = task();
    if (!warp_uniform(w.more)) return false;
    block_ = warp_uniform(w.end[group_]) - 1;
    return true;
  }

  __device__ __forceinline__ void issue_scores() {
    const uint32_t sQ = smem_ + C::kSmemQ + group_ * 64 * 128;
    const uint32_t q = warp_uniform(C::Rows::descriptor(sQ));
    const uint32_t k =
        warp_uniform(C::Keys::descriptor(smem_ + C::kSmemK + keys_.at() * C::Keys::kBytes));
#pragma unroll
    for (int step = 0; step < C::kDim / 16; ++step) {
      ptx::Wgmma<C::kBf16, C::kBlockK>::ss(s_, C::Rows::along(q, step), C::Keys::along(k, step),
                                           step > 0);
    }
    ptx::wgmma_commit_group();
  }
  __device__ __forceinline__ void issue_values(int stage) {
    const uint32_t v =
        warp_uniform(C::Keys::descriptor(smem_ + C::kSmemV + stage * C::Keys::kBytes));
#pragma unroll
    for (int step = 0; step < C::kBlockK / 16; ++step) {
      ptx::Wgmma<C::kBf16, C::kDim>::rs_tb(o_, pairs_[step], C::Keys::across(v, step));
    }
    ptx::wgmma_commit_group();
  }

  // A softcap, or a scale that is not positive.
  __device__ __forceinline__ void transform() {
    if (p_.softcap_scale) {
#pragma unroll
      for (float& x : s_) x = tanh_and_derivative(x * p_.softcap_scale).value;
    } else {
#pragma unroll
      for (float& x : s_) x *= p_.sign;
    }
  }
  // -inf for the keys of block_ that a row does not see.
  __device__ __forceinline__ void mask() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int q = query(first_row() + row() + 8 * half);
      const int first = block_ * C::kBlockK + lane() % 4 * 2;
      const auto hide = [&](const auto& hidden) {
#pragma unroll
        for (int i = 0; i < C::kBlockK / 4; ++i) {
          if (hidden(i / 2 * 8 + i % 2)) s_[i / 2 * 4 + 2 * half + i % 2] = -INFINITY;
        }
      };
      const int end = task().seq.end(q, p_) - first;
      hide([&](int key) { return key >= end; });
      if (p_.left == kNoLimit) continue;
      const int begin = task().seq.begin(q, p_) - first;
      hide([&](int key) { return key < begin; });
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
  // The same, without looking for a maximum: most blocks have none that is much above those before.
  // Where there is one after all, or no reference yet, or a NaN, the sums show it, and the scores
  // are computed once more. Also waits for O.
  __device__ __forceinline__ void guess_softmax() {
    constexpr float kMost = 1 << 14;  // of a thread's sum; fp16 holds its terms
    float sum[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < C::kBlockK / 2; ++i) {
      const int half = i % 4 / 2;
      s_[i] = ptx::ex2_approx_ftz(s_[i] * p_.scale_log2 - rows_.reference[half]);
      sum[half] += s_[i];
    }
    const bool again = __any_sync(0xffffffffu, !(sum[0] <= kMost && sum[1] <= kMost));
    ptx::wgmma_wait_all_after(again, o_);
    if (again) {
      scores_again();
      softmax<false>();
      correct_output();
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) rows_.sum[half] += sum[half];
    }
  }
  // By each warp for itself.
  __device__ __forceinline__ void scores_again() {
    const int r = lane() % 16, column = lane() / 16 * 8;
    const uint32_t q =
        smem_ + C::kSmemQ + (group_ * 64 + warp() * 16) * 128 + C::Rows::at(r, column);
    const uint32_t k = smem_ + C::kSmemK + keys_.at() * C::Keys::kBytes + C::Keys::at(r, column);
#pragma unroll
    for (float& x : s_) x = 0;
#pragma unroll 1
    for (int step = 0; step < C::kDim / 16; ++step) {
      const uint32_t chunk = step % 4 * 32;  // swizzled, as the lane's first is
      uint32_t a[4];
      ptx::ldmatrix_x4(a, (q ^ chunk) + step / 4 * C::Rows::kBlockBytes);
#pragma unroll
      for (int n = 0; n < C::kBlockK / 16; ++n) {
        uint32_t b[4];  // keys 0 to 7 and 8 to 15, of each two halves of the depth
        ptx::ldmatrix_x4(b, (k ^ chunk) + step / 4 * C::Keys::kBlockBytes + n * 16 * 128);
        float(&left)[4] = reinterpret_cast<float(&)[4]>(s_[8 * n]);
        float(&right)[4] = reinterpret_cast<float(&)[4]>(s_[8 * n + 4]);
        Type::mma(left, a, b[0], b[2], left);
        Type::mma(right, a, b[1], b[3], right);
      }
    }
  }
  __device__ __forceinline__ void correct_output() {
#pragma unroll
    for (int i = 0; i < C::kDim / 2; ++i) o_[i] *= correction_[i % 4 / 2];
  }
  __device__ __forceinline__ void wait_and_correct() {
    const bool corrects = correction_[0] != 1 || correction_[1] != 1;
    const bool any = __any_sync(0xffffffffu, corrects || !(rows_.sum[0] + rows_.sum[1] >= 0));
    ptx::wgmma_wait_all_after(any, o_);
    if (any) correct_output();
  }
  __device__ __forceinline__ void pack_pairs() {
#pragma unroll
    for (int i = 0; i < C::kBlockK / 4; ++i) {
      pairs_[i / 4][i % 4] = Type::pack(s_[2 * i], s_[2 * i + 1]);
    }
  }

  __device__ __forceinline__ bool needs_mask() const {
    return block_ >= read(task().full_end[group_]) || block_ < read(task().full_begin[group_]);
  }

  // S of a block is there: its keys are not needed any more, nor the queries after the last.
  __device__ __forceinline__ void release_scores() {
    release(slots_.k(keys_.at()));
    if (block_ > read(task().key_begin)) return;
    release(slots_.q());
  }

  // S of the next block, and O of the one before it, whose place in the ring this is.
  __device__ __forceinline__ int issue_both() {
    const Ring<C::kStages> before = keys_;
    keys_.advance();
    keys_.wait_full(slots_.k(keys_.at()));
    wait_turn();
    ptx::wgmma_fence();
    issue_scores();
    before.wait_full(slots_.v(before.at()));
    ptx::wgmma_fence();
    issue_values(before.at());
    pass_turn();
    return before.at();
  }

  // Blocks that none of the warpgroup's rows sees, before the first that some do.
  __device__ __forceinline__ void skip() {
#pragma unroll 1
    for (int n = read(task().key_end) - 1; warp_uniform(n) > block_; --n) {
      const Slot k = slots_.k(keys_.at()), v = slots_.v(keys_.at());
      keys_.wait_full(k);
      wait_turn();
      pass_turn();
      keys_.wait_full(v);
      if (lane() == 0) {
        ptx::mbarrier_arrive(k.empty);
        ptx::mbarrier_arrive(v.empty);
      }
      keys_.advance();
    }
  }
  // S of the first block of a task.
  __device__ __forceinline__ void begin() {
    ptx::mbarrier_wait(slots_.q().full, tasks_.count() % 2);
    keys_.wait_full(slots_.k(keys_.at()));
    wait_turn();
    ptx::wgmma_fence();
    issue_scores();
    pass_turn();
    ptx::wgmma_wait_group<0>(s_);
  }
  // O of the last block; then it is whole.
  __device__ __forceinline__ void finish() {
    const int last = keys_.at();
    keys_.wait_full(slots_.v(last));
    keys_.advance();
    ptx::wgmma_fence();
    issue_values(last);
    ptx::wgmma_wait_group<0>(o_);
    release(slots_.v(last));
  }
  __device__ __forceinline__ void first_softmax() {
    release_scores();
    if (C::kTile.general_score) transform();
    if (needs_mask()) mask();
    softmax<true>();
    pack_pairs();
    --block_;
#pragma unroll
    for (float& x : o_) x = 0;
  }

  // A later block.
  template <bool kMasked>
  __device__ __forceinline__ void step() {
    const int before = issue_both();
    ptx::wgmma_wait_group<1>(s_);
    if (kMasked || C::kTile.general_score) {
      release_scores();
      if (C::kTile.general_score) transform();
      if (kMasked) mask();
      softmax<false>();
      wait_and_correct();
    } else {
      guess_softmax();
      release_scores();
    }
    release(slots_.v(before));
    pack_pairs();
    --block_;
  }
  // All blocks but the first.
  __device__ __forceinline__ void go_through_keys() {
    const auto from = [&](const int& first) { return block_ >= warp_uniform(read(first)); };
#pragma unroll 1
    while (from(task().full_end[group_])) step<true>();
#pragma unroll 1
    while (from(task().full_begin[group_])) step<false>();
#pragma unroll 1
    while (from(task().key_begin)) step<true>();
  }

  // O / sum through shared memory to the copy engine, and lse.
  __device__ __forceinline__ void store() {
    float inverse[2], lse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = quad_sum(rows_.sum[half]);
      inverse[half] = sum == 0 ? 0.f : __fdividef(1.f, sum);  // 0: no key allowed
      lse[half] = sum == 0 ? -INFINITY : (rows_.reference[half] + __log2f(sum)) * kLn2;
    }
    const uint32_t sO = smem_ + C::kSmemO;
    const int r = group_ * 64 + warp() * 16 + lane() % 16;
#pragma unroll
    for (int first = 0; first < C::Rows::kBlocks; first += C::kOutStages) {
      if (thread() == 0) ptx::cp_async_bulk_wait_group_read();
      ptx::bar_sync(kStore + group_, 128);  // what was there has left
#pragma unroll
      for (int i = 4 * first; i < min(4 * (first + C::kOutStages), C::kDim / 16); ++i) {
        uint32_t x[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float times = inverse[j % 2];
          x[j] = Type::pack(o_[8 * i + 2 * j] * times, o_[8 * i + 2 * j + 1] * times);
        }
        const uint32_t at = sO + (i / 4 - first) * C::Out::kBytes;
        ptx::stmatrix_x4(at + C::Out::at(r, (16 * i + lane() / 16 * 8) % 64), x);
      }
      ptx::fence_proxy_async_shared();
      ptx::bar_sync(kStore + group_, 128);  // they are there
#pragma unroll
      for (int i = first; i < min(first + C::kOutStages, C::Rows::kBlocks); ++i) {
        send(sO + (i - first) * C::Out::kBytes, 64 * i);
      }
    }
    // After the fences, which would wait for it.
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = task().first_row + group_ * 64 + row() + 8 * half;
      if (lane() % 4 == 0) write_lse(r, lse[half]);
    }
    contain();
  }

  // Rows of a sequence that end within the tile are followed by those of the next.
  __device__ __forceinline__ void send(uint32_t sO, int column) const {
    const int first = task().first_row + group_ * 64;
    if (!p_.blocks || first + 64 <= task().seq.len_q) {
      if (thread() == 0) {
        ptx::tma_store(sO + group_ * 64 * 128, &p_.out_map, column, 0,
                       static_cast<int>(task().seq.token_q) + (first >> p_.pack), task().head,
                       task().batch);
        ptx::cp_async_bulk_commit_group();
      }
      return;
    }
    const int rows = min(task().seq.len_q - first, 64), columns = min(p_.head_dim_v - column, 64);
#pragma unroll 1
    for (int i = thread(); i < rows * 8; i += 128) {
      const uint16_t* from = static_cast<const uint16_t*>(
          __cvta_shared_to_generic(sO + C::Out::at(group_ * 64 + i / 8, i % 8 * 8)));
      uint16_t* to = out_row(first + i / 8) + column + i % 8 * 8;
      if (i % 8 * 8 + 8 <= columns) {
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
      } else {
        for (int c = i % 8 * 8; c < columns; ++c) *to++ = *from++;
      }
    }
  }

  // Where a row of the task lies.
  __device__ __forceinline__ int64_t row_offset(const Strides& strides, int row) const {
    const FwdTask& w = task();
    const int head = (w.head << p_.pack) + (row & ((1 << p_.pack) - 1));
    return offset(p_, strides, w.batch, head, w.seq.token_q) + query(row) * strides.row;
  }
  __device__ __forceinline__ uint16_t* out_row(int row) const {
    return static_cast<uint16_t*>(p_.out) + row_offset(p_.out_strides, row);
  }
  __device__ __forceinline__ void write_lse(int row, float lse) const {
    if (!p_.lse || query(row) >= task().seq.len_q) return;
    const int head = row & ((1 << p_.pack) - 1);
    p_.lse[task().lse + head * p_.lse_strides.head + query(row) * p_.lse_strides.row] = lse;
  }

  // A probability of 0 times a hidden NaN is NaN: rows with something not finite are computed once
  // more. And lengths that are wrong give NaN.
  __device__ __forceinline__ void contain() const {
    const bool hides = p_.left < kNoLimit || p_.right < kNoLimit || p_.key_lengths || p_.blocks;
    if (!hides) return;
    bool finite[2] = {task().seq.valid, task().seq.valid};
#pragma unroll
    for (int i = 0; i < C::kDim / 2; ++i) finite[i % 4 / 2] &= isfinite(o_[i]);
    const uint32_t upper = __ballot_sync(0xffffffffu, !finite[0]);
    const uint32_t lower = __ballot_sync(0xffffffffu, !finite[1]);
    if (!ptx::bar_red_or(kStore + group_, 128, upper | lower)) return;
    if (thread() == 0) ptx::cp_async_bulk_wait_group();
    ptx::bar_sync(kStore + group_, 128);  // what was sent is there
    store_again(upper, lower);
  }

  // Rows of the warp key by key, from what each really sees. `upper` has four bits for each of the
  // first eight rows, `lower` for the others. Slow, and rarely needed.
  __device__ __forceinline__ void store_again(uint32_t upper, uint32_t lower) const {
    const FwdTask& w = task();
    constexpr int kEach = (C::kDim + 31) / 32;  // columns of a lane
    const int key_head = w.head / p_.group;
    const auto number = [](const uint16_t* row, int column, int dim) {
      return column < dim ? Type::unpack(row[column]) : 0.f;
    };
    const auto key_row = [&](const void* tensor, const Strides& strides, int key) {
      return static_cast<const uint16_t*>(tensor) +
             offset(p_, strides, w.batch, key_head, w.seq.token_k) + key * strides.row;
    };
#pragma unroll 1
    for (int i = 0; i < 16; ++i) {
      const int r = w.first_row + group_ * 64 + warp() * 16 + i;
      if (query(r) >= w.seq.len_q) break;
      if (((i < 8 ? upper : lower) >> (i % 8 * 4) & 0xf) == 0) continue;
      const uint16_t* q = static_cast<const uint16_t*>(p_.query) + row_offset(p_.query_strides, r);
      float o[kEach] = {}, reference = -INFINITY, sum = 0;
      const int end = w.seq.valid ? w.seq.end(query(r), p_) : 0;
#pragma unroll 1
      for (int key = w.seq.begin(query(r), p_); key < end; ++key) {
        const uint16_t* k = key_row(p_.key, p_.key_strides, key);
        const uint16_t* v = key_row(p_.value, p_.value_strides, key);
        float s = 0;
        for (int c = lane(); c < p_.head_dim; c += 32) {
          s += number(q, c, p_.head_dim) * number(k, c, p_.head_dim);
        }
        s = warp_sum(s);
        s = p_.softcap_scale ? tanh_and_derivative(s * p_.softcap_scale).value : s * p_.sign;
        s *= p_.scale_log2;
        const float raised = fmaxf(reference, s);
        const float finite = raised == -INFINITY ? 0.f : raised;
        const float correction = ptx::ex2_approx_ftz(reference - finite);
        const float weight = ptx::ex2_approx_ftz(s - finite);
        reference = raised;
        sum = sum * correction + weight;
#pragma unroll
        for (int j = 0; j < kEach; ++j) {
          o[j] = o[j] * correction + weight * number(v, lane() + 32 * j, p_.head_dim_v);
        }
      }
      float inverse = sum == 0 ? 0.f : __fdividef(1.f, sum);
      float lse = sum == 0 ? -INFINITY : (reference + __log2f(sum)) * kLn2;
      if (!w.seq.valid) inverse = lse = NAN;
      if (lane() == 0) write_lse(r, lse);
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const int column = lane() + 32 * j;
        const uint32_t rounded = Type::pack(o[j] * inverse, 0) & 0xffff;
        if (column < p_.head_dim_v) out_row(r)[column] = static_cast<uint16_t>(rounded);
      }
    }
  }

  char* const shared_;
  const uint32_t smem_;
  const FwdSlots<C> slots_;
  const Sm90FwdParams& p_;
  const int group_;
  Ring<2> tasks_;
  Ring<C::kStages> keys_;
  // The work; of its blocks of keys this one is next.
  int block_;
  float s_[C::kBlockK / 2], o_[C::kDim / 2];  // scores and output, as wgmma lays them out
  uint32_t pairs_[C::kBlockK / 16][4];        // probabilities, two in a register
  RowState rows_;
  float correction_[2];
};

}  // namespace flashmoe::cuda::sm90
