// A pair of a query and a key: its bias, its probability, and how its score moves.
#pragma once

#include "cuda/attention/second/tile.cuh"

namespace flashmoe::cuda::second {

// Numbers of pairs of one (batch, head): a bias, how it moves, or its gradient. A ragged batch has
// its pairs one after the other.
struct PairRows {
  char* data;  // of the first query and key; null: none
  int64_t row, column;
  bool is_fp32;
  bool is_mask;  // bytes, of which 0 hides the key

  template <class C>
  __device__ __forceinline__ void write(int64_t row_of, int64_t key, float x) const {
    write_number<C>(is_fp32, data, row_of * row + key * column, x);
  }
};
template <class C>
__device__ __forceinline__ PairRows find_pairs(const void* data, const Strides& strides,
                                               int64_t column, const AttentionSecondParams& p,
                                               const Sequence& seq, int batch, int head,
                                               bool is_mask = false) {
  PairRows rows;
  const int64_t where = p.blocks ? seq.pair * column : batch_offset(p, strides.batch, batch);
  const int bytes = is_mask ? 1 : p.bias_is_fp32 ? 4 : C::kBytes;
  rows.data =
      data ? static_cast<char*>(const_cast<void*>(data)) + (where + head * strides.head) * bytes
           : nullptr;
  rows.row = p.blocks ? seq.len_k * column : strides.row;
  rows.column = column;
  rows.is_fp32 = p.bias_is_fp32;
  rows.is_mask = is_mask;
  return rows;
}
template <class C>
__device__ __forceinline__ PairRows find_bias(const AttentionSecondParams& p, const Sequence& seq,
                                              int batch, int head) {
  return find_pairs<C>(p.bias, p.bias_strides, p.bias_column, p, seq, batch, head, p.bias_is_mask);
}
template <class C>
__device__ __forceinline__ PairRows find_bias_move(const AttentionSecondParams& p,
                                                   const Sequence& seq, int batch, int head) {
  return find_pairs<C>(p.tangent_bias, p.tangent_bias_strides, p.tangent_bias_column, p, seq, batch,
                       head);
}
template <class C>
__device__ __forceinline__ PairRows find_grad_bias(const AttentionSecondParams& p,
                                                   const Sequence& seq, int batch, int head) {
  return find_pairs<C>(p.grad_bias, p.grad_bias_strides, p.grad_bias_column, p, seq, batch, head);
}

// Where the tensors of one (batch, query head) begin. Kept in shared memory: in registers it would
// take a fifth of them.
struct Head {
  Inputs in;
  PairRows bias, bias_move, grad_bias;
  int64_t numbers;  // of the sequence's first row
};
static_assert(sizeof(Head) <= kSecondHeadBytes);
// Finds it, by one thread, between two barriers.
template <class C>
__device__ __forceinline__ const Head& find_head(char* shared, const AttentionSecondParams& p,
                                                 const Sequence& seq, int batch, int head) {
  Head& found = *reinterpret_cast<Head*>(shared + C::kHead);
  __syncthreads();  // everyone is done with the one before
  if (ptx::opaque_thread() == 0) {
    found.in = find_inputs<C>(p, seq, batch, head);
    found.bias = find_bias<C>(p, seq, batch, head);
    found.bias_move = find_bias_move<C>(p, seq, batch, head);
    found.grad_bias = find_grad_bias<C>(p, seq, batch, head);
    // Rows of a head are those of all sequences.
    found.numbers = head * p.rows_of_head + (p.blocks ? seq.token_q : int64_t{batch} * p.len_q);
  }
  __syncthreads();  // it is found
  return found;
}

// Which query and key of the tile a lane holds in element i of fragment n.
template <By kBy>
struct LanePair {
  int row, key;
  __device__ __forceinline__ LanePair(int n, int i) {
    const int lane = ptx::opaque_thread() % 32;
    const int own = warp_row() + lane / 4 + i / 2 * 8;
    const int other = warp_other() + 8 * n + lane % 4 * 2 + i % 2;
    row = kBy == By::kKeys ? other : own;
    key = kBy == By::kKeys ? own : other;
  }
};

// Reads what a lane holds of fragments [begin, begin + kCount) of the tile that begins at (row,
// key); 0 outside of the tensor, and where there is none. One branch for all numbers, so that the
// reads are on their way together.
template <class C, By kBy, int kCount>
__device__ __forceinline__ void read_pairs(float (&x)[kCount][4], const PairRows& from, int row,
                                           int key, const Sequence& seq, int begin = 0) {
  constexpr bool kByKeys = kBy == By::kKeys;
  set_zero(x);
  if (!from.data) return;
  const LanePair<kBy> at(begin, 0);
  const int rows = seq.len_q - row - at.row, keys = seq.len_k - key - at.key;  // from there on
  const int64_t first = (row + at.row) * from.row + (key + at.key) * from.column;
  const int64_t own_step = kByKeys ? from.column : from.row;
  const int64_t other_step = kByKeys ? from.row : from.column;
  const auto read_all = [&](const auto& read) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int own = i / 2 * 8, other = 8 * n + i % 2;
        const bool there = own < (kByKeys ? keys : rows) && other < (kByKeys ? rows : keys);
        if (there) x[n][i] = read(first + own * own_step + other * other_step);
      }
    }
  };
  if (from.is_mask) {
    read_all([&](int64_t i) { return from.data[i] ? 0.f : -INFINITY; });
  } else if (C::kFp32 || from.is_fp32) {
    read_all([&](int64_t i) { return read_element(Element::kFp32, from.data, i); });
  } else {
    read_all([&](int64_t i) { return read_element(C::kElement, from.data, i); });
  }
}

