// Attention backward for Hopper, by TMA and wgmma. With P = 2^(S - lse):
//
//   dV = P^T dO      dP = dO V^T      dS = P * (dP - delta)      dQ = dS K      dK = dS^T Q
//
// Three kernels: bwd_preprocess.cuh makes lse in base 2 and delta, this one does the MMAs, and
// bwd_convert_dq.cuh converts dQ from its fp32 accumulator (above head dim 128 this kernel does
// that itself). This one has a CTA on each SM, which goes through tasks, each a tile of 128 keys of
// one key head. K and V stay; tiles of queries of all heads of the group go by. Up to head dim 128:
//
//              queries, tile by tile, from the last to the first or from the first to the last
//             +---------+---------+---------+
//   keys      | 64 x block_q      |         |  consumer 0: S^T, dP^T; dK and dV of its 64 keys
//   128       +---------+---------+---------+
//             | 64 x block_q      |         |  consumer 1
//             +---------+---------+---------+
//
//   MMAs of a consumer   dP(n) |       | dV(n) dK(n) dQ(n-1) S(n+1)      | dP(n+1) | ...
//   meanwhile            P(n)  | dS(n) |                  dQ(n-1) leaves | P(n+1)
//
// The tensor cores of an SM queue eight wgmma, of both consumers together; a warp that issues more
// waits. So the consumers take turns: while one issues its MMAs, the other finds P and dS. They are
// half a tile apart then, and dQ, which takes the dS of both, comes one tile late.
//
// S and dP have a row for each key, so that P and dS are left in registers as the MMAs for dV and
// dK read them. dQ takes dS from shared memory; the consumers share its rows, or where there are
// not 64 for each, its columns. Warpgroup 0 gives its registers away. Its warp 0 is the producer;
// one thread each of warps 1 and 2 adds a consumer's dQ to the accumulator by TMA, in the order of
// the accumulators (bwd_dq.cuh has the order of tiles), and warp 3 zeroes what they will add to and
// up to D = 64 looks for a NaN in K and V (bwd_guard.cuh).
//
// A bias comes by TMA, and S begins with it; dS leaves as its gradient by warp 3 of warpgroup 0
// (bwd_grad_bias.cuh). A bias in rows that begin anywhere, or in fp32, is brought by that warp
// (bias_rows.cuh), and consumers store its gradient from their registers.
//
// Tiles have as many queries as there are registers for: 128 up to D = 64. Above it there are two
// kernels. With 64 queries S and dP are bound by shared memory: of the 32 cycles of an MMA of 64 x
// 64, K takes 16 to read and Q 16; so at D = 128 half of K is in registers for S. With 80 it is 36
// of 40 cycles; dQ is transposed then, a column for each query, and dV and dK leave through sdS.
// Which one runs depends on how much of their tiles lengths and masks leave empty.
//
// Where tiles of keys are few, the queries of each come in several tasks, whose dK and dV are added
// up by one more kernel (bwd_key_sum.cuh).
//
// Registers of a thread: warpgroup 0 has 24, consumers 240; with a bias 40 and 232. Shared memory:
// BwdConfig::OneCtaSmem, 210.5 KB at D = 64, 225.5 and 225.75 KB at D = 128; with a bias BiasSmem,
// 161.5 and 225.5 KB. Head dims above 128: bwd_two_cta.cuh.
//
// Measured on an H200, 2026-11-16, bf16, 16,384 keys, rested: 593 TFLOP/s at D = 64, 642 at D =
// 128, 571 at D = 256, all kernels of the pass together. docs/speed.md has all lengths and
// the peers.
#pragma once

#include <cstddef>
#include <type_traits>

#include "cuda/attention/sm90/bias_rows.cuh"
#include "cuda/attention/sm90/bwd_consumer.cuh"
#include "cuda/attention/sm90/bwd_convert_dq.cuh"
#include "cuda/attention/sm90/bwd_grad_bias.cuh"
#include "cuda/attention/sm90/bwd_producer.cuh"
#include "cuda/attention/sm90/bwd_small_dim.cuh"
#include "cuda/attention/sm90/bwd_two_cta.cuh"
#include "cuda/attention/sm90/tiles.h"
#include "cuda/ptx/grid.cuh"
#include "cuda/tile/dtype.cuh"
#include "cuda/tma/operand.cuh"

