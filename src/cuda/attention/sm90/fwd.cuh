// Attention forward for Hopper: O = softmax(scale Q K^T) V and lse, by TMA and wgmma.
//
// One CTA per SM goes through tasks, each a tile of block_q queries of one head. Warpgroup 0 is the
// producer: it gives its registers away, and one of its threads runs the tile scheduler and loads
// Q, K and V. The others are consumers with 64 rows each:
//
//              keys, tile by tile, from the last to the first (masked tiles come first)
//             +--------+--------+--------+
//   queries   | 64 x block_k    |        |  consumer 0
//   block_q   +--------+--------+--------+
//             | 64 x block_k    |        |  consumer 1    (at D = 64 and 96 also consumer 2)
//             +--------+--------+--------+
//
//   consumer 0   S(n) O(n+1) | softmax(n)   | S(n-1) O(n)  | softmax(n-1)
//   consumer 1               | S(n) O(n+1)  | softmax(n)   | S(n-1) O(n)
//
// S = Q K^T of a tile is issued together with O += P V of the tile before, and consumers take turns
// in issuing MMAs, so that the softmax of one runs under the MMAs of another. (Both are
// FlashAttention-3's.) P stays in registers.
// A bias comes by TMA as well; in rows that begin anywhere, or in fp32, the other warps of
// warpgroup 0 bring it (bias_rows.cuh).
//
// Up to head dim 32 a bias that many batches share stays in shared memory, all keys of a tile of
// queries, while two teams, each with a producer and two consumers of its own, go through the
// batches (FwdConfig::kBiasStays): less than half comes from L2 then, and nobody waits for a bias.
//
//                 keys: 8 tiles of 64, whose bias stays
//             +----+----+----+----+----+----+----+----+    team 0: batch b      consumers 0, 1
//   128       |    |    |    |    |    |    |    |    |
//   queries   +----+----+----+----+----+----+----+----+    team 1: batch b + 1  consumers 2, 3
//
// Registers of a thread: producer 40 and consumers 232, with three consumers 32 and 160. Shared
// memory: FwdConfig::Smem, 176.5 KB at D = 64 (192 x 128, 4 stages), 192.5 KB at D = 128, 224.5 KB
// at D = 256.
//
// Measured on an H200, 2026-11-15, bf16, 16,384 keys: 582 TFLOP/s at D = 64, 729 at D = 128, 814 at
// D = 256. docs/speed.md has all lengths and the peers.
#pragma once

#include <cstddef>
#include <type_traits>

#include "cuda/attention/sm90/bias_rows.cuh"
#include "cuda/attention/sm90/fwd_consumer.cuh"
#include "cuda/attention/sm90/fwd_producer.cuh"
#include "cuda/attention/sm90/tiles.h"
#include "cuda/tile/dtype.cuh"
#include "cuda/tma/operand.cuh"

namespace flashmoe::cuda::sm90 {

template <class T, Sm90FwdTile kTile_>
struct FwdConfig {
  using Type = T;
  static constexpr bool kBf16 = std::is_same_v<T, Bf16>;
  static constexpr Sm90FwdTile kTile = kTile_;
  static constexpr int kDim = kTile.head_dim, kStages = kTile.stages;  // of V
  static constexpr int kKeyStages = kStages + kTile.more_key_stages;
  static constexpr int kTeams = kTile.teams(), kBlockQ = kTile.block_q / kTeams;
  static constexpr int kBlockK = kTile.block_k;
  // Whether the tensor cores go from task to task without a pause: see FwdConsumer::run_joined().
  static constexpr bool kJoinsTasks = kTile.joins_tasks;
  static constexpr int kQStages = kTile.q_stages();
  static constexpr int kOutStages = kTile.out_stages();
  static constexpr bool kBias = kTile.bias != kNoBias, kBiasStays = kTile.bias_tiles > 0;
  static constexpr bool kBiasRows = is_by_rows(kTile.bias);
  static constexpr int kWarpgroups = kBlockQ / kWarpgroupRows;  // of consumers, of a team
  using Rows = tma::Tile<kBlockQ, kDim>;
  using Keys = tma::Tile<kBlockK, kDim, 2, kTile.whole_rows>;
  using Out = tma::Tile<kBlockQ, (kDim < 64 ? kDim : 64)>;
  using BiasTile = std::conditional_t<kBiasRows,
                                      BiasRowTile<T, kBiasRows ? kTile.bias : kBiasByRows, kBlockQ,
                                                  kBlockK, kTile.bias_chunk_bytes()>,
                                      tma::Tile<kBlockQ, kBlockK>>;
  static constexpr int kLoaderThreads = kWarpgroupThreads - 32;  // see FwdBiasLoader
  // Whether a thread beside the producer's finds tasks: see find_tasks().
  static constexpr bool kFindsAhead = !kBiasRows && !kBiasStays;

  using ValueType = T;  // of V and P in their MMA
  // What becomes of a product q.k.
  using Rule = ScoreRule<Sm90FwdParams>;
  template <class Warpgroup>
  static __device__ __forceinline__ Rule rule(const Warpgroup& wg) {
    return Rule(wg.p);
  }
  // What a consumer keeps of a task: nothing but where it is.
  struct TaskScales {};

