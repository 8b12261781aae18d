// Attention over the pages of a cache: what its kernels are given, and what distinguishes them.
// Read by nvcc and by the host compiler. The rows of a tile are pairs (query, head of the group), a
// query's heads side by side: one pass over the keys serves the whole group, of whatever size.
#pragma once

#include "cuda/attention/params.h"

namespace flashmoe::cuda {

// Sequences with so many rows or fewer, what one new token and its group need, have a kernel of
// their own, in whose tiles several teams of warps go over keys of their own.
inline constexpr int kDecodeRows = 16;

// A split has at least so many keys: with fewer, what splits leave for each other and reading it
// again weighs more than the keys (at 256 keys of D = 128 and a group of 4, 1.6% each).
inline constexpr int kLeastSplitKeys = 256;

// Shared memory of a task, and how many a CTA keeps: the one at work, the one whose keys are loaded
// already, the one after that, which is being found, and the one before, whose output is stored.
inline constexpr int kPagedTaskBytes = 128;
inline constexpr int kPagedTasks = 4;

// Words of shared memory by which work is shared out, beside one for each thread.
inline constexpr int kPagedWorkWords = 16;

// What the combining kernel is told of a sequence.
struct alignas(16) PagedSequence {
  int64_t token_q;  // its first query
  int32_t len_q;
  int32_t splits;  // of its keys; 1: there is nothing to combine
};

struct PagedParams : AttentionFwdParams {
  // query, out: (tokens_q, heads, D); lse: (tokens_q, heads_q). key, value: (blocks, page, heads_k,
  // D), whose strides' `row` steps over the rows of a page. len_q and len_k are bounds.
  int64_t key_block, value_block;    // strides from one block to the next
  int64_t key_column, value_column;  // and from one number of a row to the next
  // Whether rows of K and V are chunks of 16 bytes, aligned and nothing but these: copies go 16
  // bytes at a time then, else number by number.
  int32_t whole_chunks;
  // Bytes from one row to the next, from block to block too, where that is so, rows are whole
  // chunks and as wide as the kernel's, of K and of V: then even_blocks is `blocks`, else 0.
  uint32_t key_step, value_step;
  int32_t even_blocks;
  int64_t tokens_q;
  int32_t heads_q, heads_k;
  int32_t blocks, page;
  int32_t page_log2;  // -1: the page is no power of two

  const void* block_table;          // (batch, blocks of a sequence), int64 or int32
  int64_t table_row, table_column;  // its strides
  uint32_t table_step;              // table_column in bytes
  const void* seq_lens;             // (batch)
  const void* cu_seqlens_q;         // (batch + 1); null: one query each
  int64_t seq_lens_stride, cu_stride;
  int32_t table_is_int64, seq_lens_are_int64, cu_is_int64;

  // Of an fp8 cache: keys and values are these times what is stored; null: 1.
  const float *k_scale, *v_scale;          // () or (heads_k)
  int64_t k_scale_stride, v_scale_stride;  // 0: one for all heads

  // Splits of a sequence's keys follow from its own lengths and from these: see paged_work.cuh.
  int32_t most_splits;
  int32_t cost_keys_log2;  // 2^this many keys count as one, where work is shared out
  int32_t head_lanes;      // parts of the key heads that CTAs work on side by side
  int32_t item_each;       // with few rows: CTAs are (heads_k, splits, batch), an item each
  int32_t partial_rows;    // queries x splits of one sequence at most
  int32_t chunk_queries;   // from so many on a sequence has a kernel of its own; 0: none has
  int32_t* tickets;        // with few rows: see paged_work.cuh; null: there are none
  // (batch + 1): the last one's `splits` says whether lengths were wrong, and nothing is combined.
  PagedSequence* sequences;
  // partial_out: (batch, partial_rows, heads_q, dim); partial_lse: (batch, partial_rows, heads_q).
};

struct PagedTile {
  int head_dim;
  int block_q, block_k;  // warps of a team share out its rows, then its columns; few rows: columns
  int warps;
  int teams;        // of warps, each with keys of its own: with few rows only
  int stages;       // tiles of K and V in shared memory
  int ctas;         // that an SM's registers are to hold
  int cache_bytes;  // of a number of the cache

  constexpr int threads() const { return warps * 32; }
  // Whether Q stays in registers.
  constexpr bool keeps_queries() const {
    return head_dim <= 128 || (head_dim <= 256 && block_q == 8);
  }
  // Q unless it stays in registers, the stages of K and V, a factor for each row of Q where the
  // cache is fp8, what teams tell each other, the work before each thread's sequences, and tasks.
  constexpr int stage_bytes() const { return 2 * block_k * head_dim * cache_bytes; }
  constexpr int query_rows() const { return keeps_queries() ? 0 : block_q; }
  constexpr int query_bytes() const { return query_rows() * head_dim * 2; }
  constexpr int body_bytes() const { return query_bytes() + stages * stage_bytes(); }
  constexpr int factor_bytes() const { return cache_bytes == 1 ? query_rows() * 4 : 0; }
  constexpr int team_bytes() const {
    return (teams * (kDecodeRows * 8 + 4) + 2 * warps * 4 + 15) / 16 * 16;
  }
  constexpr int work_bytes() const { return (threads() + kPagedWorkWords) * 4; }
  constexpr int shared_bytes() const {
    return body_bytes() + factor_bytes() + team_bytes() + work_bytes() +
           kPagedTasks * kPagedTaskBytes;
  }
};

inline constexpr int kPagedTicketThreads = 32;
// The combining kernel: a warp for each head of a query.
inline constexpr int kPagedCombineThreads = 128;

}  // namespace flashmoe::cuda
