// Boxes of a tensor, as TMA copies them.
#include <cstring>

#include "machine.h"

namespace emulator {

void copy_box(const void* map, const int (&at)[5], uint32_t address, bool to_shared) {
  TensorMapContents m;
  std::memcpy(&m, map, sizeof m);
  int64_t rows = 1;
  for (int i = 1; i < m.rank; ++i) rows *= m.box[i];
  const int row_bytes = m.box[0] * m.element_bytes;
  for (int64_t row = 0; row < rows; ++row) {
    int64_t rest = row;
    char* from = m.address;
    bool inside = true;
    for (int i = 1; i < m.rank; ++i) {
      const int64_t c = at[i] + rest % m.box[i];
      rest /= m.box[i];
      inside = inside && c >= 0 && c < static_cast<int64_t>(m.sizes[i]);
      from += c * static_cast<int64_t>(m.strides[i - 1]);
    }
    for (int i = 0; i < m.box[0]; ++i) {
      const int64_t c = int64_t{at[0]} + i;
      const uint32_t plain = address + static_cast<uint32_t>(row * row_bytes + i * m.element_bytes);
      // 1: 32 bytes, 2: 64, 3: 128.
      const uint32_t mask = (1u << m.swizzle) - 1;
      char* const here =
          shared(plain ^ (plain - kBase) / 128 % 8 % (mask + 1) * 16, m.element_bytes);
      char* const there = from + c * m.element_bytes;
      const bool exists = inside && c >= 0 && c < static_cast<int64_t>(m.sizes[0]);
      if (to_shared && exists) std::memcpy(here, there, m.element_bytes);
      if (to_shared && !exists) std::memset(here, 0, m.element_bytes);
      if (!to_shared && exists) std::memcpy(there, here, m.element_bytes);
    }
  }
}

}  // namespace emulator
