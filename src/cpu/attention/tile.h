// What both passes do to tiles besides multiplying them: find a sequence's tensors, mask scores.
//
// Tiles of scores are kept transposed, keys x queries. Then keys and values are used as they lie in
// memory, only the queries are transposed, once per block; and a query's maximum and sum run down a
// column, one vector lane per query, without any horizontal step.
#pragma once

#include <cstdint>

#include "cpu/attention/kernels.h"
#include "cpu/tile.h"

namespace flashmoe::cpu {
namespace {

inline int64_t read_integer(const Operand& op, int64_t index) {
  return op.dtype == DType::kInt32 ? static_cast<const int32_t*>(op.data)[index]
                                   : static_cast<const int64_t*>(op.data)[index];
}

// One member of the batch: its lengths, and where its tokens begin in a ragged batch.
struct Sequence {
  int64_t batch = 0;
  int64_t rows = 0, keys = 0;            // dense: keys counts up to key_lengths
  int64_t all_keys = 0;                  // dense: Sk; results exist for all of them
  int64_t first_row = 0, first_key = 0;  // ragged only
};

inline int64_t lead_offset(const Geometry& g, const int64_t* strides, int64_t batch) {
  int64_t offset = 0;
  for (int i = g.num_lead - 1; i >= 0; --i) {
    if (g.lead[i] <= 1) continue;
    offset += batch % g.lead[i] * strides[i];
    batch /= g.lead[i];
  }
  return offset;
}

inline Sequence sequence(const Params& p, int64_t batch) {
  const Geometry& g = p.geometry;
  Sequence s;
  s.batch = batch;
  if (g.ragged) {
    s.first_row = read_integer(p.cu_seqlens_q, batch * p.cu_seqlens_q.row);
    s.first_key = read_integer(p.cu_seqlens_k, batch * p.cu_seqlens_k.row);
    s.rows = read_integer(p.cu_seqlens_q, (batch + 1) * p.cu_seqlens_q.row) - s.first_row;
    s.keys = read_integer(p.cu_seqlens_k, (batch + 1) * p.cu_seqlens_k.row) - s.first_key;
    s.all_keys = s.keys;
  } else {
    s.rows = g.len_q;
    s.all_keys = g.len_k;
    s.keys = p.key_lengths ? read_integer(p.key_lengths, lead_offset(g, p.key_lengths.lead, batch))
                           : g.len_k;
  }
  return s;
}

inline Matrix matrix(const Params& p, const Operand& op, int64_t batch, int64_t head,
                     int64_t first) {
  if (!op) return {};
  const int64_t offset = lead_offset(p.geometry, op.lead, batch) + head * op.head + first * op.row;
  return {static_cast<char*>(op.data) + offset * dtype_bytes(op.dtype), op.dtype, op.row, op.col};
}

// The bias or its gradient, rows x keys. A packed bias has its rows one after the other.
inline Matrix bias_matrix(const Params& p, const Operand& op, const Sequence& s, int64_t head) {
  if (!op || !p.geometry.ragged) return matrix(p, op, s.batch, head, 0);
  const int64_t offset = p.bias_offset[s.batch] * op.row + head * op.head;
  return {static_cast<char*>(op.data) + offset * dtype_bytes(op.dtype), op.dtype, s.keys * op.row,
          op.row};
}

// lse of a query in base 2, and what rounding took off it. A query that sees no key gets +inf,
// which makes every probability 0, and false is returned.
template <class A>
bool load_lse(const Matrix& lse, int64_t row, A* base2, A* rest) {
  A natural;
  load_row(lse.dtype, element(lse, row, 0), 1, 1, &natural);
  const double exact = natural * kLog2e;
  *base2 = natural == -kInf<A> ? kInf<A> : static_cast<A>(exact);
  *rest = natural == -kInf<A> ? 0 : static_cast<A>(exact - *base2);
  return natural != -kInf<A>;
}

// A number of one head, or `absent`.
template <class A>
A number_of_head(const Params& p, const Operand& numbers, int64_t head, A absent) {
  const Matrix m = matrix(p, numbers, 0, head, 0);
  if (m) load_row(m.dtype, m.data, 1, 1, &absent);
  return absent;
}

// The score that a head's sink adds to every softmax; -inf where there is none.
template <class A>
A sink_of(const Params& p, int64_t head) {
  return number_of_head(p, p.sinks, head, -kInf<A>);
}

// How it moves.
template <class A>
A sink_move_of(const Params& p, int64_t head) {
  return number_of_head(p, p.tangent_sinks, head, A(0));
}

// The queries of one block against the mask: each may see the keys [begin, end), both relative to
// the tile at hand, and both rising with the query.
template <class A>
struct Mask {
  Int<A>* begin;
  Int<A>* end;
};

// What a tile of scores needs.
enum class TileKind { kEmpty, kMasked, kFull };

inline KeyRange row_range(const Params& p, const Sequence& s, int64_t row) {
  return allowed_keys(row, s.rows, s.keys, p.geometry.left, p.geometry.right);
}

inline TileKind tile_kind(const Params& p, const Sequence& s, int64_t row, int64_t rows,
                          int64_t key, int64_t keys) {
  const KeyRange first = row_range(p, s, row), last = row_range(p, s, row + rows - 1);
  if (first.begin >= key + keys || last.end <= key) return TileKind::kEmpty;
  return last.begin <= key && first.end >= key + keys ? TileKind::kFull : TileKind::kMasked;
}

// A tile of several heads has so many columns for each row.
template <class A>
void set_mask(const Params& p, const Sequence& s, int64_t row, int64_t rows, int64_t padded,
              int64_t key, int64_t keys, const Mask<A>& mask, int64_t heads = 1) {
  for (int64_t i = 0; i < padded; ++i) {
    const KeyRange range = i < rows ? row_range(p, s, (row + i) / heads) : KeyRange{};
    mask.begin[i] = static_cast<Int<A>>(smaller(larger(range.begin - key, 0), keys));
    mask.end[i] = static_cast<Int<A>>(smaller(larger(range.end - key, 0), keys));
  }
}

// Scores of masked keys are -inf and their probability is a negative zero, which no exponential is.
// So a tile of probabilities still knows which of its zeros are masked, and which merely
// underflowed: a NaN in a value must reach the second kind and not the first.
template <class A>
inline bool is_masked(A probability) {
  return probability == 0 && __builtin_signbit(probability);
}

// n numbers of a bias, `stride` apart; where it is a boolean mask, 0 for true and -inf for false.
template <class A>
void load_bias_row(DType dtype, const char* from, int64_t stride, int64_t n, A* to) {
  if (dtype != DType::kBool) return load_row(dtype, from, stride, n, to);
  if (stride == 1) {  // a loop that compilers make vectors of
    for (int64_t i = 0; i < n; ++i) to[i] = from[i] ? A(0) : -kInf<A>;
    return;
  }
  for (int64_t i = 0; i < n; ++i) to[i] = from[i * stride] ? A(0) : -kInf<A>;
}

// bias (keys x queries, transposed like the scores) for one tile.
template <class A>
void load_bias_tile(const Matrix& bias, int64_t row, int64_t rows, int64_t key, int64_t keys,
                    A* line, A* tile, int64_t ld) {
  if (bias.row == 1) {  // a transposed bias already lies the way we want it
    for (int64_t j = 0; j < keys; ++j) {
      load_bias_row(bias.dtype, element(bias, row, key + j), 1, rows, tile + j * ld);
      for (int64_t i = rows; i < ld; ++i) tile[j * ld + i] = 0;
    }
    return;
  }
  for (int64_t i = 0; i < rows; ++i) {
    load_bias_row(bias.dtype, element(bias, row + i, key), bias.col, keys, line + i * keys);
  }
  transpose(line, keys, rows, keys, tile, ld);
}

}  // namespace
}  // namespace flashmoe::cpu
