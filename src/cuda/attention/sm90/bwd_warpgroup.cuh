// What warpgroups of the backward pass for Hopper do that compute, whatever their share.
#pragma once

#include "cuda/attention/sm90/bwd_tile.cuh"
#include "cuda/attention/softmax.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/wgmma.cuh"

namespace flashmoe::cuda::sm90 {

// One warpgroup.
template <class C>
class BwdGroup {
 protected:
  using Type = typename C::Type;
  // P or dS of the warpgroup, two in a register, as wgmma reads them.
  using Pairs = uint32_t[C::kBlockQ / 16][4];

  __device__ __forceinline__ BwdGroup(char* shared, const BwdSlots<C>& slots, int group,
                                      const Sm90BwdParams& p)
      : shared_(shared),
        smem_(static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
        slots_(slots),
        p_(p),
        group_(group),
        part_(C::kCluster > 1 ? ptx::cluster_ctarank() : group) {}

  // Of the 64 keys, in the block and in shared memory.
  __device__ __forceinline__ int first_key() const { return 64 * part_; }
  __device__ __forceinline__ int first_row() const { return C::kCluster > 1 ? 0 : 64 * part_; }

  // kStore and the next: barriers of a warpgroup
  static constexpr int kStore = 1, kAgree = 3;
  __device__ __forceinline__ void sync_group() const { ptx::bar_sync(kStore + group_, 128); }

  // What is computed from these is computed where it is used: the main loop has no registers for
  // addresses.
  __device__ __forceinline__ uint32_t smem() const { return ptx::opaque(smem_); }
  __device__ __forceinline__ int thread() const {
    return static_cast<uint32_t>(ptx::opaque_thread()) % 128;
  }
  __device__ __forceinline__ int lane() const { return thread() % 32; }
  // Rows that a thread holds of the warpgroup's 64: row() and row() + 8.
  __device__ __forceinline__ int row() const { return thread() / 32 * 16 + lane() / 4; }
  // By a warp, all of which is done with something.
  __device__ __forceinline__ void arrive(uint32_t barrier) const {
    __syncwarp();
    if (lane() == 0) ptx::mbarrier_arrive(barrier);
  }
  // In all CTAs of the cluster.
  __device__ __forceinline__ void arrive_everywhere(uint32_t barrier) const {
    if constexpr (C::kCluster == 1) {
      arrive(barrier);
    } else {
      __syncwarp();
      const int rank = lane();
      if (rank < C::kCluster) ptx::mbarrier_arrive_cluster(ptx::mapa(barrier, rank));
    }
  }

  // An address for a descriptor, the same for all threads. Of wide tiles, computed once more where
  // it is used: there are many, and no registers to keep them. And without the number of the CTA in
  // its cluster, which stands in the high bits.
  static __device__ __forceinline__ uint32_t anew(uint32_t address) {
    return C::kTwoCta ? warp_uniform(ptx::opaque(address)) % kSharedWindow : address;
  }
  static constexpr uint32_t kSharedWindow = 1 << 18;
  // Where Q and dO of the block are, in uniform registers: computed as soon as it is next, since to
  // find out that all threads have the same takes a while.
  __device__ __forceinline__ uint32_t stage_q() const {
    return smem_ + C::kSmemQ + row_places<C>(stage_).q;
  }
  __device__ __forceinline__ uint32_t stage_grad_out() const {
    return smem_ + C::kSmemQ + row_places<C>(stage_).grad_out;
  }
  __device__ __forceinline__ void advance() {
    ring_.advance();
    stage_ = warp_uniform(ring_.count() % (2 * C::kStages));
  }
  // Of rows 2 (lane % 4) and the next, and 8 rows on for each 64 bytes: lse, delta, lse, delta.
  __device__ __forceinline__ uint32_t stage_terms() const {
    return smem() + C::kSmemTerms + ring_.at() * C::kTermBytes + lane() % 4 * 16;
  }
  // One of the two, of both rows. (Each 4 bytes of a load are a warp's turn at shared memory,
  // although only those of four threads are different: nothing that is not needed.)
  static __device__ __forceinline__ float2 two_terms(uint32_t terms) {
    return {ptx::ld_shared_f32(terms), ptx::ld_shared_f32(terms + 8)};
  }
  // Of dS there are as many as of Q and dO, or wide one.
  __device__ __forceinline__ uint32_t pairs_tile(uint32_t stage) const {
    return smem_ + C::kSmemPairs + (C::kTwoCta ? 0 : stage % 2 * C::Pairs::kBytes);
  }

  // The block of queries that is next: whether it needs a mask, for the warpgroup's keys; and care,
  // where a mask for any of the keys hides something not finite. All warps of the CTA find the
  // same.
  __device__ __forceinline__ bool look_at_rows() {
    const BwdRows& rows = this->rows();
    const int flags = rows.flags;
    if (C::kTwoCta) first_ = rows.first;
    care_ &= kOfKeys;
    if (flags & BwdRows::kMaskedAny && (care_ || bad_terms())) care_ |= kOfBlock;
    care_ = warp_uniform(care_);
    return flags & BwdRows::kMasked << part_;
  }
  __device__ __forceinline__ const BwdRows& rows() const {
    return reinterpret_cast<const BwdRows*>(shared_ + C::kSmemRows)[ring_.at()];
  }
  // Its first query. Wide, what is known of it may be gone before it is done with.
  __device__ __forceinline__ int first() const { return C::kTwoCta ? first_ : rows().first; }
  // A NaN or infinity in Q, K, V or dO must not reach what does not see it, but in a product a 0 of
  // P or dS times NaN is NaN. What is known of the rows of a block, lse in base 2 and delta, shows
  // whether there is one in Q or dO (see attention_bwd_preprocess).
  __device__ __forceinline__ bool bad_terms() const {
    const uint32_t terms = smem() + C::kSmemTerms + ring_.at() * C::kTermBytes + lane() * 16;
    bool bad = false;
#pragma unroll
    for (int i = 0; i < static_cast<int>(C::kTermBytes) / 512; ++i) {
      const float4 two = ptx::ld_shared_v4_f32(terms + i * 512);
      bad |=
          isnan(two.x) || isnan(two.z) || !(fabsf(two.y) < INFINITY) || !(fabsf(two.w) < INFINITY);
    }
    return __any_sync(0xffffffffu, bad);
  }
  __device__ __forceinline__ bool contains() const { return care_ & ~kOfKeys; }
  // K and V are looked at when a task begins, if there is a mask.
  __device__ __forceinline__ bool any_mask() const {
    return p_.left < kNoLimit || p_.right < kNoLimit;
  }
  // Whether something is not finite of what one of kThreads sees of so many bytes.
  template <int kThreads>
  __device__ __forceinline__ bool any_bad(uint32_t from, uint32_t bytes) const {
    uint32_t zero = 0;  // two numbers times 0, added up
#pragma unroll 4
    for (uint32_t i = (threadIdx.x - 128) % kThreads; i < bytes / 16; i += kThreads) {
      const uint4 eight = ptx::ld_shared_v4(from + i * 16);
      for (const uint32_t two : {eight.x, eight.y, eight.z, eight.w}) {
        zero = C::kBf16 ? ptx::fma_rn_bf16x2(two, 0, zero) : ptx::fma_rn_f16x2(two, 0, zero);
      }
    }
    return zero & 0x7fff7fff;
  }
  __device__ __forceinline__ bool group_any_bad(uint32_t from, uint32_t bytes) const {
    return ptx::bar_red_or(kStore + group_, 128, any_bad<128>(from, bytes));
  }

  // The products once more for a block that has something not finite behind its mask: number by
  // number, hidden ones left out. Slow, and rarely needed. For 64 rows of the warpgroup, of which
  // left(row, d) is {seen, number}, and a tile with a row for each of the depth, from `column` on.
  struct Factor {
    bool seen;
    float value;
  };
  template <class Right, int kCount, class Left>
  __device__ __forceinline__ void multiply_contained(float (&acc)[kCount], int depth,
                                                     const Left& left, uint32_t right,
                                                     int column) const {
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
#pragma unroll 1
      for (int d = 0; d < depth; ++d) {  // inside, or registers would not do
        const Factor factors[2] = {left(row(), d), left(row() + 8, d)};
        const uint32_t two =
            ptx::ld_shared_u32(right + Right::at(d, column + 8 * i + lane() % 4 * 2));
        const float numbers[2] = {Type::unpack(two & 0xffff), Type::unpack(two >> 16)};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (factors[j / 2].seen) acc[4 * i + j] += factors[j / 2].value * numbers[j % 2];
        }
      }
    }
  }
  // dS, or what else was stored by store_pairs(): of the block, or of another one.
  __device__ __forceinline__ Factor pair_at(const BwdTask& w, int query, int key) const {
    return pair_at(w, first(), pairs_tile(stage_), query, key);
  }
  __device__ __forceinline__ Factor pair_at(const BwdTask& w, int first, uint32_t tile, int query,
                                            int key) const {
    const int r = first + query, k = w.first_key + key;
    return {k >= w.seq.begin(r, p_) && k < w.seq.end(r, p_) && r < w.seq.len_q,
            Type::unpack(ptx::ld_shared_u16(tile + C::Pairs::at(query, key)))};
  }

