// The gradient of a bias that was broadcast, for Hopper: dBias = sum of P * (dP - delta) over the
// batches and heads that shared it, by TMA and wgmma. mma_sync/bias_sum.cuh is the same for other
// chips and has what this one needs not: biases without queries or keys of their own, and ragged
// batches.
//
// One CTA takes one tile of the gradient, 128 queries x 128 keys, and goes through the steps, the
// (batch, head) that share it, in a fixed order (mma_sync/bias_sum_steps.cuh). Where there are few
// tiles, several CTAs share the steps of one (split), leave their sums in the workspace, and a
// second launch adds those up in their order.
//
//         keys: half 0          half 1
//             +--------------+--------------+
//   queries   |   64 x 64    |   64 x 64    |  consumer 0: their sums and bias are in registers
//   128       +--------------+--------------+
//             |   64 x 64    |   64 x 64    |  consumer 1
//             +--------------+--------------+
//
//   MMAs of a consumer   dP(n, 0) S(n, 1) | dP(n, 1) S(n+1, 0) | dP(n+1, 0) S(n+1, 1) | ...
//   meanwhile            P(n, 0)          | P(n, 1)            | P(n+1, 0)
//   then                 sum(0) += dS     | sum(1) += dS       | ...           dS = P (dP - delta)
//
// So S of a half is there when its exponentials begin, and dP when they end, with S of both halves
// and dP of one in registers. The bias is added to finished scores, by the FMA that subtracts lse.
// Shared memory is a ring of slots. The bias takes the first (at D = 32 two), and leaves it for
// registers; then
// each step takes two: Q with K, and dO with V, lse and delta. At the end the tile in fp32 takes
// the place of the ring.
//
// Registers of a thread: warpgroup 0, whose warp 0 is the producer, has 40, consumers 232. Shared
// memory: BiasSumConfig::Smem, 204.5 KB (12 slots) at D = 32, 198.5 KB (6) at D = 64, 195.5 KB (3)
// above.
#pragma once

#include <cstddef>
#include <type_traits>

#include "cuda/attention/sm90/bwd_bias_sum_consumer.cuh"
#include "cuda/attention/sm90/bwd_bias_sum_producer.cuh"
#include "cuda/attention/sm90/tiles.h"
#include "cuda/tile/dtype.cuh"

namespace flashmoe::cuda::sm90 {

template <class T, Sm90BiasSumTile kTile_>
struct BiasSumConfig {
  using Type = T;
  static constexpr bool kBf16 = std::is_same_v<T, Bf16>;
  static constexpr Sm90BiasSumTile kTile = kTile_;
  static constexpr int kDim = kTile.head_dim, kSlots = kTile.slots;
  static constexpr int kBlockQ = kTile.block_q, kBlockK = kTile.block_k;
  static constexpr int kWarpgroups = 2, kConsumerThreads = kWarpgroups * kWarpgroupThreads;
  static constexpr int kHalfKeys = 64, kCount = kHalfKeys / 2;  // accumulators of a half
  static_assert(kBlockQ == kWarpgroups * kWarpgroupRows && kBlockK == 2 * kHalfKeys);
  using Ring = SumRing<kSlots>;
  using Rows = tma::Tile<kBlockQ, kDim>;          // Q or dO
  using Keys = tma::Tile<kBlockK, kDim>;          // K or V
  using ScoreTile = tma::Tile<kBlockQ, kBlockK>;  // the bias
  static constexpr int kBoxRows = kTile.kBoxRows, kKeyBox = kTile.key_box();
  static constexpr uint32_t kLseDeltaBytes = kBlockQ * 8;
  static constexpr int kPitch = kBlockK * 4 + 16;  // of the tile in fp32, in bytes

  struct Operands {
    Rows rows;
    Keys keys;
  };
  struct Smem {
    Operands operands[kSlots];
    float lse_delta[kSlots][2 * kBlockQ];  // of slots with dO
    SumTile tile;
    SumStep steps[kSlots];  // of slots with Q
    // One for each slot, a tma::Slot. full: the producer's thread whose step it is, which also
    // expects the bytes of TMA; consumers wait. empty: warps of both consumers; the producer waits.
    tma::Slot::Barriers barriers[kSlots];
  };
  static_assert(offsetof(Smem, tile) + kBarrierBytes == kTile.shared_bytes());
  static_assert(sizeof(Smem) <= kTile.shared_bytes() && kTile.shared_bytes() <= kSm90SharedBytes);
  // The slots that the bias takes, blocks of 64 keys one after the other.
  static constexpr int kBiasSlots = (sizeof(ScoreTile) + sizeof(Operands) - 1) / sizeof(Operands);
  static constexpr int kBlocksOfSlot = ScoreTile::kBlocks / kBiasSlots;
  static_assert(ScoreTile::kBlocks % kBiasSlots == 0 &&
                kBlocksOfSlot * ScoreTile::kBlockBytes <= sizeof(Operands));
  static_assert(kBlockQ * kPitch <= kSlots * sizeof(Operands));

  // Named barriers (0 is __syncthreads()).
  enum NamedBarrier : int {
    kConsumerBarrier = 1,  // all threads of both consumers
    kVerdictBarrier = 2,   // these and the producer's warp: whether the steps are added once more
  };
  static constexpr int kVerdictThreads = kConsumerThreads + 32;

  // `smem` is the address of the CTA's Smem.
  static __device__ __forceinline__ tma::Slot slot(uint32_t smem, const Ring& ring) {
    return tma::Slot(smem + offsetof(Smem, barriers) + ring.at * sizeof(tma::Slot::Barriers));
  }
  static __device__ __forceinline__ uint32_t operands(uint32_t smem, const Ring& ring) {
    return smem + ring.at * sizeof(Operands);
  }
  static __device__ __forceinline__ void init_barriers(uint32_t smem) {
    for (int i = 0; i < kSlots; ++i) slot(smem, {i, 0}).init(1, kWarpgroups * kWarpgroupWarps);
    ptx::fence_mbarrier_init();
  }

  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  static_assert(kProducerRegisters + kWarpgroups * kConsumerRegisters <=
                (kWarpgroups + 1) * registers_at_first(kWarpgroups + 1));
};

// The grid is (tiles of the gradient x splits, its heads, its batches); the last of the two
// launches of a split sum has one CTA for each tile, and adds up what the splits left.
template <class C>
__device__ __forceinline__ void attention_bwd_bias_sum(const Sm90BwdParams& p) {
  extern __shared__ __align__(1024) char shared_memory[];
  auto& shared = *reinterpret_cast<typename C::Smem*>(shared_memory);
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared_memory));
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroupThreads, 0);
  if (threadIdx.x == 0) {
    C::init_barriers(smem);
    shared.tile = SharedSteps<C>(p, nullptr).tile(SumShare(p).tile, p);
  }
  __syncthreads();  // the barriers are initialised, and the tile is known
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<C::kProducerRegisters>();
    if (threadIdx.x < 32 && !p.bias_sum_last) BiasSumProducer<C>(shared, smem, p).run();
  } else {
    ptx::setmaxnreg_inc<C::kConsumerRegisters>();
    BiasSumConsumer<C>(shared, smem, warpgroup - 1, p).run();
  }
}

}  // namespace flashmoe::cuda::sm90
