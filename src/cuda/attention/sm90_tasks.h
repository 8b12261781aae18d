// How many tasks the kernels of the sm90 family have and in which order they come: what planning
// and running both need to know.
#pragma once

#include "cuda/attention/planner.h"
#include "cuda/attention/sm90/params.h"

namespace flashmoe::cuda::sm90 {

// Rows of a task of a forward pass.
int64_t rows_of_task(const AttentionPlan& plan);

// Heads that share their keys, of which 2^this share a tile: see Sm90FwdParams.
int log2_packed_heads(const AttentionPlan& plan, int64_t block_q);

// The order of a forward pass's tiles of queries.
//
// heads_per_wave: heads whose tasks are mixed. Where all tasks see as many keys, none: those of a
// head follow each other and share its keys. Else each CTA goes forth and back through the tasks,
// the longest first, and has as much as the others after `unit` heads. These are mixed, or a
// multiple of them, as far as L2 holds their keys and values and has room for the rest; if it does
// not, none are, and longer and shorter tasks come out even over all heads. But where these are no
// multiple of `unit`, nearly, all are mixed: that comes out even, and where there are few heads
// many CTAs read the same keys at the same time.
//
// With a counter any wave comes out even. The more heads the better then, as long as L2 holds their
// keys or enough CTAs read the same ones at the same time.
//
// late_blocks: with a counter, the shortest tiles of all heads come after all waves.
void order_tiles(Sm90FwdParams& p, const AttentionPlan& plan);

// The order of the tiles of keys of a backward pass, and who zeroes sums of dQ.
//
// heads_per_wave: key heads whose tiles of keys are mixed: as far as L2 holds Q, dO and the
// accumulator of dQ of them, for each tile of keys reads and adds to all of these, of one head of
// the group after the other; and as all CTAs are busy with at once. Where sums are deterministic no
// fewer, or tiles of a head would wait for each other. Else as many as the CTAs are busy with twice
// (nearly, or each would get the same tiles of every head); or once, so that a kernel that converts
// dQ itself can soon begin. No wave is smaller than that: the last would end with the long tasks of
// few heads.
//
// zeroes_dq: whether the accumulator begins with zeros: see zero_next_wave(). Under a mask tiles of
// keys would wait for the one that stores again and again, and the longer the sequence the more:
// H200, causal, bf16, ordered and zeroed: head dim 128, 2,048 keys 418 and 413 TFLOP/s, 4,096 425
// and 435, 16,384 507 and 560; head dim 64, 4,096 keys 429 and 421, 16,384 479 and 492; without a
// mask 542 and 549 at best.
//
// pairs: under a causal mask, where L2 does not hold the rows of a wave, which are those of all
// heads of its groups: see find_paired_tile(). H200, bf16, us in waves and in pairs: 32 heads on 4
// at 2,048, 4,096 and 8,192 keys 1,626 and 1,543, 2,886 and 2,671, 5,389 and 5,004; on 8 1,561 and
// 1,586, 2,723 and 2,714, 5,099 and 5,076. So from 5 heads a group on; 5 and 6 are a choice between
// these.
void order_heads(Sm90BwdParams& p, const AttentionPlan& plan);

// plan.splits and plan.split_tiles of a backward pass: more than one split where that gives
// clusters that would be idle something to do, or shortens a causal mask's longest tasks, by more
// than what comes with it: the parts of dK and dV that each task leaves, and the kernel that adds
// them up. Either all tiles of keys are split, or without a mask those that are left when all
// clusters have had as many (or as many but one).
void choose_splits(AttentionPlan& plan, int64_t clusters);
// Queries of each head that a task has then, whole tiles.
int64_t split_rows(const AttentionPlan& plan, int64_t splits);

// Rows that a CTA of the preprocess kernel has, several tiles or a part of one: as many as leave
// enough CTAs, since finding out where the rows are takes a while.
int64_t preprocess_rows(const AttentionPlan& plan, int64_t ctas);
int64_t key_blocks(const AttentionPlan& plan);
int64_t key_tiles(const AttentionPlan& plan);  // of all heads

// The CTAs of the main launch, all of which are on the chip at once.
int64_t persistent_ctas(const AttentionPlan& plan);

// Tasks of a forward pass over packed tokens: tiles of these times boxes of heads.
int64_t packed_boxes(const AttentionPlan& plan);

// The two sides of a packed backward pass, whose tiles are both of block_q tokens. Where no
// gradient of a side is wanted, there are no tasks of it.
Sm90PackedBwdParams::Side packed_side(const AttentionPlan& plan, bool keys);
int64_t packed_bounds_ctas(const AttentionPlan& plan);

}  // namespace flashmoe::cuda::sm90
