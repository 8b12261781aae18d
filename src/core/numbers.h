// Arithmetic on sizes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flashmoe {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t multiple) { return ceil_div(a, multiple) * multiple; }

// Blocks of equal size, `most` or less, rather than full ones and a rest, rounded up to a multiple
// of `step`.
constexpr int64_t even_block(int64_t length, int64_t most, int64_t step) {
  const int64_t blocks = length > most ? ceil_div(length, most) : 1;
  const int64_t block = round_up(ceil_div(length, blocks), step);
  return block > step ? block : step;
}

// Parts of a workspace begin at multiples of this many bytes.
inline constexpr size_t kWorkspaceAlign = 64;
constexpr size_t aligned(size_t bytes) {
  return (bytes + kWorkspaceAlign - 1) / kWorkspaceAlign * kWorkspaceAlign;
}

// The logarithm to base 2 of a power of two; -1 of other numbers.
constexpr int32_t exact_log2(int64_t n) {
  if (n < 1 || (n & (n - 1)) != 0) return -1;
  int32_t log2 = 0;
  while (n >>= 1) ++log2;
  return log2;
}

}  // namespace flashmoe
