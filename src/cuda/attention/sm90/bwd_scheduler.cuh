// The tile scheduler of the sm90 backward pass: which tile of keys a CTA or cluster has next, and
// the tiles of queries that see it.
#pragma once

#include "cuda/attention/sequence.cuh"
#include "cuda/attention/sm90/params.h"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/grid.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/tma/pipeline.cuh"

namespace flashmoe::cuda::sm90 {

// A tile of keys of one (batch, key head), and the tiles of queries that see it.
struct alignas(16) BwdTask {
  static constexpr int kWhole = -1;
  Sequence seq;
  int64_t first_row;  // of the sequence in the workspace
  int64_t slice_row;  // of the sequence in the dQ accumulator, which may hold a slice of the batch
  int batch, key_head, first_key;
  int sequence;                    // the batch index; ragged: the sequence's number
  int query_begin, query_end;      // in whole tiles
  int tiles;                       // of queries, of all heads of the group
  uint32_t index;                  // how many tasks the CTA had before
  uint32_t first_tile, last_tile;  // tiles of queries of this task, as the CTA counts them
  uint8_t keys_parity;             // of the mbarriers of K and V
  bool ascending;                  // whether it goes from its first queries to its last
  bool last;                       // true: there is no task any more, and this is none
  union {
    // Kernels with a bias by TMA: the row of bias_map of the group's first query, and rows from one
    // head to the next.
    struct {
      int bias_row, bias_head_rows;
    };
    // By rows: offset of the batch in the bias's gradient.
    int64_t grad_bias;
    // Without a bias: the number of its part of dK among all; kWhole: there are no parts.
    int part;
  };
};

// A tile of keys. `head` is its (batch, key head) as the launch counts them.
struct KeyTile {
  int head, block;
  bool ascending;
};
// Heads in waves: the first tile of keys of each, then the second of each.
__device__ __forceinline__ KeyTile find_key_tile(int number, const Sm90BwdParams& p) {
  const int heads = p.key_tiles / p.key_blocks, wave = p.heads_per_wave;
  const int paired_tiles = p.paired_heads * p.key_blocks;
  const int waves = (number - paired_tiles) / (wave * p.key_blocks);
  const int first_head = p.paired_heads + waves * wave;
  const int count = min(wave, heads - first_head);
  number -= first_head * p.key_blocks;
  return {first_head + number % count, number / count, false};
}
// Pairs of heads in waves. Under a causal mask the tiles of keys of a head, when they begin at the
// last queries together, stay together: what one reads of Q and dO and adds to dQ the others find
// in L2. But later tiles of keys end sooner, and whoever then begins at the last queries of
// another head is alone there. So the other head of a pair goes from the first queries to the last,
// and a tile of keys begins where its first query is just when the others come by:
//
//   CTA 0   A0 last -----------------------------> first
//   CTA 1   A1 ---------------------------> B3 -------->
//   CTA 2   A2 -----------------> B2 ------------------>
//   CTA 3   A3 -------> B1 ---------------------------->
//   CTA 4   B0 first -----------------------------> last
//
// All that takes is the order in which tasks are given out: A0, A1, ..., B0, B1, ... If each step
// takes as long as any other, all CTAs are done at the same time. (By a model of an L2 of 30 MB, 32
// heads on 4 at 8,192 keys, batch 2, memory reads 0.5 and writes 0.4 GB; in waves 4.5 and 2.4. Not
// measured.) Where a head has more tiles of keys than there are CTAs, they come in passes, each by
// both heads.
__device__ __forceinline__ KeyTile find_paired_tile(int number, const Sm90BwdParams& p) {
  const int wave = 2 * p.pairs, first_head = number / (wave * p.key_blocks) * wave;
  number -= first_head * p.key_blocks;
  const int first_block = number / (wave * p.blocks_of_pass) * p.blocks_of_pass;
  number -= first_block * wave;
  const int tiles = min(p.blocks_of_pass, p.key_blocks - first_block) * p.pairs;  // of a direction
  const bool ascending = number >= tiles;
  if (ascending) number -= tiles;
  return {first_head + number % p.pairs + (ascending ? p.pairs : 0), first_block + number / p.pairs,
          ascending};
}

// Tile of keys `number` of all, in the order in which they are given out.
template <bool kPairs>
__device__ __forceinline__ KeyTile find_tile(int number, const Sm90BwdParams& p) {
  if (p.blocks) return {number % p.heads, number / p.heads, false};
  return kPairs && number < p.paired_heads * p.key_blocks ? find_paired_tile(number, p)
                                                          : find_key_tile(number, p);
}

// The tiles of queries that see any of the keys from `first_key` on, of all or of those in a split.
struct QueryRange {
  static constexpr int kAll = -1;
  int begin, end;
};
__device__ __forceinline__ QueryRange find_query_range(const Sequence& seq, int first_key,
                                                       int split, int block_q, int block_k,
                                                       const Sm90BwdParams& p) {
  // Row i sees key j when i + shift - left <= j <= i + shift + right.
  const int last_key = min(first_key + block_k, seq.len_k) - 1;
  int first = max(first_key - seq.shift - p.right, 0);
  int last = min(last_key - seq.shift + p.left, seq.len_q - 1);
  if (split >= 0) {
    first = max(first, split * p.split_rows);
    last = min(last, (split + 1) * p.split_rows - 1);
  }
  const int begin = first / block_q * block_q;
  const bool seen = seq.valid && first <= last && first_key <= last_key;
  return {begin, seen ? (last / block_q + 1) * block_q : begin};
}

// Fills in task `number` of all.
//
// The order of tasks decides who waits for whom. Tiles of keys add to the dQ of a tile of queries
// in ascending order where sums are deterministic, and otherwise after the first, which stores, or
// after zeros that tasks of the wave before have written (bwd_dq.cuh). So a task waits only for
// tasks with lower numbers, which some CTA already has (CTAs begin in the order of their index),
// and the lowest unfinished task waits for nobody.
//
// Three things keep the waits short:
// - Tasks that wait go through their tiles of queries from the last to the first. With causal
//   masks and windows a later tile of keys begins at the same tile of queries or a later one, so it
//   is behind the task it waits for by one hand-over, once, when it begins. (From the first to the
//   last it would be ahead of the task it waits for.) Tiles of keys that most queries see go first,
//   which also leaves the short ones for the end.
// - A wave has as few heads as L2 holds: see order_heads() on the host.
// - A CTA takes its next task when all loads of the task before are issued, and no earlier: whoever
//   waits for a task that is queued behind another one waits for both.
template <class C>
__device__ __forceinline__ void find_task(BwdTask& task, int number, const Sm90BwdParams& p) {
  task.last = number >= p.num_tasks;
  if (task.last) return;
  int split = QueryRange::kAll;
  if constexpr (C::kSplits) {
    task.part = BwdTask::kWhole;
    const int whole_tiles = p.key_tiles - p.split_tiles;
    if (number >= whole_tiles && p.splits > 1) {
      const int of_split_tiles = number - whole_tiles, tile = of_split_tiles / p.splits;
      split = of_split_tiles % p.splits;
      task.part = split * p.split_tiles + tile;
      number = whole_tiles + tile;
    }
  }
  const KeyTile tile = find_tile<C::kZeroesDq>(number, p);
  task.ascending = tile.ascending;
  if (p.blocks) {
    const RaggedBlock block = p.blocks[tile.block];
    task.last = block.kind == RaggedKind::kEmpty;  // all that follow are empty as well
    if (task.last) return;
    task.batch = 0;
    task.key_head = p.first_head + tile.head;
    task.first_key = block.block * C::kBlockK;
    task.seq = find_sequence(block);
    if (block.kind == RaggedKind::kRest) {  // keys that nobody sees
      task.seq.valid = true;
      task.seq.len_q = 0;
    }
    task.sequence = block.sequence;
  } else {
    task.batch = p.first_batch + tile.head / p.heads;
    task.key_head = p.first_head + tile.head % p.heads;
    task.first_key = tile.block * C::kBlockK;
    task.seq = find_sequence(p, task.batch);
    task.sequence = task.batch;
  }
  const Sequence seq = task.seq;
  task.first_row = workspace_row(p, seq, task.sequence);
  task.slice_row = task.first_row - rows_before_slice(p);
  const auto [query_begin, query_end] =
      find_query_range(seq, task.first_key, split, C::kBlockQ, C::kBlockK, p);
  task.query_begin = query_begin;
  task.query_end = query_end;
  task.tiles = (query_end - query_begin) / C::kBlockQ * p.group;
  if constexpr (C::kBiasRows) {
    task.grad_bias = batch_offset(p, p.grad_bias_strides.batch, task.batch);
  } else if constexpr (C::kBias) {
    const int64_t row = p.bias_strides.row;
    const int64_t batch = batch_offset(p, p.bias_strides.batch, task.batch);
    task.bias_head_rows = static_cast<int>(p.bias_strides.head / row);
    task.bias_row = static_cast<int>(batch / row) + task.key_head * p.group * task.bias_head_rows;
  }
}

// Gives out task numbers: the first of a CTA or cluster is its index, so that it can be loaded
// while the kernel ahead, which sets the counter to 0, still runs. Of a cluster, CTA 0 takes a
// number from the counter and tells CTA 1.
template <class C>
class BwdScheduler {
 public:
  __device__ __forceinline__ BwdScheduler(uint32_t smem, int rank) : smem_(smem), rank_(rank) {}

