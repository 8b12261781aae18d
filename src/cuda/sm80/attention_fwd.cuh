// Attention forward with mma.sync, for Ampere and every chip after it.
//
// One CTA takes one block of queries of one (batch, head) and goes through the keys, last block
// first, so that the blocks that need a mask (the end of the keys, the causal diagonal) come first
// and the loop after them has none.
//
//               keys ->                         shared memory, 16-bit, swizzled:
//            ┌──────┬──────┬──────┐               sQ  block_q x D      also the output on its way
//            out
//   queries  │ full │ full │masked│               sK  2 x block_k x D
//     |      └──────┴──────┴──────┘               sV  2 x block_k x D
//     v        <──────── order
//
// Each warp owns 32 rows as two m16 fragments and all columns: softmax needs no other warp, and P
// goes from the accumulators of S = Q K^T straight into the operands of O += P V. While block n is
// computed, cp.async brings block n - 1 of K and V into the other stage; one barrier a block keeps
// a stage from being overwritten while it is read.
//
// H200, bf16, batch 8, length 2,048, heads x D = 2,048, 2026-11-15: 336 TFLOP/s at D = 128 (causal
// 284), 323 at D = 64 (causal 260).
#pragma once

#include "cuda/params.h"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/special_registers.cuh"
#include "cuda/sm80/variants.h"
#include "cuda/tile/dtype.cuh"
#include "cuda/tile/softmax.cuh"
#include "cuda/tile/swizzle.cuh"

namespace flashmoe::cuda::sm80 {

template <class T, int kHeadDim, bool kCausal_, int kBlockQ_, int kBlockK_, int kWarps_,
          int kQSteps_>
struct FwdConfig {
  using Type = T;
  static constexpr FwdTile kTile = {kHeadDim, kCausal_, kBlockQ_, kBlockK_, kWarps_, kQSteps_};
  static constexpr int kDim = kHeadDim;
  static constexpr bool kCausal = kCausal_;
  static constexpr int kBlockQ = kBlockQ_, kBlockK = kBlockK_;
  static constexpr int kThreads = kTile.threads();
  static constexpr int kRowTiles = kBlockQ / kWarps_ / 16;  // m16 fragments of a warp
  static constexpr int kKeyTiles = kBlockK / 8;             // n8 fragments of S
  static constexpr int kDimTiles = kDim / 8;                // n8 fragments of O
  static constexpr int kDimSteps = kDim / 16;               // k16 steps of Q K^T
  static constexpr int kKeySteps = kBlockK / 16;            // k16 steps of P V
  static constexpr int kQSteps = kQSteps_;
  static constexpr uint32_t kTileBytes = kBlockK * kDim * 2;
  using Layout = Swizzled<kDim>;

