// What the kernels of forward mode and second derivatives share: where a CTA's tile is, its tensors
// on their way to shared memory, and the products of queries and keys (docs/kernels/second.md).
//
//   own rows     32, whose results the CTA has
//   other rows   32: the side that the loop goes along
//   columns      chunks of 64; larger head dims are loaded chunk by chunk, once for each step
//
// A warp has 16 own rows and 16 other rows. Two warps have the same own rows: each has sums over
// its other rows, which are added up in the end.
//
// A CTA's results have one chunk of columns. The chunk of the operands that these are multiplied
// from comes last, and stays in shared memory for it.
#pragma once

#include <type_traits>

#include "cuda/attention/score.cuh"
#include "cuda/attention/second/products.cuh"
#include "cuda/attention/sequence.cuh"
#include "cuda/attention/tiles.h"

namespace flashmoe::cuda::second {

template <Element kElement>
using HalfProductOf = HalfProduct<std::conditional_t<kElement == Element::kFp16, Fp16, Bf16>>;

// kTf32: whether the chip multiplies TF32.
template <class Chip_, bool kTf32, Element kElement_>
struct Config {
  using Chip = Chip_;
  static constexpr Element kElement = kElement_;
  static constexpr bool kFp32 = kElement == Element::kFp32;
  static constexpr int kBytes = kFp32 ? 4 : 2;
  static constexpr bool kFma = !kTf32;
  using Product =
      std::conditional_t<kFma, FmaProduct,
                         std::conditional_t<kFp32, FloatProduct, HalfProductOf<kElement>>>;
  using Tile = typename Product::Tile;
  static constexpr int kElementBytes = Tile::kElementBytes;  // in shared memory