namespace flashmoe::cuda::sm90 {

template <class T, Sm90BwdTile kTile_>
struct BwdConfig {
  using Type = T;
  static constexpr bool kBf16 = std::is_same_v<T, Bf16>;
  static constexpr Sm90BwdTile kTile = kTile_;
  static constexpr bool kTwoCta = kTile.two_cta(), kBias = kTile.bias != kNoBias;
  static constexpr bool kBiasRows = is_by_rows(kTile.bias);
  static constexpr bool kFloatBias = kTile.bias == kFloatsByRows;
  static constexpr bool kMask = kTile.bias == kBytesByRows;  // without a gradient
  static constexpr int kBiasBytes = bias_bytes(kTile.bias);
  static constexpr bool kOwnGrads = kTile.own_grads();
  // Whether a causal mask can hide all keys of a warpgroup from the first queries: see
  // hidden_tiles().
  static constexpr bool kSkipsHidden = !kTwoCta && !kBias && kTile.block_q < kTile.block_k;
  static constexpr bool kSplits = !kBias;  // whether a tile of keys may come in several tasks
  static constexpr int kDim = kTile.head_dim, kDqAccumDim = kTile.dq_accum_dim();
  static constexpr int kBlockQ = kTile.block_q, kBlockK = kTile.block_k, kStages = kTile.kStages;
  static constexpr int kCluster = kTile.cluster();
  static constexpr bool kSmallDim = kTile.small_dim();
  static constexpr int kWarpgroups = kTile.consumers(), kKeyBox = kTile.key_box();
  using Rows = tma::Tile<kBlockQ, kDim>;             // Q or dO
  using Keys = tma::Tile<kBlockK / kCluster, kDim>;  // K or V
  using ScoreTile = tma::Tile<kBlockQ, kBlockK>;     // dS
  using BiasTile = std::conditional_t<kBiasRows,
                                      BiasRowTile<T, kBiasRows ? kTile.bias : kBiasByRows, kBlockQ,
                                                  kBlockK, kTile.bias_chunk_bytes()>,
                                      ScoreTile>;
  struct BiasRowStage {
    BiasTile tile;
    uint32_t shift[4];  // [0]: of the tile's first row
  };
  using BiasStage = std::conditional_t<kBiasRows, BiasRowStage, BiasTile>;
  using Grads = tma::Tile<64, kDim>;  // dK or dV of 64 keys
  // Two CTAs: the columns of dQ that a CTA has are kDqFirst from column kDqFirst * rank on and
  // kDqSecond from column 128 + kDqSecond * rank on. PeerKeys are the blocks of 64 columns of the
  // other CTA's K that these are in.
  static constexpr int kDqFirst = kDim > 192 ? 128 : 64, kDqSecond = kDim > 192 ? 0 : 32;
  using PeerKeys = tma::Tile<64, 128>;
  static constexpr uint32_t kLseDeltaBytes = kBlockQ * 8;
  // How warpgroups share dQ of a tile: by rows, or where there are not 64 for each, by columns. The
  // MMA takes 64 rows: where there are as many, of queries, otherwise of columns of dQ.
  static constexpr bool kDqByRows = kBlockQ == 64 * kWarpgroups;
  static constexpr bool kDqTransposed = transposes_dq(kBlockQ);
  // Small head dims: one warpgroup computes all of it.
  static constexpr int kDqParts = kSmallDim ? 1 : kWarpgroups;
  static constexpr int kDqColumns = kDqByRows ? kDqAccumDim : kDqAccumDim / kDqParts;
  static constexpr int kDqSums = (kDqTransposed ? kBlockQ : kDqColumns) / 2;  // of a thread
  static constexpr uint32_t kDqBytes = kWarpgroupThreads * kDqSums * 4;       // on their way out
  static constexpr int kKeySteps = kTile.key_steps();
  // Whether there is a warp to zero its sums, and whether it looks at K and V, too. Above D = 64,
  // where these are twice as large, masked tiles would wait for it: consumers look, all together.
  static constexpr bool kZeroesDq = !kTwoCta && !kBias, kLooksBeside = kZeroesDq && kDim <= 64;

