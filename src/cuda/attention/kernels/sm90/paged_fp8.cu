// The same for an fp8 cache.
#include "cuda/tile/chip_sm80.cuh"

namespace flashmoe::cuda::sm90 {
using Chip = sm80::Chip;
}

#include "cuda/attention/kernels/mma_sync/paged_fp8.cu"
