// What the kernels of forward mode and second derivatives share: where a CTA's tile is, its tensors
// on their way to shared memory, and the products of queries and keys (docs/kernels/second.md).
//
//   own rows     32: 16 for each of two warps, whose scores and sums are in its registers
//   other rows   32: the side that the loop goes along
//   columns      chunks of 64; larger head dims are loaded chunk by chunk, once for each step
//
// A CTA's results have one chunk of columns. The chunk of the operands that these are multiplied
// from comes last, and stays in shared memory for it.
#pragma once

#include <type_traits>

#include "cuda/attention/score.cuh"
#include "cuda/attention/second/params.h"
#include "cuda/attention/sequence.cuh"
#include "cuda/attention/tiles.h"
#include "cuda/tile/float_product.cuh"
#include "cuda/tile/float_tile.cuh"

namespace flashmoe::cuda::second {

inline constexpr int kRows = kSecondRows, kColumns = kSecondColumns, kThreads = kSecondThreads;
using Tile = FloatTile<kColumns>;

// OneTf32 for right operands that come from 16 bits: TF32 holds every such number.
struct HalfTf32 {
  static constexpr int kSteps = OneTf32::kSteps;
  using Left = OneTf32::Left;
  struct Right {
    uint32_t x[2];

    __device__ __forceinline__ explicit Right(const float (&from)[2])
        : x{__float_as_uint(from[0]), __float_as_uint(from[1])} {}
    Right() = default;
  };
  template <bool>
  static __device__ __forceinline__ Left left(const float (&a)[4]) {
    return Left(a);
  }
  static __device__ __forceinline__ Right right(const float (&b)[2]) { return Right(b); }

  template <int kCount>
  static __device__ __forceinline__ void multiply(float (&acc)[4], const Left (&a)[kCount],
                                                  const Right (&b)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) ptx::mma_m16n8k8_tf32(acc, a[i].x, b[i].x, acc);
  }
};

// kTf32: whether the chip multiplies TF32.
template <class Chip_, bool kTf32, Element kElement_>
struct Config {
  using Chip = Chip_;
  static constexpr Element kElement = kElement_;
  static constexpr bool kFp32 = kElement == Element::kFp32;
  static constexpr int kBytes = kFp32 ? 4 : 2;
  static constexpr bool kFma = !kTf32;
  using Product = std::conditional_t<kFp32, ThreeTf32, HalfTf32>;
};

// A number of a tensor that is fp32, or of the inputs' dtype.
template <class C>
__device__ __forceinline__ float read_number(bool is_fp32, const void* data, int64_t index) {
  return is_fp32 ? read_element(Element::kFp32, data, index)
                 : read_element(C::kElement, data, index);
}
template <class C>
__device__ __forceinline__ void write_number(bool is_fp32, void* data, int64_t index, float x) {
  if (is_fp32) {
    write_element(Element::kFp32, data, index, x);
  } else {
    write_element(C::kElement, data, index, x);
  }
}

// second_chunks() on the device.
__device__ __forceinline__ int chunks_of(int head_dim) {
  return (head_dim + kColumns - 1) / kColumns;
}

// What a warp holds of its 16 rows: a number for each of the other rows, or for each column.
using Pairs = float[1][kRows / 8][4];
using Sums = float[kColumns / 8][4];

// Shared memory.
inline constexpr uint32_t kQuery = 0, kQueryMove = kSecondTileBytes, kKey = 2 * kSecondTileBytes,
                          kKeyMove = 3 * kSecondTileBytes, kValue = 4 * kSecondTileBytes,
                          kValueMove = 5 * kSecondTileBytes, kGradOut = 6 * kSecondTileBytes,
                          kNumbers = 7 * kSecondTileBytes,  // float4 of each row of queries
    kHead = kNumbers + kRows * 16;                          // Head

