// Attention forward for batches of many short sequences, on Hopper: tiles of tokens, whatever
// sequences these are of. Batches are ragged, or dense as Sm90PackedParams has them.
//
//   queries     keys, tile by tile: all that the sequences of a tile of queries have
//   +--------+--------+--------+
//   |####                      |  warp 0, 16 rows: its own keys alone, 16 at a time
//   |    #####                 |  warp 1
//   |    #####                 |
//   |         #########        |  ...
//   |         #########        |
//   +--------+--------+--------+
//
// Tokens are packed, so 128 of them see one range of keys, and each of them its own part of it,
// which row_bounds.cuh has written down: whose sequence it is and what the mask leaves of it. There
// is no list of blocks and no tile that a sequence ends in.
//
// A CTA is 8 consumer warps and a producer warp, two CTAs are on an SM, and each goes through tasks
// from a counter: 128 tokens, and 64 columns of Q, K and V, which are one head or several that lie
// side by side. One thread of the producer loads Q and the bounds of its rows, and K and V in
// stages of 32 keys, by TMA. A consumer passes by the keys that its rows do not see, so it may be
// in the next task before the others are done with this one. O leaves through Q's place, by TMA.
//
// MMAs are mma.sync, not wgmma: a warpgroup would go through the keys of 64 rows, of which a row
// sees a third, and its exponentials cost more than the MMAs, at D = 16 many times as much. With
// four heads in a box a warp has as many accumulators as with one of D = 64: the steps of the depth
// are heads then.
//
// A bias is read where it is, by the lanes that hold S, which begins with it: a pair has the heads
// of a box side by side, one load for all of them.
//
// Registers of a thread: 96, of which an SM has enough for five warps in each quarter. Shared
// memory: 98.5 KB.
#pragma once

#include <cstddef>

#include "cuda/attention/sm90/fwd_packed_consumer.cuh"
#include "cuda/attention/sm90/fwd_packed_producer.cuh"
#include "cuda/attention/sm90/tiles.h"
#include "cuda/tma/operand.cuh"

namespace flashmoe::cuda::sm90 {

template <class T, Sm90PackedTile kTile_>
struct PackedConfig {
  using Type = T;
  static constexpr Sm90PackedTile kTile = kTile_;
  static constexpr int kDim = kTile.head_dim, kHeads = kTile.heads();
  static constexpr bool kBias = kTile.bias == kBiasByPairs;
  static constexpr int kBlockQ = kTile.block_q, kBlockK = kTile.block_k;
  static constexpr int kStages = kTile.stages, kWarps = kTile.warps();
  // Keys that a warp takes at a time. There are no registers for 32.
  static constexpr int kChunk = 16;
  using Rows = tma::Tile<kBlockQ, 64>;
  using Keys = tma::Tile<kBlockK, 64>;

  // mbarriers, each a tma::Slot with `full` and `empty`. full: the producer's one thread, whose
  // arrival also expects the bytes of TMA; consumers wait. empty: each consumer warp; the producer
  // waits.
  enum Barrier : int {
    kTaskBarrier = 0,  // [2] A task: what it is, Q and the bounds of its rows.
    kKeyBarrier = 2,   // [kStages] K and V.
    kBarriers = kKeyBarrier + kStages,
  };

  struct Smem {
    Rows sQ[2];  // then O
    Keys sK[kStages], sV[kStages];
    RowBounds bounds[2][kBlockQ];
    PairRow pairs[kBias ? 2 : 0][kBlockQ];
    PackedTask tasks[2];
    tma::Slot::Barriers barriers[kBarriers];
  };
  static_assert(offsetof(Smem, tasks) + kBarrierBytes == kTile.shared_bytes());
  static_assert(sizeof(Smem) <= kTile.shared_bytes());
  static_assert(kTile.ctas * (kTile.shared_bytes() + 1024) <= 228 * 1024);
  static_assert(kBlockK == kPackedChunk && kBlockK % kChunk == 0 && kHeads * kDim == 64);

  static __device__ __forceinline__ tma::Slot slot(uint32_t smem, int barrier) {
    return tma::Slot(smem + offsetof(Smem, barriers) + barrier * sizeof(tma::Slot::Barriers));
  }
  static __device__ __forceinline__ void init_barriers(uint32_t smem) {
    for (int i = 0; i < kBarriers; ++i) slot(smem, i).init(1, kWarps);
    ptx::fence_mbarrier_init();
  }
};

template <class C>
__device__ __forceinline__ void attention_fwd_packed(const Sm90PackedParams& p) {
  extern __shared__ __align__(1024) char shared_memory[];
  auto& shared = *reinterpret_cast<typename C::Smem*>(shared_memory);
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared_memory));
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  if (threadIdx.x == 0) C::init_barriers(smem);
  __syncthreads();  // the barriers are initialised
  if (warp == C::kWarps) {
    if (threadIdx.x % 32 == 0) PackedProducer<C>(shared, smem, p).run();
  } else {
    PackedConsumer<C>(shared, smem, warp, p).run();
  }
}

}  // namespace flashmoe::cuda::sm90
