// Attention backward for Hopper where queries and keys are few: one launch, in which a cluster has
// all of a head. bwd.cuh has what is computed; there dQ is a sum over tiles of keys in memory, with
// a kernel before it and one after, which for a few hundred tokens take longer than the products.
//
//                    queries
//                +--------+--------+
//   keys         | tile 0 | tile 1 |
//   0 to 127     |        | ---------> dQ of tile 1    CTA 0: dK, dV of its keys, dQ of tile 0
//                +--------+--------+
//   128 to 255   | dQ of <--       |                   CTA 1: dK, dV of its keys, dQ of tile 1
//                +--------+--------+
//
// A CTA has 128 keys, and up to 128 keys are one CTA. Of two, each begins with the tile of queries
// whose dQ is the other's, sends it its part through shared memory, and adds what it is sent to its
// own. So dQ is complete in registers, and two numbers have one order: the same bits every time.
//
// There are no producers: one thread has everything loaded by TMA at once, and meanwhile all find
// lse and delta. Then two warpgroups have 64 keys each and do one thing after the other: S and dP
// (a row for each key, bwd_scores.cuh), P and dS, dV and dK, dQ. With two tiles at most there is
// nothing to gain by more.
//
// Shared memory: BwdWholeConfig::Smem, 194.5 KB at D = 64. Registers of a thread: 222, at D = 32
// 204.
#pragma once

#include <cstddef>
#include <type_traits>

#include "cuda/attention/sm90/bwd_epilogue.cuh"
#include "cuda/attention/sm90/bwd_guard.cuh"
#include "cuda/attention/sm90/bwd_preprocess.cuh"
#include "cuda/attention/sm90/bwd_scores.cuh"
#include "cuda/attention/sm90/tiles.h"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/grid.cuh"
#include "cuda/tile/dtype.cuh"
#include "cuda/tma/operand.cuh"

namespace flashmoe::cuda::sm90 {

// Has what BwdConfig has as far as the steps ask for it that both kernels share.
template <class T, Sm90WholeBwdTile kTile_>
struct BwdWholeConfig {
  using Type = T;
  static constexpr bool kBf16 = std::is_same_v<T, Bf16>;
  static constexpr Sm90WholeBwdTile kTile = kTile_;
  static constexpr bool kBias = false, kBiasRows = false, kFloatBias = false, kMask = false;
  static constexpr bool kTwoCta = false, kSmallDim = false, kOwnGrads = true;
  static constexpr bool kSplits = false, kZeroesDq = false, kLooksBeside = false;
  static constexpr bool kDqTransposed = false;
  static constexpr int kDim = kTile.head_dim, kDqColumns = kDim;
  static constexpr int kBlockQ = kTile.block_q, kBlockK = kTile.key_box(), kKeyBox = kBlockK;
  static constexpr int kStages = kTile.kStages, kWarpgroups = 2, kKeySteps = 0;
  static constexpr int kThreads = kWarpgroups * kWarpgroupThreads;
  static constexpr int kCluster = 1;              // CTAs that share keys
  using Rows = tma::Tile<kBlockQ, kDim>;          // Q or dO
  using Keys = tma::Tile<kBlockK, kDim>;          // K or V
  using ScoreTile = tma::Tile<kBlockQ, kBlockK>;  // dS
  using Grads = tma::Tile<64, kDim>;              // dK or dV of 64 keys
  static constexpr uint32_t kLseDeltaBytes = kBlockQ * 8;
  static constexpr uint32_t kDqBytes = kWarpgroupThreads * kDqColumns / 2 * 4;  // of a consumer

  // mbarriers, each a tma::Slot of which `full` alone is used, once: the thread that loads arrives
  // and expects the bytes of TMA, all wait.
  enum Barrier : int {
    kKBarrier = 0,
    kVBarrier = 1,
    kQBarrier = 2,        // [2]
    kGradOutBarrier = 4,  // [2]
    kDqBarrier = 6,       // the other CTA's part of dQ, whose stores it counts
    kBarriers = 7,
  };
  // Named barriers (0 is __syncthreads()).
  enum NamedBarrier : int {
    kWarpgroupBarrier = 1,                            // [2] all threads of a warpgroup
    kAgreeBarrier = kWarpgroupBarrier + kWarpgroups,  // both: whether any key is not finite
    kDsBarrier,                                       // both: their dS is there
  };

