// The kernel after a split forward pass: makes one result of those that the splits left in the
// workspace, O = sum of 2^(LSE_s - LSE) O_s; the sink joins LSE here. It goes row by row and is
// bound by memory.
#pragma once

#include "cuda/attention/params.h"
#include "cuda/attention/sequence.cuh"
#include "cuda/attention/softmax.cuh"
#include "cuda/attention/tiles.h"
#include "cuda/tile/dtype.cuh"

namespace flashmoe::cuda {

// The kernel: one CTA for each row, grid (len_q, heads, batch). Each warp goes over the LSE of all
// splits, a lane for each, and over 32 columns of the outputs at a time: eight lanes take four
// columns each, for a quarter of the splits.
template <class T>
__device__ __forceinline__ void attention_combine(const AttentionFwdParams& p) {
  constexpr int kLanes = 8, kQuarters = 32 / kLanes;
  const int batch = p.first_batch + blockIdx.z, head = blockIdx.y, row = blockIdx.x;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Sequence seq = find_sequence(p, batch);
  const int64_t rows = int64_t{p.batch} * gridDim.y * p.len_q;  // of one split
  const int64_t mine = (int64_t{batch} * gridDim.y + head) * p.len_q + row;
  const float* lses = p.partial_lse + mine;

  float top = -INFINITY, sum = 0;
  for (int s = lane; s < p.splits; s += 32) top = fmaxf(top, lses[s * rows]);
  top = warp_max(top);
  const float reference = top == -INFINITY ? 0.f : top;
  for (int s = lane; s < p.splits; s += 32) sum += ptx::ex2_approx_ftz(lses[s * rows] - reference);
  sum = warp_sum(sum);
  const RowEnd end = end_row(sum, reference, sink_of<T>(p, head, row));
  const float inverse = end.share / end.sum;
  if (p.lse && threadIdx.x == 0) {
    p.lse[offset(p, p.lse_strides, batch, head, 0) + row * p.lse_strides.row] =
        seq.valid ? end.lse : NAN;
  }

  const char* to =
      rows_of(p.out, p, p.out_strides, batch, head, 0) + row * p.out_strides.row * T::kBytes;
  for (int first = warp * 4 * kLanes; first < p.dim; first += kRowThreads) {
    const int column = first + lane % kLanes * 4;
    float value[4] = {0, 0, 0, 0};
#pragma unroll 8
    for (int s = lane / kLanes; s < p.splits; s += kQuarters) {
      const float part = lses[s * rows];
      // The row sees no key of this split, or the column is past the last.
      if (part == -INFINITY || column >= p.dim) continue;
      const float4 x =
          *reinterpret_cast<const float4*>(p.partial_out + (s * rows + mine) * p.dim + column);
      const float weight = ptx::ex2_approx_ftz(part - reference) * inverse;
      value[0] += weight * x.x;
      value[1] += weight * x.y;
      value[2] += weight * x.z;
      value[3] += weight * x.w;
    }
#pragma unroll
    for (int step = kLanes; step < 32; step *= 2) {
#pragma unroll
      for (int i = 0; i < 4; ++i) value[i] += __shfl_xor_sync(0xffffffffu, value[i], step);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (lane >= kLanes || column + i >= p.head_dim_v) continue;
      const typename T::Storage rounded = T::pack(seq.valid ? value[i] : NAN, 0) & 0xffff;
      reinterpret_cast<typename T::Storage*>(const_cast<char*>(to))[column + i] = rounded;
    }
  }
}

}  // namespace flashmoe::cuda
