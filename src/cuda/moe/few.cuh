// Few rows an expert, as in decoding: what takes time is reading the weights once. So the weights
// are operand A, 16 of their rows at a time, and tokens are the columns of B, 8 at a time. Both go
// from global memory to registers in chunks of 16 bytes, with no stop in shared memory:
//
//   lane (r, q) = lane / 4, lane % 4    reads k = 8 q .. 8 q + 7 of weights' rows r and r + 8, and
//                                       of token r
//
// An MMA wants k = 2 q, 2 q + 1 and 2 q + 8, 2 q + 9 of a lane. Which numbers of the depth these
// are does not matter as long as A and B agree, so a chunk is four pairs for two MMAs.
//
//   moe_few_up     a CTA for each tile of rows and 16 columns of n: its warps share the depth
//   moe_few_down   a CTA for 16 columns of d: its warps share all tiles of rows. The results of all
//                  pairs are in shared memory, where those of a token are added up in order.
//
// No count comes to the host, and nothing needs to be cleared. Each may begin before the kernel
// ahead of it has ended (programmatic launch), and waits for that before it reads anything.
#pragma once

#include "cuda/moe/activation.cuh"
#include "cuda/moe/experts.cuh"
#include "cuda/ptx/grid.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/tile/dtype.cuh"

namespace flashmoe::cuda::moe {

inline constexpr int kFewDepth = 32;  // of a step: four lanes' chunks

// sums += 16 rows of weights times 8 tokens, 32 of the depth. `low` is a lane's chunk of row r,
// `high` that of row r + 8.
template <class T>
__device__ __forceinline__ void few_multiply(float (&sums)[4], const uint4& low, const uint4& high,
                                             const uint4& token) {
  const uint32_t first[4] = {low.x, high.x, low.y, high.y};
  const uint32_t second[4] = {low.z, high.z, low.w, high.w};
  T::mma(sums, first, token.x, token.y, sums);
  T::mma(sums, second, token.z, token.w, sums);
}

// A lane's way through two rows of weights, 16 apart in the result at most. Rows that there are not
// repeat the last.
struct FewWeights {
  const char* row[2];

  __device__ __forceinline__ FewWeights(const char* matrix, int row_bytes, int first, int rows,
                                        int lane) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = min(first + lane / 4 + 8 * i, rows - 1);
      row[i] = matrix + int64_t{at} * row_bytes + lane % 4 * 16;
    }
  }
  __device__ __forceinline__ uint4 load(int i, int step, bool there) const {
    return there ? ptx::ld_nc_no_allocate_v4(row[i] + int64_t{step} * (kFewDepth * 2))
                 : uint4{0, 0, 0, 0};
  }
};

// A lane's chunk of a token's row.
__device__ __forceinline__ uint4 few_token(const char* row, int step, bool there) {
  return there ? *reinterpret_cast<const uint4*>(row + int64_t{step} * (kFewDepth * 2))
               : uint4{0, 0, 0, 0};
}

// Grid: slots x tiles of columns, columns fastest. Shared memory: few_up_shared_bytes().
template <class T, int kTokens>
__device__ __forceinline__ void moe_few_up(const UpParams& p) {
  constexpr int kGroups = kTokens / 8, kUnroll = 4 / kGroups;  // steps on their way
  extern __shared__ __align__(16) float shared[];
  // (warps, gate and up, tokens, columns), rows of columns an odd number apart in their banks.
  const auto sum_at = [&](int warp, int half, int token, int column) -> float& {
    return shared[((warp * 2 + half) * kTokens + token) * (kFewColumns + 1) + column];
  };
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const int slot = blockIdx.x / p.tiles.columns;
  const int first = (blockIdx.x - slot * p.tiles.columns) * kFewColumns;
  const ExpertTile tile = p.tiles.tiles[slot];
  if (tile.expert < 0) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  const char* const gW =
      static_cast<const char*>(p.weights.data) + tile.expert * p.weights.expert_bytes;
  const FewWeights gate(gW, p.weights.row_bytes, first, p.inner, lane);
  const FewWeights up(gW + (p.gated ? int64_t{p.inner} * p.weights.row_bytes : 0),
                      p.weights.row_bytes, first, p.inner, lane);
  const char* tokens[kGroups];
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const int row = min(8 * g + lane / 4, tile.rows - 1);
    tokens[g] = static_cast<const char*>(p.x) +
                p.pairs[tile.first + row] / p.top_k * p.x_row_bytes + lane % 4 * 16;
  }
  float sums[2][kGroups][4] = {};
  const int steps = (p.width + kFewDepth - 1) / kFewDepth;
#pragma unroll 1
  for (int step = warp; step < steps; step += kFewUpWarps * kUnroll) {
    uint4 w[kUnroll][2][2], x[kUnroll][kGroups];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int at = step + u * kFewUpWarps;
      const bool there = at * kFewDepth + lane % 4 * 8 < p.width;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        w[u][0][i] = gate.load(i, at, there);
        w[u][1][i] = up.load(i, at, there && p.gated);
      }
