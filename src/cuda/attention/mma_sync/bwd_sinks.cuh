// The gradient of the sinks: of a head -sum of exp(sink - LSE) * delta over its rows, delta being
// out.dO - grad_lse. It goes row by row and is bound by memory: out and dO are read once more than
// by the kernel before the backward pass, whose delta also has to show what is not finite in Q.
//
// Rows of a head, of all sequences, come in sink_parts parts; the first launch leaves the sum of
// each in the workspace, a second one adds them up. Who adds what follows from the plan alone: the
// same bits in every run. Tokens of no sequence have an LSE of -inf and add nothing.
#pragma once

#include "cuda/attention/mma_sync/bwd_preprocess.cuh"

namespace flashmoe::cuda {

// The sum over the CTA, in thread 0.
__device__ __forceinline__ float block_sum(float x) {
  constexpr int kWarps = kRowThreads / 32;
  extern __shared__ __align__(16) char shared[];
  float* const sums = reinterpret_cast<float*>(shared);
  x = warp_sum(x);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
  __syncthreads();  // the sums of all warps are there
  float sum = 0;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) sum += sums[warp];
  return sum;
}

// The sum of part blockIdx.x of head `head`, in thread 0.
template <class T>
__device__ __forceinline__ float sum_sink_rows(int head, float sink, const AttentionBwdParams& p) {
  const int lanes = row_lanes(p.head_dim_v), lane = threadIdx.x % lanes;
  const int64_t share = (p.sink_rows + p.sink_parts - 1) / p.sink_parts;
  const int64_t begin = blockIdx.x * share, end = min(begin + share, p.sink_rows);
  // Where row `row` of the head begins. Ragged, rows are tokens.
  const auto at = [&](const Strides& strides, int64_t row) {
    const int batch = p.blocks ? 0 : static_cast<int>(row / p.len_q);
    const int64_t of_sequence = p.blocks ? 0 : row - int64_t{batch} * p.len_q;
    return offset(p, strides, batch, head, row) + of_sequence * strides.row;
  };
  float sum = 0;
  // All lanes of a warp take as many turns.
#pragma unroll 4
  for (int64_t first = begin; first < end; first += kRowThreads / lanes) {
    const int64_t row = first + threadIdx.x / lanes, there = min(row, end - 1);
    float delta = 0;
    if (p.grad_out) {
      delta = row_product<T>(
          static_cast<const char*>(p.out) + at(p.out_strides, there) * T::kBytes,
          static_cast<const char*>(p.grad_out) + at(p.grad_out_strides, there) * T::kBytes,
          p.head_dim_v, lane, lanes);
    }
    const float lse = p.lse[at(p.lse_strides, there)];
    // A row that sees the sink alone: its out is 0 whatever its dO is.
    if (lse == sink && !isfinite(delta)) delta = 0;
    if (p.grad_lse) delta -= p.grad_lse[at(p.grad_lse_strides, there)];
    if (lane == 0 && row < end && lse != -INFINITY) {
      sum -= ptx::ex2_approx_ftz((sink - lse) * kLog2e) * delta;
    }
  }
  return block_sum(sum);
}

// The kernel: grid (parts, heads), and to add them up (1, heads).
template <class T>
__device__ __forceinline__ void attention_bwd_sinks(const AttentionBwdParams& p) {
  const int head = blockIdx.y;
  const float sink = sink_of<T>(p, head);
  float* const parts = p.sink_sums + int64_t{head} * p.sink_parts;
  float sum = 0;
  if (p.sink_sum_last) {
    for (int i = threadIdx.x; i < p.sink_parts; i += kRowThreads) sum += parts[i];
    sum = block_sum(sum);
  } else if (sink != -INFINITY) {  // no sink has no gradient, whatever the rows hold
    sum = sum_sink_rows<T>(head, sink, p);
  }
  if (threadIdx.x != 0) return;
  if (!p.sink_sum_last && p.sink_parts > 1) {
    parts[blockIdx.x] = sum;
    return;
  }
  const int64_t to = head * p.grad_sink_step;
  if (p.sinks_are_fp32) {
    static_cast<float*>(p.grad_sinks)[to] = sum;
  } else {
    const typename T::Storage rounded = T::pack(sum, 0) & 0xffff;
    static_cast<typename T::Storage*>(p.grad_sinks)[to] = rounded;
  }
}

}  // namespace flashmoe::cuda
