// The border between writing to a cache on the CPU (plain C++, compiled once) and its kernels
// (compiled once per instruction set).
#pragma once

#include <cstdint>

#include "cpu/target.h"
#include "flashmoe/tensor.h"

namespace flashmoe::cpu::cache {

// Keys or values. Strides in elements.
struct Side {
  const char* from = nullptr;  // (T, heads, dim)
  DType dtype = DType::kFloat32;
  int64_t token = 0, head = 0, col = 0;
  char* cache = nullptr;  // (blocks, page, heads, dim)
  DType cache_dtype = DType::kFloat32;
  int64_t block = 0, row = 0, cache_head = 0, cache_col = 0;
  int64_t dim = 0;
  const float* scale = nullptr;  // what is stored is divided by it; null: by nothing
  int64_t scale_step = 0;        // from one head to the next
};

struct Params {
  Side sides[2];  // keys, values
  const void* slots = nullptr;
  DType slots_dtype = DType::kInt64;
  int64_t slots_step = 0;
  int64_t tokens = 0, heads = 0, page = 0, rows = 0;  // rows: all of the cache
  int64_t tokens_of_item = 0;
};

// One instruction set's kernel in one arithmetic: the tokens of a work item to their slots.
struct Kernels {
  void (*append)(const Params&, int64_t item);
};

}  // namespace flashmoe::cpu::cache