  // mbarriers, each a tma::Slot with `full` and `empty`. "Producer" is its one thread, whose
  // arrival on `full` also expects the bytes of TMA; "warps" are the four of each consumer named.
  enum Barrier : int {
    // [2] A task. full: the producer; consumers and helper threads wait. empty: each thread of the
    // consumers and each helper thread; the producer waits.
    kTaskBarrier = 0,
    // full: the producer; consumers wait. empty: warps of both consumers, and with kLooksBeside the
    // warp that looks, which waits for full, too; the producer waits.
    kKBarrier = 2,
    // As K. Two CTAs: consumer 0 waits for full; warps of consumer 1, which sends dK through sV,
    // arrive on empty.
    kVBarrier = 3,
    // [2] Q. full: the producer; consumers wait. empty: warps of both consumers; the producer
    // waits.
    // Two CTAs: consumer 0 waits for full; warps of both CTAs arrive on empty, since each CTA loads
    // for both.
    kQBarrier = 4,
    // [2] dO with lse, delta and QueryTileInfo. As Q. Two CTAs: both consumers wait for full; warps
    // of consumers 0 of both CTAs arrive on empty.
    kGradOutBarrier = 6,
    // [2] dQ of consumer i in sdQ. full: its warps; its store_dq() thread waits. empty: that
    // thread; the consumer waits. Two CTAs: the second of them alone, for the CTA's turn to add to
    // dQ. empty: the keep_dq_order() thread, when it is the turn; consumer 1 waits. full: warps of
    // consumer 1, when their additions are issued; the thread waits. Small head dims: the first of
    // them alone. full: warps of the consumer whose turn it is, which waits for empty; one thread.
    kDqBarrier = 8,
    // [2] dS. full: warps of both consumers; both wait. empty: warps of both, when dQ is computed;
    // both wait. With a bias by TMA the store_grad_bias() warp waits for full, too, and its first
    // lane arrives on empty. Small head dims: the consumer whose turn it is to compute dQ waits for
    // full and its warps arrive on empty; all consumers wait for empty. Two CTAs: the first of them
    // alone. full: warps of consumer 0; consumer 1 and send_ds() wait. empty: warps of consumers 1
    // of both CTAs; consumer 0 waits.
    kDsBarrier = 10,

    // One CTA only, and no small head dims.
    // [2] `full` alone: the turn of consumer i to issue MMAs. Warps of the other consumer arrive;
    // consumer i waits.
    kMmaBarrier = 12,

    // Two CTAs only.
    // What dQ takes of the other CTA's K. full: the producer; consumer 1 waits. empty: warps of
    // consumer 1; the producer waits.
    kPeerKBarrier = 11,
    // `full` alone: the other CTA's half of dS. This CTA's send_ds() arrives and expects the bytes
    // that the other's sends; consumer 1 waits.
    kPeerDsBarrier = 12,
    // The number of the next task. full, of CTA 1: the producer of CTA 0; that of CTA 1 waits.
    // empty, of CTA 0: the producer of CTA 1; that of CTA 0 waits.
    kNextTaskBarrier = 13,

    // With a bias only.
    // [2] The bias of a tile. full: the producer; consumers wait. empty: warps of both consumers,
    // as soon as they have read it; the producer waits. By rows the load_bias_rows() warp takes the
    // producer's place: each lane arrives when its part is there, and the first for the shift.
    kBiasBarrier = 14,

    // With kLooksBeside only.
    // `full` alone: whether something in K or V is not finite is known. The warp that looks;
    // consumers wait.
    kLookBarrier = 14,

    kBarriers = kBias          ? 16
                : kLooksBeside ? 15
                               : 14,
  };
  // Named barriers (0 is __syncthreads()).
  enum NamedBarrier : int {
    kWarpgroupBarrier = 1,  // [kWarpgroups] all threads of a consumer
    // All consumers, when a task begins. One CTA: they have cleared unseen keys, and whether any
    // key is not finite. Two CTAs: consumer 1 has cleared K and arrives, consumer 0 waits.
    kAgreeBarrier = kWarpgroupBarrier + kWarpgroups,
  };

  // Without shared memory of their own dV and dK leave through sdS.
  struct NoGrads {};
  using OwnGrads = std::conditional_t<kOwnGrads, Grads[kWarpgroups], NoGrads>;

