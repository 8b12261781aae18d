// Writes keys and values to the slots of a cache: plain loads and stores, as wide as strides allow.
#pragma once

#include "cuda/cache/params.h"
#include "cuda/tile/dtype.cuh"
#include "cuda/tile/e4m3.cuh"

namespace flashmoe::cuda::cache {

// The tokens of this CTA, and where they go, as the call says. Checked when they are needed: until
// then what they have is on its way as well.
struct Slots {
  int64_t slot[kAppendTokens];

  __device__ __forceinline__ explicit Slots(const AppendParams& p) {
#pragma unroll
    for (int i = 0; i < kAppendTokens; ++i) {
      slot[i] = -1;
      if (!exists(i, p)) continue;
      const int64_t at = token(i) * p.slots_stride;
      slot[i] = p.slots_are_int64 ? static_cast<const int64_t*>(p.slots)[at]
                                  : static_cast<const int32_t*>(p.slots)[at];
    }
  }
  static __device__ __forceinline__ int64_t token(int i) {
    return int64_t{blockIdx.x} * kAppendTokens + i;
  }
  static __device__ __forceinline__ bool exists(int i, const AppendParams& p) {
    return token(i) < p.tokens;
  }
  // Whether the token is written at all.
  __device__ __forceinline__ bool has_place(int i, const AppendParams& p) const {
    return slot[i] >= 0 && slot[i] < p.slots_of_cache;
  }
};

// Goes over the rows of the CTA's tokens in units of `Unit`: all loads first, then put(to, unit,
// head) for those that have a slot.
template <class Unit, class Put>
__device__ __forceinline__ void for_each_unit(const AppendSide& s, const AppendParams& p,
                                              const Put& put) {
  const Slots slots(p);
  for (int i = threadIdx.x; i < s.units * p.heads; i += kAppendThreads) {
    const int head = i / s.units, unit = i - head * s.units;
    Unit x[kAppendTokens];
#pragma unroll
    for (int t = 0; t < kAppendTokens; ++t) {
      if (!Slots::exists(t, p)) continue;
      x[t] = *reinterpret_cast<const Unit*>(s.from + Slots::token(t) * s.token + head * s.head +
                                            unit * s.col);
    }
#pragma unroll
    for (int t = 0; t < kAppendTokens; ++t) {
      if (!slots.has_place(t, p)) continue;
      // A division of 64 bits takes longer than all else here.
      const int64_t slot = slots.slot[t];
      const int64_t block = p.page_log2 >= 0 ? slot >> p.page_log2 : slot / p.page;
      const int64_t row = slot - block * p.page;
      put(s.cache + block * s.block + row * s.row + head * s.cache_head + unit * s.cache_col, x[t],
          head);
    }
  }
}

template <class Unit>
__device__ __forceinline__ void copy_units(const AppendSide& s, const AppendParams& p) {
  for_each_unit<Unit>(s, p, [](char* to, const Unit& x, int) { *reinterpret_cast<Unit*>(to) = x; });
}

__device__ __forceinline__ float scale_of(const AppendSide& s, int head) {
  return s.scale ? s.scale[head * s.scale_stride] : 1.f;
}

// 16-bit numbers to e4m3, eight at a time or one.
template <class T>
__device__ __forceinline__ void convert_units(const AppendSide& s, const AppendParams& p) {
  using Storage = typename T::Storage;
  const auto round = [](uint32_t bits, float scale) {
    return E4m3::round(__fdiv_rn(T::unpack(static_cast<Storage>(bits)), scale));
  };
  if (s.unit == 16) {
    for_each_unit<uint4>(s, p, [&](char* to, const uint4& x, int head) {
      const uint32_t words[4] = {x.x, x.y, x.z, x.w};
      const float scale = scale_of(s, head);
      uint32_t packed[2] = {};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        packed[i / 4] |= round(words[i / 2] >> (i % 2 * 16) & 0xffff, scale) << (i % 4 * 8);
      }
      *reinterpret_cast<uint2*>(to) = {packed[0], packed[1]};
    });
  } else {
    for_each_unit<Storage>(s, p, [&](char* to, Storage x, int head) {
      *to = static_cast<char>(round(x, scale_of(s, head)));
    });
  }
}

// The kernel: grid (tokens / kAppendTokens, keys and values).
__device__ __forceinline__ void cache_append(const AppendParams& p) {
  const AppendSide& s = p.sides[blockIdx.y];
  switch (p.conversion) {
    case Conversion::kFromFp16:
      return convert_units<Fp16>(s, p);
    case Conversion::kFromBf16:
      return convert_units<Bf16>(s, p);
    case Conversion::kFromFp32:
      return for_each_unit<float>(s, p, [&](char* to, float x, int head) {
        *to = static_cast<char>(E4m3::round(__fdiv_rn(x, scale_of(s, head))));
      });
    case Conversion::kNone:
      break;
  }
  switch (s.unit) {
    case 16:
      return copy_units<uint4>(s, p);
    case 8:
      return copy_units<uint2>(s, p);
    case 4:
      return copy_units<uint32_t>(s, p);
    case 2:
      return copy_units<uint16_t>(s, p);
    default:
      return copy_units<uint8_t>(s, p);
  }
}

}  // namespace flashmoe::cuda::cache
