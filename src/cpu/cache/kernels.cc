// One instruction set's kernels: compiled once per target, see cpu/target.h.
#include "cpu/cache/kernels.h"

#include "cpu/tile.h"

namespace flashmoe::cpu::cache {
namespace {

int64_t slot_of(const Params& p, int64_t token) {
  const int64_t at = token * p.slots_step;
  return p.slots_dtype == DType::kInt32 ? static_cast<const int32_t*>(p.slots)[at]
                                        : static_cast<const int64_t*>(p.slots)[at];
}

// Numbers as they are, bit for bit.
void copy_row(const char* from, int64_t step, char* to, int64_t to_step, int64_t n, int64_t size) {
  if (step == 1 && to_step == 1) {
    __builtin_memcpy(to, from, n * size);
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    __builtin_memcpy(to + i * to_step * size, from + i * step * size, size);
  }
}

// Divided by `scale` and rounded to the cache's dtype.
template <class A>
void convert_row(const Side& s, const char* from, char* to, A scale) {
  constexpr int64_t kPart = 256;
  alignas(kVectorBytes) A line[kPart];
  for (int64_t d = 0; d < s.dim; d += kPart) {
    const int64_t n = smaller(kPart, s.dim - d);
    load_row(s.dtype, from + d * s.col * dtype_bytes(s.dtype), s.col, n, line);
    for (int64_t i = 0; i < n; ++i) line[i] /= scale;
    store_row(s.cache_dtype, to + d * s.cache_col * dtype_bytes(s.cache_dtype), s.cache_col, n,
              line);
  }
}

template <class A>
void append(const Params& p, int64_t item) {
  const int64_t first = item * p.tokens_of_item;
  for (int64_t t = first; t < smaller(first + p.tokens_of_item, p.tokens); ++t) {
    const int64_t slot = slot_of(p, t);
    if (slot < 0 || slot >= p.rows) continue;
    const int64_t block = slot / p.page, row = slot % p.page;
    for (const Side& s : p.sides) {
      for (int64_t h = 0; h < p.heads; ++h) {
        const char* from = s.from + (t * s.token + h * s.head) * dtype_bytes(s.dtype);
        char* to = s.cache +
                   (block * s.block + row * s.row + h * s.cache_head) * dtype_bytes(s.cache_dtype);
        if (s.dtype == s.cache_dtype) {
          copy_row(from, s.col, to, s.cache_col, s.dim, dtype_bytes(s.dtype));
        } else {
          convert_row<A>(s, from, to, s.scale ? s.scale[h * s.scale_step] : 1);
        }
      }
    }
  }
}

}  // namespace
}  // namespace flashmoe::cpu::cache

namespace flashmoe::cpu {

extern const Arithmetics<cache::Kernels> FLASHMOE_OF_TARGET(cache);
const Arithmetics<cache::Kernels> FLASHMOE_OF_TARGET(cache) = {
    {cache::append<float>}, {cache::append<double>}, {cache::append<float>}};

}  // namespace flashmoe::cpu
