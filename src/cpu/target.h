// What one instruction set offers. Kernel files are compiled once per target, with
// FLASHMOE_CPU_TARGET naming it and the compiler flags choosing its instructions; each defines one
// table, and all else in it is local to it. It uses no inline function or template that other files
// use too: the linker keeps one copy of those, and that copy could hold instructions the machine
// does not have.
#pragma once

#include "flashmoe/tensor.h"

namespace flashmoe::cpu {

// The kernels of one operator, in each arithmetic.
template <class Kernels>
struct Arithmetics {
  Kernels fp32;  // fp32 and fp16 tensors, multiplied in fp32
  Kernels fp64;
  Kernels bf16;  // bf16 tensors, multiplied in bf16 where the target can, else in fp32
};

struct Kernels;
namespace cache {
struct Kernels;
}
namespace moe {
struct Kernels;
}

struct Target {
  const char* name;
  const Arithmetics<Kernels>* attention;
  const Arithmetics<cache::Kernels>* cache;
  const Arithmetics<moe::Kernels>* moe;
};

}  // namespace flashmoe::cpu

// The name of a target's table: FLASHMOE_OF_TARGET(attention) is attention_neon.
#define FLASHMOE_CONCAT_(a, b) a##_##b
#define FLASHMOE_CONCAT(a, b) FLASHMOE_CONCAT_(a, b)
#define FLASHMOE_OF_TARGET(what) FLASHMOE_CONCAT(what, FLASHMOE_CPU_TARGET)
