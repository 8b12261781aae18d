// What the kernel that writes to a cache is given, by value. Read by nvcc and by the host compiler.
#pragma once

#include <cstdint>

namespace flashmoe::cuda::cache {

inline constexpr int kAppendThreads = 128;
inline constexpr int kAppendTokens = 4;  // of a CTA: several rows are on their way at once

// How numbers go from the tensor to the cache.
enum class Conversion : int32_t {
  kNone,      // bit for bit, `unit` bytes at a time
  kFromFp16,  // to e4m3
  kFromBf16,
  kFromFp32,
};

// Keys or values. Strides in bytes.
struct AppendSide {
  const char* from;          // (tokens, heads, dim)
  char* cache;               // (blocks, page, heads, dim)
  int64_t token, head, col;  // strides of `from`
  int64_t block, row, cache_head, cache_col;
  const float* scale;    // e4m3: what is divided by, () or (heads); null: 1
  int64_t scale_stride;  // in floats; 0: one for all heads
  int32_t units;         // of a head's row
  // Bytes of `from` that a thread takes at once: a number, or what lies side by side and is aligned
  // in both. Converted: 16 bytes, which are 8 numbers, or one number.
  int32_t unit;
};

struct AppendParams {
  AppendSide sides[2];  // grid.y: keys and values
  const void* slots;    // (tokens), int64 or int32
  int64_t slots_stride;
  int64_t slots_of_cache;  // blocks x page
  int32_t slots_are_int64;
  int32_t tokens, heads, page;
  int32_t page_log2;  // -1: the page is no power of two
  Conversion conversion;
};

}  // namespace flashmoe::cuda::cache
