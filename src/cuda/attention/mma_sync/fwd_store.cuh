// The end of the forward pass: a row's accumulators and sums become its output and LSE.
#pragma once

#include "cuda/attention/mma_sync/fwd_tile.cuh"
#include "cuda/attention/softmax.cuh"

namespace flashmoe::cuda {

// The accumulators of one warp.
template <class C>
struct FwdState {
  uint32_t rQ[C::kRowTiles][C::kQSteps + 1][4];  // one more than used: no array of size 0
  float o[C::kRowTiles][C::kDimTiles][4];
  RowState rows[C::kRowTiles];
};

// Stores O / sum, and the LSE.
template <class C>
__device__ __forceinline__ void store_output(const FwdState<C>& t, uint32_t smem,
                                             const FwdTask& task, const AttentionFwdParams& p) {
  const Sequence& seq = task.seq;
  const int lane = threadIdx.x % 32;
  float* gLse =
      p.lse ? p.lse + offset(p, p.lse_strides, task.batch, task.head, seq.token_q) : nullptr;
  const auto inverse = [&](int m, int half) {
    const int r = task.first_row + warp_row<C>() + 16 * m + 8 * half + lane / 4;
    const float sink = sink_of<typename C::Type>(p, task.head, min(r, seq.len_q - 1));
    const RowEnd end = end_row(quad_sum(t.rows[m].sum[half]), t.rows[m].reference[half], sink);
    if (gLse && lane % 4 == 0 && r < seq.len_q) gLse[r * p.lse_strides.row] = end.lse;
    const float share = end.share * (1.f / end.sum);
    return C::kDropout ? share * p.kept_scale : share;
  };
  const char* gO = rows_of(p.out, p, p.out_strides, task.batch, task.head, seq.token_q);
  store_rows<C>(t.o, inverse, smem, const_cast<char*>(gO), p.out_strides, p.head_dim_v, task);
}

// Stores the result of one split, in fp32, where fwd_combine.cuh looks for it. The sink is left to
// that.
template <class C>
__device__ __forceinline__ void store_partial(FwdState<C>& t, const FwdTask& task,
                                              const AttentionFwdParams& p) {
  const int lane = threadIdx.x % 32;
  const int64_t first =
      ((int64_t{task.split} * p.batch + task.batch) * gridDim.y + task.head) * p.len_q;
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = quad_sum(t.rows[m].sum[half]);
      float inverse = sum == 0 ? 0.f : 1.f / sum;  // 0: no key allowed; a NaN is not 0
      if (C::kDropout) inverse *= p.kept_scale;
      const int r = task.first_row + warp_row<C>() + 16 * m + 8 * half + lane / 4;
      if (r >= task.seq.len_q) continue;
      float2* to = reinterpret_cast<float2*>(p.partial_out + (first + r) * C::kDim) + lane % 4;
#pragma unroll
      for (int d = 0; d < C::kDimTiles; ++d) {
        to[4 * d] = {t.o[m][d][2 * half] * inverse, t.o[m][d][2 * half + 1] * inverse};
      }
      if (lane % 4 == 0) {
        p.partial_lse[first + r] = sum == 0 ? -INFINITY : t.rows[m].reference[half] + __log2f(sum);
      }
    }
  }
}

// Sets the results of rows without keys to one value.
template <class C>
__device__ __forceinline__ void fill_output(const FwdTask& task, uint16_t out, float lse,
                                            const AttentionFwdParams& p) {
  const Sequence& seq = task.seq;
  const int end = min(task.first_row + C::kBlockQ, seq.len_q);
  const char* gO = rows_of(p.out, p, p.out_strides, task.batch, task.head, seq.token_q);
  fill_rows(const_cast<char*>(gO), p.out_strides.row_bytes(), task.first_row, end, p.head_dim_v,
            out);
  if (!p.lse) return;
  float* gLse = p.lse + offset(p, p.lse_strides, task.batch, task.head, seq.token_q);
  for (int row = task.first_row + threadIdx.x; row < end; row += C::kThreads) {
    gLse[row * p.lse_strides.row] = lse;
  }
}

}  // namespace flashmoe::cuda
