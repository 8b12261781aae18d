// A tile of bias in rows that begin anywhere in memory, which TMA cannot load: it takes rows that
// are a multiple of 16 bytes apart. Warps beside the producer copy each row by cp.async, in the
// chunks of memory that hold it, and consumers read it number by number from where it begins.
//
//   shared memory   |.......| number 0 | number 1 | ... | number kKeys - 1 |.....|
//                   <-shift->                      kPitch                        >
//
// The shift of a row is where it begins within a chunk. Tiles begin at keys that are a multiple of
// 8 and at rows that are, so it is the same for all tiles of a head; and since eight rows are a
// multiple of 16 bytes, it is the same for rows that are a multiple of 8 apart. Of a mask, eight
// rows are a multiple of 8 bytes: its chunks have 8.
#pragma once

#include <cstdint>

#include "cuda/attention/tiles.h"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/special_registers.cuh"

namespace flashmoe::cuda::sm90 {

// T is the 16-bit type of Q, K and V.
template <class T, BiasInput kInput, int kRows, int kKeys, int kChunkBytes>
struct BiasRowTile {
  static constexpr int kElementBytes = bias_bytes(kInput);
  static constexpr int kPitch = kKeys * kElementBytes + kChunkBytes;
  static constexpr uint32_t kBytes = kRows * kPitch;
  static constexpr int kChunks = kKeys * kElementBytes / kChunkBytes;  // of a row, and one more
  static_assert(32 % kChunks == 0 && (kChunkBytes == 8 || kChunkBytes == 16));
  static_assert(kElementBytes * 8 % kChunkBytes == 0);

  char bytes[kBytes];

  // The shift of a row, in bytes. `first` is that of a row a multiple of 8 before it.
  static __device__ __forceinline__ uint32_t shift(uint32_t first, int row, int64_t stride) {
    return (first + row * static_cast<uint32_t>(stride) * kElementBytes) % kChunkBytes;
  }
  static __device__ __forceinline__ uint32_t shift(const void* row) {
    return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(row)) % kChunkBytes;
  }

  // A number in shared memory.
  static __device__ __forceinline__ float read(uint32_t shared) {
    if constexpr (kInput == kFloatsByRows) {
      return ptx::ld_shared_f32(shared);
    } else if constexpr (kInput == kBytesByRows) {
      return ptx::ld_shared_u8(shared) ? 0.f : -INFINITY;
    } else {
      return T::unpack(ptx::ld_shared_u16(shared));
    }
  }

  // Begins the copy of a tile by kThreads threads, the first of which is thread kFirst of the CTA;
  // cp_async_mbarrier_arrive_noinc() of each says when its part is there. `from` is the tile's
  // first number. Numbers past the last of `rows` rows and `keys` keys become 0 and are not read.
  template <int kThreads, int kFirst>
  static __device__ __forceinline__ void load(uint32_t shared, const char* from, int64_t stride,
                                              int rows, int keys) {
    constexpr int kStep = kThreads / kChunks;  // rows at once
    const int64_t row_bytes = stride * kElementBytes;
    const int thread = ptx::opaque_thread() - kFirst, chunk = thread % kChunks;
    const char* at = from + thread / kChunks * row_bytes + chunk * kChunkBytes;
    uint32_t to = shared + thread / kChunks * kPitch + chunk * kChunkBytes;
    if (rows >= kRows && keys >= kKeys) {
      // Forward, where several warps load, a thread may have 32 registers only.
#pragma unroll(kThreads > 32 ? 1 : 2)
      for (int row = thread / kChunks; row < kRows;
           row += kStep, at += kStep * row_bytes, to += kStep * kPitch) {
        copy(to, at - shift(at));
      }
    } else {
      const int bytes = min(keys, kKeys) * kElementBytes - chunk * kChunkBytes;
#pragma unroll 1
      for (int row = thread / kChunks; row < kRows;
           row += kStep, at += kStep * row_bytes, to += kStep * kPitch) {
        copy(to, at - shift(at), row < rows ? bytes + static_cast<int>(shift(at)) : 0);
      }
    }
    // The last chunks: what the shift leaves of them, up to the tile's last number.
    const int first = ptx::opaque_thread() - kFirst;
    at = from + first * row_bytes + kChunks * kChunkBytes;
    const int bytes = min(keys - kKeys, 0) * kElementBytes;
#pragma unroll 1
    for (int row = first; row < kRows; row += kThreads, at += kThreads * row_bytes) {
      copy(shared + row * kPitch + kChunks * kChunkBytes, at - shift(at),
           row < rows ? bytes + static_cast<int>(shift(at)) : 0);
    }
  }

 private:
  static __device__ __forceinline__ void copy(uint32_t to, const char* from) {
    if constexpr (kChunkBytes == 16) {
      ptx::cp_async_cg_16(to, from, true);
    } else {
      ptx::cp_async_ca_8(to, from);
    }
  }
  // The first `bytes` bytes of a chunk, or none; zeros for the others.
  static __device__ __forceinline__ void copy(uint32_t to, const char* from, int bytes) {
    bytes = min(max(bytes, 0), kChunkBytes);
    if constexpr (kChunkBytes == 16) {
      ptx::cp_async_cg_16_part(to, from, bytes);
    } else {
      ptx::cp_async_ca_8_part(to, from, bytes);
    }
  }
};

// A number of the bias in memory.
template <class T, BiasInput kInput>
__device__ __forceinline__ float bias_number(const void* bias, int64_t at) {
  if constexpr (kInput == kFloatsByRows) {
    return static_cast<const float*>(bias)[at];
  } else if constexpr (kInput == kBytesByRows) {
    return static_cast<const char*>(bias)[at] ? 0.f : -INFINITY;
  } else {
    return T::unpack(static_cast<const uint16_t*>(bias)[at]);
  }
}

}  // namespace flashmoe::cuda::sm90
