// Stacks of threads, with pages between them that nobody may touch. Those that are given back are
// used again.
#pragma once

#include <cstddef>

namespace emulator {

inline constexpr size_t kStackBytes = 256 << 10;
char* take_stack();  // its lowest byte
void give_back_stack(char* stack);

}  // namespace emulator