  // Of the CTA's task `index`.
  __device__ __forceinline__ int next(uint32_t index, const Sm90BwdParams& p) {
    if (index == 0) return blockIdx.x / C::kCluster;
    wait_for_kernel_ahead();  // the task before may have had nothing to load
    if constexpr (C::kCluster == 1) {
      return gridDim.x + atomicAdd(p.tile_counter, 1);
    } else {
      const uint32_t next_task = smem_ + offsetof(typename C::Smem, next_task);
      const tma::Slot slot = C::slot(smem_, C::kNextTaskBarrier);
      parity_ ^= 1;
      int number;
      if (rank_ == 0) {
        number = gridDim.x / C::kCluster + atomicAdd(p.tile_counter, 1);
        ptx::mbarrier_wait(slot.empty, parity_ ^ 1);
        ptx::st_shared_cluster_u32(ptx::mapa(next_task, 1), number);
        ptx::mbarrier_arrive_release_cluster(ptx::mapa(slot.full, 1));
      } else {
        ptx::mbarrier_wait_cluster(slot.full, parity_);
        number = ptx::ld_shared_u32(next_task);
        ptx::mbarrier_arrive_cluster(ptx::mapa(slot.empty, 0));
      }
      return number;
    }
  }

  // Before anything that it writes is read. The kernel behind may begin from then on: it asks for
  // nothing that the kernel ahead of this one has yet to write.
  static __device__ __forceinline__ void wait_for_kernel_ahead() {
    ptx::griddepcontrol_wait();
    ptx::griddepcontrol_launch_dependents();
  }

