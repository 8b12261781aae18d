// Products of fp32 tiles, in fragments of m16n8k8, accumulated in a warp's registers.
//
// A Product says how two fragments are multiplied:
//   ThreeTf32   x = big + small, both TF32; big big + big small + small big has fp32's accuracy
//   OneTf32     rounded to TF32, which is exact for what came from fp16 or bf16
//   Fma         ordinary multiplications in fp32, for chips without TF32
//
// Operands lie in shared memory (FloatTile), with the depth along their rows or across them, or are
// accumulators of a product before. Fragments number the depth so that all three are read without a
// shuffle: with c = lane % 4, a lane has columns 2c and 2c + 1 of the depth, which are columns c
// and c + 4 of the instruction.
//
//   A B^T   Along, Along          A B   Along or FromAccumulators, Across
//   A^T B   Across, Across
#pragma once

#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/special_registers.cuh"
#include "cuda/ptx/tf32.cuh"
#include "cuda/tile/float_tile.cuh"
#include "cuda/tile/product.cuh"

namespace flashmoe::cuda {

// Rows of a tile from `row` on (a multiple of 8) as fragments of A or B, whose depth is along them.
template <class Tile>
struct Along {
  uint32_t lane;

  __device__ __forceinline__ explicit Along(uint32_t tile, int row = 0)
      : lane(Tile::lane_rows(tile, row)) {}
  __device__ __forceinline__ void load_left(float (&a)[4], uint32_t m, uint32_t step) const {
    const uint32_t at = Tile::along(lane, 2 * step) + 16 * m * Tile::kRowBytes;
    const float2 top = ptx::ld_shared_v2_f32(at);
    const float2 bottom = ptx::ld_shared_v2_f32(at + 8 * Tile::kRowBytes);
    a[0] = top.x, a[1] = bottom.x, a[2] = top.y, a[3] = bottom.y;
  }
  __device__ __forceinline__ void load_right(float (&b)[2], uint32_t n, uint32_t step) const {
    const float2 two = ptx::ld_shared_v2_f32(Tile::along(lane, 2 * step) + 8 * n * Tile::kRowBytes);
    b[0] = two.x, b[1] = two.y;
  }
};

// Columns of a tile from `col` on (a multiple of 8) as fragments of A or B: a row for each of the
// depth.
template <class Tile>
struct Across {
  uint32_t lane;

  __device__ __forceinline__ explicit Across(uint32_t tile, int col = 0)
      : lane(Tile::lane_cols(tile, col)) {}
  __device__ __forceinline__ void load_left(float (&a)[4], uint32_t m, uint32_t step) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t at = Tile::along(lane, 4 * m + 2 * half);
      a[half] = ptx::ld_shared_f32(at + 8 * step * Tile::kRowBytes);
      a[half + 2] = ptx::ld_shared_f32(Tile::next_row(at) + 8 * step * Tile::kRowBytes);
    }
  }
  __device__ __forceinline__ void load_right(float (&b)[2], uint32_t n, uint32_t step) const {
    const uint32_t at = Tile::along(lane, 2 * n);
    b[0] = ptx::ld_shared_f32(at + 8 * step * Tile::kRowBytes);
    b[1] = ptx::ld_shared_f32(Tile::next_row(at) + 8 * step * Tile::kRowBytes);
  }
};

// Accumulators as A of a next product: an n8 fragment is a step of its depth.
template <int kM, int kN>
struct FromAccumulators {
  static constexpr bool kInRegisters = true;
  const float (&acc)[kM][kN][4];

  __device__ __forceinline__ explicit FromAccumulators(const float (&x)[kM][kN][4]) : acc(x) {}
  __device__ __forceinline__ void load_left(float (&a)[4], uint32_t m, uint32_t step) const {
    const float(&x)[4] = acc[m][step];
    a[0] = x[0], a[1] = x[2], a[2] = x[1], a[3] = x[3];
  }
};

// The bits of fp32 that TF32 has, and the same where the compiler cannot see them, in constant
// memory. It would leave the cutting to the tensor core, and for an A that comes from shared memory
// has to copy numbers, several times over, into the registers in a row that the instruction takes:
// 156 instructions for 24 MMAs, 116 with the hidden bits.
inline constexpr uint32_t kTf32Bits = 0xffffe000u;
static __constant__ uint32_t hidden_tf32_bits = kTf32Bits;

// Tensor cores cut off what does not fit into an accumulator, always towards 0, where ordinary
// adders round: over thousands of keys that would cost a digit. So the sum over kSteps steps of
// the depth begins at 0, the small products first, and an ordinary addition adds it to the
// accumulators.
struct ThreeTf32 {
  static constexpr int kSteps = 2;
  template <int kCount>
  struct Split {
    uint32_t big[kCount], small[kCount];

