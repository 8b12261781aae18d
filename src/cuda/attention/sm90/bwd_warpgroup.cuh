// What a consumer warpgroup of the sm90 backward pass knows: its keys, its place in the pipeline,
// and the tile of queries that is next.
#pragma once

#include "cuda/attention/sm90/bwd_producer.cuh"
#include "cuda/attention/sm90/warpgroup.cuh"
#include "cuda/ptx/shared.cuh"

namespace flashmoe::cuda::sm90 {

template <class C>
struct BwdWarpgroup {
  using Smem = typename C::Smem;

  Smem& shared;
  const uint32_t smem;      // the same as an address in shared memory
  const uint32_t barriers;  // the address of its mbarriers
  const Sm90BwdParams& p;
  const int index;  // of the consumers
  const int part;   // which 64 of the tile's keys: the warpgroup's, or of two CTAs the CTA's
  tma::Ring<C::kStages> ring;  // of Q and dO
  uint32_t stage = 0;          // ring.count() as row_places() needs it, warp-uniform
  int kept_first_query;        // see first_query()
  // Where something is not finite, in one register: in K or V (not where another warp looks);
  // behind a mask of the tile of queries; behind a mask of the tile before, whose dQ is yet to
  // come.
  static constexpr int kInKeys = 1, kInTile = 2, kInPreviousTile = 4;
  int nonfinite;

  __device__ __forceinline__ BwdWarpgroup(Smem& shared, uint32_t smem, int index,
                                          const Sm90BwdParams& p)
      : shared(shared),
        smem(smem),
        barriers(smem + offsetof(Smem, barriers)),
        p(p),
        index(index),
        part(C::kCluster > 1 ? ptx::cluster_ctarank() : index) {}

  // The first of the warpgroup's 64 keys, in the tile of keys and in the rows of sK and sV.
  __device__ __forceinline__ int first_key() const { return 64 * part; }
  __device__ __forceinline__ int first_row() const { return C::kCluster > 1 ? 0 : 64 * part; }

  // smem, opaque: what is computed from it is recomputed where it is used, since the main loop has
  // no registers for addresses.
  __device__ __forceinline__ uint32_t opaque_smem() const { return ptx::opaque(smem); }
  __device__ __forceinline__ tma::Slot slot(int barrier) const {
    return tma::Slot(barriers + barrier * sizeof(tma::Slot::Barriers));
  }
  __device__ __forceinline__ tma::Slot q_slot() const { return slot(C::kQBarrier + ring.at()); }
  __device__ __forceinline__ tma::Slot grad_out_slot() const {
    return slot(C::kGradOutBarrier + ring.at());
  }

  __device__ __forceinline__ void sync() const {
    ptx::bar_sync(C::kWarpgroupBarrier + index, kWarpgroupThreads);
  }
  // warp_arrive() in all CTAs of the cluster. Nothing was written for them, so no release is
  // needed, which would cost a fence of the whole GPU. racecheck reports these as it does
  // warp_arrive()'s.
  __device__ __forceinline__ void cluster_arrive(uint32_t barrier) const {
    if constexpr (C::kCluster == 1) {
      warp_arrive(barrier);
    } else {
      __syncwarp();
      const int rank = lane();
      if (rank < C::kCluster) ptx::mbarrier_arrive_cluster(ptx::mapa(barrier, rank));
    }
  }

  // An address for a descriptor, warp-uniform. With two CTAs it is recomputed where it is used,
  // since there are many and no registers to keep them, and without the CTA's rank in the cluster,
  // which stands in the high bits. So it is at D = 128 beside a byte mask, beside keys in
  // registers, and with 80 queries.
  static constexpr bool kRecomputes =
      C::kTwoCta || (C::kMask && C::kDim == 128) || C::kKeySteps > 0 || C::kDqTransposed;
  static __device__ __forceinline__ uint32_t recompute(uint32_t address) {
    constexpr uint32_t kSharedWindow = 1 << 18;
    return kRecomputes ? tma::warp_uniform(ptx::opaque(address)) % kSharedWindow : address;
  }
  // Where Q and dO of the tile are. `stage` is in uniform registers as soon as a tile is next: it
  // takes a while to find out that all threads have the same.
  __device__ __forceinline__ uint32_t stage_q() const {
    return smem + offsetof(Smem, sRows) + row_places<C>(stage).q;
  }
  __device__ __forceinline__ uint32_t stage_grad_out() const {
    return smem + offsetof(Smem, sRows) + row_places<C>(stage).grad_out;
  }
  // dS of the tile with that stage: two stages, or one with two CTAs.
  __device__ __forceinline__ uint32_t ds_tile(uint32_t stage) const {
    return smem + offsetof(Smem, sdS) + (C::kTwoCta ? 0 : stage % 2 * C::ScoreTile::kBytes);
  }
  __device__ __forceinline__ tma::Ring<C::kStages> next_tile() const {
    return tma::Ring<C::kStages>(ring.count() + 1);
  }
  __device__ __forceinline__ void advance() {
    ring.advance();
    // In uniform registers where there are no others.
    if constexpr (C::kSmallDim) {
      ring = tma::Ring<C::kStages>(tma::warp_uniform(ring.count()));
    }
    stage = tma::warp_uniform(ring.count() % (2 * C::kStages));
  }

