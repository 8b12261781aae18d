// The border between the CPU backend (plain C++, compiled once) and its kernels (compiled once per
// instruction set): what a kernel is given, and the table of kernels that each instruction set
// offers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/matrix.h"
#include "cpu/target.h"
#include "moe/problem.h"

namespace flashmoe::cpu::moe {

// One matrix for each expert, `step` elements apart; or one for each gate.
struct Stack {
  Matrix first;
  int64_t step = 0;

  explicit operator bool() const { return first.data != nullptr; }
};

// Rows of one expert: neighbours in the order of routing.
struct Block {
  int32_t expert, first, rows;
};

struct Params {
  MoeSizes s;
  Activation activation = Activation::kSwiglu;

  Matrix x, out;                        // (T, d)
  Stack gate_up, down;                  // (G n, d) and (d, n)
  Matrix up_bias, down_bias;            // (E, G n) and (E, d)
  Matrix ids, weights;                  // (T, k)
  Stack pre;                            // for each gate (T k, n)
  Matrix grad_out, grad_x;              // (T, d)
  Stack grad_gate_up, grad_down;        // (G n, d) and (d, n)
  Matrix grad_up_bias, grad_down_bias;  // (E, G n) and (E, d)
  Matrix grad_weights;                  // (T, k)

  const int32_t* offsets = nullptr;  // (E + 1)  the routing: see routing_elems()
  const int32_t* pairs = nullptr;    // (T k)
  const Block* blocks = nullptr;  // the work: each block of rows for each part of the inner width
  int64_t block_rows = 0;         // at most, in a block
  int64_t block_inner = 0;        // inner columns that are in scratch at once
  int64_t parts = 1;

  // In the workspace. What pairs add to their token, (parts, T k, d), in the accumulator's type;
  // absent where a token has one pair and one part, which then writes the result itself.
  void* sums = nullptr;
  // Backward, as left() and right() take them: gradients of the pre-activations (T k, G n),
  // weighted activations (T k, n). In the accumulator's type: gradients of the weights (parts, T
  // k).
  void* grad_pre = nullptr;
  void* weighted = nullptr;
  void* grad_weight_sums = nullptr;
};

struct RouteParams {
  int64_t tokens = 0, experts = 0, top_k = 0;
  Scoring scoring = Scoring::kSoftmax;
  bool normalize = true;
  Matrix logits, grad_logits;         // (T, E)
  Matrix bias;                        // (1, E)
  Matrix ids, weights, grad_weights;  // (T, k)
};

// Tokens in a work item of combine, route and their like.
inline constexpr int64_t kTokenBlock = 32;

// A side of a weight's gradient in tiles, at least one: there may be a bias beside an empty matrix.
[[gnu::always_inline]] inline int64_t grad_tiles(int64_t length, int64_t block) {
  return length > block ? (length + block - 1) / block : 1;
}

// One instruction set's kernels in one arithmetic. Each call does one work item, alone, in
// `scratch`; what it computes depends on the item only.
struct Kernels {
  size_t element_bytes;      // of grad_pre and weighted
  size_t accumulator_bytes;  // of sums
  int64_t block_rows, block_inner;
  int64_t row_step;  // rows of a block come in multiples of this, as far as there are any
  int64_t grad_rows, grad_cols;  // a tile of a weight's gradient

  size_t (*forward_scratch)(const Params&);
  void (*forward)(const Params&, int64_t item, void* scratch);  // out, or its sums
  size_t (*backward_scratch)(const Params&);
  // grad_x, or its sums; grad_pre, weighted, grad_weight_sums
  void (*backward)(const Params&, int64_t item, void* scratch);
  void (*grad_gate_up)(const Params&, int64_t item, void* scratch);  // one tile, and grad_up_bias
  void (*grad_down)(const Params&, int64_t item, void* scratch);     // one tile, and grad_down_bias
  // From sums to out or grad_x and grad_weights, a block of tokens.
  void (*combine)(const Params&, int64_t item, void* scratch);

  size_t (*route_scratch)(const RouteParams&);
  void (*route_forward)(const RouteParams&, int64_t item, void* scratch);  // a block of tokens
  void (*route_backward)(const RouteParams&, int64_t item, void* scratch);
};

}  // namespace flashmoe::cpu::moe