#pragma unroll
      for (int g = 0; g < kGroups; ++g) x[u][g] = few_token(tokens[g], at, there);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        few_multiply<T>(sums[0][g], w[u][0][0], w[u][0][1], x[u][g]);
        if (p.gated) few_multiply<T>(sums[1][g], w[u][1][0], w[u][1][1], x[u][g]);
      }
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sum_at(warp, half, 8 * g + lane % 4 * 2 + i % 2, lane / 4 + i / 2 * 8) = sums[half][g][i];
      }
    }
  }
  __syncthreads();

  using Storage = typename T::Storage;
  for (int i = threadIdx.x; i < kTokens * kFewColumns; i += 32 * kFewUpWarps) {
    const int token = i / kFewColumns, at = i % kFewColumns, column = first + at;
    if (token >= tile.rows || column >= p.inner) continue;
    const int64_t row = tile.first + token;
    float h[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      h[half] = 0;
#pragma unroll
      for (int w = 0; w < kFewUpWarps; ++w) h[half] += sum_at(w, half, token, at);
      if (half == 1 && !p.gated) continue;
      if (p.bias) {
        h[half] += bias_at<T>(
            p.bias, tile.expert * p.bias_expert + (int64_t{half} * p.inner + column) * p.bias_col);
      }
      if (p.pre) {
        char* const to =
            static_cast<char*>(p.pre) + row * p.pre_row_bytes + half * p.pre_half_bytes;
        reinterpret_cast<Storage*>(to)[column] = static_cast<Storage>(T::pack(h[half], 0.f));
      }
    }
    float act = activation_curve(p.kind, h[0]).value;
    if (p.gated) act *= h[1];
    char* const to = static_cast<char*>(p.act) + row * p.act_row_bytes;
    reinterpret_cast<Storage*>(to)[column] = static_cast<Storage>(T::pack(act, 0.f));
  }
}

// Grid: tiles of columns. Shared memory: few_down_shared_bytes().
template <class T, int kTokens>
__device__ __forceinline__ void moe_few_down(const FewDownParams& p) {
  constexpr int kGroups = kTokens / 8, kUnroll = 4;
  extern __shared__ __align__(16) float shared[];
  float* const sSums = shared;  // (T k, parts, 16)
  ptx::griddepcontrol_wait();
  const int first = blockIdx.x * kFewColumns;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int steps = (p.depth + kFewDepth - 1) / kFewDepth, units = *p.tile_count * kFewSplits;
#pragma unroll 1
  for (int unit = warp; unit < units; unit += kFewDownWarps) {
    const ExpertTile tile = p.tiles[unit / kFewSplits];
    const int part = unit % kFewSplits;
    const FewWeights weights(
        static_cast<const char*>(p.weights.data) + tile.expert * p.weights.expert_bytes,
        p.weights.row_bytes, first, p.columns, lane);
    const char* tokens[kGroups];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int64_t row = tile.first + min(8 * g + lane / 4, tile.rows - 1);
      tokens[g] = static_cast<const char*>(p.rows) + row * p.row_bytes + lane % 4 * 16;
    }
    float sums[kGroups][4] = {};
    const int end = steps * (part + 1) / kFewSplits;
#pragma unroll 1
    for (int step = steps * part / kFewSplits; step < end; step += kUnroll) {
      uint4 w[kUnroll][2], x[kUnroll][kGroups];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int at = step + u;
        const bool there = at < end && at * kFewDepth + lane % 4 * 8 < p.depth;
#pragma unroll
        for (int i = 0; i < 2; ++i) w[u][i] = weights.load(i, at, there);
#pragma unroll
        for (int g = 0; g < kGroups; ++g) x[u][g] = few_token(tokens[g], at, there);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
        for (int g = 0; g < kGroups; ++g) few_multiply<T>(sums[g], w[u][0], w[u][1], x[u][g]);
      }
    }
    float bias[2] = {};  // of the lane's two columns
    if (p.bias && part == 0) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int64_t column = min(first + lane / 4 + 8 * i, p.columns - 1);
        bias[i] = bias_at<T>(p.bias, tile.expert * p.bias_expert + column * p.bias_col);
      }
    }
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = 8 * g + lane % 4 * 2 + i % 2, at = lane / 4 + i / 2 * 8;
        if (token >= tile.rows) continue;
        sSums[((tile.first + token) * kFewSplits + part) * kFewColumns + at] =
            sums[g][i] + bias[i / 2];
      }
    }
  }
  __syncthreads();

  using Storage = typename T::Storage;
  for (int i = threadIdx.x; i < p.tokens * kFewColumns; i += 32 * kFewDownWarps) {
    const int token = i / kFewColumns, at = i % kFewColumns;
    if (first + at >= p.columns) continue;
    float sum = 0;
    for (int j = 0; j < p.top_k; ++j) {
      const int row = p.row_of[token * p.top_k + j];
      if (row < 0) continue;
      const float weight = p.scale.data ? p.scale.data[token * p.scale.row + j * p.scale.col] : 1.f;
      float y = 0;
#pragma unroll
      for (int part = 0; part < kFewSplits; ++part) {
        y += sSums[(row * kFewSplits + part) * kFewColumns + at];
      }
      sum += weight * y;
    }
    char* const to = static_cast<char*>(p.out) + token * p.out_row_bytes;
    reinterpret_cast<Storage*>(to)[first + at] = static_cast<Storage>(T::pack(sum, 0.f));
  }
}

}  // namespace flashmoe::cuda::moe
