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
// There are no producers: one thread has everything loaded by TMA at once, O as well, of which all
// threads find delta. Then two warpgroups have 64 keys each and do one thing after the other: S and
// dP (a row for each key, bwd_scores.cuh), P and dS, dV and dK, dQ. With two tiles at most there is
// nothing to gain by more.
//
// Shared memory: BwdWholeConfig::Smem, 194.5 KB at D = 64. Registers of a thread: 222, at D = 32
// 204.
#pragma once

#include <cstddef>
#include <type_traits>

#include "cuda/attention/mma_sync/bwd_preprocess.cuh"
#include "cuda/attention/sm90/bwd_epilogue.cuh"
#include "cuda/attention/sm90/bwd_guard.cuh"
#include "cuda/attention/sm90/bwd_scores.cuh"
#include "cuda/attention/sm90/tiles.h"
#include "cuda/attention/sm90/whole.h"
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
    kGradOutBarrier = 4,  // [2] dO and O
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
    // dS, where O of the tile was before. dV and dK leave through the one that is not the last
    // tile's.
    ScoreTile sdS[kStages];
    float sdQ[kWarpgroups][kDqBytes / 4];  // the other CTA's part, as wgmma lays it out
    float lse_delta[kStages][2 * kBlockQ];
    BwdTask task;
    QueryTileInfo query_tiles[kStages];
    tma::Slot::Barriers barriers[kBarriers];
  };
  static_assert(offsetof(Smem, task) + kBwdControlBytes == kTile.shared_bytes());
  static_assert(sizeof(Smem) <= kTile.shared_bytes() && kTile.shared_bytes() <= kSm90SharedBytes);
  static_assert(2 * kWarpgroups * Grads::kBytes <= ScoreTile::kBytes);
  static_assert(Rows::kBytes <= ScoreTile::kBytes && kThreads == kStages * kBlockQ);

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
// Whether all queries see all keys, of which there is one at least.
__device__ __forceinline__ bool sees_all(const BwdTask& task, const Sm90BwdParams& p) {
  return !any_mask(p) && task.seq.valid && task.seq.len_k > 0;
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
  if (sees_all(task, p)) return rank * C::kBlockK < task.seq.len_k;
  const auto [begin, end] =
      find_query_range(task.seq, rank * C::kBlockK, QueryRange::kAll, C::kBlockQ, C::kBlockK, p);
  return begin <= first && first < end;
}

// Has all that the CTA needs loaded by TMA, by one thread.
template <class C>
__device__ __forceinline__ void load_whole(typename C::Smem& shared, uint32_t smem,
                                           const Sm90WholeBwdParams& p) {
  using Smem = typename C::Smem;
  using Rows = typename C::Rows;
  const BwdTask& task = shared.task;
  const int head = task.key_head, batch = task.batch;
  const auto load_keys = [&](int barrier, uint32_t to, const TensorMap& map) {
    tma::fill<typename C::Keys>(C::slot(smem, barrier), smem + to, map, task.first_key, head,
                                batch);
  };
#pragma unroll 1
  for (int tile = 0; tile < task.tiles; ++tile) {
    const int first = whole_tile<C>(task, tile), grad_row = p.grad_out ? first : kNoLimit;
    const auto [q, grad_out] = row_places<C>(tile);
    const uint32_t rows = smem + offsetof(Smem, sRows);
    const uint32_t sO = smem + offsetof(Smem, sdS) + tile * C::ScoreTile::kBytes;
    const tma::Slot slot = C::slot(smem, C::kGradOutBarrier + tile);
    tma::fill<Rows, Rows::kBytes>(slot, rows + grad_out, p.grad_out_map, grad_row, head, batch);
    ptx::tma_load(sO, &p.out_map, slot.full, 0, first, head, batch);
    if (tile == 0) load_keys(C::kKBarrier, offsetof(Smem, sK), p.key_map);
    tma::fill<Rows>(C::slot(smem, C::kQBarrier + tile), rows + q, p.query_map, first, head, batch);
    if (tile == 0) load_keys(C::kVBarrier, offsetof(Smem, sV), p.value_map);
  }
  static_assert(Rows::kBlocks == 1);
  ptx::mbarrier_arrive_expect_tx(C::slot(smem, C::kDqBarrier).full, C::kWarpgroups * C::kDqBytes);
#pragma unroll 1
  for (int tile = 0; tile < task.tiles; ++tile) {
    shared.query_tiles[tile] = find_query_tile<C>(task, head, whole_tile<C>(task, tile), p);
  }
}

// Writes dQ of the CTA's tiles of queries that see no key, or of lengths that are wrong.
template <class C>
__device__ __forceinline__ void fill_unseen_tiles(const BwdTask& task, int rank,
                                                  const Sm90BwdParams& p) {
#pragma unroll 1
  for (int first = 0; first < task.seq.len_q; first += C::kBlockQ) {
    if (owner_of<C>(first, p) != rank || is_seen(task.seq, first, p)) continue;
    const RaggedKind kind = task.seq.valid ? RaggedKind::kBlock : RaggedKind::kInvalid;
    fill_unseen_dq<typename C::Type>(task.seq, kind, task.batch, task.key_head, first, p);
  }
}

