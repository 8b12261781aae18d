// Eight 16-bit numbers, 16 bytes, between global memory and floats. Rows begin at multiples of 16
// bytes; the last chunk of a row may be a part of one, and nothing is read or written beyond.
#pragma once

#include "cuda/tile/dtype.cuh"

namespace flashmoe::cuda {

// `count` numbers as they lie, of which there may be more than 8 or less than 1; zeros where there
// are none. Without kPartial all 8 or none: one load under a predicate, so that a thread has many
// on their way before it unpacks the first.
template <class T, bool kPartial>
__device__ __forceinline__ uint4 read_chunk(const char* from, int count) {
  uint4 chunk = {0, 0, 0, 0};
  if (kPartial && count < 8) {
    uint32_t words[4] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < count) {
        words[i / 2] |= static_cast<uint32_t>(reinterpret_cast<const typename T::Storage*>(from)[i])
                        << (i % 2 * 16);
      }
    }
    chunk = {words[0], words[1], words[2], words[3]};
  } else if (count > 0) {
    chunk = *reinterpret_cast<const uint4*>(from);
  }
  return chunk;
}

template <class T>
__device__ __forceinline__ void unpack_chunk(float (&x)[8], const uint4& chunk) {
  const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    x[i] = T::unpack(static_cast<typename T::Storage>(words[i / 2] >> (i % 2 * 16)));
  }
}

template <class T>
__device__ __forceinline__ void store_chunk(char* to, const uint4& chunk, int count) {
  if (count >= 8) {
    *reinterpret_cast<uint4*>(to) = chunk;
  } else {
    const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < count) {
        reinterpret_cast<typename T::Storage*>(to)[i] =
            static_cast<typename T::Storage>(words[i / 2] >> (i % 2 * 16));
      }
    }
  }
}

template <class T>
__device__ __forceinline__ void store_chunk(char* to, const float (&x)[8], int count) {
  const uint4 chunk = {T::pack(x[0], x[1]), T::pack(x[2], x[3]), T::pack(x[4], x[5]),
                       T::pack(x[6], x[7])};
  store_chunk<T>(to, chunk, count);
}

}  // namespace flashmoe::cuda