// The tile of a CTA.
struct Place {
  Sequence seq;
  RaggedKind kind;
  int batch, head;
  int first;  // row of the sequence
  int chunk;  // of the columns of its results
};
// The grid is (tiles x chunks, heads, batch); ragged (slots x heads, chunks).
__device__ __forceinline__ Place find_place(const AttentionSecondParams& p,
                                            const RaggedBlock* blocks, int heads, int chunks) {
  Place place;
  if (p.blocks) {
    const RaggedBlock block = blocks[blockIdx.x / heads];
    place.seq = find_sequence(block);
    place.kind = block.kind;
    place.batch = block.sequence;
    place.head = blockIdx.x % heads;
    place.first = block.block * kRows;
    place.chunk = blockIdx.y;
  } else {
    place.batch = p.first_batch + blockIdx.z;
    place.seq = find_sequence(p, place.batch);
    place.kind = place.seq.valid ? RaggedKind::kBlock : RaggedKind::kInvalid;
    place.head = blockIdx.y;
    place.first = blockIdx.x / chunks * kRows;
    place.chunk = blockIdx.x % chunks;
  }
  return place;
}

// The first rows of one sequence and head; null where there is no such tensor.
struct Inputs {
  const char *query, *query_move, *key, *key_move, *value, *value_move, *grad_out;
};
template <class C>
__device__ __forceinline__ Inputs find_inputs(const AttentionSecondParams& p, const Sequence& seq,
                                              int batch, int head) {
  const int key_head = head / p.group;
  const auto of = [&](const void* tensor, const Strides& strides, int h, int64_t token) {
    return tensor ? rows_of<C::kBytes>(tensor, p, strides, batch, h, token) : nullptr;
  };
  Inputs in;
  in.query = of(p.query, p.query_strides, head, seq.token_q);
  in.query_move = of(p.tangent_query, p.tangent_query_strides, head, seq.token_q);
  in.key = of(p.key, p.key_strides, key_head, seq.token_k);
  in.key_move = of(p.tangent_key, p.tangent_key_strides, key_head, seq.token_k);
  in.value = of(p.value, p.value_strides, key_head, seq.token_k);
  in.value_move = of(p.tangent_value, p.tangent_value_strides, key_head, seq.token_k);
  in.grad_out = of(p.grad_out, p.grad_out_strides, head, seq.token_q);
  return in;
}

// Loads one chunk of the columns of 32 rows from `first` on.
template <class C>
__device__ __forceinline__ void load_chunk(uint32_t tile, const char* rows, const Strides& strides,
                                           int first, int len, int dim, int chunk) {
  if (!rows) return;
  const Rows from{rows + chunk * kColumns * C::kBytes, static_cast<int>(strides.row) * C::kBytes};
  load_floats<typename C::Chip, Tile, kRows, kThreads>(tile, from, C::kElement, first, len,
                                                       dim - chunk * kColumns);
}
template <class C>
__device__ __forceinline__ void load_query_chunk(uint32_t smem, const Inputs& in, int row,
                                                 int chunk, const Sequence& seq,
                                                 const AttentionSecondParams& p) {
  load_chunk<C>(smem + kQuery, in.query, p.query_strides, row, seq.len_q, p.head_dim, chunk);
  load_chunk<C>(smem + kQueryMove, in.query_move, p.tangent_query_strides, row, seq.len_q,
                p.head_dim, chunk);
}
template <class C>
__device__ __forceinline__ void load_key_chunk(uint32_t smem, const Inputs& in, int key, int chunk,
                                               const Sequence& seq,
                                               const AttentionSecondParams& p) {
  load_chunk<C>(smem + kKey, in.key, p.key_strides, key, seq.len_k, p.head_dim, chunk);
  load_chunk<C>(smem + kKeyMove, in.key_move, p.tangent_key_strides, key, seq.len_k, p.head_dim,
                chunk);
}
template <class C>
__device__ __forceinline__ void load_value_chunk(uint32_t smem, const Inputs& in, int key,
                                                 int chunk, const Sequence& seq,
                                                 const AttentionSecondParams& p) {
  load_chunk<C>(smem + kValue, in.value, p.value_strides, key, seq.len_k, p.head_dim_v, chunk);
  load_chunk<C>(smem + kValueMove, in.value_move, p.tangent_value_strides, key, seq.len_k,
                p.head_dim_v, chunk);
}
template <class C>
__device__ __forceinline__ void load_grad_chunk(uint32_t smem, const Inputs& in, int row, int chunk,
                                                const Sequence& seq,
                                                const AttentionSecondParams& p) {
  load_chunk<C>(smem + kGradOut, in.grad_out, p.grad_out_strides, row, seq.len_q, p.head_dim_v,
                chunk);
}