  // Byte offsets in shared memory.
  static constexpr uint32_t kSmemQ = 0;
  static constexpr uint32_t kSmemK = kBlockQ * kDim * 2;
  static constexpr uint32_t kSmemV = kSmemK + 2 * kTileBytes;
  static_assert(kSmemV + 2 * kTileBytes == kTile.shared_bytes());
  static_assert(kBlockQ % (16 * kWarps_) == 0 && kBlockK % 16 == 0 && kDim % 64 == 0);
};

// Rows [first, first + kRows) of a (len, D) matrix to shared memory; rows past the end become
// zeros, so that nothing is read beyond the tensor and nothing but zeros meets a probability of 0.
template <class C, int kRows>
__device__ __forceinline__ void load_tile(uint32_t shared, const char* global, int64_t row_bytes,
                                          int first, int len) {
  constexpr int kChunks = C::Layout::kChunks;
  constexpr int kStep = C::kThreads / kChunks;  // rows between a thread's chunks
  static_assert(kStep % 8 == 0, "so that they all have the same place in their row");
  const int thread = ptx::tid_x_volatile();
  const int row = thread / kChunks, chunk = thread % kChunks;
  const uint32_t to = shared + C::Layout::at(row, chunk);
  const char* from = global + (first + row) * row_bytes + chunk * 16;
#pragma unroll
  for (int i = 0; i < kRows / kStep; ++i) {
    const bool inside = first + row + i * kStep < len;
    ptx::cp_async_cg_16(to + i * kStep * C::Layout::kRowBytes, inside ? from : global,
                        inside ? 16 : 0);
    from += kStep * row_bytes;
  }
}

// Where this lane's part of a fragment is: of 16 rows by 16 of the depth of Q, of 16 keys by 16 of
// the depth of K, of 16 keys by 16 columns of V.
template <class C>
__device__ __forceinline__ uint32_t lane_address_q(uint32_t sQ, int row) {
  const int lane = ptx::tid_x_volatile() % 32;
  return sQ + C::Layout::at(row + lane % 16, lane / 16);
}
template <class C>
__device__ __forceinline__ uint32_t lane_address_k(uint32_t sK) {
  const int lane = ptx::tid_x_volatile() % 32;
  return sK + C::Layout::at(lane % 8 + lane / 16 * 8, lane / 8 % 2);
}
template <class C>
__device__ __forceinline__ uint32_t lane_address_v(uint32_t sV) {
  const int lane = ptx::tid_x_volatile() % 32;
  return sV + C::Layout::at(lane % 16, lane / 16);
}

// S = Q K^T
template <class C>
__device__ __forceinline__ void scores(float (&s)[C::kRowTiles][C::kKeyTiles][4],
                                       const uint32_t (&rQ)[C::kRowTiles][C::kQSteps + 1][4],
                                       uint32_t lane_q, uint32_t lane_k) {
  constexpr int kRowBytes = C::Layout::kRowBytes;
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < C::kKeyTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[m][n][i] = 0;
    }
  }
  constexpr int kUnroll = C::kQSteps > 0 ? C::kDimSteps : 1;
#pragma unroll kUnroll
  for (int step = 0; step < C::kDimSteps; ++step) {
    uint32_t a[C::kRowTiles][4];
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
      if (step < C::kQSteps) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[m][i] = rQ[m][step][i];
      } else {
        ptx::ldmatrix_x4(a[m], C::Layout::along(lane_q, 2 * step) + 16 * m * kRowBytes);
      }
    }
