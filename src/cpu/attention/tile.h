// What both passes do to tiles besides multiplying them: find a sequence's tensors, bring rows of
// any dtype and stride into scratch and back, mask scores.
//
// Tiles of scores are kept transposed, keys x queries. Then keys and values are used as they lie in
// memory, only the queries are transposed, once per block; and a query's maximum and sum run down a
// column, one vector lane per query, without any horizontal step.
#pragma once

#include <cstdint>

#include "cpu/attention/kernels.h"
#include "cpu/simd.h"

namespace flashmoe::cpu {
namespace {

constexpr int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// Of a product, whose operands need not be packed alike.
enum class Side { kLeft, kRight };

// Hands out pieces of a work item's scratch, 64-byte aligned. With no memory behind it, it counts.
class Arena {
 public:
  explicit Arena(void* memory) : memory_(static_cast<char*>(memory)) {}
  template <class T>
  T* take(int64_t count) {
    char* piece = memory_ + used_;
    used_ += round_up(count * static_cast<int64_t>(sizeof(T)), 64);
    return reinterpret_cast<T*>(piece);
  }
  size_t used() const { return static_cast<size_t>(used_); }

 private:
  char* memory_;
  int64_t used_ = 0;
};

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

// A matrix of one (batch, head): element (i, j) at data + i * row + j * col elements.
struct Matrix {
  char* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t row = 0, col = 0;

