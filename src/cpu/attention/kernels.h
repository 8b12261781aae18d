// The border between the CPU backend (plain C++, compiled once) and its kernels (compiled once per
// instruction set): what a kernel is given, and the table of kernels that each instruction set
// offers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/problem.h"
#include "cpu/target.h"

namespace flashmoe::cpu {

// A tensor as kernels see it. Strides in elements; 0 where the tensor is broadcast.
struct Operand {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t lead[kMaxLead] = {};
  int64_t head = 0;
  int64_t row = 0;  // queries or keys; ragged: tokens
  int64_t col = 0;  // head dim; bias: keys

  explicit operator bool() const { return data != nullptr; }
};

// How a sequence over pages is cut. A tile has the queries of all heads that share a key head:
// column c is query c / group of head c % group of those. The keys of a tile come in parts, each of
// which a work item sums up on its own; with more than one, `combine` adds them up. All of it
// follows from the sequence alone, so that a request has the same bits whatever shares its batch.
struct PagedSequence {
  int64_t first_row = 0, rows = 0, keys = 0;
  int64_t columns = 0;  // of a tile, at most
  int64_t tiles = 0;
  int64_t heads =
      1;  // key heads of a work item: one, or all, to read what lies side by side at once
  int64_t parts = 1;
  int64_t first_task = 0;     // (tile, key head) of the sequences before it
  int64_t first_item = 0;     // and (tile, one or all key heads, part)
  int64_t first_partial = 0;  // where its parts are: (tile, key head, part), each columns x
                              // partial_ld and two numbers for each column
};
// A sequence with no more columns than these has all key heads in one work item.
inline constexpr int64_t kColumnsOfAllHeads = 16;

struct Params {
  Geometry geometry;

  Operand query, key, value;  // (..., H, S, D)
  bool has_bias = false;      // as planned: scratch has room for it
  Operand bias;               // (..., H, Sq, Sk); ragged: row is the stride of the packed dimension
  Operand sinks;              // (H)
  Operand out, lse;
  Operand grad_out, grad_lse, grad_query, grad_key, grad_value, grad_bias, grad_sinks;
  bool has_tangent_bias = false;  // as planned, like has_bias
  Operand tangent_query, tangent_key, tangent_value, tangent_bias, tangent_sinks;
  Operand tangent_out, tangent_lse;
  Operand key_lengths;                   // one integer per batch, by `lead`
  Operand cu_seqlens_q, cu_seqlens_k;    // integers, by `row`
  const int64_t* bias_offset = nullptr;  // ragged: first packed row of each sequence

  // Paged: key and value have the stride of blocks as lead[0], and rows are those of a page.
  Operand block_table;                       // integers, by `row` (sequence) and `col` (block)
  Operand k_scale, v_scale;                  // fp32, by `head`
  const PagedSequence* sequences = nullptr;  // (batch), of which these are known:
  int64_t sequence_count = 0;
  int64_t partial_ld = 0;  // Dv, padded

  uint64_t seed = 0;  // of dropout

  int64_t block_q = 0, block_k = 0;  // tile of scores
  int64_t chunks = 1;                // pieces each (batch, head) is cut into
  // Gradients with chunks > 1: partial dK and dV, (batch, heads_k, chunks, len_k, D + Dv), each
  // dimension padded as the kernels pad it. Paged: see PagedSequence.
  void* partial = nullptr;
  // Backward where dSinks is wanted: what each work item of the main pass adds to it.
  double* sink_partial = nullptr;  // (items, heads_q / heads_k)
  int64_t items = 0;

  // How dBias comes about. kDirect: no two (batch, head) share an element, so the main pass writes
  // it. kShared: elements are sums over broadcast dimensions, made by a pass of their own, one tile
  // of dBias at a time and always in the same order.
  enum class BiasGrad { kNone, kDirect, kShared } bias_grad = BiasGrad::kNone;
  bool bias_own[kMaxLead + 1] =
      {};  // kShared: which leading dims (last: heads) the bias has of its own
  bool bias_rows = true, bias_cols = true;  // kShared: the bias has rows, columns of its own
};

// The kernels of a pass that gives gradients.
struct GradientKernels {
  size_t (*scratch)(const Params&);
  void (*gradients)(const Params&, int64_t item, void* scratch);  // of q, k, v, and direct dBias
  void (*bias)(const Params&, int64_t item, void* scratch);       // shared dBias, one tile
};

// One instruction set's kernels in one arithmetic. Each call does one work item, alone, in
// `scratch`; what it computes depends on the item only.
struct Kernels {
  int64_t block;     // a tile of scores has so many queries and keys, at most
  int64_t key_step;  // and keys in multiples of this
  size_t (*forward_scratch)(const Params&);
  void (*forward)(const Params&, int64_t item, void* scratch);
  size_t (*tangent_scratch)(const Params&);
  void (*tangent)(const Params&, int64_t item, void* scratch);
  GradientKernels backward, second;
  size_t (*partial_bytes)(const Params&);
  void (*reduce)(const Params&, int64_t item, void* scratch);     // sums the chunks' dK and dV
  void (*sink_grad)(const Params&, int64_t item, void* scratch);  // sums dSinks, one head
  size_t (*paged_scratch)(const Params&);
  void (*paged)(const Params&, int64_t item, void* scratch);  // forward, one part of a tile's keys
  void (*combine)(const Params&, int64_t task, void* scratch);  // adds up a tile's parts
};

}  // namespace flashmoe::cpu