  // Shared memory. Two warps leave a float4 for each row in kNumbers.
  static constexpr uint32_t kTileBytes = second_tile_bytes(kElementBytes);
  static constexpr uint32_t kQuery = 0, kQueryMove = kTileBytes, kKey = 2 * kTileBytes,
                            kKeyMove = 3 * kTileBytes, kValue = 4 * kTileBytes,
                            kValueMove = 5 * kTileBytes, kGradOut = 6 * kTileBytes,
                            kNumbers = 7 * kTileBytes,  // float4 of each row of queries, or two
      kHead = kNumbers + 2 * kRows * 16;                // Head
  static_assert(kHead + kSecondHeadBytes == second_shared_bytes(kElementBytes));
  static_assert(kNumbers >= kThreads * sizeof(HalfSums));
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
  using Tile = typename C::Tile;
  const Rows from{rows + chunk * kColumns * C::kBytes, static_cast<int>(strides.row) * C::kBytes};
  const int columns = dim - chunk * kColumns;
  if constexpr (C::kBytes == C::kElementBytes) {
    load_tile<typename C::Chip, Tile, kRows, kThreads>(tile, from, first, len, columns);
  } else {
    load_floats<typename C::Chip, Tile, kRows, kThreads>(tile, from, C::kElement, first, len,
                                                         columns);
  }
}
template <class C>
__device__ __forceinline__ void load_query_chunk(uint32_t smem, const Inputs& in, int row,
                                                 int chunk, const Sequence& seq,
                                                 const AttentionSecondParams& p) {
  load_chunk<C>(smem + C::kQuery, in.query, p.query_strides, row, seq.len_q, p.head_dim, chunk);
  load_chunk<C>(smem + C::kQueryMove, in.query_move, p.tangent_query_strides, row, seq.len_q,
                p.head_dim, chunk);
}
template <class C>
__device__ __forceinline__ void load_key_chunk(uint32_t smem, const Inputs& in, int key, int chunk,
                                               const Sequence& seq,
                                               const AttentionSecondParams& p) {
  load_chunk<C>(smem + C::kKey, in.key, p.key_strides, key, seq.len_k, p.head_dim, chunk);
  load_chunk<C>(smem + C::kKeyMove, in.key_move, p.tangent_key_strides, key, seq.len_k, p.head_dim,
                chunk);
}
template <class C>
__device__ __forceinline__ void load_value_chunk(uint32_t smem, const Inputs& in, int key,
                                                 int chunk, const Sequence& seq,
                                                 const AttentionSecondParams& p) {
  load_chunk<C>(smem + C::kValue, in.value, p.value_strides, key, seq.len_k, p.head_dim_v, chunk);
  load_chunk<C>(smem + C::kValueMove, in.value_move, p.tangent_value_strides, key, seq.len_k,
                p.head_dim_v, chunk);
}
template <class C>
__device__ __forceinline__ void load_grad_chunk(uint32_t smem, const Inputs& in, int row, int chunk,
                                                const Sequence& seq,
                                                const AttentionSecondParams& p) {
  load_chunk<C>(smem + C::kGradOut, in.grad_out, p.grad_out_strides, row, seq.len_q, p.head_dim_v,
                chunk);
}

// The first of a warp's own rows, and of its other rows, in the tile.
__device__ __forceinline__ int warp_row() { return ptx::opaque_thread() / 64 * kWarpRows; }
__device__ __forceinline__ int warp_other() { return ptx::opaque_thread() / 32 % 2 * kWarpRows; }
template <class C>
__device__ __forceinline__ uint32_t own_rows(uint32_t tile) {
  return tile + warp_row() * C::Tile::kRowBytes;
}
template <class C>
__device__ __forceinline__ uint32_t other_rows(uint32_t tile) {
  return tile + warp_other() * C::Tile::kRowBytes;
}

// A pair that is hidden from its row, by the mask or by a bias of -inf, has the weight -0, and no
// other has.
inline constexpr uint32_t kHidden = 0x80000000u;
__device__ __forceinline__ float weight_of(bool seen, float x) { return seen ? x + 0.f : -0.f; }

// Adds the pairs, times the warp's rows of tile `other`, to the first `columns` columns of the
// sums, with FMAs, leaving out hidden pairs: a NaN in a row that a mask hides stays there.
template <class C>
__device__ __forceinline__ void add_seen_rows(Sums& sums, const Pairs& pairs, uint32_t other,
                                              int columns) {
  const uint32_t lane = ptx::opaque_thread() % 32;
#pragma unroll
  for (int n = 0; n < kWarpRows / 8; ++n) {
    const float(&x)[4] = pairs[n];
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
        const float2 two = C::Product::read_two(other, 8 * n + j, 8 * d + lane % 4 * 2);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const bool hidden = __float_as_uint(weight[i / 2]) == kHidden;
          if (!hidden) sums[d][i] += weight[i / 2] * (i % 2 ? two.y : two.x);
        }
      }
    }
  }
}

// The same as the chip multiplies best. guarded: something may not be finite.
template <class C>
__device__ __forceinline__ void add_rows(Sums& sums, const Pairs& pairs, uint32_t tile, int columns,
                                         bool guarded) {
  const uint32_t other = other_rows<C>(tile);
  if constexpr (C::kFma) {
    add_seen_rows<C>(sums, pairs, other, columns);
  } else if (guarded) {
    add_seen_rows<C>(sums, pairs, other, columns);
  } else {
    C::Product::add_rows(sums, pairs, other, columns);
  }
}

template <int kCount>
__device__ __forceinline__ void set_zero(float (&x)[kCount][4]) {
#pragma unroll
  for (int i = 0; i < 4 * kCount; ++i) x[i / 4][i % 4] = 0;
}