  explicit operator bool() const { return data != nullptr; }
};

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

inline char* element(const Matrix& m, int64_t row, int64_t col) {
  return m.data + (row * m.row + col * m.col) * dtype_bytes(m.dtype);
}

// n elements of any float dtype, `stride` apart, to accumulators.
template <class A>
void load_row(DType dtype, const void* source, int64_t stride, int64_t n, A* to) {
  int64_t i = 0;
  const auto* half = static_cast<const uint16_t*>(source);
  switch (dtype) {
    case DType::kBFloat16:
      if constexpr (sizeof(A) == sizeof(float)) {
        if (stride == 1) {
          for (; i + kLanes<A> <= n; i += kLanes<A>) store(to + i, widen_bf16(half + i));
        }
      }
      for (; i < n; ++i) to[i] = from_bf16(half[i * stride]);
      return;
    case DType::kFloat16:
      if constexpr (sizeof(A) == sizeof(float)) {
        if (stride == 1) {
          for (; i + kLanes<A> <= n; i += kLanes<A>) store(to + i, widen_fp16(half + i));
        }
      }
      for (; i < n; ++i) to[i] = from_fp16(half[i * stride]);
      return;
    case DType::kFloat64:
      for (; i < n; ++i) to[i] = static_cast<A>(static_cast<const double*>(source)[i * stride]);
      return;
    default:
      for (; i < n; ++i) to[i] = static_cast<A>(static_cast<const float*>(source)[i * stride]);
      return;
  }
}

template <class A>
void store_row(DType dtype, void* target, int64_t stride, int64_t n, const A* from) {
  int64_t i = 0;
  auto* half = static_cast<uint16_t*>(target);
  switch (dtype) {
    case DType::kBFloat16:
      if constexpr (sizeof(A) == sizeof(float)) {
        if (stride == 1) {
          for (; i + kLanes<A> <= n; i += kLanes<A>) narrow_bf16(half + i, load<Vec<A>>(from + i));
        }
      }
      for (; i < n; ++i) half[i * stride] = to_bf16(static_cast<float>(from[i]));
      return;
    case DType::kFloat16:
      if constexpr (sizeof(A) == sizeof(float)) {
        if (stride == 1) {
          for (; i + kLanes<A> <= n; i += kLanes<A>) narrow_fp16(half + i, load<Vec<A>>(from + i));
        }
      }
      for (; i < n; ++i) half[i * stride] = to_fp16(static_cast<float>(from[i]));
      return;
    case DType::kFloat64:
      for (; i < n; ++i) static_cast<double*>(target)[i * stride] = from[i];
      return;
    default:
      for (; i < n; ++i) static_cast<float*>(target)[i * stride] = static_cast<float>(from[i]);
      return;
  }
}

template <class A>
constexpr DType kDTypeOf = sizeof(A) == sizeof(double) ? DType::kFloat64 : DType::kFloat32;

// Rows of a tensor as accumulators, padded to whole vectors with zeros.
template <class A>
struct Block {
  const A* data;
  int64_t ld;
};

// Used where it lies if it can be; otherwise brought to `scratch`, which holds rows x
// round_up(cols).
template <class A>
Block<A> load_block(const Matrix& m, int64_t first, int64_t rows, int64_t cols, A* scratch) {
  if (m.dtype == kDTypeOf<A> && m.col == 1 && cols % kLanes<A> == 0) {
    return {reinterpret_cast<const A*>(element(m, first, 0)), m.row};
  }
  const int64_t ld = round_up(cols, kLanes<A>);
  for (int64_t i = 0; i < rows; ++i) {
    A* to = scratch + i * ld;
    load_row(m.dtype, element(m, first + i, 0), m.col, cols, to);
    for (int64_t j = cols; j < ld; ++j) to[j] = 0;
  }
  return {scratch, ld};
}

// to (cols x ld) = from^T (rows x cols), zeros in the columns past `rows`. Written a few source
// rows at a time, so that each line of the target is filled while it is at hand.
template <class A>
void transpose(const A* from, int64_t from_ld, int64_t rows, int64_t cols, A* to, int64_t ld) {
  constexpr int64_t kStrip = 8;
  for (int64_t i0 = 0; i0 < rows; i0 += kStrip) {
    const int64_t strip = smaller(kStrip, rows - i0);
    for (int64_t j = 0; j < cols; ++j) {
      for (int64_t i = 0; i < strip; ++i) to[j * ld + i0 + i] = from[(i0 + i) * from_ld + j];
    }
  }
  for (int64_t j = 0; j < cols; ++j) {
    for (int64_t i = rows; i < ld; ++i) to[j * ld + i] = 0;
  }
}

template <class A>
bool is_finite(A x) {
  return x * 0 == 0;
}

template <class A>
bool all_finite(const Block<A>& block, int64_t rows, int64_t cols) {
  Vec<A> sum = {};  // x * 0 is 0 for a finite x and NaN for any other
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; j += kLanes<A>) {
      sum += load<Vec<A>>(block.data + i * block.ld + j) * A(0);
    }
  }
  for (int i = 0; i < kLanes<A>; ++i) {
    if (sum[i] != 0) return false;
  }
  return true;
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

template <class A>
void set_mask(const Params& p, const Sequence& s, int64_t row, int64_t rows, int64_t padded,
              int64_t key, int64_t keys, const Mask<A>& mask) {
  for (int64_t i = 0; i < padded; ++i) {
    const KeyRange range = i < rows ? row_range(p, s, row + i) : KeyRange{};
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

// bias (keys x queries, transposed like the scores) for one tile.
template <class A>
void load_bias_tile(const Matrix& bias, int64_t row, int64_t rows, int64_t key, int64_t keys,
                    A* line, A* tile, int64_t ld) {
  if (bias.row == 1) {  // a transposed bias already lies the way we want it
    for (int64_t j = 0; j < keys; ++j) {
      load_row(bias.dtype, element(bias, row, key + j), 1, rows, tile + j * ld);
      for (int64_t i = rows; i < ld; ++i) tile[j * ld + i] = 0;
    }
    return;
  }
  for (int64_t i = 0; i < rows; ++i) {
    load_row(bias.dtype, element(bias, row + i, key), bias.col, keys, line + i * keys);
  }
  transpose(line, keys, rows, keys, tile, ld);
}

}  // namespace
}  // namespace flashmoe::cpu
