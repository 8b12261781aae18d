// What the kernel before the backward pass for Hopper and its main kernel both know of dQ.
#pragma once

#include "cuda/sm90/params.h"
#include "cuda/tile/sequence.cuh"

namespace flashmoe::cuda::sm90 {

// Whether the block of queries that `first` is in sees any key. Else nobody adds to its dQ.
__device__ __forceinline__ bool is_seen(const Sequence& seq, int first,
                                        const AttentionBwdParams& p) {
  const int begin = first / p.block_q * p.block_q, end = min(begin + p.block_q, seq.len_q);
  return seq.valid && begin < end && seq.begin(begin, p) < seq.end(end - 1, p);
}

// How many blocks of keys of a head are done with, each in two parts.
__device__ __forceinline__ int* blocks_done(const HopperBwdParams& p, int sequence, int key_head) {
  const int64_t of_round = p.blocks ? sequence : sequence - p.first_batch;
  return p.done + of_round * p.heads + key_head - p.first_head;
}

}  // namespace flashmoe::cuda::sm90