__device__ __forceinline__ int warp_row() { return ptx::opaque_thread() / 32 * 16; }

// An operand from its step `first` on.
template <class Operand>
struct FromStep {
  const Operand& operand;
  uint32_t first;
  __device__ __forceinline__ void load_left(float (&a)[4], uint32_t m, uint32_t step) const {
    operand.load_left(a, m, first + step);
  }
  __device__ __forceinline__ void load_right(float (&b)[2], uint32_t n, uint32_t step) const {
    operand.load_right(b, n, first + step);
  }
};

// Adds the products of the warp's rows of tile `own` with the rows of tile `other`, over the first
// `depth` columns, four at a time: each lane reads the rows that its pairs are of.
__device__ __forceinline__ void add_products_by_fma(Pairs& pairs, uint32_t own, uint32_t other,
                                                    int depth) {
  const int lane = ptx::opaque_thread() % 32;
#pragma unroll 1
  for (int chunk = 0; 4 * chunk < depth; ++chunk) {
    const auto read = [&](uint32_t tile, int row) {
      return ptx::ld_shared_v4_f32(tile + Tile::at(row, chunk));
    };
    float4 left[2];  // rows r and r + 8
#pragma unroll
    for (int half = 0; half < 2; ++half) left[half] = read(own, warp_row() + lane / 4 + 8 * half);
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float4 b = read(other, 8 * n + lane % 4 * 2 + i);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float4& a = left[half];
          pairs[0][n][2 * half + i] += a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
        }
      }
    }
  }
}

// The same as the chip multiplies best.
template <class C>
__device__ __forceinline__ void add_products(Pairs& pairs, uint32_t own, uint32_t other,
                                             int depth) {
  constexpr int kSteps = 4;  // of 8 columns, for which tiles have zeros behind the last
  if constexpr (C::kFma) {
    add_products_by_fma(pairs, own, other, depth);
  } else {
    const Along<Tile> left(own, warp_row()), right(other);
#pragma unroll 1
    for (uint32_t step = 0; 8 * step < depth; step += kSteps) {
      multiply_floats<typename C::Product, kSteps>(pairs, FromStep<Along<Tile>>{left, step},
                                                   FromStep<Along<Tile>>{right, step});
    }
  }
}

// Adds the pairs, times the rows of tile `other`, to the first `columns` columns of the sums.
template <class C>
__device__ __forceinline__ void add_all_rows(Sums& sums, const Pairs& pairs, uint32_t other,
                                             int columns) {
  using Product = typename C::Product;
  constexpr int kSteps = kRows / 8;
  const FromAccumulators<1, kSteps> left(pairs);
  const Across<Tile> right(other);
  typename Product::Left a[kSteps];
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    float x[4];
    left.load_left(x, 0, i);
    a[i] = typename Product::Left(x);
  }
#pragma unroll
  for (int n = 0; n < kColumns / 8; ++n) {
    if (8 * n >= columns) continue;
    typename Product::Right b[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      float x[2];
      right.load_right(x, n, i);
      b[i] = typename Product::Right(x);
    }
    Product::multiply(sums[n], a, b);
  }
}

// A pair that is hidden from its row, by the mask or by a bias of -inf, has the weight -0, and no
// other has.
inline constexpr uint32_t kHidden = 0x80000000u;
__device__ __forceinline__ float weight_of(bool seen, float x) { return seen ? x + 0.f : -0.f; }