  struct Smem {
    Keys sK, sV;
    Rows sRows[2 * kStages];  // Q and dO: see row_places()
    ScoreTile sdS[kStages];   // dV and dK leave through the one that is not the last tile's
    float sdQ[kWarpgroups][kDqBytes / 4];  // the other CTA's part, as wgmma lays it out
    float lse_delta[kStages][2 * kBlockQ];
    BwdTask task;
    QueryTileInfo query_tiles[kStages];
    tma::Slot::Barriers barriers[kBarriers];
  };
  static_assert(offsetof(Smem, task) + kBwdControlBytes == kTile.shared_bytes());
  static_assert(sizeof(Smem) <= kTile.shared_bytes() && kTile.shared_bytes() <= kSm90SharedBytes);
  static_assert(2 * kWarpgroups * Grads::kBytes <= ScoreTile::kBytes);

  static __device__ __forceinline__ tma::Slot slot(uint32_t smem, int barrier) {
    return tma::Slot(smem + offsetof(Smem, barriers) + barrier * sizeof(tma::Slot::Barriers));
  }
  static __device__ __forceinline__ void init_barriers(uint32_t smem) {
    for (int i = 0; i < kBarriers; ++i) ptx::mbarrier_init(slot(smem, i).full, 1);
    ptx::fence_mbarrier_init();
  }
};

// The CTA's keys: those of CTA `rank` of the cluster, of which there are p.key_blocks.
template <class C>
__device__ __forceinline__ void find_whole_task(BwdTask& task, int rank, const Sm90BwdParams& p) {
  const int head = blockIdx.x / p.key_blocks;
  task.batch = head / p.heads;
  task.key_head = head % p.heads;
  task.seq = find_sequence(p, task.batch);
  task.first_key = rank * C::kBlockK;
  const auto [begin, end] =
      find_query_range(task.seq, task.first_key, QueryRange::kAll, C::kBlockQ, C::kBlockK, p);
  task.query_begin = begin;
  task.query_end = end;
  task.tiles = (end - begin) / C::kBlockQ;
  task.slice_row = 0;
  task.ascending = rank > 0;  // so that the tile comes first whose dQ is the other CTA's
}
// The first query of the CTA's tile of queries number `tile`.
template <class C>
__device__ __forceinline__ int whole_tile(const BwdTask& task, int tile) {
  return task.ascending ? task.query_begin + tile * C::kBlockQ
                        : task.query_end - (tile + 1) * C::kBlockQ;
}
// Whose dQ of a tile is.
template <class C>
__device__ __forceinline__ int owner_of(int first_query, const Sm90BwdParams& p) {
  return min(first_query / C::kBlockQ, p.key_blocks - 1);
}

// Whether any query of the tile from `first` on sees a key of CTA `rank`.
template <class C>
__device__ __forceinline__ bool sees_tile(const BwdTask& task, int rank, int first,
                                          const Sm90BwdParams& p) {
  const auto [begin, end] =
      find_query_range(task.seq, rank * C::kBlockK, QueryRange::kAll, C::kBlockQ, C::kBlockK, p);
  return begin <= first && first < end;
}

// Has all that the CTA needs loaded by TMA, by one thread.
template <class C>
__device__ __forceinline__ void load_whole(typename C::Smem& shared, uint32_t smem,
                                           const Sm90BwdParams& p) {
  using Smem = typename C::Smem;
  const BwdTask& task = shared.task;
  const int head = task.key_head, batch = task.batch;
  ptx::mbarrier_arrive_expect_tx(C::slot(smem, C::kDqBarrier).full, C::kWarpgroups * C::kDqBytes);
  const auto load_keys = [&](int barrier, uint32_t to, const TensorMap& map) {
    tma::fill<typename C::Keys>(C::slot(smem, barrier), smem + to, map, task.first_key, head,
                                batch);
  };
#pragma unroll 1
  for (int tile = 0; tile < task.tiles; ++tile) {
    const int first = whole_tile<C>(task, tile);
    const auto load_rows = [&](int barrier, uint32_t place, const TensorMap& map, int row) {
      tma::fill<typename C::Rows>(C::slot(smem, barrier + tile),
                                  smem + offsetof(Smem, sRows) + place, map, row, head, batch);
    };
    const auto [q, grad_out] = row_places<C>(tile);
    if (tile == 0) load_keys(C::kKBarrier, offsetof(Smem, sK), p.key_map);
    load_rows(C::kQBarrier, q, p.query_map, first);
    if (tile == 0) load_keys(C::kVBarrier, offsetof(Smem, sV), p.value_map);
    load_rows(C::kGradOutBarrier, grad_out, p.grad_out_map, p.grad_out ? first : kNoLimit);
    shared.query_tiles[tile] = find_query_tile<C>(task, head, first, p);
  }
}
// lse and delta of all rows that the CTA has, at once.
template <class C>
__device__ __forceinline__ void find_whole_lse_delta(typename C::Smem& shared,
                                                     const Sm90BwdParams& p) {
  constexpr int kAtOnce = 8;  // 256 rows of up to 64 numbers
  const BwdTask& task = shared.task;
  const auto place = [&](int, int row) -> float2& {
    const int last = task.tiles - 1, number = (row - task.query_begin) / C::kBlockQ;
    const int tile = task.ascending ? number : last - number;
    return reinterpret_cast<float2*>(shared.lse_delta[tile])[row % C::kBlockQ];
  };
  find_lse_delta<typename C::Type, C::kThreads, kAtOnce>(
      {.seq = task.seq,
       .batch = task.batch,
       .head = task.key_head,
       .log2_heads = 0,
       .first = task.query_begin,
       .count = task.query_end - task.query_begin,
       .end = task.query_end},
      place, p);
}

template <class C>
class BwdWholeWarpgroup {
  using Smem = typename C::Smem;
  using Packed = PackedTile<C>;

