// Dynamic shared memory, by the names that kernels have for it: each CTA, a thread of the host, has
// its own.
#include "device.h"

#define SHARED_MEMORY(name) __shared__ __align__(1024) char name[227 * 1024]

namespace flashmoe::cuda {
SHARED_MEMORY(shared);
namespace second {
SHARED_MEMORY(shared);
}
namespace sm90 {
SHARED_MEMORY(shared);
SHARED_MEMORY(shared_memory);
SHARED_MEMORY(shared_sequences);
}  // namespace sm90
}  // namespace flashmoe::cuda

void emulator::clear_shared(int bytes) {
  namespace cuda = flashmoe::cuda;
  for (char* memory : {cuda::shared, cuda::second::shared, cuda::sm90::shared,
                       cuda::sm90::shared_memory, cuda::sm90::shared_sequences}) {
    std::memset(memory, 0xff, bytes);
  }
}
