// Device code as host code, for its arithmetic: which CTA has which tile, in which order, who waits
// for whom. What does that is plain C++; around it this gives the few names of CUDA that it needs.
// PTX compiles here and cannot run: nothing that uses it may be called, but for three functions
// which have meanings on the host below.
//
// To be included behind all other headers, and before those of device code.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <type_traits>

#define __CUDACC__ 1
#define __device__
#define __forceinline__ inline
#define __shared__
#define __align__(bytes) __attribute__((aligned(bytes)))

struct Dim3 {
  unsigned int x = 1, y = 1, z = 1;
};
// Which CTA and thread the code below is.
inline Dim3 blockIdx{0, 0, 0}, threadIdx{0, 0, 0}, blockDim, gridDim;

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
using std::isnan;

inline float __uint_as_float(unsigned int x) { return std::bit_cast<float>(x); }
inline unsigned int __float_as_uint(float x) { return std::bit_cast<unsigned int>(x); }
inline int atomicAdd(int* at, int x) {
  const int before = *at;
  *at += x;
  return before;
}
inline void __nanosleep(unsigned int) {}
inline void __syncwarp() {}
template <class T>
T __shfl_sync(unsigned int, T x, int) {
  return x;
}

// Declared, and nowhere called.
template <class T>
T __shfl_xor_sync(unsigned int, T, int);
template <class T>
T __shfl_up_sync(unsigned int, T, int);
template <class T>
T __ldcs(const T*);
template <class T>
T __ldcg(const T*);
int __any_sync(unsigned int, int);
unsigned int __ballot_sync(unsigned int, int);
unsigned int __funnelshift_r(unsigned int, unsigned int, unsigned int);
unsigned int __vcmpeq4(unsigned int, unsigned int);
unsigned int __byte_perm(unsigned int, unsigned int, unsigned int);
float __fdividef(float, float);
int __clz(int);
void __syncthreads();
size_t __cvta_generic_to_shared(const void*);

// One thread at a time runs here: whoever waits does so for ever.
#define ld_acquire ld_acquire_of_device
#define red_release_add red_release_add_of_device
#include "cuda/ptx/memory.cuh"
#undef ld_acquire
#undef red_release_add
#define fence_proxy_async fence_proxy_async_of_device
#include "cuda/ptx/tma.cuh"
#undef fence_proxy_async
namespace flashmoe::cuda::ptx {
struct WaitsForever : std::runtime_error {
  using std::runtime_error::runtime_error;
};
inline int ld_acquire(const int* at) {
  constexpr int kPatience = 1 << 22;  // many in turn may ask, and be answered, without waiting
  static const int* last = nullptr;
  static int value = 0, times = 0;
  times = at == last && *at == value ? times + 1 : 0;
  last = at;
  value = *at;
  if (times > kPatience) throw WaitsForever("waits for a number that stays as it is");
  return value;
}
inline void red_release_add(int* at, int x) { *at += x; }
inline void fence_proxy_async() {}
}  // namespace flashmoe::cuda::ptx