#pragma unroll
    for (int n = 0; n < C::kKeyTiles; n += 2) {
      uint32_t b[4];  // two n8 fragments
      ptx::ldmatrix_x4(b, C::Layout::along(lane_k, 2 * step) + 8 * n * kRowBytes);
#pragma unroll
      for (int m = 0; m < C::kRowTiles; ++m) {
        C::Type::mma(s[m][n], a[m], b[0], b[1]);
        C::Type::mma(s[m][n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// Keys that query row `row` may see: [0, end).
template <class C>
__device__ __forceinline__ int row_end(int row, const AttentionFwdParams& p) {
  return C::kCausal ? min(p.len_k, row + p.len_k - p.len_q + 1) : p.len_k;
}

// -inf where key `first_key` + column is not for the row: past the end, or past the diagonal.
template <class C>
__device__ __forceinline__ void mask_scores(float (&s)[C::kRowTiles][C::kKeyTiles][4], int row,
                                            int first_key, const AttentionFwdParams& p) {
  const int lane = ptx::tid_x_volatile() % 32;
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int end = row_end<C>(row + 16 * m + lane / 4 + 8 * half, p);
#pragma unroll
      for (int n = 0; n < C::kKeyTiles; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          if (first_key + 8 * n + lane % 4 * 2 + c >= end) s[m][n][2 * half + c] = -INFINITY;
        }
      }
    }
  }
}

// A NaN or infinity in V must reach the rows that may see its key and no others, but in a product a
// masked 0 times NaN is NaN. So where rows of a block differ in what they see: what is not finite
// is added to the rows that see it, and a zero put in its place. Costs a look at the tile, and
// nothing more when all is finite.
template <class C>
__device__ __forceinline__ void contain_values(float (&o)[C::kRowTiles][C::kDimTiles][4], char* sV,
                                               int row, int first_key,
                                               const AttentionFwdParams& p) {
  constexpr int kChunks = C::kTileBytes / 16 / C::kThreads;  // of a thread
  const int thread = ptx::tid_x_volatile();
  uint4* mine = reinterpret_cast<uint4*>(sV) + thread;
  bool found = false;
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const uint4 v = mine[i * C::kThreads];
    found |= any_not_finite<typename C::Type>(v.x) || any_not_finite<typename C::Type>(v.y) ||
             any_not_finite<typename C::Type>(v.z) || any_not_finite<typename C::Type>(v.w);
  }
  if (!__syncthreads_or(found)) return;

  const int lane = thread % 32;
#pragma unroll 1
  for (int key = 0; key < C::kBlockK; ++key) {
#pragma unroll
    for (int d = 0; d < C::kDimTiles; ++d) {
      const uint32_t two =
          *reinterpret_cast<const uint32_t*>(sV + C::Layout::at(key, d) + lane % 4 * 4);
      if (!any_not_finite<typename C::Type>(two)) continue;
#pragma unroll
      for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (first_key + key >= row_end<C>(row + 16 * m + lane / 4 + 8 * half, p)) continue;
          o[m][d][2 * half] += infinity_or_nan<typename C::Type>(two & 0xffff);
          o[m][d][2 * half + 1] += infinity_or_nan<typename C::Type>(two >> 16);
        }
      }
    }
  }
  __syncthreads();  // everyone has seen the tile
#pragma unroll 1
  for (int i = 0; i < kChunks * 8; ++i) {
    uint16_t& number = reinterpret_cast<uint16_t*>(mine + i / 8 * C::kThreads)[i % 8];
    if ((number & C::Type::kExponent) == C::Type::kExponent) number = 0;
  }
  __syncthreads();  // and now its finite version
}

// P = softmax of S relative to the rows' maxima so far, O = correction * O + P V. Exponentials are
// taken a k16 step at a time, just before the product that needs them: they then run under the
// product before. `contain` is called with O scaled and V not yet used.
template <class C, class Contain>
__device__ __forceinline__ void accumulate(float (&o)[C::kRowTiles][C::kDimTiles][4],
                                           float (&s)[C::kRowTiles][C::kKeyTiles][4],
                                           RowState (&rows)[C::kRowTiles], float scale_log2,
                                           uint32_t lane_v, const Contain& contain) {
  float reference[C::kRowTiles][2], sum[C::kRowTiles][2] = {};
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
    float correction[2];
    update_maximum(s[m], rows[m], scale_log2, reference[m], correction);
#pragma unroll
    for (int d = 0; d < C::kDimTiles; ++d) {
#pragma unroll
      for (int i = 0; i < 4; ++i) o[m][d][i] *= correction[i / 2];
    }
  }
  contain();
#pragma unroll
  for (int step = 0; step < C::kKeySteps; ++step) {
    // Accumulator fragments 2 * step and 2 * step + 1 of S are exactly the k16 operand of the next
    // product.
    uint32_t a[C::kRowTiles][4];
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
      auto &left = s[m][2 * step], &right = s[m][2 * step + 1];
      probabilities(left, right, sum[m], scale_log2, reference[m]);
      a[m][0] = C::Type::pack(left[0], left[1]);
      a[m][1] = C::Type::pack(left[2], left[3]);
      a[m][2] = C::Type::pack(right[0], right[1]);
      a[m][3] = C::Type::pack(right[2], right[3]);
    }
