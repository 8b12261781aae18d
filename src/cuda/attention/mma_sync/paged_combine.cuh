// The kernel after attention over pages: makes one result of those that the splits of a sequence
// left in the workspace, O = sum of 2^(LSE_s - LSE) O_s; the sink joins LSE here.
#pragma once

#include "cuda/attention/mma_sync/paged_store.cuh"
#include "cuda/ptx/grid.cuh"

namespace flashmoe::cuda {

// One head of one query, by a warp.
template <class T, int kDim>
__device__ __forceinline__ void combine_row(const PagedSequence& seq, int sequence, int query,
                                            int head, const PagedParams& p) {
  const int lane = threadIdx.x % 32;
  const int64_t first = (sequence * int64_t{p.partial_rows} + query) * p.heads_q + head;
  const int64_t step = int64_t{seq.len_q} * p.heads_q;  // from one split to the next
  const float* lses = p.partial_lse + first;

  float top = -INFINITY, sum = 0;
  for (int s = lane; s < seq.splits; s += 32) top = fmaxf(top, lses[s * step]);
  top = warp_max(top);
  const float reference = top == -INFINITY ? 0.f : top;
  for (int s = lane; s < seq.splits; s += 32)
    sum += ptx::ex2_approx_ftz(lses[s * step] - reference);
  sum = warp_sum(sum);
  const RowEnd end = end_row(sum, reference, sink_of<T>(p, head));
  const float inverse = end.share / end.sum;

  const int64_t token = seq.token_q + query;
  if (p.lse && lane == 0) p.lse[token * p.lse_strides.row + head * p.lse_strides.head] = end.lse;
  uint16_t* out =
      static_cast<uint16_t*>(p.out) + token * p.out_strides.row + head * p.out_strides.head;
#pragma unroll
  for (int column = lane * 4; column < kDim; column += 128) {
    float value[4] = {0, 0, 0, 0};
#pragma unroll 4
    for (int s = 0; s < seq.splits; ++s) {
      const float part = lses[s * step];
      const float4 x =
          *reinterpret_cast<const float4*>(p.partial_out + (first + s * step) * kDim + column);
      if (part == -INFINITY) continue;  // the row sees no key of this split
      const float weight = ptx::ex2_approx_ftz(part - reference) * inverse;
      value[0] += weight * x.x;
      value[1] += weight * x.y;
      value[2] += weight * x.z;
      value[3] += weight * x.w;
    }
    const uint32_t two[2] = {T::pack(value[0], value[1]), T::pack(value[2], value[3])};
    if (column + 4 <= p.head_dim_v) {
      *reinterpret_cast<uint2*>(out + column) = {two[0], two[1]};
    } else {
      for (int i = 0; i < p.head_dim_v - column; ++i) {
        out[column + i] = static_cast<uint16_t>(two[i / 2] >> (i % 2 * 16));
      }
    }
  }
}

// The kernel: grid (batch, heads by warps, some of the queries at once).
template <class T, int kDim>
__device__ __forceinline__ void attention_paged_combine(const PagedParams& p) {
  ptx::griddepcontrol_wait();  // for the splits
  const int sequence = blockIdx.x;
  const int head = blockIdx.y * (kPagedCombineThreads / 32) + threadIdx.x / 32;
  const PagedSequence seq = p.sequences[sequence];
  if (seq.splits == 1 || head >= p.heads_q || p.sequences[p.batch].splits) return;
  for (int query = blockIdx.z; query < seq.len_q; query += gridDim.z) {
    combine_row<T, kDim>(seq, sequence, query, head, p);
  }
}

}  // namespace flashmoe::cuda