// Adds up the sums of the two warps that have the same own rows. Each gets half of the columns.
__device__ __forceinline__ void add_up(HalfSums& half, const Sums& sums, char* shared) {
  constexpr int kHalf = kColumns / 16;
  float4* const sSums = reinterpret_cast<float4*>(shared);
  const int thread = ptx::opaque_thread();
  const bool upper = warp_other() != 0;
  __syncthreads();  // nobody reads what is there
#pragma unroll
  for (int n = 0; n < kHalf; ++n) {
    const float(&low)[4] = sums[n], (&high)[4] = sums[n + kHalf];
    sSums[n * kThreads + thread] = {upper ? low[0] : high[0], upper ? low[1] : high[1],
                                    upper ? low[2] : high[2], upper ? low[3] : high[3]};
#pragma unroll
    for (int i = 0; i < 4; ++i) half[n][i] = upper ? high[i] : low[i];
  }
  __syncthreads();  // the other warp's half is there
#pragma unroll
  for (int n = 0; n < kHalf; ++n) {
    const float4 x = sSums[n * kThreads + (thread ^ 32)];
    half[n][0] += x.x, half[n][1] += x.y, half[n][2] += x.z, half[n][3] += x.w;
  }
}

__device__ __forceinline__ bool all_finite(const HalfSums& sums) {
  float sum = 0;  // becomes NaN
#pragma unroll
  for (int i = 0; i < kColumns / 4; ++i) sum += sums[i / 4][i % 4] * 0.f;
  return sum == 0;
}

// Calls each(row, column, x) with what a warp has of rows and columns that exist, two neighbouring
// columns at a time.
template <class Each>
__device__ __forceinline__ void for_each_two(const HalfSums& sums, int first, int len, int chunk,
                                             int dim, const Each& each) {
  const int lane = ptx::opaque_thread() % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first + warp_row() + lane / 4 + 8 * half;
    if (row >= len) continue;
#pragma unroll
    for (int n = 0; n < kColumns / 16; ++n) {
      const int column = chunk * kColumns + 2 * warp_other() + 8 * n + lane % 4 * 2;
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

// Stores them, times `scale`, as rows of a tensor whose first row of the sequence is at `rows`.
template <class C>
__device__ __forceinline__ void store_sums(const HalfSums& sums, float scale, const char* rows,
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

// A warp's products of queries and keys, own rows x other rows.
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
    using Product = typename C::Product;
    if (turn >= 0) {
      const int depth = min(p.head_dim - at * kColumns, kColumns);
      const uint32_t own_tile = own_rows<C>(smem + (kByKeys ? C::kKey : C::kQuery));
      const uint32_t own_move = own_rows<C>(smem + (kByKeys ? C::kKeyMove : C::kQueryMove));
      const uint32_t other_tile = other_rows<C>(smem + (kByKeys ? C::kQuery : C::kKey));
      const uint32_t other_move = other_rows<C>(smem + (kByKeys ? C::kQueryMove : C::kKeyMove));
      const bool own_moves = kByKeys ? in.key_move : in.query_move;
      const bool other_moves = kByKeys ? in.query_move : in.key_move;
#pragma unroll 1
      for (int step = 0; 16 * step < depth; ++step) {
        const auto right = Product::right(other_tile, step);
        if (own_moves) Product::multiply(x.move, Product::left(own_move, step), right);
        const auto left = Product::left(own_tile, step);
        Product::multiply(x.score, left, right);
        if (other_moves) Product::multiply(x.move, left, Product::right(other_move, step));
      }
    }
    if (!kTangent && value_turn >= 0 && in.grad_out) {
      const int depth = min(p.head_dim_v - value_at * kColumns, kColumns);
      const uint32_t gradient = smem + C::kGradOut;
      const auto left = [&](uint32_t values, int step) {
        return Product::left(own_rows<C>(kByKeys ? values : gradient), step);
      };
      const auto right = [&](uint32_t values, int step) {
        return Product::right(other_rows<C>(kByKeys ? gradient : values), step);
      };
      const uint32_t values = smem + C::kValue, moves = smem + C::kValueMove;
#pragma unroll 1
      for (int step = 0; 16 * step < depth; ++step) {
        const auto a = left(values, step);
        const auto b = right(values, step);
        Product::multiply(x.gradient, a, b);
        if (!in.value_move) continue;
        if constexpr (kByKeys) {
          Product::multiply(x.gradient_move, left(moves, step), b);
        } else {
          Product::multiply(x.gradient_move, a, right(moves, step));
        }
      }
    }
  }
}

}  // namespace flashmoe::cuda::second
