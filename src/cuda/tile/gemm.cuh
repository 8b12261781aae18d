// The main loop of a matrix product with mma.sync: a CTA computes block_m x block_n of A B.
//
//                   B   depth x block_n, two halves of columns
//                  +-----------+-----------+
//                  | from one  |  another  |     stage 0: in use, stages 1 and on: on their way
//                  +-----------+-----------+
//   A              +-----------+-----------+
//   block_m x      |  warp 0   |  warp 1   |     each warp: (block_m / warps_m) x
//   depth          +-----------+-----------+                (block_n / warps_n), in registers
//                  |  warp 2   |  warp 3   |
//                  +-----------+-----------+
//
// The caller copies the tiles of a step to a stage, so the loop knows neither where rows lie nor
// whose they are; the halves of B may come from two places. Tiles are kept as they came: `Along`
// the depth (a row of the tile for each row of A or column of B) or `Across` it (a row for each of
// the depth). At the end the sums go to shared memory in fp32, from where the caller takes them row
// by row: eight neighbours at once, in a loop that is not unrolled over registers.
//
// Shared memory: GemmTile::shared_bytes(). Registers: the sums, (block_m / warps_m) x
// (block_n / warps_n) / 32 a thread; 64 x 64 of a warp are 128.
#pragma once

#include <type_traits>

#include "cuda/tile/gemm_tile.h"
#include "cuda/tile/loader.cuh"
#include "cuda/tile/product.cuh"

namespace flashmoe::cuda {

template <class Chip_, class T_, GemmTile kTile_, bool kAlongA, bool kAlongB>
struct Gemm {
  using Chip = Chip_;
  using T = T_;
  static constexpr GemmTile kTile = kTile_;
  static constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n, kDepth = kTile.depth;
  static constexpr int kHalfN = kBlockN / 2, kThreads = kTile.threads(), kStages = kTile.stages;
  static constexpr int kWarpM = kBlockM / kTile.warps_m, kWarpN = kBlockN / kTile.warps_n;
  static constexpr int kM = kWarpM / 16, kN = kWarpN / 8, kPitch = kTile.sums_pitch();
  static_assert(kM > 0 && kN > 0 && kN % 2 == 0 && kHalfN % kWarpN == 0 && kDepth % 16 == 0);

  using LayoutA = Swizzled<kAlongA ? kDepth : kBlockM>;
  using LayoutB = Swizzled<kAlongB ? kDepth : kHalfN>;  // of a half
  static constexpr int kRowsA = kAlongA ? kBlockM : kDepth;
  static constexpr int kRowsB = kAlongB ? kHalfN : kDepth;  // of a half
  static constexpr int kBytesA = kBlockM * kDepth * T::kBytes;
  static constexpr int kBytesB = kHalfN * kDepth * T::kBytes;  // of a half
  static constexpr int kStageBytes = kTile.stage_bytes(), kSharedBytes = kTile.shared_bytes();
  static_assert(kBytesA + 2 * kBytesB == kStageBytes && kBytesA % 128 == 0 && kBytesB % 128 == 0);

  using Sums = float[kM][kN][4];

  // The loaders of the operands.
  template <bool kPartial>
  using LoaderA =
      std::conditional_t<kAlongA, AlongLoader<Chip, LayoutA, kRowsA, kThreads, kPartial>,
                         AcrossLoader<Chip, LayoutA, kRowsA, kThreads, kPartial>>;
  template <bool kPartial>
  using LoaderB =
      std::conditional_t<kAlongB, AlongLoader<Chip, LayoutB, kRowsB, kThreads, kPartial>,
                         AcrossLoader<Chip, LayoutB, kRowsB, kThreads, kPartial>>;