 public:
  __device__ __forceinline__ BwdWholeWarpgroup(Smem& shared, uint32_t smem, int index, int rank,
                                               const Sm90BwdParams& p)
      : wg_(shared, smem, index, p), rank_(rank) {}

  __device__ __forceinline__ void run() {
    const BwdTask& task = wg_.shared.task;
    if (task.tiles > 0) {
      compute(task);
    } else {
      fill_gradients(wg_, task);
    }
    if (shares_dq()) store_shared_dq(task);
    if (warpgroup_thread() == 0) ptx::cp_async_bulk_wait_group();
  }

 private:
  // Whether dQ of a tile is a sum over two CTAs, and whether this one has the sum.
  __device__ __forceinline__ bool shares_dq() const { return wg_.p.key_blocks > 1; }
  __device__ __forceinline__ bool is_mine(int first_query) const {
    return owner_of<C>(first_query, wg_.p) == rank_;
  }

  __device__ __forceinline__ void compute(const BwdTask& task) {
    const int first_key = task.first_key + wg_.first_key();
#pragma unroll
    for (int i = 0; i < C::kDim / 2; ++i) rdK_[i] = rdV_[i] = 0;
    ptx::mbarrier_wait(wg_.slot(C::kKBarrier).full, 0);
    ptx::mbarrier_wait(wg_.slot(C::kVBarrier).full, 0);
    for (const uint32_t at : {offsetof(Smem, sK), offsetof(Smem, sV)}) {
      clear_unseen_keys(wg_, task, first_key, wg_.opaque_smem() + at, wg_.first_row());
    }
    wg_.nonfinite = nonfinite_keys(wg_, task) ? wg_.kInKeys : 0;
#pragma unroll 1
    for (int tile = 0; tile < task.tiles; ++tile) {
      const int first = whole_tile<C>(task, tile);
      step(task);
      if (!shares_dq()) {
        store_dq(task, first);
      } else if (!is_mine(first)) {
        send_dq();
      }
      wg_.advance();
    }
    // The tile of dS that the last step did not use: both warpgroups are through with it.
    const uint32_t place =
        wg_.ds_tile(wg_.stage) + 2 * wg_.index * static_cast<uint32_t>(C::Grads::kBytes);
    const Sm90BwdParams& p = wg_.p;
    send_gradient(wg_, task, rdV_, 1.f, p.grad_value, p.grad_value_strides, p.grad_value_map,
                  p.head_dim_v, place);
    send_gradient(wg_, task, rdK_, p.scale, p.grad_key, p.grad_key_strides, p.grad_key_map,
                  p.head_dim, place + C::Grads::kBytes);
  }

