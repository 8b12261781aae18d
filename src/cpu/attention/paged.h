// Forward pass over the pages of a cache: one part of the keys of a tile at a time.
//
//   pages ── bring_rows ──> K, V (keys x D) ──> S^T ── softmax_step ──> P^T ── accumulate ──> O
//
// A block of keys is brought together from its pages (and from e4m3) where it does not lie in one,
// and never more than a block. The rest is the forward pass of fwd.h, but that one pass over the
// keys serves all query heads that share them.
#pragma once

#include "cpu/attention/fwd.h"

namespace flashmoe::cpu {
namespace {

// What kernels multiply: numbers of a cache are converted to it on their way out of the pages.
template <class M>
constexpr DType kElementDType = sizeof(typename M::Element) == 2 ? DType::kBFloat16
                                                                 : kDTypeOf<typename M::A>;

template <class M>
struct PagedScratch : ForwardScratch<M> {
  using Element = typename M::Element;
  int64_t ld_rows;    // D or Dv, padded
  Element* gathered;  // max(block_q, block_k) x ld_rows: queries, keys or values

  PagedScratch(const Params& p, void* memory) : ForwardScratch<M>(p, memory) {
    Arena arena(memory);
    arena.take<char>(this->bytes);
    ld_rows = round_up(larger(p.geometry.head_dim, p.geometry.head_dim_v), kLanes<typename M::A>);
    gathered = arena.take<Element>(larger(p.block_q, p.block_k) * ld_rows);
    this->bytes = arena.used();
  }

  Matrix gathered_rows() const {
    return {reinterpret_cast<char*>(gathered), kElementDType<M>, ld_rows, 1};
  }
};

// n numbers, `step` apart, as elements that M multiplies.
inline void bring_row(DType dtype, const char* from, int64_t step, int64_t n, uint16_t* to) {
  if (dtype == DType::kBFloat16) {
    if (step == 1) {
      __builtin_memcpy(to, from, n * sizeof(uint16_t));
      return;
    }
    for (int64_t i = 0; i < n; ++i) to[i] = reinterpret_cast<const uint16_t*>(from)[i * step];
    return;
  }
  constexpr int64_t kPart = 64;
  float line[kPart];
  for (int64_t i = 0; i < n; i += kPart) {
    const int64_t count = smaller(kPart, n - i);
    load_row(dtype, from + i * step * dtype_bytes(dtype), step, count, line);
    store_row(DType::kBFloat16, to + i, 1, count, line);
  }
}
template <class A>
void bring_row(DType dtype, const char* from, int64_t step, int64_t n, A* to) {
  load_row(dtype, from, step, n, to);
}

// Rows of the keys or values of a sequence, from `key` on: where they lie, if they are in one page
// and can be multiplied as they are.
template <class M>
Matrix bring_rows(const Params& p, const Operand& cache, int64_t sequence, int64_t head,
                  int64_t key, int64_t keys, int64_t dim, const PagedScratch<M>& t) {
  const int64_t page = p.geometry.page;
  for (int64_t done = 0; done < keys;) {
    const int64_t number = (key + done) / page, row = (key + done) % page;
    const int64_t rows = smaller(page - row, keys - done);
    const int64_t block =
        read_integer(p.block_table, sequence * p.block_table.row + number * p.block_table.col);
    char* const from =
        static_cast<char*>(cache.data) +
        (block * cache.lead[0] + row * cache.row + head * cache.head) * dtype_bytes(cache.dtype);
    if (rows == keys && cache.dtype == kElementDType<M>) {
      return {from, cache.dtype, cache.row, cache.col};
    }
    for (int64_t i = 0; i < rows; ++i) {
      bring_row(cache.dtype, from + i * cache.row * dtype_bytes(cache.dtype), cache.col, dim,
                t.gathered + (done + i) * t.ld_rows);
    }
    done += rows;
  }
  return t.gathered_rows();
}

// A tile of queries of a key head, and the part of its keys that an item has.
struct PagedTile {
  const PagedSequence* cut;
  Sequence s;
  int64_t head_k, part, task;
  int64_t column, columns;  // of all of its key head's
  int64_t row, rows;        // that these columns are of
  int64_t begin, end;       // keys