  struct OneCtaSmem {
    Keys sK, sV;
    Rows sRows[2 * kStages];  // Q and dO: see row_places()
    ScoreTile sdS[2];
    float sdQ[kWarpgroups][kDqBytes / 4];   // dQ on its way out, as wgmma lays it out
    [[no_unique_address]] OwnGrads sGrads;  // dV, then dK, on their way out
    float lse_delta[kStages][2 * kBlockQ];
    BwdTask tasks[2];
    QueryTileInfo query_tiles[kStages];
    tma::Slot::Barriers barriers[kBarriers];
    uint32_t nonfinite_task;  // 1 + the index of the last task in which K or V is not finite
  };
  struct TwoCtaSmem {
    Keys sK, sV;              // of 64 keys; dK leaves through sV
    Rows sRows[2 * kStages];  // Q and dO: see row_places(); dV leaves through the last dO
    ScoreTile sdS[1];         // one half from the other CTA
    PeerKeys sPeerK;
    float lse_delta[kStages][2 * kBlockQ];
    BwdTask tasks[2];
    QueryTileInfo query_tiles[kStages];
    tma::Slot::Barriers barriers[kBarriers];
    uint32_t next_task;
  };
  struct BiasSmem {
    Keys sK, sV;
    Rows sRows[2 * kStages];  // Q and dO: see row_places()
    // dS. At D = 64 the third is where dV and dK leave from, elsewhere the first two are.
    ScoreTile sdS[kOwnGrads ? 3 : 2];
    BiasStage sBias[kStages];
    float sdQ[kDqParts][kDqBytes / 4];
    float lse_delta[kStages][2 * kBlockQ];
    BwdTask tasks[2];
    QueryTileInfo query_tiles[kStages];
    tma::Slot::Barriers barriers[kBarriers];
  };
  using Smem =
      std::conditional_t<kTwoCta, TwoCtaSmem, std::conditional_t<kBias, BiasSmem, OneCtaSmem>>;
  // Where dV and dK of a consumer leave from; one CTA. Through sdS: half of the consumers have one
  // of its two stages.
  static constexpr uint32_t kGradsAt =
      !kBias ? kOwnGrads ? offsetof(OneCtaSmem, sGrads) : offsetof(OneCtaSmem, sdS)
             : offsetof(BiasSmem, sdS) + (kOwnGrads ? 2 * ScoreTile::kBytes : 0);
  static constexpr int kGradsOfStage = kOwnGrads ? kWarpgroups : (kWarpgroups + 1) / 2;
  static __device__ __forceinline__ uint32_t grads_at(int index) {
    return kGradsAt + index / kGradsOfStage * ScoreTile::kBytes +
           index % kGradsOfStage * Grads::kBytes;
  }
  static_assert(offsetof(Smem, tasks) + kBwdControlBytes == kTile.shared_bytes());
  static_assert(sizeof(Smem) <= kTile.shared_bytes() && kTile.shared_bytes() <= kSm90SharedBytes);
  static_assert(kSmallDim || kBlockK == kKeysOfBlock);
  static_assert(!(kTwoCta || kSmallDim) || kBlockQ == 64);
  static_assert(kTwoCta || kBlockQ * kDqAccumDim * 4 == kDqParts * kDqBytes);
  static_assert((!kBias && kOwnGrads) ||
                kWarpgroups * Grads::kBytes <= (kOwnGrads ? 1 : 2) * ScoreTile::kBytes);

  // `smem` is the address of the CTA's Smem.
  static __device__ __forceinline__ tma::Slot slot(uint32_t smem, int barrier) {
    return tma::Slot(smem + offsetof(Smem, barriers) + barrier * sizeof(tma::Slot::Barriers));
  }
  // Threads beside the producer's that look at tasks.
  static constexpr int kHelpers = kSmallDim ? 1 + 32 : kTwoCta ? 2 : 2 + 32;
  static __device__ __forceinline__ void init_barriers(uint32_t smem) {
    constexpr int kOne = kWarpgroupWarps, kBoth = kWarpgroups * kWarpgroupWarps;
    for (int i = 0; i < 2; ++i) {
      slot(smem, kTaskBarrier + i).init(1, kWarpgroups * kWarpgroupThreads + kHelpers);
      slot(smem, kQBarrier + i).init(1, kCluster * kBoth);
      slot(smem, kGradOutBarrier + i).init(1, kCluster * (kTwoCta ? kOne : kBoth));
      slot(smem, kDqBarrier + i).init(kOne, 1);
    }
    if constexpr (kTwoCta) {
      slot(smem, kDsBarrier).init(kOne, kCluster * kOne);
      slot(smem, kPeerKBarrier).init(1, kOne);
      slot(smem, kPeerDsBarrier).init(1, 1);
      slot(smem, kNextTaskBarrier).init(1, 1);
    } else {
      for (int i = 0; i < 2; ++i) {
        slot(smem, kDsBarrier + i).init(kBoth, (kSmallDim ? kOne : kBoth) + (kBias && !kBiasRows));
        if (kBias) slot(smem, kBiasBarrier + i).init(kBiasRows ? 32 + 1 : 1, kBoth);
        ptx::mbarrier_init(slot(smem, kMmaBarrier + i).full, kOne);
      }
      if (kLooksBeside) ptx::mbarrier_init(slot(smem, kLookBarrier).full, 1);
    }
    slot(smem, kKBarrier).init(1, kBoth + kLooksBeside);
    slot(smem, kVBarrier).init(1, kTwoCta ? kOne : kBoth + kLooksBeside);
    ptx::fence_mbarrier_init();
  }

