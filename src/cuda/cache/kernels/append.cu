// The kernel that writes to a cache, for every family: it has no dtype of its own.
#include "cuda/cache/append.cuh"

#define FLASHMOE_PASTE(FAMILY) FAMILY##_cache_append
#define FLASHMOE_PASTE_VALUE(FAMILY) FLASHMOE_PASTE(FAMILY)

using namespace flashmoe::cuda::cache;

extern "C" __global__ void __launch_bounds__(kAppendThreads)
    FLASHMOE_PASTE_VALUE(FLASHMOE_FAMILY)(const __grid_constant__ AppendParams p) {
  cache_append(p);
}
