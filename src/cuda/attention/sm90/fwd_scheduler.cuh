// The tile scheduler of the sm90 forward pass: which tile of queries a CTA has next, and which
// tiles of keys it sees. It takes divisions, which whoever multiplies or loads would have to wait
// for: where there is one, a thread beside the producer's runs it (find_tasks()).
#pragma once

#include "cuda/attention/sequence.cuh"
#include "cuda/attention/sm90/params.h"
#include "cuda/attention/sm90/warpgroup.cuh"
#include "cuda/ptx/grid.cuh"

namespace flashmoe::cuda::sm90 {

// A tile of queries of one (batch, head), and the tiles of keys that it sees.
struct alignas(16) FwdTask {
  Sequence seq;
  int batch = 0, head = 0, first_row = 0;
  int key_begin = 0, key_end = 0;  // tiles of keys that any row sees
  int warpgroup_end[3] = {};       // the end of those that rows of a warpgroup see
  int unmasked_begin[3] = {}, unmasked_end[3] = {};  // those that need no mask, by warpgroup
  int half_first[3] = {};  // whether rows of a warpgroup see only the first half of its first tile
  int more = false;        // false: there is no task any more
  // Kernels with a bias: the tile's first row of bias_map; by rows, where the head's first number
  // lies in memory, as far as its shift takes (bias_rows.cuh).
  int bias_row = 0;
  int bias_parity = 0;  // where a bias stays: of the mbarriers of its tiles
  int64_t lse = 0;      // offset of the sequence's first lse

  // The tile's first token, as the tensor maps of Q and O count.
  __device__ __forceinline__ int first_token(const Sm90FwdParams& p) const {
    return static_cast<int>(seq.token_q) + (first_row >> p.pack);
  }
};

template <class C>
struct FwdScheduler {
  const Sm90FwdParams& p;

  // The task of this CTA after its task `number`, which was its `count`th; the first is blockIdx.x.
  // With a counter the next that no CTA has. Else CTAs go forth and back through the list, so that
  // the one that had the longest task of one pass has the shortest of the next.
  __device__ __forceinline__ int next(int number, uint32_t count) const {
    if (p.tile_counter) return gridDim.x + atomicAdd(p.tile_counter, 1);
    return number + 1 + 2 * (count % 2 ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
  }

  // Fills in task `number` of all.
  __device__ __forceinline__ void find_task(int number, FwdTask& task) const {
    task.more = number < p.num_tasks;
    if (!task.more) return;
    Sequence seq;
    int first_row;
    if (p.blocks) {
      const RaggedBlock block = p.blocks[number / p.heads];
      task.more = block.kind != RaggedKind::kEmpty;  // all that follow are empty as well
      task.batch = 0;
      task.head = number % p.heads;
      first_row = block.block * C::kBlockQ;
      seq = find_sequence(block);
      if (block.kind == RaggedKind::kRest) {  // rows that see nothing
        seq.valid = seq.rest = true;
        seq.len_k = 0;
      }
    } else if constexpr (C::kBiasStays) {
      // All that share a bias follow each other.
      const int slab = number / p.bias_batches, rest = slab / p.query_blocks;
      const int batch = rest / p.heads * p.bias_batches + number % p.bias_batches;
      task.head = rest % p.heads;
      task.batch = batch;
      first_row = slab % p.query_blocks * C::kBlockQ;
      seq = find_sequence(p, batch);
    } else {
      // A wave has as many heads as L2 holds the keys of; within it, the tiles that see most keys
      // go first. The shortest tiles of all heads come last, so that CTAs end at the same time
      // although each has found tasks ahead.
      const int heads = p.heads * p.batch, early_blocks = p.query_blocks - p.late_blocks;
      const bool late = number >= heads * early_blocks;
      const int wave = late ? heads : p.heads_per_wave;
      const int blocks = late ? p.late_blocks : early_blocks;
      if (late) number -= heads * early_blocks;
      const int first = number / (blocks * wave) * wave;
      const int count = min(wave, heads - first);
      const int rest = number - first * blocks;
      int block = rest / count;
      if (p.right < kNoLimit) block = blocks - 1 - block + (late ? 0 : p.late_blocks);
      const int index = first + rest % count, batch = index / p.heads;
      task.head = index % p.heads;
      task.batch = batch;
      first_row = block * C::kBlockQ;
      seq = find_sequence(p, batch);
    }
    task.first_row = first_row;
    task.seq = seq;
    task.lse = offset(p, p.lse_strides, task.batch, task.head << p.pack, seq.token_q);
    if (C::kBias) {
      const int64_t where = offset(p, p.bias_strides, task.batch, task.head, 0);
      if constexpr (C::kBiasRows) {
        constexpr int kBytes = C::BiasTile::kElementBytes;
        task.bias_row = C::BiasTile::shift(static_cast<const char*>(p.bias) + where * kBytes);
      } else {
        task.bias_row = static_cast<int>(where / p.bias_strides.row) + first_row;
      }
    }
    find_key_tiles(task, seq, first_row);
  }

  // Which tiles of keys the rows of a task see, from its sequence and first row.
  __device__ __forceinline__ void find_key_tiles(FwdTask& task, const Sequence& seq,
                                                 int first_row) const {
    const int last_row = min((first_row + C::kBlockQ - 1) >> p.pack, seq.len_q - 1);
    const int key_begin = seq.begin(first_row >> p.pack, p) / C::kBlockK;
    const int key_end = (max(seq.end(last_row, p), 0) + C::kBlockK - 1) / C::kBlockK;
    task.key_begin = key_begin;
    // At least one tile, even if it is masked altogether.
    task.key_end = seq.valid ? max(key_end, key_begin + 1) : key_begin + 1;
#pragma unroll
    for (int i = 0; i < C::kWarpgroups; ++i) {
      const int first = (first_row + i * kWarpgroupRows) >> p.pack;
      const int last = (first_row + i * kWarpgroupRows + kWarpgroupRows - 1) >> p.pack;
      const int end = first < seq.len_q ? seq.end(min(last, seq.len_q - 1), p) : 0;
      task.warpgroup_end[i] =
          min(max((end + C::kBlockK - 1) / C::kBlockK, key_begin + 1), task.key_end);
      const int begin = (seq.begin(last, p) + C::kBlockK - 1) / C::kBlockK;
      task.unmasked_begin[i] = max(begin, key_begin);
      task.unmasked_end[i] = max(max(seq.end(first, p), 0) / C::kBlockK, key_begin);
      if constexpr (C::kHalfSoftmax) {
        task.half_first[i] = end <= (task.warpgroup_end[i] - 1) * C::kBlockK + C::kBlockK / 2;
      }
    }
  }
};

// The kernel before a dense pass that counts its tasks.
__device__ __forceinline__ void attention_task_counter(const Sm90FwdParams& p) {
  // The forward kernel reads what kernels ahead of this one have written.
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  if (threadIdx.x == 0) *p.tile_counter = 0;
}

}  // namespace flashmoe::cuda::sm90