// The same with FMAs, leaving out hidden pairs: a NaN in a row that a mask hides stays there.
__device__ __forceinline__ void add_seen_rows(Sums& sums, const Pairs& pairs, uint32_t other,
                                              int columns) {
  const uint32_t lane = ptx::opaque_thread() % 32;
#pragma unroll
  for (int n = 0; n < kRows / 8; ++n) {
    const float(&x)[4] = pairs[0][n];
#pragma unroll 1
    for (int j = 0; j < 8; ++j) {
      const uint32_t from = lane / 4 * 4 + j / 2;
      const bool odd = j % 2;
      // Of rows r and r + 8.
      const float weight[2] = {__shfl_sync(0xffffffffu, odd ? x[1] : x[0], from),
                               __shfl_sync(0xffffffffu, odd ? x[3] : x[2], from)};
#pragma unroll
      for (int d = 0; d < kColumns / 8; ++d) {
        if (8 * d >= columns) continue;
        const uint32_t at = other + Tile::at_element(8 * n + j, 8 * d + lane % 4 * 2);
        const float2 two = ptx::ld_shared_v2_f32(at);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const bool hidden = __float_as_uint(weight[i / 2]) == kHidden;
          if (!hidden) sums[d][i] += weight[i / 2] * (i % 2 ? two.y : two.x);
        }
      }
    }
  }
}

// Adds the pairs, times the rows of tile `other`, to the first `columns` columns of the sums.
// guarded: something may not be finite.
template <class C>
__device__ __forceinline__ void add_rows(Sums& sums, const Pairs& pairs, uint32_t other,
                                         int columns, bool guarded) {
  if (C::kFma || guarded) {
    add_seen_rows(sums, pairs, other, columns);
  } else {
    add_all_rows<C>(sums, pairs, other, columns);
  }
}

__device__ __forceinline__ void clear(Sums& sums) {
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) sums[i / 4][i % 4] = 0;
}

__device__ __forceinline__ bool all_finite(const Sums& sums) {
  float sum = 0;  // becomes NaN
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) sum += sums[i / 4][i % 4] * 0.f;
  return sum == 0;
}

// Calls each(row, column, x) with what the warp's sums have of rows and columns that exist, two
// neighbouring columns at a time.
template <class Each>
__device__ __forceinline__ void for_each_two(const Sums& sums, int first, int len, int chunk,
                                             int dim, const Each& each) {
  const int lane = ptx::opaque_thread() % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first + warp_row() + lane / 4 + 8 * half;
    if (row >= len) continue;
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
      const int column = chunk * kColumns + 8 * n + lane % 4 * 2;
      if (column < dim) {
        each(row, column, float2{sums[n][2 * half], sums[n][2 * half + 1]});
      }
    }
  }
}

template <class C>
__device__ __forceinline__ void write_two(void* row, int column, int dim, const float2& x) {
  if (C::kElement == Element::kFp32 && column + 1 < dim) {
    reinterpret_cast<float2*>(row)[column / 2] = x;
    return;
  }
  write_element(C::kElement, row, column, x.x);
  if (column + 1 < dim) write_element(C::kElement, row, column + 1, x.y);
}

// Stores the warp's sums, times `scale`, as rows of a tensor whose first row of the sequence is at
// `rows`.
template <class C>
__device__ __forceinline__ void store_sums(const Sums& sums, float scale, const char* rows,
                                           const Strides& strides, int first, int len, int chunk,
                                           int dim) {
  for_each_two(sums, first, len, chunk, dim, [&](int row, int column, const float2& x) {
    char* to = const_cast<char*>(rows) + row * strides.row * C::kBytes;
    write_two<C>(to, column, dim, {x.x * scale, x.y * scale});
  });
}

// Sets one chunk of the columns of rows [first, end).
template <class C>
__device__ __forceinline__ void fill_chunk(const char* rows, const Strides& strides, int first,
                                           int end, int chunk, int dim, float value) {
  const int columns = min(dim - chunk * kColumns, kColumns);
  for (int row = first; row < end; ++row) {
    for (int i = ptx::opaque_thread(); i < columns; i += kThreads) {
      write_element(C::kElement, const_cast<char*>(rows), row * strides.row + chunk * kColumns + i,
                    value);
    }
  }
}