  // P = 2^(S - lse), a row for each key; and with a softcap what dS is yet to be multiplied with.
  __device__ __forceinline__ void probabilities(float (&s)[C::kBlockQ / 2], Pairs& slopes) const {
    if (C::kTile.general_score && p_.softcap_scale) {
#pragma unroll
      for (int i = 0; i < C::kBlockQ / 4; ++i) {
        const Tanh two[] = {tanh_and_derivative(s[2 * i] * p_.softcap_scale),
                            tanh_and_derivative(s[2 * i + 1] * p_.softcap_scale)};
        s[2 * i] = two[0].value;
        s[2 * i + 1] = two[1].value;
        slopes[i / 4][i % 4] = Type::pack(two[0].derivative, two[1].derivative);
      }
    }
    const uint32_t terms = stage_terms();
#pragma unroll
    for (int i = 0; i < C::kBlockQ / 8; ++i) {
      const float2 lse = two_terms(terms + 64 * i);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        s[4 * i + j] = ptx::ex2_approx_ftz(s[4 * i + j] * p_.scale_log2 - (j % 2 ? lse.y : lse.x));
      }
    }
  }
  // 0 where a query does not see the key, of P or dS. `first_key` is that of the warpgroup.
  __device__ __forceinline__ void mask(float (&s)[C::kBlockQ / 2], const Sequence& seq,
                                       int first_key) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = first_key + row() + 8 * half, from = first() + lane() % 4 * 2;
      // Queries [begin, end] see it.
      const int begin = key < seq.len_k ? max(key - seq.shift - p_.right, 0) - from : kNoLimit;
      const int end = min(key - seq.shift + p_.left, seq.len_q - 1) - from;