  // A tile of queries: adds to dV and dK, and leaves its dQ in registers.
  __device__ __forceinline__ void step(const BwdTask& task) {
    scores_.begin_tile(wg_, task);
    Packed rP, rdS;
    pack<C>(rP, scores_.rS);
    ptx::wgmma_wait_group<0>(scores_.rdP);
    scores_.differentiate(wg_, rP);
    pack<C>(rdS, scores_.rdP);
    if (wg_.needs_guard()) return step_guarded(task, rP, rdS);
    publish_ds(rdS);
    ptx::wgmma_keep_alive(rP);  // packed by now, and not between the MMAs
    ptx::wgmma_keep_alive(rdS);
    ptx::wgmma_fence();
    issue_gradient<C>(rdV_, rP, wg_.stage_grad_out());
    issue_gradient<C>(rdK_, rdS, wg_.stage_q());
    wait_ds();
    issue_dq();
    ptx::wgmma_wait_group<0>(rdV_);
    ptx::wgmma_wait_group<0>(rdK_);
    ptx::wgmma_wait_group<0>(rdQ_);
    ptx::wgmma_keep_alive(rP);
    ptx::wgmma_keep_alive(rdS);
  }
  // Where a mask hides something not finite.
  __device__ __forceinline__ void step_guarded(const BwdTask& task, const Packed& rP,
                                               const Packed& rdS) {
    add_dv_guarded<C>(wg_, rdV_, rP, task);
    publish_ds(rdS);
    wg_.sync();  // the warpgroup's dS is there
    multiply_guarded<C, typename C::Rows>(
        rdK_, C::kBlockQ,
        [&](int key, int query) { return ds_at(wg_, task, query, wg_.first_key() + key); },
        wg_.stage_q(), 0);
    wait_ds();
#pragma unroll
    for (float& x : rdQ_) x = 0;
    multiply_guarded<C, typename C::Keys>(
        rdQ_, C::kBlockK,
        [&](int query, int key) { return ds_at(wg_, task, query + 64 * wg_.index, key); },
        wg_.opaque_smem() + offsetof(Smem, sK), 0);
  }
  __device__ __forceinline__ void publish_ds(const Packed& rdS) {
    store_ds<C>(wg_, rdS, wg_.first_key());
    ptx::fence_proxy_async_shared();
  }
  __device__ __forceinline__ void wait_ds() const { ptx::bar_sync(C::kDsBarrier, C::kThreads); }
  // dQ = dS K of 64 queries.
  __device__ __forceinline__ void issue_dq() {
    using Wgmma = ptx::Wgmma<C::kBf16, C::kDqColumns>;
    const uint32_t ds =
        C::ScoreTile::descriptor(wg_.ds_tile(wg_.stage) + wg_.index * 64 * C::ScoreTile::kRowBytes);
    const uint32_t keys = C::Keys::descriptor(wg_.smem + offsetof(Smem, sK));
    ptx::wgmma_fence();
    Wgmma::ss_tb_first(rdQ_, C::ScoreTile::along(ds, 0), C::Keys::across(keys, 0));
#pragma unroll
    for (int step = 1; step < C::kBlockK / 16; ++step) {
      Wgmma::ss_tb(rdQ_, C::ScoreTile::along(ds, step), C::Keys::across(keys, step));
    }
    ptx::wgmma_commit_group();
  }