  // mbarriers, each a tma::Slot with `full` and `empty`. "Producer" is its one thread, whose
  // arrival on `full` also expects the bytes of TMA.
  enum Barrier : int {
    // [2] A task. full: who finds it, a thread of its own or the producer; consumers, bias loaders
    // and the producer wait. empty: each thread of these; who finds tasks waits.
    kTaskBarrier = 0,
    // [kQStages] Q. full: the producer; consumers wait. empty: each warp of the consumers; the
    // producer waits.
    kQBarrier = 2,
    // [kKeyStages] K, and [kStages] V. As Q.
    kKBarrier = kQBarrier + kQStages,
    kVBarrier = kKBarrier + kKeyStages,
    // [kStages] The bias, in kernels that load it tile by tile. As Q; by rows each thread of the
    // bias loaders fills it and waits for empty.
    kBiasBarrier = kVBarrier + kStages,
    kBarriers = kBiasBarrier + (kBias && !kBiasStays ? kStages : 0),
  };
  // Named barriers (0 is __syncthreads()).
  enum NamedBarrier : int {
    // [kWarpgroups] The turn to issue MMAs: the consumer before arrives, the consumer waits.
    kPingPong = 1,
    // [kTeams x kWarpgroups] All threads of a consumer, around its use of sO.
    kEpilogueBarrier = kPingPong + kWarpgroups,
  };
  static constexpr int kPingPongThreads = 2 * kWarpgroupThreads;

  // Where a bias stays: that of a team.
  struct PlainSmem {
    Rows sQ[1];
    Keys sK[kKeyStages], sV[kStages];
    Out sO[kOutStages];       // O on its way out, up to 64 columns each
    FwdTask tasks[2], found;  // found: see FwdTaskGiver
    tma::Slot::Barriers barriers[kBarriers];
  };
  struct JoinedSmem {
    Rows sQ[kQStages];  // then O, on its way out
    Keys sK[kKeyStages], sV[kStages];
    FwdTask tasks[2], found;  // found: see FwdTaskGiver
    tma::Slot::Barriers barriers[kBarriers];
  };
  struct BiasSmem {
    Rows sQ[1];
    Keys sK[kKeyStages], sV[kStages];
    BiasTile sBias[kStages];
    Out sO[kOutStages];
    FwdTask tasks[2], found;  // found: see FwdTaskGiver
    tma::Slot::Barriers barriers[kBarriers];
  };
  using Smem = std::conditional_t<kJoinsTasks, JoinedSmem,
                                  std::conditional_t<kBias && !kBiasStays, BiasSmem, PlainSmem>>;
  // Where O of task number `task` leaves from.
  static __device__ __forceinline__ uint32_t out_at(uint32_t smem, uint32_t task) {
    if constexpr (kJoinsTasks) {
      return smem + offsetof(Smem, sQ) + task % kQStages * sizeof(Rows);
    } else {
      return smem + offsetof(Smem, sO);
    }
  }
  // Where a bias stays: the teams', kTeamBytes from each other, and what they share.
  static constexpr uint32_t kTeamBytes = offsetof(Smem, tasks) + kTeamControlBytes;
  struct SharedBias {
    BiasTile sBias[kBiasStays ? kTile.bias_tiles : 1];
    // Of a tile. The producer of team 0 arrives and expects the bytes of TMA; consumers wait, and
    // both producers, before it is loaded again.
    uint64_t full[kBiasStays ? kTile.bias_tiles : 1];
    uint64_t empty;  // both producers, when their team needs the bias no more; that of team 0 waits
  };
  static __device__ __forceinline__ uint32_t bias_at(uint32_t smem, int team) {
    return smem + (kTeams - team) * kTeamBytes;
  }
  static __device__ __forceinline__ uint32_t bias_full(uint32_t smem, int team, int tile) {
    return bias_at(smem, team) + offsetof(SharedBias, full) + tile * 8;
  }
  static __device__ __forceinline__ uint32_t bias_empty(uint32_t smem, int team) {
    return bias_at(smem, team) + offsetof(SharedBias, empty);
  }
  static_assert(kBiasStays || offsetof(Smem, tasks) + kFwdControlBytes == kTile.shared_bytes());
  static_assert(!kBiasStays || kTeams * kTeamBytes + offsetof(SharedBias, full) + kBarrierBytes ==
                                   kTile.shared_bytes());
  static_assert(!kBiasStays || sizeof(Smem) <= kTeamBytes);
  static_assert(sizeof(Smem) <= kTile.shared_bytes() && kTile.shared_bytes() <= kSm90SharedBytes);
  static_assert(kBlockQ % kWarpgroupRows == 0 && kBlockK % 16 == 0);
  static_assert(!kJoinsTasks || (kOutStages * sizeof(Out) == sizeof(Rows) && !kBias));

