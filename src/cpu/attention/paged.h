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

// Where the rows of a block of keys, or of its values, begin: those of the first key head.
using PageRows = const char**;

template <class M>
struct PagedScratch {
  using A = typename M::A;
  using Element = typename M::Element;
  ForwardScratch<M> tile;
  int64_t ld_rows;                      // D or Dv, padded
  Element* gathered;                    // max(block_q, block_k) x ld_rows: queries, keys or values
  PageRows key_rows[2], value_rows[2];  // block_k each: of the block at hand, and of the next
  // What each key head of an item keeps from one block of keys to the next.
  int64_t query_bytes, columns;
  typename M::Narrow* narrow;  // (heads)
  char* queries;               // (heads) operands
  A* out;                      // (heads, columns, ld_out)
  A* maximum;                  // (heads, columns)
  A* sum;
  size_t bytes;

  PagedScratch(const Params& p, void* memory) : tile(p, memory) {
    const Geometry& g = p.geometry;
    Arena arena(memory);
    arena.take<char>(tile.bytes);
    ld_rows = round_up(larger(g.head_dim, g.head_dim_v), kLanes<A>);
    gathered = arena.take<Element>(larger(p.block_q, p.block_k) * ld_rows);
    for (int i = 0; i < 2; ++i) {
      key_rows[i] = arena.take<const char*>(p.block_k);
      value_rows[i] = arena.take<const char*>(p.block_k);
    }
    columns = round_up(smaller(p.block_q, kColumnsOfAllHeads), kLanes<A>);
    query_bytes = round_up(M::operand_bytes(columns, g.head_dim), 64);
    narrow = arena.take<typename M::Narrow>(g.heads_k);
    queries = arena.take<char>(g.heads_k * query_bytes);
    out = arena.take<A>(g.heads_k * columns * tile.ld_out);
    maximum = arena.take<A>(g.heads_k * columns);
    sum = arena.take<A>(g.heads_k * columns);
    bytes = arena.used();
  }

  // Of the n-th key head of an item that has all; one alone may have more columns.
  ForwardScratch<M> of_head(const PagedSequence& cut, int64_t n) const {
    ForwardScratch<M> t = tile;
    if (cut.heads == 1) return t;
    t.queries = queries + n * query_bytes;
    t.out = out + n * columns * tile.ld_out;
    t.maximum = maximum + n * columns;
    t.sum = sum + n * columns;
    return t;
  }

  Matrix rows() const { return {reinterpret_cast<char*>(gathered), kElementDType<M>, ld_rows, 1}; }
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
  const auto* const bytes = reinterpret_cast<const uint8_t*>(from);  // e4m3
  int64_t i = 0;
  for (; step == 1 && i + 2 * kLanes<float> <= n; i += 2 * kLanes<float>) {
    Vec<float> low, high;
    widen_e4m3(bytes + i, &low, &high);
    narrow_bf16(to + i, low);
    narrow_bf16(to + i + kLanes<float>, high);
  }
  for (; i < n; ++i) to[i] = to_bf16(from_e4m3(bytes[i * step]));
}
template <class A>
void bring_row(DType dtype, const char* from, int64_t step, int64_t n, A* to) {
  load_row(dtype, from, step, n, to);
}

// Looks up `keys` rows from `key` on.
inline void find_rows(const Params& p, const Operand& cache, int64_t sequence, int64_t key,
                      int64_t keys, PageRows rows) {
  const int64_t page = p.geometry.page, size = dtype_bytes(cache.dtype);
  for (int64_t done = 0; done < keys;) {
    const int64_t number = (key + done) / page;
    const int64_t block =
        read_integer(p.block_table, sequence * p.block_table.row + number * p.block_table.col);
    const char* const from = static_cast<const char*>(cache.data) + block * cache.lead[0] * size;
    for (int64_t row = key + done - number * page; row < page && done < keys; ++row) {
      rows[done++] = from + row * cache.row * size;
    }
  }
}

// Rows of a head, one under the other, as elements that M multiplies. What is wanted next is on its
// way meanwhile: rows of a page are too short, and too far apart, for the machine to see it coming.
template <class M>
Matrix bring_rows(const Operand& cache, int64_t head, PageRows rows, int64_t keys, PageRows next,
                  int64_t next_keys, int64_t dim, const PagedScratch<M>& t) {
  constexpr int64_t kLine = 64;
  const int64_t size = dtype_bytes(cache.dtype), offset = head * cache.head * size;
  const int64_t bytes = cache.col == 1 ? dim * size : 0;
  for (int64_t i = 0; i < keys; ++i) {
    bring_row(cache.dtype, rows[i] + offset, cache.col, dim, t.gathered + i * t.ld_rows);
    if (i >= next_keys) continue;
    for (int64_t b = 0; b < bytes; b += kLine) __builtin_prefetch(next[i] + offset + b, 0, 2);
  }
  return t.rows();
}

