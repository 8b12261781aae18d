// The kernel before the packed backward pass: the bounds of queries and of keys (row_bounds.cuh),
// and of every query LSE in base 2 and -delta = grad_lse - out.dO.
//
// The first CTAs find bounds, bounds_ctas for each side. The others go through rows of out and dO,
// bound by memory: 2 to 8 lanes share a row, and a warp has four tokens, so that it reads lines of
// 128 bytes (whole heads side by side where these are small) and writes sectors of 32.
#pragma once

#include "cuda/attention/sm90/bwd_preprocess.cuh"
#include "cuda/attention/sm90/packed_rows.cuh"
#include "cuda/attention/sm90/row_bounds.cuh"

namespace flashmoe::cuda::sm90 {

// By warp `warp` of `warps`. Rows after the last token, and heads of a box that there are not, have
// an LSE of infinity: no probability.
template <class T, bool kDense>
__device__ __forceinline__ void find_lse_delta(int warp, int warps, const Sm90PackedBwdParams& p) {
  // Groups of rows of a warp, and how many at once: registers are few.
  constexpr int kTokens = 4, kAtOnce = kDense ? 2 : 3;
  const int pitch = kDense ? p.pitch_q : 0;
  const int lanes = row_lanes(p.head_dim_v), heads = 8 / lanes;  // of a group
  const int lane = threadIdx.x % lanes, row = threadIdx.x % 32 / lanes;
  const int head_groups = (p.stored_heads + heads - 1) / heads;
  const int quads = static_cast<int>(p.rows) / kTokens;  // of tokens
  // The last token of all: where there is none, its rows are read and thrown away.
  const int last =
      kDense ? (p.batch - 1) * pitch + p.len_q - 1 : static_cast<int>(p.ragged.query.tokens) - 1;
  const auto row_of = [&](const void* tensor, const Strides& strides, const TokenPlace& at,
                          int head) {
    return static_cast<const char*>(tensor) + mapped_offset(strides, at, head, p) * T::kBytes;
  };
  // Which group is next: its tokens, and its heads, which are the faster index.
  int quad = warp / head_groups, of_quad = warp % head_groups;
  const int quad_step = warps / head_groups, of_quad_step = warps % head_groups;
#pragma unroll 1
  while (quad < quads) {
    int token[kAtOnce], head[kAtOnce];
    bool exists[kAtOnce];
    const char *out[kAtOnce], *grad_out[kAtOnce];
    float lse[kAtOnce], delta[kAtOnce] = {};
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      head[i] = of_quad * heads + row % heads;
      token[i] = quad * kTokens + row / heads;
      const int length = kDense ? p.len_q : last + 1;
      exists[i] = is_token(TokenPlace(token[i], pitch), length, p) && head[i] < p.heads_q;
      quad += quad_step;
      of_quad += of_quad_step;
      if (of_quad >= head_groups) {
        of_quad -= head_groups;
        ++quad;
      }
      const TokenPlace from(kDense ? (exists[i] ? token[i] : last) : min(token[i], last), pitch);
      const int from_head = min(head[i], p.heads_q - 1);
      out[i] = row_of(p.out, p.out_strides, from, from_head);
      grad_out[i] = row_of(p.grad_out, p.grad_out_strides, from, from_head);
      lse[i] = p.lse[token_offset(p.lse_strides, from, from_head, p)];
    }
    if (p.grad_out) row_products<T>(delta, out, grad_out, p.head_dim_v, lane, lanes);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      float2 result = {INFINITY, 0};
      if (exists[i]) {
        result.y = -delta[i];
        if (p.grad_lse) {
          const TokenPlace from(token[i], pitch);
          result.y += p.grad_lse[token_offset(p.grad_lse_strides, from, head[i], p)];
        }
        // A row that sees no key has probabilities 2^(s - inf) = 0.
        if (lse[i] != -INFINITY) result.x = lse[i] == INFINITY ? NAN : lse[i] * kLog2e;
      }
      const auto dO = [&] { return grad_out[i]; };
      if (is_far_and_unused<T>(lse[i], result.y, dO, p, lane, lanes) && exists[i]) {
        result.x = kLseOfNoWeight;
      }
      if (lane == 0 && head[i] < p.stored_heads && token[i] < p.rows) {
        reinterpret_cast<float2*>(p.lse_delta)[head[i] * p.rows + token[i]] = result;
      }
    }
  }
}

template <class T>
__device__ __forceinline__ void attention_bwd_packed_preprocess(const Sm90PackedBwdParams& p) {
  ptx::griddepcontrol_launch_dependents();
  if (blockIdx.x + threadIdx.x == 0) *p.tile_counter = 0;
  const int number = blockIdx.x - 2 * p.bounds_ctas;
  if (number < 0) {
    // Which side is told at compile time: a kernel of so many threads has few registers.
    if (blockIdx.x % 2) {
      const BoundsOf keys = {.keys = true,
                             .bounds = p.key_bounds,
                             .rows = p.key_side.rows,
                             .pairs = p.key_pairs,
                             .grad_bias = static_cast<uint16_t*>(p.grad_bias),
                             .grad_bias_pair = p.grad_bias_column,
                             .grad_bias_head = p.grad_bias_strides.head,
                             .heads = p.heads_q,
                             .nan = T::kNan};
      find_bounds(keys, blockIdx.x / 2, p.bounds_ctas, p);
    } else {
      const BoundsOf queries = {.keys = false,
                                .bounds = p.query_bounds,
                                .rows = p.query_side.rows,
                                .pairs = p.query_pairs};
      find_bounds(queries, blockIdx.x / 2, p.bounds_ctas, p);
    }
  } else {
    constexpr int kWarps = kRaggedThreads / 32;
    const int warp = number * kWarps + static_cast<int>(threadIdx.x) / 32;
    const int warps = (static_cast<int>(gridDim.x) - 2 * p.bounds_ctas) * kWarps;
    if (p.pitch_q) {
      find_lse_delta<T, true>(warp, warps, p);
    } else {
      find_lse_delta<T, false>(warp, warps, p);
    }
  }
}

}  // namespace flashmoe::cuda::sm90