    // big is rounded, so that small is half as large and of either sign, and so is what the tensor
    // core cuts off of it, 2^-22 of x. (Cut off, big would take one instruction less, and errors
    // of gradients of short sequences were three times those of fp32: they add up. A NaN may be
    // lost in big, and is in small.)
    __device__ __forceinline__ explicit Split(const float (&x)[kCount], uint32_t bits = kTf32Bits) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        big[i] = (__float_as_uint(x[i]) + 0x1000u) & bits;
        small[i] = __float_as_uint(x[i] - __uint_as_float(big[i]));
      }
    }
    Split() = default;
  };
  using Left = Split<4>;
  using Right = Split<2>;
  template <bool kInShared>
  static __device__ __forceinline__ Left left(const float (&a)[4]) {
    return Left(a, kInShared ? hidden_tf32_bits : kTf32Bits);
  }
  static __device__ __forceinline__ Right right(const float (&b)[2]) { return Right(b); }

  template <int kCount>
  static __device__ __forceinline__ void multiply(float (&acc)[4], const Left (&a)[kCount],
                                                  const Right (&b)[kCount]) {
    float sum[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      ptx::mma_m16n8k8_tf32(sum, a[i].small, b[i].big, sum);
      ptx::mma_m16n8k8_tf32(sum, a[i].big, b[i].small, sum);
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) ptx::mma_m16n8k8_tf32(sum, a[i].big, b[i].big, sum);
#pragma unroll
    for (int i = 0; i < 4; ++i) acc[i] += sum[i];
  }
};

// The accumulators are those of the instruction: what it cuts off is far below TF32's own error.
struct OneTf32 {
  static constexpr int kSteps = 2;
  template <int kCount>
  struct Rounded {
    uint32_t x[kCount];

    __device__ __forceinline__ explicit Rounded(const float (&from)[kCount]) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[i] = ptx::cvt_rna_tf32(from[i]);
    }
    Rounded() = default;
  };
  using Left = Rounded<4>;
  using Right = Rounded<2>;
  template <bool>
  static __device__ __forceinline__ Left left(const float (&a)[4]) {
    return Left(a);
  }
  static __device__ __forceinline__ Right right(const float (&b)[2]) { return Right(b); }

  template <int kCount>
  static __device__ __forceinline__ void multiply(float (&acc)[4], const Left (&a)[kCount],
                                                  const Right (&b)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) ptx::mma_m16n8k8_tf32(acc, a[i].x, b[i].x, acc);
  }
};

// The fragments of the instruction, multiplied by FMAs: shuffles bring each lane the two rows of A
// and the two columns of B that its accumulators are made of.
struct Fma {
  static constexpr int kSteps = 1;
  struct Left {
    float x[8][2];  // depth, rows r and r + 8

    __device__ __forceinline__ explicit Left(const float (&a)[4]) {
      const int row = ptx::opaque_thread() % 32 / 4 * 4;
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        x[i / 2][i % 2] = __shfl_sync(0xffffffffu, a[i / 2 % 2 * 2 + i % 2], row + i / 4);
      }
    }
    Left() = default;
  };
  struct Right {
    float x[8][2];  // depth, columns 2c and 2c + 1

    __device__ __forceinline__ explicit Right(const float (&b)[2]) {
      const int col = ptx::opaque_thread() % 4 * 8;
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        x[i / 2][i % 2] = __shfl_sync(0xffffffffu, b[i / 2 % 2], col + 4 * (i % 2) + i / 4);
      }
    }
    Right() = default;
  };

  template <bool>
  static __device__ __forceinline__ Left left(const float (&a)[4]) {
    return Left(a);
  }
  static __device__ __forceinline__ Right right(const float (&b)[2]) { return Right(b); }

  template <int kCount>
  static __device__ __forceinline__ void multiply(float (&acc)[4], const Left (&a)[kCount],
                                                  const Right (&b)[kCount]) {
    // Eight terms at a time: of hundreds, one after the other, each would be rounded to the ulp of
    // all before it.
    float sum[4] = {0, 0, 0, 0};
#pragma unroll
    for (int k = 0; k < 8 * kCount; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[i] += a[k / 8].x[k % 8][i / 2] * b[k / 8].x[k % 8][i % 2];
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) acc[i] += sum[i];
  }
};

// acc += A B over kSteps times 8 of the depth. kUnroll counts rounds of Product::kSteps: with
// FromAccumulators all of them, which is what registers need.
template <class Product, int kSteps, int kUnroll = 1, int kM, int kN, class A, class B>
__device__ __forceinline__ void multiply_floats(float (&acc)[kM][kN][4], const A& left,
                                                const B& right) {
  constexpr int kRound = Product::kSteps < kSteps ? Product::kSteps : kSteps;
  static_assert(kSteps % kRound == 0);
#pragma unroll kUnroll
  for (uint32_t round = 0; round < kSteps / kRound; ++round) {
    typename Product::Left a[kM][kRound];
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int i = 0; i < kRound; ++i) {
        float x[4];
        left.load_left(x, m, round * kRound + i);
        a[m][i] = Product::template left < !requires { A::kInRegisters; }
        > (x);
      }
    }
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      typename Product::Right b[kRound];
#pragma unroll
      for (int i = 0; i < kRound; ++i) {
        float x[2];
        right.load_right(x, n, round * kRound + i);
        b[i] = Product::right(x);
      }
#pragma unroll
      for (int m = 0; m < kM; ++m) Product::multiply(acc[m][n], a[m], b);
    }
  }
}

}  // namespace flashmoe::cuda