// A tile of queries of a key head, and the part of its keys that an item has.
struct PagedTile {
  const PagedSequence* cut;
  Sequence s;
  int64_t head_k;
  int64_t task;             // of the sequence
  int64_t column, columns;  // of all of its key head's
  int64_t row, rows;        // that these columns are of
  int64_t begin, end;       // keys

  int64_t row_of(int64_t c, int64_t group) const { return (column + c) / group; }
  int64_t head_of(int64_t c, int64_t group) const { return head_k * group + (column + c) % group; }
};

// The last sequence that begins at `index` or before: those without work begin where the next does.
inline const PagedSequence& sequence_at(const Params& p, int64_t index,
                                        int64_t PagedSequence::*first) {
  int64_t low = 0, high = p.sequence_count;  // in [low, high)
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (p.sequences[middle].*first <= index ? low : high) = middle;
  }
  return p.sequences[low];
}

inline PagedTile paged_tile(const Params& p, const PagedSequence& cut, int64_t tile, int64_t head_k,
                            int64_t part) {
  const int64_t group = p.geometry.group;
  PagedTile x;
  x.cut = &cut;
  x.s.batch = &cut - p.sequences;
  x.s.rows = cut.rows;
  x.s.keys = x.s.all_keys = cut.keys;
  x.s.first_row = cut.first_row;
  x.head_k = head_k;
  x.task = tile * p.geometry.heads_k + head_k;
  x.column = tile * cut.columns;
  x.columns = smaller(cut.columns, cut.rows * group - x.column);
  x.row = x.row_of(0, group);
  x.rows = x.row_of(x.columns - 1, group) + 1 - x.row;
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
    const RowEnd<A> end(maximum, sum, sink_of<A>(p, head));
    const A factor = end.factor * v_scale;
    for (int64_t d = 0; d < g.head_dim_v; ++d) line[d] = end.empty ? 0 : line[d] * factor;
    const Matrix out = matrix(p, p.out, 0, head, x.s.first_row);
    store_row(out.dtype, element(out, row, 0), out.col, g.head_dim_v, line);
    const Matrix lse = matrix(p, p.lse, 0, head, x.s.first_row);
    if (lse) store_row(lse.dtype, element(lse, row, 0), 1, 1, &end.lse);
  }
}

// The queries of a tile, one under the other.
template <class M>
Matrix bring_queries(const Params& p, const PagedTile& x, const PagedScratch<M>& scratch) {
  const Geometry& g = p.geometry;
  for (int64_t c = 0; c < x.columns; ++c) {
    const Matrix query = matrix(p, p.query, 0, x.head_of(c, g.group), x.s.first_row);
    bring_row(query.dtype, element(query, x.row_of(c, g.group), 0), query.col, g.head_dim,
              scratch.gathered + c * scratch.ld_rows);
  }
  return scratch.rows();
}

// A block of keys, and how many there are in the next.
struct KeyStep {
  int64_t key, keys, next_keys;
  int now;  // which of the lists of rows is its
};

// A block of keys against the queries of a tile.
template <class M>
void paged_block(const Params& p, const PagedTile& x, const typename M::Narrow& q,
                 const KeyStep& step, const ForwardScratch<M>& t, const PagedScratch<M>& scratch) {
  using A = typename M::A;
  Geometry g = p.geometry;
  g.scale *= scale_of(p.k_scale, x.head_k);
  const int64_t padded = round_up(x.columns, kLanes<A>);
  const auto& [key, keys, next_keys, now] = step;
  const bool masked = tile_kind(p, x.s, x.row, x.rows, key, keys) == TileKind::kMasked;
  if (masked) set_mask(p, x.s, x.column, x.columns, padded, key, keys, t.mask, g.group);
  const Matrix k = bring_rows(p.key, x.head_k, scratch.key_rows[now], keys,
                              scratch.key_rows[1 - now], next_keys, g.head_dim, scratch);
  M::multiply(M::rows(k, 0, keys, g.head_dim, t.keys), q, keys, padded, g.head_dim, t.scores, t.ld);
  const ScoreRule<A> rule(g, nullptr, masked ? &t.mask : nullptr, t.ld);
  const Matrix v = bring_rows(p.value, x.head_k, scratch.value_rows[now], keys,
                              scratch.value_rows[1 - now], next_keys, g.head_dim_v, scratch);
  forward_keys<M>(rule, x.columns, keys, v, 0, key == x.begin, g.head_dim_v, t);
}