  // `smem` is the address of the CTA's Smem.
  static __device__ __forceinline__ tma::Slot slot(uint32_t smem, int barrier) {
    return tma::Slot(smem + offsetof(Smem, barriers) + barrier * sizeof(tma::Slot::Barriers));
  }
  static __device__ __forceinline__ void init_barriers(uint32_t smem) {
    for (int i = 0; i < kBarriers; ++i) {
      const int loaders = kBiasRows ? kLoaderThreads : 0;
      if (i < kQBarrier) {
        slot(smem, i).init(1, kWarpgroupThreads * kWarpgroups + loaders + kFindsAhead);
      } else {
        slot(smem, i).init(kBiasRows && i >= kBiasBarrier ? loaders : 1,
                           kWarpgroupWarps * kWarpgroups);
      }
    }
    ptx::fence_mbarrier_init();
  }

  static __device__ __forceinline__ void init_bias_barriers(uint32_t smem) {
    for (int i = 0; i < kTile.bias_tiles; ++i) ptx::mbarrier_init(bias_full(smem, 0, i), 1);
    ptx::mbarrier_init(bias_empty(smem, 0), kTeams);
    ptx::fence_mbarrier_init();
  }

  static constexpr int kAllWarpgroups = kTeams * kWarpgroups;  // of consumers
  static constexpr int kProducerRegisters = kTile.ctas > 1 || kAllWarpgroups > 2 ? 32 : 40;
  static constexpr int kConsumerRegisters = kTile.ctas > 1        ? 104
                                            : kAllWarpgroups == 4 ? 112
                                            : kAllWarpgroups == 3 ? 160
                                                                  : 232;
  static_assert(kProducerRegisters + kAllWarpgroups * kConsumerRegisters <=
                (kAllWarpgroups + 1) * registers_at_first(kAllWarpgroups + 1, kTile.ctas));
  // Whether the bias is added to finished scores. That hides its way from shared memory under the
  // MMA, and takes a register for each score beside those of S; where there are none, S begins with
  // the bias.
  static constexpr bool kPackedBias =
      kBias && !kBiasRows && kDim <= 32;  // see FwdSoftmax::load_bias()
  static constexpr bool kLateBias = kBias && !kPackedBias && kWarpgroups == 2 && kTile.ctas == 1;
  static constexpr bool kEarlyBias = kBias && !kPackedBias && !kLateBias;
  // Whether a warpgroup computes the softmax of half of its first tile of keys where its rows see
  // no more: under a causal mask that is so of every other one.
  static constexpr bool kHalfSoftmax = kBlockK == 2 * kWarpgroupRows && !kBias;
  // Whether consumers take turns in issuing MMAs. These are few at head dims up to 32.
  static constexpr bool kTakesTurns = kWarpgroups > 1 && kDim > 32;
};

template <class C>
__device__ __forceinline__ void attention_fwd(const Sm90FwdParams& p) {
  extern __shared__ __align__(1024) char shared_memory[];
  auto& shared = *reinterpret_cast<typename C::Smem*>(shared_memory);
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared_memory));
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroupThreads, 0);
  if (threadIdx.x == 0) {
    for (int team = 0; team < C::kTeams; ++team) C::init_barriers(smem + team * C::kTeamBytes);
    if constexpr (C::kBiasStays) C::init_bias_barriers(smem);
  }
  // The kernel ahead may have written anything; but if it only set the counter to 0, the first task
  // needs nothing of it.
  if (!p.tile_counter || p.blocks) ptx::griddepcontrol_wait();
  __syncthreads();  // the barriers are initialised
  if constexpr (C::kTeams == 1) {
    if (warpgroup == 0) {
      ptx::setmaxnreg_dec<C::kProducerRegisters>();
      if (threadIdx.x == 0) FwdProducer<C>(shared, smem, p).run();
      if constexpr (C::kFindsAhead) {
        if (threadIdx.x == 32) find_tasks<C>(shared, smem, p);
      }
      if constexpr (C::kBiasRows) {
        if (threadIdx.x >= 32) FwdBiasLoader<C>(shared, smem, p).run();
      }
    } else {
      ptx::setmaxnreg_inc<C::kConsumerRegisters>();
      FwdConsumer<C>(shared, smem, warpgroup - 1, p).run();
    }
  } else {
    const auto of_team = [&](int team) -> typename C::Smem& {
      return *reinterpret_cast<typename C::Smem*>(shared_memory + team * C::kTeamBytes);
    };
    if (warpgroup == 0) {
      ptx::setmaxnreg_dec<C::kProducerRegisters>();
      const int team = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);  // a warp for each
      if (threadIdx.x % 32 == 0 && team < C::kTeams) {
        FwdProducer<C>(of_team(team), smem + team * C::kTeamBytes, p, team).run();
      }
    } else {
      ptx::setmaxnreg_inc<C::kConsumerRegisters>();
      const int team = (warpgroup - 1) / C::kWarpgroups, index = (warpgroup - 1) % C::kWarpgroups;
      FwdConsumer<C>(of_team(team), smem + team * C::kTeamBytes, index, p, team).run();
    }
  }
}

}  // namespace flashmoe::cuda::sm90
