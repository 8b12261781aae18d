// What the kernels of forward mode and second derivatives are given, and their tile. Read by nvcc
// and by the host compiler.
#pragma once

#include "cuda/attention/params.h"

namespace flashmoe::cuda {

// Rows of queries and of keys in a tile, and columns of a chunk of the head dim. A warp has 16 rows
// of either side.
inline constexpr int kSecondRows = 32, kSecondColumns = 64;
inline constexpr int kSecondThreads = 128;
inline constexpr int kSecondHeadBytes = 256;  // where all of it comes from

// Shared memory: a tile for each of the seven tensors, whose numbers have 2 bytes where tensor
// cores multiply them as they are and 4 otherwise; and numbers of rows, of two warps.
constexpr int second_tile_bytes(int element_bytes) {
  return kSecondRows * kSecondColumns * element_bytes;
}
constexpr int second_shared_bytes(int element_bytes) {
  return 7 * second_tile_bytes(element_bytes) + 2 * kSecondRows * 16 + kSecondHeadBytes;
}
// CTAs that an SM is to hold: as many as Hopper has memory for; by keys, which have two sums,
// registers.
constexpr int second_ctas(int element_bytes, bool by_keys) {
  return element_bytes == 4 || by_keys ? 3 : 4;
}
inline constexpr int kSecondSinksSharedBytes = 16;
inline constexpr int kSecondRowsOfCta = 8;  // of the kernel that goes row by row

constexpr int second_chunks(int head_dim) {
  return (head_dim + kSecondColumns - 1) / kSecondColumns;
}

// How inputs move, and how results move with them.
struct AttentionSecondParams : AttentionBwdParams {
  const void* tangent_query;  // like query; null: it does not move, as the next four
  const void* tangent_key;
  const void* tangent_value;
  const void* tangent_bias;   // like bias, in its dtype
  const void* tangent_sinks;  // like sinks
  void* tangent_out;          // like out; written by the tangent pass, read by the second; or null
  float* tangent_lse;         // like lse; the same
  Strides tangent_query_strides, tangent_key_strides, tangent_value_strides, tangent_bias_strides,
      tangent_out_strides, tangent_lse_strides;
  int64_t tangent_bias_column;
  int64_t tangent_sink_step;
  float softcap;  // 0: none

  // Workspace: of each row its lse, delta = out.dO - grad_lse, lse' and out'.dO. Rows of a head are
  // (batch, len_q), ragged: tokens.
  float* row_numbers;  // (heads_q, rows_of_head, 4)
  int64_t rows_of_head;
};

}  // namespace flashmoe::cuda
