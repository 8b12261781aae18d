// What the kernels of the backward pass for Hopper all know of dQ.
#pragma once

#include "cuda/attention/sequence.cuh"
#include "cuda/attention/sm90/params.h"
#include "cuda/ptx/memory.cuh"

namespace flashmoe::cuda::sm90 {

// Whether the block of queries that `first` is in sees any key. Else nobody adds to its dQ.
__device__ __forceinline__ bool is_seen(const Sequence& seq, int first,
                                        const AttentionBwdParams& p) {
  const int begin = first / p.block_q * p.block_q, end = min(begin + p.block_q, seq.len_q);
  return seq.valid && begin < end && seq.begin(begin, p) < seq.end(end - 1, p);
}

// Eight numbers of a row of dQ, or as many as are left of it.
__device__ __forceinline__ void store_eight(char* to, const uint4& eight, int left) {
  if (left >= 8) {
    *reinterpret_cast<uint4*>(to) = eight;
    return;
  }
  const uint32_t twos[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint16_t one = static_cast<uint16_t>(twos[i / 2] >> (i % 2 * 16));
    if (i < left) reinterpret_cast<uint16_t*>(to)[i] = one;
  }
}

// Keys of a block, and parts in which it adds to dQ: each warpgroup has one, or wide each CTA.
inline constexpr int kKeysOfBlock = 128, kPartsOfBlock = 2;

// How many parts of blocks of keys of a head are done with.
__device__ __forceinline__ int* blocks_done(const Sm90BwdParams& p, int sequence, int key_head) {
  const int64_t of_round = p.blocks ? sequence : sequence - p.first_batch;
  return p.done + of_round * p.heads + key_head - p.first_head;
}

// Until all are.
__device__ __forceinline__ void wait_until_done(const Sm90BwdParams& p, const Sequence& seq,
                                                int sequence, int key_head) {
  const int blocks = p.blocks ? (seq.len_k + kKeysOfBlock - 1) / kKeysOfBlock : p.key_blocks;
  const int* const done = blocks_done(p, sequence, key_head);
  while (ptx::ld_acquire(done) < kPartsOfBlock * blocks) __nanosleep(200);
}

}  // namespace flashmoe::cuda::sm90