// Which of a lane's pairs of the tile that begins at (row, key) the mask leaves: bit 4 n + i.
template <By kBy>
__device__ __forceinline__ uint32_t visible_pairs(int row, int key, const Sequence& seq,
                                                  const AttentionSecondParams& p) {
  uint32_t visible = ~0u;
  const bool all = row + kRows <= seq.len_q && seq.begin(row + kRows - 1, p) <= key &&
                   key + kRows <= seq.end(row, p);
  if (all) return visible;
#pragma unroll
  for (int i = 0; i < kWarpRows / 2; ++i) {
    const LanePair<kBy> at(i / 4, i % 4);
    const int r = row + at.row, k = key + at.key;
    const bool seen = r < seq.len_q && k >= seq.begin(r, p) && k < seq.end(r, p);
    visible ^= seen ? 0u : 1u << i;
  }
  return visible;
}

// The score of a pair: its probability P, and how it moves. With a softcap it has a slope by
// scale * q.k, and that one a derivative of its own.
struct Score {
  bool seen;  // whether the row sees the key: neither the mask nor the bias hides it
  float probability;
  float move;         // of the score
  float slope, bend;  // bend: how the slope moves
};
__device__ __forceinline__ Score find_score(float product, float product_move, float bias,
                                            float bias_move, bool visible, float lse,
                                            const AttentionSecondParams& p) {
  Score s;
  const float scaled_move = product_move * p.scale;
  float score = product * p.scale;
  s.slope = 1;
  s.bend = 0;
  if (p.softcap_scale) {
    const Tanh capped = tanh_and_derivative(product * p.softcap_scale);
    score = capped.value * p.softcap;
    s.slope = capped.derivative;
    s.bend = -2 / p.softcap * capped.value * capped.derivative * scaled_move;
  }
  score += bias;
  s.seen = visible && bias != -INFINITY && score != -INFINITY;
  // The difference before the change of base: what rounding takes off is small then.
  s.probability = ptx::ex2_approx_ftz((score - lse) * kLog2e);
  s.move = scaled_move * s.slope + bias_move;
  return s;
}

// Loads the numbers of 32 rows of queries; of rows past the end any.
template <class C>
__device__ __forceinline__ void load_numbers(char* shared, int64_t first_row, int there,
                                             const AttentionSecondParams& p) {
  const int row = ptx::opaque_thread();
  if (row >= kRows) return;
  float4 numbers = {0, 0, 0, 0};
  if (row < there) numbers = reinterpret_cast<const float4*>(p.row_numbers)[first_row + row];
  reinterpret_cast<float4*>(shared + C::kNumbers)[row] = numbers;
}

// From the products of a tile to the weights of its gradients, by pairs:
//   move           Z = P ((dP - delta)(S' - lse') + dP' - out'.dO), which is the bias's gradient;
//                  then the gradient of scale * q.k: times the slope, and dS times its bend
//   gradient       dS = P (dP - delta), times the slope
//   gradient_move  Y = P (S' - lse')
// of fragment n. give_bias(i, z) gets the bias's gradient.
template <class C, By kBy, class GiveBias>
__device__ __forceinline__ void differentiate(Products& x, int n, const float (&bias)[4],
                                              const float (&bias_move)[4], uint32_t visible,
                                              const char* shared, const AttentionSecondParams& p,
                                              const GiveBias& give_bias) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const LanePair<kBy> at(n, i);
    const float4 numbers = reinterpret_cast<const float4*>(shared + C::kNumbers)[at.row];
    const float lse = numbers.x, delta = numbers.y, lse_move = numbers.z, mean = numbers.w;
    const Score s = find_score(x.score[n][i], x.move[n][i], bias[i], bias_move[i],
                               visible >> (4 * n + i) & 1, lse, p);
    const float centred = x.gradient[n][i] - delta, moved = s.move - lse_move;
    const float first = s.probability * centred;
    const float second = s.probability * (centred * moved + x.gradient_move[n][i] - mean);
    give_bias(i, s.seen ? second : 0.f);
    x.move[n][i] = weight_of(s.seen, second * s.slope + first * s.bend);
    x.gradient[n][i] = weight_of(s.seen, first * s.slope);
    x.gradient_move[n][i] = weight_of(s.seen, s.probability * moved);
  }
}

}  // namespace flashmoe::cuda::second