 private:
  const uint32_t smem_;
  const int rank_;
  int parity_ = 1;
};

// The first query of the tile of queries after which a task has `more` of each head.
template <class C>
__device__ __forceinline__ int query_tile_with(const BwdTask& task, int more) {
  const int rows = more * C::kBlockQ;
  return C::kZeroesDq && task.ascending ? task.query_end - C::kBlockQ - rows
                                        : task.query_begin + rows;
}

// f(head, first query) for the tiles of queries of a task, in their order: those of all heads of
// the group, then the rows beside them. So tasks of a key head stay side by side. (Head by head, a
// causal mask makes later tiles of keys done with a head sooner, and they wait for the first at the
// next one: each task took as long as the longest, and 8 heads of a group at 8,192 keys had 0.49 of
// FlashAttention-3's speed.)
template <class C, class F>
__device__ __forceinline__ void for_each_query_tile(const BwdTask& task, const Sm90BwdParams& p,
                                                    const F& f) {
#pragma unroll 1
  for (int more = (task.query_end - task.query_begin) / C::kBlockQ; --more >= 0;) {
    const int first = query_tile_with<C>(task, more);
#pragma unroll 1
    for (int head = task.key_head * p.group; head < (task.key_head + 1) * p.group; ++head) {
      f(head, first);
    }
  }
}

// f(task) for all tasks of the CTA, by a thread of the producer's warpgroup that loads nothing.
template <class C, class F>
__device__ __forceinline__ void for_each_task(const typename C::Smem& shared, uint32_t smem,
                                              const F& f) {
  tma::Ring<2> tasks;
#pragma unroll 1
  for (;; tasks.advance()) {
    const tma::Slot slot = C::slot(smem, C::kTaskBarrier + tasks.at());
    tasks.wait_full(slot);
    const BwdTask& task = shared.tasks[tasks.at()];
    if (task.last) break;
    f(task);
    ptx::mbarrier_arrive(slot.empty);
  }
}

}  // namespace flashmoe::cuda::sm90
