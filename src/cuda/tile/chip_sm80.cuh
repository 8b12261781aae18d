// What the kernels of any/ need to know of Ampere and later.
#pragma once

#include "cuda/ptx/cp_async.cuh"
#include "cuda/tile/dtype.cuh"

namespace flashmoe::cuda::sm80 {

struct Chip {
  // 16 bytes to shared memory, in the background; zeros where nothing is to be read.
  static __device__ __forceinline__ void copy_16(uint32_t shared, const char* global, bool read) {
    ptx::cp_async_cg_16(shared, global, read);
  }
  // Zeros after the first `bytes`.
  static __device__ __forceinline__ void copy_part(uint32_t shared, const char* global, int bytes) {
    ptx::cp_async_cg_16_part(shared, global, bytes);
  }
  static __device__ __forceinline__ void commit() { ptx::cp_async_commit_group(); }
  // Until at most kPending of what was committed is still on its way.
  template <int kPending>
  static __device__ __forceinline__ void wait() {
    ptx::cp_async_wait_group<kPending>();
  }
};

}  // namespace flashmoe::cuda::sm80