  int64_t row_of(int64_t c, int64_t group) const { return (column + c) / group; }
  int64_t head_of(int64_t c, int64_t group) const { return head_k * group + (column + c) % group; }
};

// The last sequence that begins at `index` or before: those without work begin where the next does.
inline const PagedSequence& sequence_at(const Params& p, int64_t index,
                                        int64_t PagedSequence::*first) {
  int64_t low = 0, high = p.geometry.batch;  // in [low, high)
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (p.sequences[middle].*first <= index ? low : high) = middle;
  }
  return p.sequences[low];
}

inline PagedTile paged_tile(const Params& p, const PagedSequence& cut, int64_t task, int64_t part) {
  const Geometry& g = p.geometry;
  PagedTile x;
  x.cut = &cut;
  x.s.batch = &cut - p.sequences;
  x.s.rows = cut.rows;
  x.s.keys = x.s.all_keys = cut.keys;
  x.s.first_row = cut.first_row;
  x.head_k = task % g.heads_k;
  x.part = part;
  x.task = task;
  x.column = task / g.heads_k * cut.columns;
  x.columns = smaller(cut.columns, cut.rows * g.group - x.column);
  x.row = x.row_of(0, g.group);
  x.rows = x.row_of(x.columns - 1, g.group) + 1 - x.row;
  const int64_t first = row_range(p, x.s, x.row).begin;
  const int64_t last = row_range(p, x.s, x.row + x.rows - 1).end;
  // Whole blocks: the last parts may have none.
  const int64_t blocks = (larger(last - first, 0) + p.block_k - 1) / p.block_k;
  const int64_t step = (blocks + cut.parts - 1) / cut.parts * p.block_k;
  x.begin = smaller(first + part * step, last);
  x.end = smaller(x.begin + step, last);
  return x;
}

// A number for each key head; 1 where there is none.
inline float scale_of(const Operand& op, int64_t head) {
  return op ? static_cast<const float*>(op.data)[head * op.head] : 1;
}

// The sums of one part of the keys: out (columns x ld), not yet divided.
template <class A>
struct Partial {
  A* out;
  int64_t ld;
  A* maximum;
  A* sum;
};

template <class A>
Partial<A> partial_at(const Params& p, const PagedTile& x, int64_t part) {
  const int64_t columns = x.cut->columns;
  A* const at = static_cast<A*>(p.partial) + x.cut->first_partial +
                (x.task * x.cut->parts + part) * columns * (p.partial_ld + 2);
  A* const maximum = at + columns * p.partial_ld;
  return {at, p.partial_ld, maximum, maximum + columns};
}

// Adds up the parts, in their order, and stores the tile. part(n) is the n-th; `line` has room for
// Dv, padded.
template <class A, class Part>
void store_parts(const Params& p, const PagedTile& x, int64_t parts, const Part& part, A* line) {
  const Geometry& g = p.geometry;
  const A v_scale = scale_of(p.v_scale, x.head_k);
  for (int64_t c = 0; c < x.columns; ++c) {
    const int64_t head = x.head_of(c, g.group), row = x.row_of(c, g.group);
    A maximum = -kInf<A>, sum = 0;
    for (int64_t n = 0; n < parts; ++n) {
      const Partial<A> one = part(n);
      if (one.maximum[c] > maximum) maximum = one.maximum[c];
    }
    for (int64_t d = 0; d < g.head_dim_v; ++d) line[d] = 0;
    for (int64_t n = 0; n < parts; ++n) {
      const Partial<A> one = part(n);
      if (one.sum[c] == 0) continue;  // it saw no key
      const A weight = parts == 1 ? 1 : static_cast<A>(__builtin_exp2(one.maximum[c] - maximum));
      sum += one.sum[c] * weight;
      const A* const from = one.out + c * one.ld;
      for (int64_t d = 0; d < g.head_dim_v; ++d) line[d] += from[d] * weight;
    }
    const bool empty = sum == 0;  // no key allowed; a NaN is not empty
    const A inverse = empty ? 0 : 1 / sum;
    for (int64_t d = 0; d < g.head_dim_v; ++d) line[d] = empty ? 0 : line[d] * inverse * v_scale;
    const Matrix out = matrix(p, p.out, 0, head, x.s.first_row);
    store_row(out.dtype, element(out, row, 0), out.col, g.head_dim_v, line);
    const Matrix lse = matrix(p, p.lse, 0, head, x.s.first_row);
    if (!lse) continue;
    const double log_sum = maximum * kLn2 + __builtin_log(static_cast<double>(sum));
    const A value = empty ? -kInf<A> : static_cast<A>(sum != sum ? sum : log_sum);
    store_row(lse.dtype, element(lse, row, 0), 1, 1, &value);
  }
}

// The queries of a tile, one under the other.
template <class M>
Matrix bring_queries(const Params& p, const PagedTile& x, const PagedScratch<M>& t) {
  const Geometry& g = p.geometry;
  for (int64_t c = 0; c < x.columns; ++c) {
    const Matrix query = matrix(p, p.query, 0, x.head_of(c, g.group), x.s.first_row);
    bring_row(query.dtype, element(query, x.row_of(c, g.group), 0), query.col, g.head_dim,
              t.gathered + c * t.ld_rows);
  }
  return t.gathered_rows();
}

// All keys of the item against its queries, which are an operand of M.
template <class M, class Queries>
void paged_keys(const Params& p, const PagedTile& x, const Queries& q, const PagedScratch<M>& t) {
  using A = typename M::A;
  Geometry g = p.geometry;
  g.scale *= scale_of(p.k_scale, x.head_k);
  const int64_t padded = round_up(x.columns, kLanes<A>);
  for (int64_t j = x.begin; j < x.end; j += p.block_k) {
    const int64_t keys = smaller(p.block_k, x.end - j);
    const bool masked = tile_kind(p, x.s, x.row, x.rows, j, keys) == TileKind::kMasked;
    if (masked) {
      set_mask(p, x.s, x.column, x.columns, padded, j, keys, t.mask, g.group);
    }
    const Matrix key = bring_rows(p, p.key, x.s.batch, x.head_k, j, keys, g.head_dim, t);
    const auto k = M::rows(key, 0, keys, g.head_dim, t.keys);
    M::multiply(k, q, keys, padded, g.head_dim, t.scores, t.ld, false);
    const ScoreRule<A> rule(g, nullptr, masked ? &t.mask : nullptr, t.ld);
    const Matrix value = bring_rows(p, p.value, x.s.batch, x.head_k, j, keys, g.head_dim_v, t);
    forward_keys<M>(rule, x.columns, keys, value, 0, j == x.begin, g.head_dim_v, t);
  }
}

// Work item: (sequence, tile, key head, part of the keys).
template <class M>
void paged(const Params& p, int64_t item, void* scratch) {
  using A = typename M::A;
  const int64_t head_dim = p.geometry.head_dim;
  const PagedScratch<M> t(p, scratch);
  const PagedSequence& cut = sequence_at(p, item, &PagedSequence::first_item);
  const int64_t place = item - cut.first_item;
  const PagedTile x = paged_tile(p, cut, place / cut.parts, place % cut.parts);
  for (int64_t i = 0; i < round_up(x.columns, kLanes<A>); ++i) {
    t.maximum[i] = -kInf<A>;
    t.sum[i] = 0;
  }
  const Matrix query = bring_queries(p, x, t);
  if (x.columns <= M::kFewColumns) {
    if constexpr (M::kFewColumns > 0) {
      paged_keys<M>(p, x, M::few(query, 0, x.columns, head_dim, t.queries), t);
    }
  } else {
    paged_keys<M>(p, x, M::transposed(query, 0, x.columns, head_dim, t.queries, t.rows), t);
  }
  const Partial<A> all{t.out, t.ld_out, t.maximum, t.sum};
  if (cut.parts == 1) {
    store_parts<A>(
        p, x, 1, [&](int64_t) { return all; }, t.rows);
    return;
  }
  const Partial<A> to = partial_at<A>(p, x, x.part);
  for (int64_t c = 0; c < x.columns; ++c) {
    to.maximum[c] = all.maximum[c];
    to.sum[c] = all.sum[c];
    for (int64_t d = 0; d < p.geometry.head_dim_v; ++d) {
      to.out[c * to.ld + d] = all.out[c * all.ld + d];
    }
  }
}

// Of a (sequence, tile, key head), where its keys came in parts.
template <class M>
void combine(const Params& p, int64_t task, void* scratch) {
  using A = typename M::A;
  const PagedSequence& cut = sequence_at(p, task, &PagedSequence::first_task);
  if (cut.parts == 1) return;
  const PagedTile x = paged_tile(p, cut, task - cut.first_task, 0);
  const PagedScratch<M> t(p, scratch);
  store_parts<A>(
      p, x, cut.parts, [&](int64_t n) { return partial_at<A>(p, x, n); }, t.rows);
}

template <class M>
size_t paged_scratch(const Params& p) {
  return PagedScratch<M>(p, nullptr).bytes;
}

}  // namespace
}  // namespace flashmoe::cpu
