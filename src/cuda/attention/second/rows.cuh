// Second derivatives row by row: before the tiles, what each row of queries has; after, the
// gradient of the sinks. Both are bound by memory.
#pragma once

#include "cuda/attention/second/tile.cuh"

namespace flashmoe::cuda::second {

inline constexpr int kRowLanes = 16;  // of a row, each with four columns of every 64
static_assert(kSecondRowsOfCta == kRowThreads / kRowLanes);

// Four columns of a row from `column` on; 0 past the end.
template <class C>
__device__ __forceinline__ float4 read_four(const char* row, int column, int dim) {
  float x[4] = {0, 0, 0, 0};
  if (C::kElement == Element::kFp32 && column + 4 <= dim) {
    return *reinterpret_cast<const float4*>(row + column * 4);
  }
  if (C::kElement != Element::kFp32 && column + 4 <= dim) {
    const uint2 four = *reinterpret_cast<const uint2*>(row + column * 2);
    const uint32_t two[2] = {four.x, four.y};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] = half_to_float(C::kElement, two[i / 2] >> i % 2 * 16 & 0xffff);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (column + i < dim) x[i] = read_element(C::kElement, row, column + i);
    }
  }
  return {x[0], x[1], x[2], x[3]};
}

__device__ __forceinline__ float sum_of_row(float x) {
#pragma unroll
  for (int step = kRowLanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

// Where row `row` of a head is, of all sequences.
__device__ __forceinline__ int64_t row_at(const Strides& strides, int head, int64_t row,
                                          const AttentionSecondParams& p) {
  const int batch = p.blocks ? 0 : static_cast<int>(row / p.len_q);
  const int64_t of_sequence = p.blocks ? 0 : row - int64_t{batch} * p.len_q;
  return offset(p, strides, batch, head, row) + of_sequence * strides.row;
}

template <class C>
__device__ __forceinline__ float sink_of_head(int head, const AttentionSecondParams& p) {
  if (!p.sinks) return -INFINITY;
  return read_number<C>(p.sinks_are_fp32, p.sinks, head * p.sink_head);
}

// The numbers of each row: lse, delta, lse' and out'.dO. The grid is all rows of all heads.
template <class C>
__device__ __forceinline__ void attention_second_rows(const AttentionSecondParams& p) {
  const int lane = threadIdx.x % kRowLanes;
  const int64_t all = p.heads_q * p.rows_of_head;
  const int64_t number = int64_t{blockIdx.x} * kSecondRowsOfCta + threadIdx.x / kRowLanes;
  const int64_t there = min(number, all - 1);  // past the end, the last row again
  const int head = static_cast<int>(there / p.rows_of_head);
  const int64_t row = there - head * p.rows_of_head;
  const auto at = [&](const Strides& strides) { return row_at(strides, head, row, p); };
  float delta = 0, mean = 0;
  if (p.grad_out) {
    const auto rows = [&](const void* tensor, const Strides& strides) {
      return static_cast<const char*>(tensor) + at(strides) * C::kBytes;
    };
    const char* gO = rows(p.out, p.out_strides);
    const char* gdO = rows(p.grad_out, p.grad_out_strides);
    const char* gMove = rows(p.tangent_out, p.tangent_out_strides);
#pragma unroll 1
    for (int column = 4 * lane; column < p.head_dim_v; column += 4 * kRowLanes) {
      const float4 o = read_four<C>(gO, column, p.head_dim_v);
      const float4 dO = read_four<C>(gdO, column, p.head_dim_v);
      const float4 move = read_four<C>(gMove, column, p.head_dim_v);
      delta += o.x * dO.x + o.y * dO.y + o.z * dO.z + o.w * dO.w;
      mean += move.x * dO.x + move.y * dO.y + move.z * dO.z + move.w * dO.w;
    }
  }
  delta = sum_of_row(delta);
  mean = sum_of_row(mean);
  const float lse = p.lse[at(p.lse_strides)];
  // A row that sees no key, or the sink alone: its out is 0 whatever its dO is.
  if (lse == sink_of_head<C>(head, p) && !isfinite(delta + mean)) delta = mean = 0;
  if (p.grad_lse) delta -= p.grad_lse[at(p.grad_lse_strides)];
  const float lse_move = lse == -INFINITY ? 0 : p.tangent_lse[at(p.tangent_lse_strides)];
  if (lane == 0 && number < all) {
    reinterpret_cast<float4*>(p.row_numbers)[number] = {lse == -INFINITY ? INFINITY : lse, delta,
                                                        lse_move, mean};
  }
}

// The gradient of a head's sink, the score of a key whose value is 0: of all its rows
//   -sum of exp(sink - lse) (delta (sink' - lse') + out'.dO)
// added up in a fixed order. The grid is the heads.
template <class C>
__device__ __forceinline__ void attention_second_sinks(const AttentionSecondParams& p) {
  extern __shared__ __align__(1024) char shared[];
  float* const sums = reinterpret_cast<float*>(shared);  // of each warp
  const int head = blockIdx.x;
  const float sink = sink_of_head<C>(head, p);
  const int64_t at = head * p.tangent_sink_step;
  const float move = p.tangent_sinks ? read_number<C>(p.sinks_are_fp32, p.tangent_sinks, at) : 0;
  const float4* numbers = reinterpret_cast<const float4*>(p.row_numbers) + head * p.rows_of_head;
  float sum = 0;
  if (sink != -INFINITY) {  // no sink has no gradient, whatever the rows hold
#pragma unroll 4
    for (int64_t row = threadIdx.x; row < p.rows_of_head; row += kRowThreads) {
      const float4 x = numbers[row];
      // Tokens of no sequence have an lse of -inf, which is +inf here.
      if (x.x != INFINITY) {
        sum -= ptx::ex2_approx_ftz((sink - x.x) * kLog2e) * (x.y * (move - x.z) + x.w);
      }
    }
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();  // the sums of all warps are there
  if (threadIdx.x != 0) return;
  sum = 0;
  for (int warp = 0; warp < kRowThreads / 32; ++warp) sum += sums[warp];
  write_number<C>(p.sinks_are_fp32, p.grad_sinks, head * p.grad_sink_step, sum);
}

}  // namespace flashmoe::cuda::second