#pragma unroll
    for (int d = 0; d < C::kDimTiles; d += 2) {
      uint32_t b[4];
      ptx::ldmatrix_x4_trans(b, C::Layout::along(lane_v, d) + 16 * step * C::Layout::kRowBytes);
#pragma unroll
      for (int m = 0; m < C::kRowTiles; ++m) {
        C::Type::mma(o[m][d], a[m], b[0], b[1]);
        C::Type::mma(o[m][d + 1], a[m], b[2], b[3]);
      }
    }
  }
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) rows[m].sum[half] += sum[m][half];
  }
}

// O / sum through Q's place in shared memory to 16-byte stores, and lse.
template <class C>
__device__ __forceinline__ void store_output(float (&o)[C::kRowTiles][C::kDimTiles][4],
                                             RowState (&state)[C::kRowTiles], char* sO, int row,
                                             int first_row, void* gO, float* gLse,
                                             const AttentionFwdParams& p) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = quad_sum(state[m].sum[half]);
      const bool empty = sum == 0;  // no key allowed; a NaN is not empty
      const float inverse = empty ? 0.f : 1.f / sum;
      const int r = row + 16 * m + lane / 4 + 8 * half;
#pragma unroll
      for (int d = 0; d < C::kDimTiles; ++d) {
        const uint32_t packed =
            C::Type::pack(o[m][d][2 * half] * inverse, o[m][d][2 * half + 1] * inverse);
        *reinterpret_cast<uint32_t*>(sO + C::Layout::at(r, d) + lane % 4 * 4) = packed;
      }
      if (gLse && lane % 4 == 0 && first_row + r < p.len_q) {
        const float log_sum = (state[m].maximum[half] * p.scale_log2 + __log2f(sum)) * kLn2;
        gLse[(first_row + r) * p.lse_strides.row] = empty ? -INFINITY : log_sum;
      }
    }
  }
  __syncwarp();  // a warp stores the rows it wrote
  constexpr int kChunks = C::Layout::kChunks;
#pragma unroll
  for (int i = 0; i < C::kRowTiles * 16 * kChunks / 32; ++i) {
    const int index = i * 32 + lane;
    const int r = row + index / kChunks, chunk = index % kChunks;
    if (first_row + r >= p.len_q) continue;
    const uint4 value = *reinterpret_cast<const uint4*>(sO + C::Layout::at(r, chunk));
    char* to = static_cast<char*>(gO) + ((first_row + r) * p.out_strides.row + chunk * 8) * 2;
    *reinterpret_cast<uint4*>(to) = value;
  }
}

// The accumulators of one warp.
template <class C>
struct FwdState {
  uint32_t rQ[C::kRowTiles][C::kQSteps + 1][4];  // one more than used: no array of size 0
  float s[C::kRowTiles][C::kKeyTiles][4];
  float o[C::kRowTiles][C::kDimTiles][4];
  RowState rows[C::kRowTiles];
};

// The first row of this warp, in the block.
template <class C>
__device__ __forceinline__ int warp_row() {
  return ptx::tid_x_volatile() / 32 * (C::kRowTiles * 16);
}

// One block of keys, already in shared memory.
template <class C>
__device__ __forceinline__ void fwd_block(FwdState<C>& t, uint32_t sQ, uint32_t sK, uint32_t sV,
                                          int first_row, int first_key,
                                          const AttentionFwdParams& p) {
  const int row = warp_row<C>();
  scores<C>(t.s, t.rQ, lane_address_q<C>(sQ, row), lane_address_k<C>(sK));
  if (p.sign != 1) {
#pragma unroll
    for (int i = 0; i < C::kRowTiles * C::kKeyTiles * 4; ++i) {
      t.s[i / 4 / C::kKeyTiles][i / 4 % C::kKeyTiles][i % 4] *= p.sign;
    }
  }
  // The first query row may not see the last key, or not all keys are there.
  const int end = first_key + C::kBlockK;
  const bool diagonal = C::kCausal && end > first_row + p.len_k - p.len_q + 1;
  if (diagonal || end > p.len_k) mask_scores<C>(t.s, first_row + row, first_key, p);
  accumulate<C>(t.o, t.s, t.rows, p.scale_log2, lane_address_v<C>(sV), [&] {
    if (!diagonal) return;
    char* values = static_cast<char*>(__cvta_shared_to_generic(sV));
    contain_values<C>(t.o, values, first_row + warp_row<C>(), first_key, p);
  });
}

