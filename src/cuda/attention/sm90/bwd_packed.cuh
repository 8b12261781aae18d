// Attention backward for batches of many short sequences, on Hopper: tiles of tokens,
// whatever sequences these are of, as fwd_packed.cuh has them.
//
//   own rows    the other side, stage by stage: all that the sequences of a tile have
//   +--------+--------+--------+
//   |####                      |  warp 0, 16 rows: what these see alone, 16 tokens at a time
//   |    #####                 |  warp 1
//   |         #########        |  ...
//   +--------+--------+--------+
//
// A task is a tile of queries, which get dQ, or of keys, which get dK and dV. Both are the same
// computation with the sides exchanged. X are the rows of the tile, Y those of the other side:
//
//                   X1  X2    Y1  Y2
//   queries         Q   dO    K   V       S = X1 Y1^T            dX1 = scale dS Y1
//   keys            K   V     Q   dO      dP = X2 Y2^T           dX2 = P Y2, of keys alone
//                                         dS = P (dP - delta)
//
// so each pair is computed twice, once for its query and once for its key. In exchange all sums
// stay in the registers of one warp: nothing is added up in memory, and the bits are the same in
// every run. Sequences of some dozen tokens cost bytes more than products, and the two tasks of a
// tile follow each other, so that the second finds in L2 what the first has loaded.
//
// A CTA is 12 consumer warps and the producer's warpgroup, which leaves its registers to them. It
// goes through tasks from a counter: 192 tokens and 64 columns, which are one head or several that
// lie side by side. One thread of the producer loads the tile, the bounds of its rows, and the
// other side in stages of 32 tokens, with LSE and delta of queries, all by TMA. A consumer passes
// by what its rows do not see, so it may be in the next task before the others are done with this
// one. Gradients leave through the tile's place, by TMA.
//
// A bias is read where it is, from both sides, and tasks of queries store dS as its gradient, also
// one head after the other: each pair is one query's.
//
// Why mma.sync and not wgmma: fwd_packed.cuh. Shared memory's rate is what limits it: of 16 rows
// and 16 tokens, Y is read twice by ldmatrix, along and across. X is not, which takes 152 registers
// (X and two gradients are 96), and so 12 warps; 16 warps of 96 registers would read X each time.
#pragma once

#include <cstddef>

#include "cuda/attention/sm90/bwd_packed_consumer.cuh"
#include "cuda/attention/sm90/bwd_packed_producer.cuh"
#include "cuda/attention/sm90/tiles.h"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/tma/operand.cuh"

namespace flashmoe::cuda::sm90 {

template <class T, Sm90PackedBwdTile kTile_>
struct PackedBwdConfig {
  using Type = T;
  static constexpr Sm90PackedBwdTile kTile = kTile_;
  static constexpr int kDim = kTile.head_dim, kHeads = kTile.heads();
  static constexpr bool kBias = kTile.bias == kBiasByPairs;
  static constexpr int kBlockQ = kTile.block_q, kBlockK = kTile.block_k;
  static constexpr int kStages = kTile.stages, kWarps = kTile.warps();
  // Tokens of the other side that a warp takes at a time.
  static constexpr int kChunk = 16;
  static constexpr int kWarpgroups = kTile.threads() / 128;
  static constexpr int kConsumerRegisters = 152, kProducerRegisters = 56;
  static_assert(kWarps % 4 == 0 && (kWarpgroups - 1) * kConsumerRegisters + kProducerRegisters <=
                                       kWarpgroups * registers_at_first(kWarpgroups, kTile.ctas));
  using Rows = tma::Tile<kBlockQ, 64>;
  using Stage = tma::Tile<kBlockK, 64>;

  // mbarriers, each a tma::Slot with `full` and `empty`. full: the producer's one thread, whose
  // arrival also expects the bytes of TMA; consumers wait. empty: each consumer warp; the producer
  // waits.
  enum Barrier : int {
    kTaskBarrier = 0,   // [2] A task: what it is, its tile and the bounds of its rows.
    kStageBarrier = 2,  // [kStages] Y1 and Y2.
    kBarriers = kStageBarrier + kStages,
  };

  struct Smem {
    Rows sX[2][2];                                     // [task] X1 and X2, then their gradients
    Stage sY[kStages][2];                              // Y1 and Y2
    float2 row_lse_delta[2][kHeads][kBlockQ];          // [task] of queries: LSE, -delta
    float2 stage_lse_delta[kStages][kHeads][kBlockK];  // of a task of keys
    RowBounds bounds[2][kBlockQ];
    PairRow pairs[kBias ? 2 : 0][kBlockQ];
    PackedBwdTask tasks[2];
    tma::Slot::Barriers barriers[kBarriers];
  };
  static_assert(offsetof(Smem, tasks) + kBarrierBytes == kTile.shared_bytes());
  static_assert(sizeof(Smem) <= kTile.shared_bytes());
  static_assert(kTile.ctas * (kTile.shared_bytes() + 1024) <= 228 * 1024);
  static_assert(kBlockK == kPackedChunk && kBlockK % kChunk == 0 && kBlockQ % kBlockK == 0);
  static_assert(kHeads * kDim == 64);

  static __device__ __forceinline__ tma::Slot slot(uint32_t smem, int barrier) {
    return tma::Slot(smem + offsetof(Smem, barriers) + barrier * sizeof(tma::Slot::Barriers));
  }
  static __device__ __forceinline__ void init_barriers(uint32_t smem) {
    for (int i = 0; i < kBarriers; ++i) slot(smem, i).init(1, kWarps);
    ptx::fence_mbarrier_init();
  }
};

template <class C>
__device__ __forceinline__ void attention_bwd_packed(const Sm90PackedBwdParams& p) {
  extern __shared__ __align__(1024) char shared_memory[];
  auto& shared = *reinterpret_cast<typename C::Smem*>(shared_memory);
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared_memory));
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  if (threadIdx.x == 0) C::init_barriers(smem);
  __syncthreads();             // the barriers are initialised
  ptx::griddepcontrol_wait();  // for the bounds, LSE and delta, and the counter
  if (warp >= C::kWarps) {
    ptx::setmaxnreg_dec<C::kProducerRegisters>();
    if (threadIdx.x == C::kWarps * 32) PackedBwdProducer<C>(shared, smem, p).run();
  } else {
    ptx::setmaxnreg_inc<C::kConsumerRegisters>();
    PackedBwdConsumer<C>(shared, smem, warp, p).run();
  }
}

}  // namespace flashmoe::cuda::sm90
