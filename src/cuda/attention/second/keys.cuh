// Second derivatives by tiles of keys, over all queries that see them and all heads that share
// them: dK = scale (Z^T Q + dS^T Q'), dV = Y^T dO, and Z as the gradient of a bias that no others
// share.
#pragma once

#include "cuda/attention/second/pairs.cuh"

namespace flashmoe::cuda::second {

// The queries [begin, end) that see some of the keys [first, last].
struct QueryRange {
  int begin = 0, end = 0;
  __device__ __forceinline__ QueryRange(int first, int last, const Sequence& seq,
                                        const AttentionParams& p) {
    if (first > last) return;
    begin = static_cast<int>(max(int64_t{first} - seq.shift - p.right, int64_t{0}));
    end = static_cast<int>(
        min(int64_t{last} - seq.shift + p.left + 1, static_cast<int64_t>(seq.len_q)));
    begin = min(begin, seq.len_q) / kRows * kRows;
  }
};

// Sets the bias's gradient of the tile's keys for queries outside of `seen`.
template <class C>
__device__ __forceinline__ void fill_grad_bias(const PairRows& grad, const QueryRange& seen,
                                               int first, int keys, float value,
                                               const Sequence& seq) {
  for (int row = 0; row < seq.len_q; ++row) {
    if (row == seen.begin && seen.begin < seen.end) row = seen.end;
    if (row >= seq.len_q) return;
    for (int key = ptx::opaque_thread(); key < keys; key += kThreads) {
      grad.template write<C>(row, first + key, value);
    }
  }
}

// Results of a tile whose lengths are wrong, or of tokens after the last sequence.
template <class C>
__device__ __forceinline__ void fill_keys(const Place& place, int stored, float value,
                                          const AttentionSecondParams& p) {
  const Sequence& seq = place.seq;
  const int first = place.first, end = min(first + kRows, stored);
  const auto fill = [&](void* gradient, const Strides& strides, int dim) {
    if (!gradient || place.chunk * kColumns >= dim) return;
    fill_chunk<C>(rows_of<C::kBytes>(gradient, p, strides, place.batch, place.head, seq.token_k),
                  strides, first, end, place.chunk, dim, value);
  };
  fill(p.grad_key, p.grad_key_strides, p.head_dim);
  fill(p.grad_value, p.grad_value_strides, p.head_dim_v);
  if (!p.grad_bias || place.chunk > 0) return;
  for (int head = place.head * p.group; head < (place.head + 1) * p.group; ++head) {
    const PairRows grad = find_grad_bias<C>(p, seq, place.batch, head);
    if (!p.blocks) {
      fill_grad_bias<C>(grad, QueryRange(1, 0, seq, p), first, end - first, value, seq);
      continue;
    }
    for (int64_t i = ptx::opaque_thread(); i < seq.token_q; i += kThreads)
      grad.template write<C>(0, i, value);
  }
}

template <class C>
__device__ __forceinline__ void attention_second_keys(const AttentionSecondParams& p) {
  extern __shared__ __align__(1024) char shared[];
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const int chunks = max(chunks_of(p.head_dim), chunks_of(p.head_dim_v));
  const Place place = find_place(p, p.blocks, p.heads_q / p.group, chunks);
  if (place.kind == RaggedKind::kEmpty) return;
  const Sequence& seq = place.seq;
  const int chunk = place.chunk, first = place.first;
  const int stored = p.blocks ? seq.len_k : p.len_k;  // keys that gradients have
  if (place.kind != RaggedKind::kBlock) {
    fill_keys<C>(place, stored, place.kind == RaggedKind::kRest ? 0.f : NAN, p);
    return;
  }
  const bool wants_key = p.grad_key && chunk * kColumns < p.head_dim;
  const bool wants_value = p.grad_value && chunk * kColumns < p.head_dim_v;
  const bool wants_bias = p.grad_bias && chunk == 0;
  if (!wants_key && !wants_value && !wants_bias) return;
  const int columns = min(p.head_dim - chunk * kColumns, kColumns);
  const int value_columns = min(p.head_dim_v - chunk * kColumns, kColumns);
  const QueryRange range(first, min(first + kRows, seq.len_k) - 1, seq, p);
  HalfSums key_results, value_results;
  bool guarded = false;
  // Where something is not finite, once more and guarded.
#pragma unroll 1
  while (true) {
    Sums key_sums, value_sums;
    set_zero(key_sums);
    set_zero(value_sums);
    bool own_there = false;
#pragma unroll 1
    for (int head = place.head * p.group; head < (place.head + 1) * p.group; ++head) {
      const Head& h = find_head<C>(shared, p, seq, place.batch, head);
      if (wants_bias) {
        fill_grad_bias<C>(h.grad_bias, range, first, min(kRows, stored - first), 0, seq);
      }
#pragma unroll 1
      for (int row = range.begin; row < range.end; row += kRows) {
        Products x;
        find_products<C, By::kKeys>(x, smem, h.in, row, first, chunk, own_there, seq, p, [&] {
          load_numbers<C>(shared, h.numbers + row, seq.len_q - row, p);
        });
        own_there = true;
        const uint32_t visible = visible_pairs<By::kKeys>(row, first, seq, p);
#pragma unroll
        for (int n = 0; n < kWarpRows / 8; ++n) {
          float rBias[1][4], rBiasMove[1][4];
          read_pairs<C, By::kKeys>(rBias, h.bias, row, first, seq, n);
          read_pairs<C, By::kKeys>(rBiasMove, h.bias_move, row, first, seq, n);
          differentiate<C, By::kKeys>(
              x, n, rBias[0], rBiasMove[0], visible, shared, p, [&](int i, float z) {
                const LanePair<By::kKeys> at(n, i);
                if (!wants_bias || row + at.row >= seq.len_q || first + at.key >= stored) return;
                h.grad_bias.template write<C>(row + at.row, first + at.key, z);
              });
        }
        if (wants_key) {
          add_rows<C>(key_sums, x.move, smem + C::kQuery, columns, guarded);
          if (h.in.query_move) {
            add_rows<C>(key_sums, x.gradient, smem + C::kQueryMove, columns, guarded);
          }
        }
        if (wants_value && h.in.grad_out) {
          add_rows<C>(value_sums, x.gradient_move, smem + C::kGradOut, value_columns, guarded);
        }
      }
    }
    add_up(key_results, key_sums, shared);
    add_up(value_results, value_sums, shared);
    const bool finite = all_finite(key_results) && all_finite(value_results);
    if (guarded || !__syncthreads_or(!finite)) break;
    guarded = true;
  }
  const auto store = [&](const HalfSums& sums, float scale, void* gradient, const Strides& strides,
                         int dim) {
    const char* to = rows_of<C::kBytes>(gradient, p, strides, place.batch, place.head, seq.token_k);
    store_sums<C>(sums, scale, to, strides, first, min(first + kRows, stored), chunk, dim);
  };
  if (wants_key) store(key_results, p.scale, p.grad_key, p.grad_key_strides, p.head_dim);
  if (wants_value) store(value_results, 1.f, p.grad_value, p.grad_value_strides, p.head_dim_v);
}

}  // namespace flashmoe::cuda::second
