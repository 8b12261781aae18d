// What kernels of a mixture of experts share: ids, pairs, tiles of experts, their weights.
#pragma once

#include <type_traits>

#include "cuda/moe/params.h"
#include "cuda/moe/tiles.h"

namespace flashmoe::cuda::moe {

// n / d for n below 2^31, without the machine's twenty instructions for it: the inverse is rounded
// down by less than 1 / 2^32, so the first guess is the quotient or one less.
struct Divider {
  uint32_t d, inverse;
  __device__ __forceinline__ explicit Divider(int d)
      : d(static_cast<uint32_t>(d)), inverse(0xffffffffu / static_cast<uint32_t>(d)) {}
  __device__ __forceinline__ uint32_t operator()(uint32_t n) const {
    const uint32_t guess = __umulhi(n, inverse);
    return guess + (n - guess * d >= d ? 1 : 0);
  }
};

// The expert of a pair, or -1.
__device__ __forceinline__ int expert_of(const Ids& ids, int pair, const Divider& token_of) {
  const int token = static_cast<int>(token_of(pair));
  const int64_t at = token * ids.row + (pair - token * static_cast<int>(token_of.d)) * ids.col;
  const int64_t id = ids.are_int64 ? static_cast<const int64_t*>(ids.data)[at]
                                   : static_cast<const int32_t*>(ids.data)[at];
  return id >= 0 && id < ids.experts ? static_cast<int>(id) : -1;
}

__device__ __forceinline__ int expert_of(const Ids& ids, int pair, int top_k) {
  return expert_of(ids, pair, Divider(top_k));
}

__device__ __forceinline__ float weight_of(const RoutingWeights& weights, int pair, int top_k) {
  if (!weights.data) return 1.f;
  const int token = pair / top_k;
  return weights.data[token * weights.row + (pair - token * top_k) * weights.col];
}

// What a CTA of a product does: a tile of rows and a tile of columns.
struct Task {
  ExpertTile tile;
  int column;
};

// CTAs go through kRasterRows tiles of rows before they take the next column, so that those in
// flight share rows and weights in L2:
//
//   columns    0    1    2
//   slot 0     0    8   16
//   ...
//   slot 7     7   15   23
//   slot 8    24   32   40
__device__ __forceinline__ Task find_task(const ProductTiles& p, uint32_t number) {
  const uint32_t group = number / (kRasterRows * p.columns);
  const uint32_t within = number - group * (kRasterRows * p.columns);
  const uint32_t first = group * kRasterRows;
  const uint32_t height = min(static_cast<uint32_t>(kRasterRows), p.slots - first);
  return {p.tiles[first + within % height], static_cast<int>(within / height)};
}

// The loader of columns [first, first + kHalfN) of `columns` of an expert's weights, one half of a
// product's B. Along the depth weights lie as (columns, depth), across it as (depth, columns).
template <class G, bool kAlong, bool kPartial>
__device__ __forceinline__ auto weight_loader(const char* matrix, int row_bytes, int first,
                                              int columns) {
  using Loader = typename G::template LoaderB<kPartial>;
  if constexpr (kAlong) {
    first = min(first, columns - 1);
    return Loader(columns - first,
                  [&](int i) { return matrix + (int64_t{first} + i) * row_bytes; });
  } else {
    return Loader(matrix, row_bytes, first, columns);
  }
}

// Calls body(std::true_type or std::false_type): the main loop for rows that may end within a chunk
// of 16 bytes is another one.
template <class Body>
__device__ __forceinline__ void with_partial(bool partial, const Body& body) {
  if (partial) {
    body(std::true_type());
  } else {
    body(std::false_type());
  }
}

// A bias of the columns of a tile, in fp32.
template <class T>
__device__ __forceinline__ float bias_at(const void* bias, int64_t offset) {
  return T::unpack(static_cast<const typename T::Storage*>(bias)[offset]);
}

}  // namespace flashmoe::cuda::moe