  __device__ __forceinline__ void store_dq(const BwdTask& task, int first) const {
    if (!wg_.p.grad_query) return;
    store_dq_rows<C>(rdQ_, task, task.key_head, first + 64 * wg_.index, wg_.p);
  }
  __device__ __forceinline__ uint32_t part_of_dq() const {
    return wg_.opaque_smem() + offsetof(Smem, sdQ) + wg_.index * C::kDqBytes +
           warpgroup_thread() * 16;
  }
  // To the other CTA, whose dQ it is.
  __device__ __forceinline__ void send_dq() const {
    const uint32_t there = ptx::mapa(part_of_dq(), 1 - rank_);
    const uint32_t barrier = ptx::mapa(wg_.slot(C::kDqBarrier).full, 1 - rank_);
#pragma unroll
    for (int i = 0; i < C::kDqColumns / 8; ++i) {
      ptx::st_async_v4(there + i * 2048,
                       uint4{__float_as_uint(rdQ_[4 * i]), __float_as_uint(rdQ_[4 * i + 1]),
                             __float_as_uint(rdQ_[4 * i + 2]), __float_as_uint(rdQ_[4 * i + 3])},
                       barrier);
    }
  }
  // The CTA's own tile, whose part was the last that was computed, with the other CTA's part. (Of
  // tiles that nobody sees dQ was written before.)
  __device__ __forceinline__ void store_shared_dq(const BwdTask& task) {
    const int first = rank_ * C::kBlockQ;
    if (!is_seen(task.seq, first, wg_.p)) return;
    if (!sees_tile<C>(task, rank_, first, wg_.p)) {
#pragma unroll
      for (float& x : rdQ_) x = 0;
    }
    if (sees_tile<C>(task, 1 - rank_, first, wg_.p)) {
      ptx::mbarrier_wait(wg_.slot(C::kDqBarrier).full, 0);
      const uint32_t part = part_of_dq();
#pragma unroll
      for (int i = 0; i < C::kDqColumns / 8; ++i) {
        const float4 x = ptx::ld_shared_v4_f32(part + i * 2048);
        rdQ_[4 * i] += x.x;
        rdQ_[4 * i + 1] += x.y;
        rdQ_[4 * i + 2] += x.z;
        rdQ_[4 * i + 3] += x.w;
      }
    }
    store_dq(task, first);
  }

  BwdWarpgroup<C> wg_;
  BwdScores<C> scores_;
  const int rank_;
  float rdK_[C::kDim / 2], rdV_[C::kDim / 2], rdQ_[C::kDqColumns / 2];
};

template <class C>
__device__ __forceinline__ void attention_bwd_whole(const Sm90BwdParams& p) {
  extern __shared__ __align__(1024) char shared_memory[];
  auto& shared = *reinterpret_cast<typename C::Smem*>(shared_memory);
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared_memory));
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroupThreads, 0);
  const bool shares_dq = p.key_blocks > 1;
  const int rank = shares_dq ? ptx::cluster_ctarank() : 0;
  if (threadIdx.x == 0) C::init_barriers(smem);
  __syncwarp();
  if (shares_dq) ptx::barrier_cluster_arrive_relaxed();
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  if (threadIdx.x == 0) find_whole_task<C>(shared.task, rank, p);
  __syncthreads();  // the barriers are initialised, the task is there
  const BwdTask& task = shared.task;
  for (int first = 0; p.grad_query && first < task.seq.len_q; first += C::kBlockQ) {
    if (owner_of<C>(first, p) != rank || is_seen(task.seq, first, p)) continue;
    const RaggedKind kind = task.seq.valid ? RaggedKind::kBlock : RaggedKind::kInvalid;
    fill_unseen_dq<typename C::Type>(task.seq, kind, task.batch, task.key_head, first, p);
  }
  if (threadIdx.x == 0) load_whole<C>(shared, smem, p);
  __syncwarp();
  find_whole_lse_delta<C>(shared, p);
  __syncthreads();                             // lse and delta of all rows are there
  if (shares_dq) ptx::barrier_cluster_wait();  // and the other CTA, with barriers of its own
  BwdWholeWarpgroup<C>(shared, smem, warpgroup, rank, p).run();
}

}  // namespace flashmoe::cuda::sm90
