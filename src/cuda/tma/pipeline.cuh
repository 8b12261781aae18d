// Places in shared memory that one thread has filled and warpgroups empty, in turns.
#pragma once

#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/special_registers.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/tma/tensor_map.h"

namespace flashmoe::cuda::sm90 {

// The barriers of one place.
struct Slot {
  uint32_t full, empty;
  static constexpr uint32_t kBytes = 16;

  __device__ __forceinline__ explicit Slot(uint32_t barriers)
      : full(barriers), empty(barriers + 8) {}
  // `readers` say that it is empty.
  __device__ __forceinline__ void init(int readers) const {
    ptx::mbarrier_init(full, 1);
    ptx::mbarrier_init(empty, readers);
  }
};

// Which of kCount places is next, and how often it was filled before.
template <int kCount>
class Ring {
 public:
  __device__ __forceinline__ explicit Ring(uint32_t turns = 0) : turns_(turns) {}
  __device__ __forceinline__ uint32_t turns() const { return turns_; }
  // Opaque: so that addresses are computed once more rather than kept in registers.
  __device__ __forceinline__ int at() const { return ptx::opaque(turns_) % kCount; }
  __device__ __forceinline__ int parity() const { return turns_ / kCount % 2; }
  __device__ __forceinline__ void advance() { ++turns_; }
  __device__ __forceinline__ void wait_full(const Slot& slot) const {
    ptx::mbarrier_wait(slot.full, parity());
  }
  // The first turn finds every place empty.
  __device__ __forceinline__ void wait_empty(const Slot& slot) const {
    ptx::mbarrier_wait(slot.empty, parity() ^ 1);
  }

 private:
  static_assert((kCount & (kCount - 1)) == 0);  // turns may overflow
  uint32_t turns_;
};

// What is the same for all threads of a warp; so that the compiler knows, too, and has it in
// uniform registers.
template <class Number>
__device__ __forceinline__ Number same(Number x) {
  return __shfl_sync(0xffffffffu, x, 0);
}

// A tile, in blocks of 64 columns, on its way to shared memory: `where` names row, head and so on.
// Whoever waits for it waits for kMoreBytes as well. kOnce: nobody else needs it.
template <class Tile, uint32_t kMoreBytes = 0, bool kOnce = false, class... Where>
__device__ __forceinline__ void fill(const Slot& slot, uint32_t shared, const TensorMap& map,
                                     Where... where) {
  ptx::mbarrier_arrive_expect_tx(slot.full, Tile::kBytes + kMoreBytes);
#pragma unroll
  for (int i = 0; i < Tile::kBlocks; ++i) {
    const uint32_t to = shared + i * Tile::kBlockBytes;
    if constexpr (kOnce) {
      ptx::tma_load_once(to, &map, slot.full, 64 * i, where...);
    } else {
      ptx::tma_load(to, &map, slot.full, 64 * i, where...);
    }
  }
}

}  // namespace flashmoe::cuda::sm90
