#include "stacks.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <vector>

namespace emulator {
namespace {

constexpr size_t kGuardBytes = 4096 << 2;

std::mutex mutex;
std::vector<char*> unused;

char* make_stack() {
  void* const memory = mmap(nullptr, kGuardBytes + kStackBytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED || mprotect(memory, kGuardBytes, PROT_NONE) != 0) {
    std::perror("emulator: no memory for a stack");
    std::abort();
  }
  return static_cast<char*>(memory) + kGuardBytes;
}

}  // namespace

char* take_stack() {
  const std::lock_guard lock(mutex);
  if (unused.empty()) return make_stack();
  char* const stack = unused.back();
  unused.pop_back();
  return stack;
}
void give_back_stack(char* stack) {
  const std::lock_guard lock(mutex);
  unused.push_back(stack);
}

}  // namespace emulator