// The product of two rows in shared memory, added up.
template <class C>
__device__ __forceinline__ float row_product(uint32_t left, uint32_t right, int row) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < C::kDim / 8; ++i) {
    const uint4 a = ptx::ld_shared_v4(left + C::Rows::at(row, 8 * i));
    const uint4 b = ptx::ld_shared_v4(right + C::Rows::at(row, 8 * i));
    const uint32_t as[4] = {a.x, a.y, a.z, a.w}, bs[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      sum += C::Type::unpack(as[j] & 0xffff) * C::Type::unpack(bs[j] & 0xffff);
      sum += C::Type::unpack(as[j] >> 16) * C::Type::unpack(bs[j] >> 16);
    }
  }
  return sum;
}
// lse in base 2 and delta of the CTA's rows, one for each thread. (bwd_preprocess.cuh has the same
// for rows in global memory, and says what they tell of a Q that is not finite, or of a dO of
// zeros.)
template <class C>
__device__ __forceinline__ void find_whole_lse_delta(typename C::Smem& shared, uint32_t smem,
                                                     const Sm90BwdParams& p) {
  using Smem = typename C::Smem;
  const BwdTask& task = shared.task;
  const int tile = threadIdx.x / C::kBlockQ, row = threadIdx.x % C::kBlockQ;
  if (tile >= task.tiles) return;
  const int number = whole_tile<C>(task, tile) + row, seen = min(number, task.seq.len_q - 1);
  const auto of_row = [&](const float* numbers, const Strides& strides) {
    return numbers[offset(p, strides, task.batch, task.key_head, 0) + seen * strides.row];
  };
  const float natural = of_row(p.lse, p.lse_strides);
  const float grad_lse = p.grad_lse ? of_row(p.grad_lse, p.grad_lse_strides) : 0;
  const auto [q, grad_out] = row_places<C>(tile);
  const uint32_t sQ = smem + offsetof(Smem, sRows) + q;
  const uint32_t sdO = smem + offsetof(Smem, sRows) + grad_out;
  const uint32_t sO = smem + offsetof(Smem, sdS) + tile * C::ScoreTile::kBytes;
  ptx::mbarrier_wait(C::slot(smem, C::kGradOutBarrier + tile).full, 0);
  float2 lse_delta = {natural == -INFINITY ? INFINITY : natural * kLog2e,
                      (p.grad_out ? row_product<C>(sO, sdO, row) : 0) - grad_lse};
  if (natural == sink_of<typename C::Type>(p, task.key_head)) {
    ptx::mbarrier_wait(C::slot(smem, C::kQBarrier + tile).full, 0);
    if (!(row_product<C>(sQ, sQ, row) < INFINITY)) lse_delta.y = NAN;
  }
  if (natural == INFINITY) lse_delta.y = NAN;
  if (is_far(natural, lse_delta.y) && row_product<C>(sdO, sdO, row) == 0) {
    lse_delta.x = kLseOfNoWeight;
  }
  if (number >= task.seq.len_q) lse_delta = {INFINITY, 0};
  reinterpret_cast<float2*>(shared.lse_delta[tile])[row] = lse_delta;
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
    if (first >= task.seq.len_q) return;
    if (!sees_all(task, wg_.p) && !is_seen(task.seq, first, wg_.p)) return;
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
__device__ __forceinline__ void attention_bwd_whole(const Sm90WholeBwdParams& p) {
  extern __shared__ __align__(1024) char shared_memory[];
  auto& shared = *reinterpret_cast<typename C::Smem*>(shared_memory);
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared_memory));
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroupThreads, 0);
  const bool shares_dq = p.key_blocks > 1;
  const int rank = shares_dq ? ptx::cluster_ctarank() : 0;
  // Of what the kernel ahead may still write, only lengths say what the task is.
  if (threadIdx.x == 0) {
    C::init_barriers(smem);
    if (!p.key_lengths) find_whole_task<C>(shared.task, rank, p);
  } else if (threadIdx.x == 32) {
    for (const TensorMap* map : {&p.grad_out_map, &p.out_map, &p.key_map, &p.query_map,
                                 &p.value_map, &p.grad_value_map, &p.grad_key_map}) {
      ptx::prefetch_tensormap(map);
    }
  }
  __syncwarp();
  if (shares_dq) ptx::barrier_cluster_arrive_relaxed();
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  if (threadIdx.x == 0) {
    if (p.key_lengths) find_whole_task<C>(shared.task, rank, p);
    load_whole<C>(shared, smem, p);
  }
  __syncthreads();  // the barriers are initialised, the task is there
  find_whole_lse_delta<C>(shared, smem, p);
  __syncthreads();                             // lse and delta of all rows are there
  if (shares_dq) ptx::barrier_cluster_wait();  // and the other CTA, with barriers of its own
  const BwdTask& task = shared.task;
  if (p.grad_query && !sees_all(task, p)) fill_unseen_tiles<C>(task, rank, p);
  BwdWholeWarpgroup<C>(shared, smem, warpgroup, rank, p).run();
}

}  // namespace flashmoe::cuda::sm90
