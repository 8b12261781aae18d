// What device code needs of CUDA C++, as the emulator has it (machine.h).
//
// To be included behind all other headers, and before those of device code.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <type_traits>

#include "machine.h"

#define __CUDACC__ 1
#define __builtin_assume(x)
#define __CUDA_ARCH__ 900
#define __global__ __attribute__((used))  // of whoever looks for a kernel by its name
#define __launch_bounds__(...)
#define __grid_constant__
#define __device__
#define __constant__
#define __forceinline__ inline
#define __shared__ __thread  // a CTA is a thread of the host
#define __align__(bytes) __attribute__((aligned(bytes)))

struct alignas(4) ushort2 {
  unsigned short x, y;
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(8) uint2 {
  unsigned int x, y;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned int x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

template <class A, class B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  return b < a ? b : a;
}
template <class A, class B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  return a < b ? b : a;
}
using std::isfinite;
using std::isinf;
using std::isnan;

inline float __uint_as_float(unsigned int x) { return std::bit_cast<float>(x); }
inline unsigned int __float_as_uint(float x) { return std::bit_cast<unsigned int>(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __log2f(float x) { return std::log2(x); }
inline float __expf(float x) { return std::exp(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned int>(x)); }
inline int __popc(unsigned int x) { return std::popcount(x); }
inline int __ffs(int x) { return x ? std::countr_zero(static_cast<unsigned int>(x)) + 1 : 0; }
inline unsigned int __umulhi(unsigned int x, unsigned int y) { return uint64_t{x} * y >> 32; }
inline unsigned int __funnelshift_lc(unsigned int low, unsigned int high, unsigned int shift) {
  return static_cast<unsigned int>((uint64_t{high} << 32 | low) << std::min(shift, 32u) >> 32);
}
inline unsigned int __funnelshift_r(unsigned int low, unsigned int high, unsigned int shift) {
  return static_cast<unsigned int>((uint64_t{high} << 32 | low) >> shift % 32);
}
inline unsigned int __byte_perm(unsigned int low, unsigned int high, unsigned int selector) {
  const uint64_t bytes = uint64_t{high} << 32 | low;
  unsigned int result = 0;
  for (int i = 0; i < 4; ++i) {
    result |= static_cast<unsigned int>(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  }
  return result;
}
inline unsigned int __vcmpeq4(unsigned int a, unsigned int b) {
  unsigned int result = 0;
  for (int i = 0; i < 32; i += 8) result |= (a >> i & 0xff) == (b >> i & 0xff) ? 0xffu << i : 0;
  return result;
}
template <class T>
T __ldcs(const T* from) {
  return *from;
}
template <class T>
T __ldg(const T* from) {
  return *from;
}
template <class T>
T __ldcg(const T* from) {
  return *from;
}
inline int atomicAdd(int* at, int x) { return __atomic_fetch_add(at, x, __ATOMIC_ACQ_REL); }

inline size_t __cvta_generic_to_shared(const void* memory) {
  return emulator::shared_address(memory);
}
inline void* __cvta_shared_to_generic(size_t address) {
  return emulator::shared(static_cast<uint32_t>(address), 1);
}
inline void __nanosleep(unsigned int) { emulator::yield(); }
inline void __syncthreads() { emulator::barrier(0, 0, false); }
inline void __threadfence_block() {}
inline int __syncthreads_and(int mine) { return !emulator::barrier(0, 0, !mine); }
inline int __syncthreads_or(int mine) { return emulator::barrier(0, 0, mine); }

namespace emulator {

// A number of each lane, of which lanes take that of another.
template <class T>
struct Exchange {
  T mine;
  int from;
  T got;
  static void all(Lanes& lanes) {
    for (void* lane : lanes) {
      if (!lane) continue;
      auto& one = *static_cast<Exchange*>(lane);
      const auto* other = static_cast<const Exchange*>(lanes[one.from & 31]);
      one.got = other ? other->mine : one.mine;
    }
  }
};
inline constexpr char kShuffle = 0, kSync = 0, kVote = 0;
inline int lane() { return static_cast<int>(threadIdx.x % 32); }
template <class T>
T exchange(T mine, int from) {
  Exchange<T> one{mine, from, mine};
  collective(&kShuffle, &one, Exchange<T>::all);
  return one.got;
}
struct Vote {
  bool mine;
  uint32_t of_all;
  static void all(Lanes& lanes) {
    uint32_t votes = 0;
    for (int i = 0; i < 32; ++i)
      votes |= uint32_t{lanes[i] && static_cast<Vote*>(lanes[i])->mine} << i;
    for (void* lane : lanes) {
      if (lane) static_cast<Vote*>(lane)->of_all = votes;
    }
  }
};
inline uint32_t vote(bool mine) {
  Vote one{mine, 0};
  collective(&kVote, &one, Vote::all);
  return one.of_all;
}

}  // namespace emulator

inline void __syncwarp() {
  int nothing = 0;
  emulator::collective(&emulator::kSync, &nothing,
                       [](emulator::Lanes&) { emulator::lanes_meet(); });
}
template <class T>
T __shfl_sync(unsigned int, T x, int from) {
  return emulator::exchange(x, from);
}
template <class T>
T __shfl_xor_sync(unsigned int, T x, int bits) {
  return emulator::exchange(x, emulator::lane() ^ bits);
}
template <class T>
T __shfl_up_sync(unsigned int, T x, int lanes) {
  return emulator::exchange(x, max(emulator::lane() - lanes, 0));
}
inline int __all_sync(unsigned int, int mine) { return emulator::vote(!mine) == 0; }
inline unsigned int __reduce_max_sync(unsigned int, unsigned int x) {
  for (int bits = 1; bits < 32; bits *= 2) x = max(x, __shfl_xor_sync(~0u, x, bits));
  return x;
}
inline unsigned int __match_any_sync(unsigned int, unsigned int x) {
  unsigned int same = 0;
  for (int lane = 0; lane < 32; ++lane) same |= (__shfl_sync(~0u, x, lane) == x) << lane;
  return same;
}
inline int __any_sync(unsigned int, int mine) { return emulator::vote(mine) != 0; }
inline unsigned int __ballot_sync(unsigned int, int mine) { return emulator::vote(mine); }