#pragma unroll
      for (int i = 0; i < C::kBlockQ / 4; ++i) {
        const int query = i / 2 * 8 + i % 2;
        if (query < begin || query > end) s[i / 2 * 4 + 2 * half + i % 2] = 0;
      }
    }
  }
  __device__ __forceinline__ void pack(Pairs& pairs, const float (&x)[C::kBlockQ / 2]) const {
#pragma unroll
    for (int i = 0; i < C::kBlockQ / 4; ++i) {
      pairs[i / 4][i % 4] = Type::pack(x[2 * i], x[2 * i + 1]);
    }
  }
  // dS to shared memory, a row for each query; the warpgroup's keys from column `first` on.
  __device__ __forceinline__ void store_pairs(const Pairs& pairs, int first) const {
    const int query = lane() / 16 * 8 + lane() % 8;
    const int key = first + thread() / 32 * 16 + lane() / 8 % 2 * 8;
    const uint32_t to = pairs_tile(stage_) + C::Pairs::at(query, key);
#pragma unroll
    for (int i = 0; i < C::kBlockQ / 16; ++i) ptx::stmatrix_x4_trans(to + i * 16 * 128, pairs[i]);
  }

  // dK or dV of 64 keys to shared memory: blocks of 64 columns, each `block_bytes` after the other.
  __device__ __forceinline__ void write_gradient(uint32_t to, uint32_t block_bytes,
                                                 const float (&x)[C::kDim / 2], float times) const {
    const int r = thread() / 32 * 16 + lane() % 16;
#pragma unroll
    for (int i = 0; i < C::kDim / 16; ++i) {
      uint32_t four[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        four[j] = Type::pack(x[8 * i + 2 * j] * times, x[8 * i + 2 * j + 1] * times);
      }
      const uint32_t at = C::Grads::at(r, 16 * (i % 4) + lane() / 16 * 8);
      ptx::stmatrix_x4(to + i / 4 * block_bytes + at, four);
    }
  }

  // The same from there to where they belong: by the copy engine, except where others' keys follow,
  // ragged. `first_key` is that of the 64. Shared memory is free again once the warps are through,
  // and the first thread has waited for the copy engine.
  __device__ __forceinline__ void send_gradient(const BwdTask& w, const void* gradient,
                                                const Strides& strides, const TensorMap& map,
                                                int dim, uint32_t from, uint32_t block_bytes,
                                                int first_key) const {
    if (!gradient) return;
    if (!ends_within(w, first_key, p_)) {
      if (thread() > 0) return;
      const int token = static_cast<int>(w.seq.token_k) + first_key;
#pragma unroll
      for (int i = 0; i < C::Grads::kBlocks; ++i) {
        ptx::tma_store_evict_first(from + i * block_bytes, &map, 64 * i, token, w.key_head,
                                   w.batch);
      }
      ptx::cp_async_bulk_commit_group();
      return;
    }
    const char* const to = rows_of(gradient, p_, strides, w.batch, w.key_head, w.seq.token_k);
    const int rows = w.seq.len_k - first_key;
#pragma unroll 1
    for (int i = thread(); i < rows * dim; i += 128) {
      const int r = i / dim, column = i % dim;
      const uint32_t at = from + column / 64 * block_bytes + C::Grads::at(r, column % 64);
      reinterpret_cast<uint16_t*>(const_cast<char*>(
          to + (first_key + r) * static_cast<int64_t>(strides.row_bytes())))[column] =
          ptx::ld_shared_u16(at);
    }
  }

  __device__ __forceinline__ bool any_unseen(const BwdTask& w, int first_key, int count) const {
    return w.seq.begin(0, p_) > first_key ||
           w.seq.end(w.seq.len_q - 1, p_) <
               (p_.blocks ? first_key + count : min(first_key + count, p_.len_k));
  }
  // Keys that no row sees may hold anything, those past the end of the sequence above all: nothing,
  // then. Of 64 keys, in rows from `tile_row` on of K or V at `keys`.
  template <class Keys = typename C::Keys>
  __device__ __forceinline__ void clear_keys(const BwdTask& w, int first_key, uint32_t keys,
                                             int tile_row) const {
    const int begin = w.seq.begin(0, p_), end = w.seq.end(w.seq.len_q - 1, p_);
    if (!any_unseen(w, first_key, 64)) return;
#pragma unroll 1
    for (int i = thread(); i < 64 * Keys::kBlocks * 8; i += 128) {
      const int r = i / 8 % 64, block = i / (64 * 8);
      if (first_key + r >= begin && first_key + r < end) continue;
      const uint32_t at = block * Keys::kBlockBytes + (tile_row + r) * 128 + i % 8 * 16;
      ptx::st_shared_v4(keys + at, uint4{0, 0, 0, 0});
    }
    ptx::fence_proxy_async_shared();
    sync_group();
  }

  // dK and dV of keys that no query sees, or of lengths that are wrong.
  __device__ void fill_gradients(const BwdTask& w) const {
    const uint16_t value = w.seq.valid ? 0 : Type::kNan;
    const auto fill = [&](void* gradient, const Strides& strides, int dim) {
      if (!gradient) return;
      const char* to = rows_of(gradient, p_, strides, w.batch, w.key_head, w.seq.token_k);
      const int first_key = w.first_key + (C::kCluster > 1 ? this->first_key() : 0);
      const int end = min(first_key + C::kBlockK / C::kCluster, p_.blocks ? w.seq.len_k : p_.len_k);
#pragma unroll 1
      for (int r = first_key + group_; r < end; r += C::kGroups) {
        uint16_t* const numbers = reinterpret_cast<uint16_t*>(
            const_cast<char*>(to) + r * static_cast<int64_t>(strides.row_bytes()));
        for (int i = thread(); i < dim; i += 128) numbers[i] = value;
      }
    };
    fill(p_.grad_key, p_.grad_key_strides, p_.head_dim);
    fill(p_.grad_value, p_.grad_value_strides, p_.head_dim_v);
  }

  // f(task) for all tasks of the CTA.
  template <class F>
  __device__ __forceinline__ void for_each_task(const F& f) {
#pragma unroll 1
    for (Ring<2> tasks;;) {
      tasks.wait_full(slots_.task(tasks.at()));
      const BwdTask& w = reinterpret_cast<const BwdTask*>(shared_ + C::kSmemTasks)[tasks.at()];
      if (w.last) break;
      if (w.tiles == 0) {
        fill_gradients(w);
      } else {
        f(w);
      }
      tasks = Ring<2>(w.index);  // there is no register to keep it
      ptx::mbarrier_arrive(slots_.task(tasks.at()).empty);
      tasks.advance();
      __syncwarp();  // so that the compiler knows it of the next task as well
    }
  }

  char* const shared_;
  const uint32_t smem_;
  const BwdSlots<C> slots_;
  const Sm90BwdParams& p_;
  const int group_;
  const int part_;         // the keys: those of the warpgroup, or of the CTA
  Ring<C::kStages> ring_;  // of Q and dO
  uint32_t stage_ = 0;     // which places of these: see row_places()
  int first_;              // see first()
  // Whether something is not finite: in K or V; behind a mask of the block of queries, or of the
  // one before, whose dQ is yet to come. In one register.
  static constexpr int kOfKeys = 1, kOfBlock = 2, kOfBlockBefore = 4;
  int care_;
};

}  // namespace flashmoe::cuda::sm90