template <class C>
__device__ __forceinline__ void attention_fwd(const AttentionFwdParams& p) {
  extern __shared__ __align__(1024) char smem[];
  const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(smem));
  const uint32_t sQ = base + C::kSmemQ;
  const auto sK = [&](int n) { return base + C::kSmemK + (n & 1) * C::kTileBytes; };
  const auto sV = [&](int n) { return base + C::kSmemV + (n & 1) * C::kTileBytes; };

  // Query blocks of one head follow each other, so that its keys stay in the second-level cache;
  // causal heads begin with the block that has the most keys.
  const int first_row = (C::kCausal ? gridDim.x - 1 - blockIdx.x : blockIdx.x) * C::kBlockQ;
  const auto at = [&](const void* tensor, const Strides& strides, int head) {
    return static_cast<const char*>(tensor) +
           (blockIdx.z * strides.batch + head * strides.head) * 2;
  };
  const char* gK = at(p.key, p.key_strides, blockIdx.y / p.group);
  const char* gV = at(p.value, p.value_strides, blockIdx.y / p.group);
  const auto load_keys = [&](int n) {
    load_tile<C, C::kBlockK>(sK(n), gK, p.key_strides.row * 2, n * C::kBlockK, p.len_k);
    load_tile<C, C::kBlockK>(sV(n), gV, p.value_strides.row * 2, n * C::kBlockK, p.len_k);
  };

  // Blocks of keys that this block of queries may see.
  int keys = p.len_k;
  if (C::kCausal) keys = min(keys, first_row + C::kBlockQ + p.len_k - p.len_q);
  const int blocks = max(keys + C::kBlockK - 1, 0) / C::kBlockK;

  load_tile<C, C::kBlockQ>(sQ, at(p.query, p.query_strides, blockIdx.y), p.query_strides.row * 2,
                           first_row, p.len_q);
  if (blocks > 0) load_keys(blocks - 1);
  ptx::cp_async_commit_group();

  FwdState<C> t;
#pragma unroll
  for (int i = 0; i < C::kRowTiles * C::kDimTiles * 4; ++i) {
    t.o[i / 4 / C::kDimTiles][i / 4 % C::kDimTiles][i % 4] = 0;
  }
  if (C::kQSteps > 0) {
    ptx::cp_async_wait_group<0>();
    __syncthreads();
    const uint32_t lane_q = lane_address_q<C>(sQ, warp_row<C>());
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
      for (int step = 0; step < C::kQSteps; ++step) {
        ptx::ldmatrix_x4(t.rQ[m][step],
                         C::Layout::along(lane_q, 2 * step) + 16 * m * C::Layout::kRowBytes);
      }
    }
  }

#pragma unroll 1
  for (int n = blocks - 1; n >= 0; --n) {
    ptx::cp_async_wait_group<0>();
    __syncthreads();  // block n is there for everyone, and everyone is done with the other stage
    if (n > 0) load_keys(n - 1);
    ptx::cp_async_commit_group();
    fwd_block<C>(t, sQ, sK(n), sV(n), first_row, n * C::kBlockK, p);
  }

  // Q arrived even if there was no key to wait for, and no warp still reads it.
  ptx::cp_async_wait_group<0>();
  __syncthreads();
  void* gO = const_cast<char*>(at(p.out, p.out_strides, blockIdx.y));
  float* gLse =
      p.lse ? p.lse + blockIdx.z * p.lse_strides.batch + blockIdx.y * p.lse_strides.head : nullptr;
  store_output<C>(t.o, t.rows, smem + C::kSmemQ, warp_row<C>(), first_row, gO, gLse, p);
}

}  // namespace flashmoe::cuda::sm80
