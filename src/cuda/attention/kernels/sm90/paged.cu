// Attention over pages for Hopper where a sequence has few queries: mma.sync as before, since its
// work is reading the cache, with stages for Hopper's shared memory.
#include "cuda/tile/chip_sm80.cuh"

namespace flashmoe::cuda::sm90 {
using Chip = sm80::Chip;
}

#include "cuda/attention/kernels/mma_sync/paged.cu"
