// Second derivatives by tiles of queries: dQ = scale (Z K + dS K'), over all keys that they see.
#pragma once

#include "cuda/attention/second/pairs.cuh"

namespace flashmoe::cuda::second {

template <class C>
__device__ __forceinline__ void attention_second_queries(const AttentionSecondParams& p) {
  extern __shared__ __align__(1024) char shared[];
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const Place place = find_place(p, p.query_blocks, p.heads_q, chunks_of(p.head_dim));
  const Sequence& seq = place.seq;
  if (place.kind == RaggedKind::kEmpty) return;
  const char* to = rows_of<C::kBytes>(p.grad_query, p, p.grad_query_strides, place.batch,
                                      place.head, seq.token_q);
  const int first = place.first, end = min(first + kRows, seq.len_q);
  if (place.kind != RaggedKind::kBlock) {
    fill_chunk<C>(to, p.grad_query_strides, first, end, place.chunk, p.head_dim,
                  place.kind == RaggedKind::kRest ? 0.f : NAN);
    return;
  }
  const Head& h = find_head<C>(shared, p, seq, place.batch, place.head);
  const int key_begin = seq.begin(first, p), key_end = seq.end(end - 1, p);
  const int columns = min(p.head_dim - place.chunk * kColumns, kColumns);
  HalfSums results;
  bool guarded = false;
  // Where something is not finite, once more and guarded.
#pragma unroll 1
  while (true) {
    Sums sums;
    set_zero(sums);
    bool own_there = false;
#pragma unroll 1
    for (int key = key_begin / kRows * kRows; key < key_end; key += kRows) {
      Products x;
      Pairs rBias, rBiasMove;
      // On their way while the products are made.
      read_pairs<C, By::kQueries>(rBias, h.bias, first, key, seq);
      read_pairs<C, By::kQueries>(rBiasMove, h.bias_move, first, key, seq);
      find_products<C, By::kQueries>(x, smem, h.in, first, key, place.chunk, own_there, seq, p,
                                     [&] {
                                       if (!own_there)
                                         load_numbers<C>(shared, h.numbers + first, end - first, p);
                                     });
      own_there = true;
      const uint32_t visible = visible_pairs<By::kQueries>(first, key, seq, p);
#pragma unroll
      for (int n = 0; n < kWarpRows / 8; ++n) {
        differentiate<C, By::kQueries>(x, n, rBias[n], rBiasMove[n], visible, shared, p,
                                       [](int, float) {});
      }
      add_rows<C>(sums, x.move, smem + C::kKey, columns, guarded);
      if (h.in.key_move) add_rows<C>(sums, x.gradient, smem + C::kKeyMove, columns, guarded);
    }
    add_up(results, sums, shared);
    if (guarded || !__syncthreads_or(!all_finite(results))) break;
    guarded = true;
  }
  store_sums<C>(results, p.scale, to, p.grad_query_strides, first, end, place.chunk, p.head_dim);
}

}  // namespace flashmoe::cuda::second