  static constexpr int kProducerRegisters = kSmallDim ? 32 : kTwoCta || kBias ? 40 : 24;
  static constexpr int kConsumerRegisters = kSmallDim ? (kWarpgroups == 4 ? 112 : 160)
                                            : kBias   ? 232
                                                      : 240;
  static constexpr int kSecondConsumerRegisters = kTwoCta ? 224 : kConsumerRegisters;
  static_assert(kProducerRegisters + (kWarpgroups - 1) * kConsumerRegisters +
                    kSecondConsumerRegisters <=
                (kWarpgroups + 1) * registers_at_first(kWarpgroups + 1, kTile.ctas));
};

template <class C>
__device__ __forceinline__ void attention_bwd(const Sm90BwdParams& p) {
  extern __shared__ __align__(1024) char shared_memory[];
  auto& shared = *reinterpret_cast<typename C::Smem*>(shared_memory);
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared_memory));
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroupThreads, 0);
  if (threadIdx.x == 0) {
    C::init_barriers(smem);
    if constexpr (C::kLooksBeside) shared.nonfinite_task = 0;
  }
  // The barriers are initialised.
  if constexpr (C::kCluster == 1) {
    __syncthreads();
  } else {
    ptx::barrier_cluster_sync();
  }
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<C::kProducerRegisters>();
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    // Whoever touches what the kernel ahead writes waits for its end; the producer loads Q, K, V
    // and dO of the first task meanwhile.
    if (warp > 0) ptx::griddepcontrol_wait();
    if (C::kTwoCta && warp == 3) convert_dq<C, 2>(p);
    if constexpr (C::kBiasRows) {
      if (warp == 3) load_bias_rows<C>(shared, smem, p);
    } else if constexpr (C::kBias) {
      if (warp == 3) store_grad_bias<C>(shared, smem, p);
    } else if constexpr (C::kZeroesDq) {
      if (warp == 3) {
        for_each_task<C>(shared, smem, [&](const BwdTask& task) {
          if constexpr (C::kLooksBeside) prefetch_keys<C>(task, p);
          zero_next_wave<C>(task, p);
          if constexpr (C::kLooksBeside) look_at_keys<C>(smem, task, p);
        });
      }
    }
    if (threadIdx.x % 32 == 0) {
      if (warp == 0) produce<C>(shared, smem, p);
      if constexpr (C::kTwoCta) {
        if (warp == 1) send_ds<C>(shared, smem);
        if (warp == 2) keep_dq_order<C>(shared, smem, p);
      } else {
        if (warp >= 1 && warp <= C::kDqParts) store_dq<C>(shared, smem, warp - 1, p);
      }
    }
  } else {
    if constexpr (C::kSmallDim) {
      ptx::setmaxnreg_inc<C::kConsumerRegisters>();
      BwdSmallDimConsumer<C>(shared, smem, warpgroup - 1, p).run();
    } else if constexpr (!C::kTwoCta) {
      ptx::setmaxnreg_inc<C::kConsumerRegisters>();
      BwdConsumer<C>(shared, smem, warpgroup - 1, p).run();
    } else if (warpgroup == 1) {
      ptx::setmaxnreg_inc<C::kConsumerRegisters>();
      BwdTwoCtaDv<C>(shared, smem, p).run();
    } else {
      ptx::setmaxnreg_inc<C::kSecondConsumerRegisters>();
      BwdTwoCtaDkDq<C>(shared, smem, p).run();
    }
    if constexpr (C::kTwoCta) {
      ptx::griddepcontrol_wait();
      convert_dq<C, 4>(p);
    }
  }
  // A CTA ends only when the other needs its shared memory no more.
  if constexpr (C::kCluster > 1) ptx::barrier_cluster_sync();
}

}  // namespace flashmoe::cuda::sm90
