// out[t] = sum over j of weight[t, j] * y[row of (t, j)], in fp32 and in the order of j, so that
// bits repeat. Also the sum of dX over a token's pairs, without weights. Bound by memory: it reads
// T k d numbers and writes T d.
//
// A CTA takes as many tokens as have threads for all their chunks of 16 bytes, at least one.
#pragma once

#include "cuda/moe/experts.cuh"
#include "cuda/tile/chunk.cuh"

namespace flashmoe::cuda::moe {

template <class T>
__device__ __forceinline__ void moe_combine(const CombineParams& p) {
  constexpr int kAtOnce = 4;  // rows on their way
  const int chunks = (p.width + 7) / 8;
  const int lanes = p.lanes, lane = threadIdx.x % lanes;
  const int64_t token = int64_t{blockIdx.x} * (kRowThreads / lanes) + threadIdx.x / lanes;
  if (token >= p.tokens) return;
  const int32_t* const row_of = p.row_of + token * p.top_k;
  if (p.only_absent && (p.top_k == 0 || row_of[0] >= 0)) return;
  const char* const rows = static_cast<const char*>(p.rows);
  for (int chunk = lane; chunk < chunks; chunk += lanes) {
    float sum[8] = {};
    for (int first = 0; first < p.top_k; first += kAtOnce) {
      uint4 y[kAtOnce];
      float weight[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int row = first + i < p.top_k ? row_of[first + i] : -1;
        y[i] = {0, 0, 0, 0};
        weight[i] = 0;
        if (row >= 0) {
          // Rows of the workspace have whole chunks.
          y[i] = *reinterpret_cast<const uint4*>(rows + row * p.row_bytes + chunk * 16);
          weight[i] = p.weights.data
                          ? p.weights.data[token * p.weights.row + (first + i) * p.weights.col]
                          : 1.f;
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        float x[8];
        unpack_chunk<T>(x, y[i]);
#pragma unroll
        for (int e = 0; e < 8; ++e) sum[e] += weight[i] * x[e];
      }
    }
    store_chunk<T>(static_cast<char*>(p.out) + token * p.out_row_bytes + chunk * 16, sum,
                   p.width - chunk * 8);
  }
}

}  // namespace flashmoe::cuda::moe
