// Kernels without a tile.
#include "cuda/moe/kernels/small.cuh"
