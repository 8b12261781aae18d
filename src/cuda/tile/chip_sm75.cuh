// What kernels with mma.sync need to know of Turing.
#pragma once

#include "cuda/ptx/shared.cuh"
#include "cuda/tile/dtype.cuh"

namespace flashmoe::cuda::sm75 {

struct Chip {
  // Copies 16 bytes to shared memory, at once: Turing does not copy in the background. Writes zeros
  // where nothing is to be read.
  static __device__ __forceinline__ void copy_16(uint32_t shared, const char* global, bool read) {
    ptx::st_shared_v4(shared, read ? *reinterpret_cast<const uint4*>(global) : uint4{0, 0, 0, 0});
  }
  // Copies `bytes` bytes, an even number, and fills the 16 up with zeros. Nothing is read beyond.
  static __device__ __forceinline__ void copy_part(uint32_t shared, const char* global, int bytes) {
    uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      if (2 * e >= bytes) continue;
      const uint32_t element = reinterpret_cast<const uint16_t*>(global)[e];
      words[e / 2] |= element << (e % 2 * 16);
    }
    ptx::st_shared_v4(shared, {words[0], words[1], words[2], words[3]});
  }
  static __device__ __forceinline__ void commit() {}
  template <int kPending>
  static __device__ __forceinline__ void wait() {}
};

// fp16 with Turing's instructions.
struct Fp16 : flashmoe::cuda::Fp16 {
  static __device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1, const float (&c)[4]) {
    ptx::mma_m16n8k8_f16(d, a[0], a[1], b0, c);
    ptx::mma_m16n8k8_f16(d, a[2], a[3], b1, d);
  }
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    return ptx::cvt_rn_f16(low) | static_cast<uint32_t>(ptx::cvt_rn_f16(high)) << 16;
  }
};

}  // namespace flashmoe::cuda::sm75
