// A pipeline between one producer thread, which loads tiles to shared memory by TMA, and consumer
// warpgroups: stages with two mbarriers each, used in a ring.
#pragma once

#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/special_registers.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/tma/tensor_map.h"

namespace flashmoe::cuda::tma {

// The two mbarriers of a stage, by their addresses. The producer arrives on `full` and consumers
// wait for it; consumers arrive on `empty` and the producer waits for it.
struct Slot {
  // What a slot takes of shared memory.
  struct Barriers {
    uint64_t full, empty;
  };

  uint32_t full, empty;

  __device__ __forceinline__ explicit Slot(uint32_t barriers)
      : full(barriers), empty(barriers + 8) {}
  // `writers` and `readers` are the arrivals that end a phase of `full` and of `empty`.
  __device__ __forceinline__ void init(int writers, int readers) const {
    ptx::mbarrier_init(full, writers);
    ptx::mbarrier_init(empty, readers);
  }
};

// Which of kStages stages is next. Producer and consumers count stages each for themselves.
template <int kStages, bool kPowerOfTwo = (kStages & (kStages - 1)) == 0>
class Ring {
 public:
  __device__ __forceinline__ explicit Ring(uint32_t count = 0) : count_(count) {}
  // How many stages came before this one.
  __device__ __forceinline__ uint32_t count() const { return count_; }
  // The stage's index. Opaque, so that addresses are recomputed rather than kept in registers.
  __device__ __forceinline__ int at() const { return ptx::opaque(count_) % kStages; }
  __device__ __forceinline__ int parity() const { return count_ / kStages % 2; }
  __device__ __forceinline__ void advance(uint32_t stages = 1) { count_ += stages; }
  __device__ __forceinline__ void wait_full(const Slot& slot) const {
    ptx::mbarrier_wait(slot.full, parity());
  }
  // The first round of the ring finds every stage empty.
  __device__ __forceinline__ void wait_empty(const Slot& slot) const {
    ptx::mbarrier_wait(slot.empty, parity() ^ 1);
  }

 private:
  uint32_t count_;  // may overflow
};

// The same where kStages is no power of two.
template <int kStages>
class Ring<kStages, false> {
 public:
  __device__ __forceinline__ int at() const {
    const uint32_t place = ptx::opaque(place_);
    return place < kStages ? place : place - kStages;
  }
  __device__ __forceinline__ int parity() const { return place_ >= kStages; }
  __device__ __forceinline__ void advance() { place_ = place_ + 1 < 2 * kStages ? place_ + 1 : 0; }
  __device__ __forceinline__ void wait_full(const Slot& slot) const {
    ptx::mbarrier_wait(slot.full, parity());
  }
  __device__ __forceinline__ void wait_empty(const Slot& slot) const {
    ptx::mbarrier_wait(slot.empty, parity() ^ 1);
  }

 private:
  uint32_t place_ = 0;  // of two rounds, which differ in parity
};

// Returns lane 0's `x`, which all lanes of the warp have: the compiler then knows that it is
// uniform and keeps it in uniform registers.
template <class Number>
__device__ __forceinline__ Number warp_uniform(Number x) {
  return __shfl_sync(0xffffffffu, x, 0);
}

// Loads a tile, one box of kBlockCols columns after the other, by one thread. `where` are the
// coordinates after the column: row, head and so on. `slot.full` also counts kMoreBytes, which the
// caller loads. kEvictFirst: no other CTA loads the tile.
template <class Tile, uint32_t kMoreBytes = 0, bool kEvictFirst = false, class... Where>
__device__ __forceinline__ void fill(const Slot& slot, uint32_t shared, const TensorMap& map,
                                     Where... where) {
  ptx::mbarrier_arrive_expect_tx(slot.full, Tile::kBytes + kMoreBytes);
#pragma unroll
  for (int i = 0; i < Tile::kBlocks; ++i) {
    const uint32_t to = shared + i * Tile::kBlockBytes;
    if constexpr (kEvictFirst) {
      ptx::tma_load_evict_first(to, &map, slot.full, Tile::kBlockCols * i, where...);
    } else {
      ptx::tma_load(to, &map, slot.full, Tile::kBlockCols * i, where...);
    }
  }
}

}  // namespace flashmoe::cuda::tma