  // lse and delta of the thread's queries: of fragment_column() and the next, lse, delta, lse,
  // delta, and of 8 queries on for each 64 bytes.
  __device__ __forceinline__ uint32_t stage_lse_delta() const {
    return opaque_smem() + offsetof(Smem, lse_delta) + ring.at() * C::kLseDeltaBytes +
           lane() % 4 * 16;
  }
  // One of lse and delta, of both queries. (Each 4 bytes of a load take a warp's turn at shared
  // memory, although only those of four threads differ: so nothing is loaded that is not needed.)
  static __device__ __forceinline__ float2 two_queries(uint32_t lse_delta) {
    return {ptx::ld_shared_f32(lse_delta), ptx::ld_shared_f32(lse_delta + 8)};
  }

  __device__ __forceinline__ const QueryTileInfo& query_tile() const {
    return shared.query_tiles[ring.at()];
  }
  // The first query of the tile. With two CTAs its QueryTileInfo may be overwritten before the tile
  // is done with, so a register keeps it.
  __device__ __forceinline__ int first_query() const {
    return C::kTwoCta ? kept_first_query : query_tile().first;
  }
  // The head of the tile, with a bias.
  __device__ __forceinline__ int head() const {
    return C::kBias ? query_tile().flags >> QueryTileInfo::kHeadBit : 0;
  }
  // The tile of queries before this one, of the same task: see for_each_query_tile(). Its head with
  // a bias only.
  struct TileBefore {
    int head, first;
  };
  __device__ __forceinline__ TileBefore tile_before(const BwdTask& task) const {
    const bool first_head = query_tile().flags & QueryTileInfo::kFirstHead;
    const int rows = C::kZeroesDq && task.ascending ? -C::kBlockQ : C::kBlockQ;
    return {head() + (first_head ? p.group - 1 : -1), first_query() + (first_head ? rows : 0)};
  }
  // Looks at the tile of queries that is next: returns whether it needs a mask for the warpgroup's
  // keys, and sets kInTile where a mask for any of the keys hides something not finite. All warps
  // of the CTA find the same.
  __device__ __forceinline__ bool inspect_query_tile(const BwdTask& task) {
    const QueryTileInfo& info = query_tile();
    const int flags = info.flags;
    if (C::kTwoCta) kept_first_query = info.first;
    nonfinite &= kInKeys;
    if (flags & QueryTileInfo::kMaskedAny && (nonfinite_keys(task) || nonfinite_queries())) {
      nonfinite |= kInTile;
    }
    nonfinite = tma::warp_uniform(nonfinite);
    return flags & QueryTileInfo::kMasked << part;
  }
  // Whether something in K or V is not finite.
  __device__ __forceinline__ bool nonfinite_keys(const BwdTask& task) const {
    if constexpr (C::kLooksBeside) {
      const uint32_t smem = opaque_smem();
      ptx::mbarrier_wait(C::slot(smem, C::kLookBarrier).full, task.keys_parity);
      return ptx::ld_shared_u32(smem + offsetof(Smem, nonfinite_task)) == task.index + 1;
    }
    return nonfinite;
  }
  // Whether lse or delta show that a query's Q or dO is not finite: attention_bwd_preprocess()
  // makes them so.
  __device__ __forceinline__ bool nonfinite_queries() const {
    const uint32_t lse_delta =
        opaque_smem() + offsetof(Smem, lse_delta) + ring.at() * C::kLseDeltaBytes + lane() * 16;
    bool bad = false;
#pragma unroll
    for (uint32_t i = 0; i < C::kLseDeltaBytes; i += 512) {
      if (i + lane() * 16 >= C::kLseDeltaBytes) continue;
      const float4 two = ptx::ld_shared_v4_f32(lse_delta + i);
      bad |=
          isnan(two.x) || isnan(two.z) || !(fabsf(two.y) < INFINITY) || !(fabsf(two.w) < INFINITY);
    }
    return __any_sync(0xffffffffu, bad);
  }
  // Whether the tile goes the guarded way: see bwd_guard.cuh.
  __device__ __forceinline__ bool needs_guard() const { return nonfinite & ~kInKeys; }

  // f(task) for all tasks of the CTA.
  template <class F>
  __device__ __forceinline__ void for_each_task(const F& f) {
#pragma unroll 1
    for (tma::Ring<2> tasks;;) {
      tasks.wait_full(slot(C::kTaskBarrier + tasks.at()));
      const BwdTask& task = shared.tasks[tasks.at()];
      if (task.last) break;
      f(task);
      tasks = tma::Ring<2>(task.index);  // reloaded: there is no register to keep it
      ptx::mbarrier_arrive(slot(C::kTaskBarrier + tasks.at()).empty);
      tasks.advance();
      __syncwarp();  // so that the compiler knows in the next task that the warp is converged
    }
  }
};

}  // namespace flashmoe::cuda::sm90
