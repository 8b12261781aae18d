// The small kernels around attention, which go row by row and are bound by memory: what the
// backward pass needs of each row, and the sum of a split forward pass.
#pragma once

#include "cuda/params.h"
#include "cuda/tile/dtype.cuh"
#include "cuda/tile/sequence.cuh"
#include "cuda/tile/softmax.cuh"

namespace flashmoe::cuda {

inline constexpr int kRowThreads = 128;
inline constexpr int kRowLanes = 8;  // threads of a row: 128 bytes at once

// The sum of the products of two rows, over the kRowLanes threads of the row.
template <class T>
__device__ __forceinline__ float row_product(const char* left, const char* right, int dim,
                                             int lane) {
  float sum = 0;
  for (int chunk = lane; chunk * 8 < dim; chunk += kRowLanes) {
    if (chunk * 8 + 8 <= dim) {
      const uint4 a = reinterpret_cast<const uint4*>(left)[chunk];
      const uint4 b = reinterpret_cast<const uint4*>(right)[chunk];
      const uint32_t as[4] = {a.x, a.y, a.z, a.w}, bs[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sum += T::unpack(as[i] & 0xffff) * T::unpack(bs[i] & 0xffff);
        sum += T::unpack(as[i] >> 16) * T::unpack(bs[i] >> 16);
      }
    } else {
      for (int i = chunk * 8; i < dim; ++i) {
        sum += T::unpack(reinterpret_cast<const uint16_t*>(left)[i]) *
               T::unpack(reinterpret_cast<const uint16_t*>(right)[i]);
      }
    }
  }
#pragma unroll
  for (int step = 1; step < kRowLanes; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  return sum;
}

// lse in base 2 and delta = out.dO - grad_lse of every row, and zeros where dQ will be summed. The
// grid is that of attention_bwd_finish: see find_query_rows().
template <class T>
__device__ __forceinline__ void attention_bwd_prepare(const AttentionBwdParams& p) {
  if (p.deterministic && blockIdx.x + blockIdx.y + blockIdx.z + threadIdx.x == 0) *p.tickets = 0;
  const auto [seq, kind, batch, head, first] = find_query_rows(p);
  if (kind != RaggedKind::kBlock || first >= seq.len_q) return;
  const int64_t sequence_row = workspace_row(p, seq, batch) + first;
  const int64_t block_row = head * p.rows + sequence_row;
  const int64_t round_row = head * p.sum_rows + sequence_row - round_rows(p);

  const char* gO = rows_of(p.out, p, p.out_strides, batch, head, seq.token_q);
  const char* gQ = rows_of(p.query, p, p.query_strides, batch, head, seq.token_q);
  const char* gdO = rows_of(p.grad_out, p, p.grad_out_strides, batch, head, seq.token_q);
  const float* lse = p.lse + offset(p, p.lse_strides, batch, head, seq.token_q);
  const float* grad_lse =
      p.grad_lse ? p.grad_lse + offset(p, p.grad_lse_strides, batch, head, seq.token_q) : nullptr;
  const int lane = threadIdx.x % kRowLanes;
#pragma unroll 2
  for (int r = threadIdx.x / kRowLanes; r < p.block_q; r += kRowThreads / kRowLanes) {
    const int64_t row = min(first + r, seq.len_q - 1);  // past the end, the last once more
    float delta = 0;
    if (p.grad_out) {
      delta = row_product<T>(gO + row * p.out_strides.row * 2,
                             gdO + row * p.grad_out_strides.row * 2, p.head_dim_v, lane);
    }
    if (grad_lse) delta -= grad_lse[row * p.grad_lse_strides.row];
    const float natural = lse[row * p.lse_strides.row];
    // A row that sees no key has probabilities 2^(s - inf) = 0. Where lse and delta would not show
    // that its Q is not finite, a NaN does.
    float2 terms = {natural == -INFINITY ? INFINITY : natural * kLog2e, delta};
    if (__any_sync(0xffffffffu, natural == -INFINITY)) {
      const char* q = gQ + row * p.query_strides.row * 2;
      const float square = row_product<T>(q, q, p.head_dim, lane);
      if (natural == -INFINITY && !(square < INFINITY)) terms.y = NAN;
    }
    if (natural == INFINITY) terms.y = NAN;
    if (first + r >= seq.len_q) terms = {INFINITY, 0};
    if (lane == 0) reinterpret_cast<float2*>(p.row_terms)[block_row + r] = terms;
  }
  if (!p.grad_query || writes_directly(seq, p)) return;
  float4* sums = reinterpret_cast<float4*>(p.grad_query_sums + round_row * p.dim);
  for (int i = threadIdx.x; i < p.block_q * p.dim / 4; i += kRowThreads) sums[i] = {0, 0, 0, 0};
  if (p.deterministic && threadIdx.x == 0) p.turns[round_row / p.block_q] = 0;
}

// The results of all splits as one: a CTA for each row, grid (len_q, heads, batch). Each warp goes
// over all of lse, a lane for a split. Of the outputs it has 32 columns at a time: eight lanes take
// four each, for a quarter of the splits.
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
  const float lse = sum == 0 ? -INFINITY : reference + __log2f(sum);
  if (p.lse && threadIdx.x == 0) {
    p.lse[offset(p, p.lse_strides, batch, head, 0) + row * p.lse_strides.row] =
        seq.valid ? lse * kLn2 : NAN;
  }

  const char* to = rows_of(p.out, p, p.out_strides, batch, head, 0) + row * p.out_strides.row * 2;
  for (int first = warp * 4 * kLanes; first < p.dim; first += kRowThreads) {
    const int column = first + lane % kLanes * 4;
    float value[4] = {0, 0, 0, 0};
#pragma unroll 8
    for (int s = lane / kLanes; s < p.splits; s += kQuarters) {
      const float part = lses[s * rows];
      // No key of this split was for the row, or a column past the last.
      if (part == -INFINITY || column >= p.dim) continue;
      const float4 x =
          *reinterpret_cast<const float4*>(p.partial_out + (s * rows + mine) * p.dim + column);
      const float weight = ptx::ex2_approx_ftz(part - lse);
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
      const uint16_t rounded = T::pack(seq.valid ? value[i] : NAN, 0) & 0xffff;
      reinterpret_cast<uint16_t*>(const_cast<char*>(to))[column + i] = rounded;
    }
  }
}

}  // namespace flashmoe::cuda