  // Adds up `steps` steps of the depth. load(stage, step) copies the tiles of a step: A to `stage`,
  // the halves of B to `stage` + kBytesA and kBytesB on. It is called by all threads, in the order
  // of the steps, from step kStages - 1 on with a barrier before each. It is also called for up to
  // kStages - 1 steps past the last, which must read nothing: without a branch the compiler mixes
  // copies and MMAs. All threads are done with shared memory when it returns.
  template <class Load>
  static __device__ __forceinline__ void run(Sums& sums, uint32_t shared, int steps,
                                             const Load& load) {
    set_zero(sums);
    const uint32_t lane_a = lane_of_a(), lane_b = lane_of_b();
    // A commit for every step: waits count groups.
#pragma unroll
    for (int step = 0; step < kStages - 1; ++step) {
      load(shared + step * kStageBytes, step);
      Chip::commit();
    }
    uint32_t stage = shared, free_stage = shared + (kStages - 1) * kStageBytes;
#pragma unroll 1
    for (int next = kStages - 1; next < steps + kStages - 1; ++next) {
      Chip::template wait<kStages - 2>();
      // The step's tiles are there, every thread's part of them, and nobody reads the stage of the
      // step before any more: it is free.
      __syncthreads();
      const OperandA a{stage + lane_a};
      const OperandB b{stage + lane_b};
      // The first MMAs are under way while the copies are begun.
      multiply<T, 1>(sums, a, b);
      __builtin_assume(next >= kStages - 1);  // so that what `load` does from then on has no branch
      load(free_stage, next);
      Chip::commit();
      multiply<T, kDepth / 16 - 1>(sums, Later<OperandA>{a}, Later<OperandB>{b});
      free_stage = stage;
      stage += kStageBytes;
      if (stage == shared + kStages * kStageBytes) stage = shared;
    }
    Chip::template wait<0>();
    __syncthreads();
  }

  // The sums of all warps to shared memory, for everybody to read with sums_at().
  static __device__ __forceinline__ void store(float* shared, const Sums& sums) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row = warp / kTile.warps_n * kWarpM + lane / 4;
    const int col = warp % kTile.warps_n * kWarpN + lane % 4 * 2;
    float* const to = shared + row * kPitch + col;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const float(&x)[4] = sums[m][n];
        *reinterpret_cast<float2*>(to + 16 * m * kPitch + 8 * n) = {x[0], x[1]};
        *reinterpret_cast<float2*>(to + (16 * m + 8) * kPitch + 8 * n) = {x[2], x[3]};
      }
    }
    __syncthreads();
  }

  // Eight neighbours of a row, from a multiple of 8 on. Neighbouring threads take neighbours; odd
  // ones read their second half first, so that eight threads read from all banks at once.
  static __device__ __forceinline__ void sums_at(float (&x)[8], const float* shared, int row,
                                                 int col) {
    const float4* const from = reinterpret_cast<const float4*>(shared + row * kPitch + col);
    const bool odd = threadIdx.x % 2;
    const float4 first = from[odd], second = from[!odd];
    const float4 low = odd ? second : first, high = odd ? first : second;
    x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
    x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
  }

 private:
  // What this lane gives to ldmatrix, from the beginning of a stage on.
  static __device__ __forceinline__ uint32_t lane_of_a() {
    const int first = threadIdx.x / 32 / kTile.warps_n * kWarpM;
    if constexpr (kAlongA) {
      return lane_rows<LayoutA>(0, first, 0);
    } else {
      return lane_cols<LayoutA>(0, 0, first / 8);
    }
  }
  static __device__ __forceinline__ uint32_t lane_of_b() {
    const int first = threadIdx.x / 32 % kTile.warps_n * kWarpN;
    const uint32_t half = kBytesA + first / kHalfN * kBytesB;
    if constexpr (kAlongB) {
      return lane_cols<LayoutB>(half, first % kHalfN, 0);
    } else {
      return lane_rows<LayoutB>(half, 0, first % kHalfN / 8);
    }
  }

  using OperandA = std::conditional_t<kAlongA, AlongA<LayoutA>, AcrossA<LayoutA>>;
  using OperandB = std::conditional_t<kAlongB, AlongB<LayoutB>, AcrossB<LayoutB>>;
  // An operand from its second 16 of the depth on.
  template <class Operand>
  struct Later {
    Operand all;
    __device__ __forceinline__ void load(uint32_t (&fragment)[4], int i, int step) const {
      all.load(fragment, i, step + 1);
    }
  };
};

}  // namespace flashmoe::cuda