// What an item has summed up, to where it belongs.
template <class M, class A = typename M::A>
void store_item(const Params& p, const PagedTile& x, int64_t part, const ForwardScratch<M>& t) {
  const Partial<A> all{t.out, t.ld_out, t.maximum, t.sum};
  if (x.cut->parts == 1) {
    store_parts<A>(
        p, x, 1, [&](int64_t) { return all; }, t.rows);
    return;
  }
  const Partial<A> to = partial_at<A>(p, x, part);
  for (int64_t c = 0; c < x.columns; ++c) {
    to.maximum[c] = all.maximum[c];
    to.sum[c] = all.sum[c];
    for (int64_t d = 0; d < p.geometry.head_dim_v; ++d) {
      to.out[c * to.ld + d] = all.out[c * all.ld + d];
    }
  }
}

// Work item: (sequence, tile, one or all key heads, part of the keys). Block by block, and within a
// block head by head: heads of a key mostly lie side by side. With 8 of them, 32768 keys in pages
// of 16 took 2.4 times as long head by head (one Neoverse V1 core, bf16): every head found its rows
// in other pages of virtual memory.
template <class M>
void paged(const Params& p, int64_t item, void* memory) {
  using A = typename M::A;
  const PagedScratch<M> scratch(p, memory);
  const PagedSequence& cut = sequence_at(p, item, &PagedSequence::first_item);
  const int64_t place = item - cut.first_item, part = place % cut.parts;
  const int64_t group = place / cut.parts, groups = p.geometry.heads_k / cut.heads;
  const int64_t tile = group / groups, head = group % groups * cut.heads;
  const auto for_each_head = [&](const auto& visit) {
    for (int64_t n = 0; n < cut.heads; ++n) {
      visit(paged_tile(p, cut, tile, head + n, part), scratch.narrow[n], scratch.of_head(cut, n));
    }
  };

  for_each_head([&](const PagedTile& x, typename M::Narrow& q, const ForwardScratch<M>& t) {
    q = M::narrow(bring_queries(p, x, scratch), 0, x.columns, p.geometry.head_dim, t.queries,
                  t.rows);
    for (int64_t i = 0; i < round_up(x.columns, kLanes<A>); ++i) {
      t.maximum[i] = -kInf<A>;
      t.sum[i] = 0;
    }
  });
  const PagedTile any = paged_tile(p, cut, tile, head, part);  // its keys are those of all heads
  const auto find_block = [&](int64_t key, int i) {
    const int64_t keys = larger(smaller(p.block_k, any.end - key), 0);
    find_rows(p, p.key, any.s.batch, key, keys, scratch.key_rows[i]);
    find_rows(p, p.value, any.s.batch, key, keys, scratch.value_rows[i]);
    return keys;
  };
  KeyStep step{any.begin, find_block(any.begin, 0), 0, 0};
  while (step.keys > 0) {
    step.next_keys = find_block(step.key + p.block_k, 1 - step.now);
    for_each_head([&](const PagedTile& x, const typename M::Narrow& q, const ForwardScratch<M>& t) {
      paged_block(p, x, q, step, t, scratch);
    });
    step = {step.key + p.block_k, step.next_keys, 0, 1 - step.now};
  }
  for_each_head([&](const PagedTile& x, const typename M::Narrow&, const ForwardScratch<M>& t) {
    store_item<M>(p, x, part, t);
  });
}

// Of a (sequence, tile, key head), where its keys came in parts.
template <class M>
void combine(const Params& p, int64_t task, void* memory) {
  using A = typename M::A;
  const PagedSequence& cut = sequence_at(p, task, &PagedSequence::first_task);
  if (cut.parts == 1) return;
  const int64_t place = task - cut.first_task, heads = p.geometry.heads_k;
  const PagedTile x = paged_tile(p, cut, place / heads, place % heads, 0);
  A* const line = PagedScratch<M>(p, memory).tile.rows;
  store_parts<A>(
      p, x, cut.parts, [&](int64_t n) { return partial_at<A>(p, x, n); }, line);
}

template <class M>
size_t paged_scratch(const Params& p) {
  return PagedScratch<M>(p, nullptr).bytes;
}

}  // namespace
}  // namespace flashmoe::cpu
