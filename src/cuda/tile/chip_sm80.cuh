// What kernels with mma.sync need to know of Ampere and later.
#pragma once

#include "cuda/ptx/cp_async.cuh"
#include "cuda/tile/dtype.cuh"

namespace flashmoe::cuda::sm80 {

struct Chip {
  // Copies 16 bytes to shared memory in the background; writes zeros where nothing is to be read.
  static __device__ __forceinline__ void copy_16(uint32_t shared, const char* global, bool read) {
    ptx::cp_async_cg_16(shared, global, read);
  }
  // Copies `bytes` bytes and fills the 16 up with zeros.
  static __device__ __forceinline__ void copy_part(uint32_t shared, const char* global, int bytes) {
    ptx::cp_async_cg_16_part(shared, global, bytes);
  }
  static __device__ __forceinline__ void commit() { ptx::cp_async_commit_group(); }
  // Waits until at most kPending of the committed groups are still on their way.
  template <int kPending>
  static __device__ __forceinline__ void wait() {
    ptx::cp_async_wait_group<kPending>();
  }
};

}  // namespace flashmoe::cuda::sm80
