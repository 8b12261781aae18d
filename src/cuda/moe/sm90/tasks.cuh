// The tiles of a product over rows of experts, as persistent CTAs go through them.
#pragma once

#include "cuda/moe/experts.cuh"

namespace flashmoe::cuda::moe::sm90 {

struct ProductTask {
  ExpertTile tile;
  int column;  // tile of columns
  int depth_steps;

  __device__ __forceinline__ int steps() const { return depth_steps; }
  __device__ __forceinline__ int rows() const { return tile.rows; }
};

// All tiles of rows that there are, times all tiles of columns, in the order of find_task().
class ProductTasks {
 public:
  __device__ __forceinline__ ProductTasks(const ProductTiles& p, const int32_t* tile_count,
                                          int depth, int depth_of_step)
      : p_(p), count_(*tile_count), steps_((depth + depth_of_step - 1) / depth_of_step) {}

  __device__ __forceinline__ int total() const { return count_ * p_.columns; }
  __device__ __forceinline__ int steps() const { return steps_; }
  __device__ __forceinline__ ProductTask find(int number) const {
    const ProductTiles there_are{p_.tiles, count_, p_.columns};
    const Task task = find_task(there_are, number);
    return {task.tile, task.column, steps_};
  }

 private:
  const ProductTiles& p_;
  const int count_, steps_;
};

// Calls body(task) for the tiles of this CTA. The next one is looked up early.
template <class Body>
__device__ __forceinline__ void for_each_task(const ProductTasks& tasks, const Body& body) {
  const int total = tasks.total();
  if (static_cast<int>(blockIdx.x) >= total) return;
  ProductTask next = tasks.find(blockIdx.x);
#pragma unroll 1
  for (int number = blockIdx.x; number < total; number += gridDim.x) {
    const ProductTask task = next;
    next = tasks.find(min(number + static_cast<int>(gridDim.x), total - 1));
    body(task, next);
  }
}

}  // namespace flashmoe::cuda::moe::sm90