// Which of its tensors the tiles of a kernel's own rows are, and what it multiplies.
enum class By {
  kTangent,  // queries, without dO
  kQueries,
  kKeys,
};

// The products of a tile of 32 queries and 32 keys, own rows x other rows.
struct Products {
  Pairs score;          // q.k
  Pairs move;           // q'.k + q.k'
  Pairs gradient;       // dO.v
  Pairs gradient_move;  // dO.v'
};

// Loads the tile's tensors and multiplies them. `own_there`: whether the own rows are in shared
// memory from the step before. Chunk `chunk` comes last. load_more() loads what else the tile has,
// before the barrier.
template <class C, By kBy, class LoadMore>
__device__ __forceinline__ void find_products(Products& x, uint32_t smem, const Inputs& in, int row,
                                              int key, int chunk, bool own_there,
                                              const Sequence& seq, const AttentionSecondParams& p,
                                              const LoadMore& load_more) {
  constexpr bool kByKeys = kBy == By::kKeys, kTangent = kBy == By::kTangent;
  const int chunks = chunks_of(p.head_dim);
  const int value_chunks = kTangent ? 1 : chunks_of(p.head_dim_v);
  const int rounds = max(chunks, value_chunks);
  set_zero(x.score);
  set_zero(x.move);
  set_zero(x.gradient);
  set_zero(x.gradient_move);
#pragma unroll 1
  for (int round = 0; round < rounds; ++round) {
    // Below 0: not yet.
    const int turn = round - (rounds - chunks), value_turn = round - (rounds - value_chunks);
    const int at = (chunk + 1 + turn) % chunks;
    const int value_at = kTangent ? chunk : (chunk + 1 + value_turn) % value_chunks;
    const bool own = chunks > 1 || !own_there, own_values = value_chunks > 1 || !own_there;
    __syncthreads();  // everyone is done with the tiles before
    if (turn >= 0 && (kByKeys || own)) load_query_chunk<C>(smem, in, row, at, seq, p);
    if (turn >= 0 && (!kByKeys || own)) load_key_chunk<C>(smem, in, key, at, seq, p);
    if (value_turn >= 0) {
      if (!kByKeys || own_values) load_value_chunk<C>(smem, in, key, value_at, seq, p);
      if (!kTangent && (kByKeys || own_values)) load_grad_chunk<C>(smem, in, row, value_at, seq, p);
    }
    if (round == 0) load_more();
    C::Chip::commit();
    C::Chip::template wait<0>();
    __syncthreads();  // the tiles are there
    if (turn >= 0) {
      const int depth = min(p.head_dim - at * kColumns, kColumns);
      const uint32_t own_tile = smem + (kByKeys ? kKey : kQuery);
      const uint32_t own_move = smem + (kByKeys ? kKeyMove : kQueryMove);
      const uint32_t other_tile = smem + (kByKeys ? kQuery : kKey);
      const uint32_t other_move = smem + (kByKeys ? kQueryMove : kKeyMove);
      add_products<C>(x.score, own_tile, other_tile, depth);
      if (kByKeys ? in.key_move : in.query_move) {
        add_products<C>(x.move, own_move, other_tile, depth);
      }
      if (kByKeys ? in.query_move : in.key_move) {
        add_products<C>(x.move, own_tile, other_move, depth);
      }
    }
    if (!kTangent && value_turn >= 0 && in.grad_out) {
      const int depth = min(p.head_dim_v - value_at * kColumns, kColumns);
      const auto add = [&](Pairs& pairs, uint32_t values) {
        add_products<C>(pairs, smem + (kByKeys ? values : kGradOut),
                        smem + (kByKeys ? kGradOut : values), depth);
      };
      add(x.gradient, kValue);
      if (in.value_move) add(x.gradient_move, kValueMove);
    }
  }
}

}  // namespace flashmoe::cuda::second
