// Device code is compiled with -fsanitize=thread, which calls a function for each access to memory:
// these, in place of ThreadSanitizer's own. They tell the emulator, and what is no shared memory it
// passes over. (Other compilers than GCC name them alike.)
#include <cstdint>

#include "machine.h"

extern "C" {

void __tsan_init() {}

#define ACCESSES(bytes)                                                               \
  void __tsan_read##bytes(void* memory) { emulator::accessed(memory, bytes, false); } \
  void __tsan_write##bytes(void* memory) { emulator::accessed(memory, bytes, true); } \
  void __tsan_unaligned_read##bytes(void* memory) { __tsan_read##bytes(memory); }     \
  void __tsan_unaligned_write##bytes(void* memory) { __tsan_write##bytes(memory); }   \
  void __tsan_volatile_read##bytes(void* memory) { __tsan_read##bytes(memory); }      \
  void __tsan_volatile_write##bytes(void* memory) { __tsan_write##bytes(memory); }

ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)

void __tsan_read_range(void* memory, uintptr_t bytes) {
  emulator::accessed(memory, static_cast<int>(bytes), false);
}
void __tsan_write_range(void* memory, uintptr_t bytes) {
  emulator::accessed(memory, static_cast<int>(bytes), true);
}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

// Atomics are of global memory.
int __tsan_atomic32_load(const volatile int* at, int) {
  return __atomic_load_n(at, __ATOMIC_SEQ_CST);
}
void __tsan_atomic32_store(volatile int* at, int x, int) {
  __atomic_store_n(at, x, __ATOMIC_SEQ_CST);
}
int __tsan_atomic32_fetch_add(volatile int* at, int x, int) {
  return __atomic_fetch_add(at, x, __ATOMIC_SEQ_CST);
}
unsigned char __tsan_atomic8_load(const volatile unsigned char* at, int) {
  return __atomic_load_n(at, __ATOMIC_SEQ_CST);
}

}  // extern "C"
