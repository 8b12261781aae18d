// dK and dV from parts, where tiles of keys came in several tasks: see Sm90BwdParams::splits. The
// parts are added in the order of their queries, so results are the same bits every time.
//
// Few key heads of few or short sequences are fewer tiles of keys than there are SMs, and under a
// causal mask the first tile is twice as long as the mean. So each tile's queries are shared out;
// or those of the last tiles, which would leave most SMs without work. The parts are fp32: 16 bits
// would round each of them. Which splits see a tile follows from the mask; of the others no part is
// written or read.
#pragma once

#include "cuda/attention/sm90/bwd_convert_dq.cuh"

namespace flashmoe::cuda::sm90 {

// 64 keys of a key head, and 64 columns of one of its gradients: what a CTA adds up.
struct SummedPart {
  Sequence seq;
  int batch, key_head;
  int first, count;  // keys of the sequence
  int tile;          // of those that are split
  bool value;        // of dV
  int column;
};

// The grid is (parts of 64 columns x 2 x split tiles), dK before dV. Returns false where there are
// no keys. No heads are paired where tiles are split.
__device__ __forceinline__ bool find_summed_part(SummedPart& r, const Sm90BwdParams& p) {
  const int of_key = (p.head_dim + 63) / 64, of_value = (p.head_dim_v + 63) / 64;
  const int part = blockIdx.x % (of_key + of_value), rows = blockIdx.x / (of_key + of_value);
  r.value = part >= of_key;
  r.column = 64 * (r.value ? part - of_key : part);
  const int half = rows % 2 * 64;
  r.tile = rows / 2;
  const KeyTile tile = find_tile<false>(p.key_tiles - p.split_tiles + r.tile, p);
  r.key_head = p.first_head + tile.head % p.heads;
  int len_k;  // rows of the tensor
  if (p.blocks) {
    const RaggedBlock& found = p.blocks[tile.block];
    if (found.kind == RaggedKind::kEmpty) return false;
    r.seq = find_sequence(found);
    if (found.kind == RaggedKind::kRest) {  // keys that nobody sees
      r.seq.valid = true;
      r.seq.len_q = 0;
    }
    r.batch = 0;
    r.first = found.block * kKeysOfBlock + half;
    len_k = r.seq.len_k;
  } else {
    r.batch = p.first_batch + tile.head / p.heads;
    r.seq = find_sequence(p, r.batch);
    r.first = tile.block * kKeysOfBlock + half;
    len_k = p.len_k;
  }
  r.count = min(len_k - r.first, 64);
  return r.count > 0;
}

template <class T>
__device__ __forceinline__ void attention_bwd_key_sum(const Sm90BwdParams& p) {
  ptx::griddepcontrol_wait();
  SummedPart r;
  if (!find_summed_part(r, p)) return;
  const void* const gradient = r.value ? p.grad_value : p.grad_key;
  if (!gradient) return;
  const Strides& strides = r.value ? p.grad_value_strides : p.grad_key_strides;
  const int first_part = (r.value ? p.splits * p.split_tiles : 0) + r.tile;
  const int first_key = r.first / kKeysOfBlock * kKeysOfBlock;
  const int eights = min(p.dim - r.column, 64) / 8;
  const float filled = r.seq.valid ? 0.f : NAN;
  float4 sums[8];
#pragma unroll
  for (float4& sum : sums) sum = {filled, filled, filled, filled};
#pragma unroll 2
  for (int split = 0; split < p.splits; ++split) {
    const QueryRange queries =
        find_query_range(r.seq, first_key, split, p.block_q, kKeysOfBlock, p);
    if (queries.begin >= queries.end) continue;
    const int64_t part = first_part + split * p.split_tiles;
    const int64_t row = part * kKeysOfBlock + r.first - first_key;
    const float* const rows = p.grad_parts + row * p.dim + r.column * 64;
    const float4* const from = reinterpret_cast<const float4*>(rows) + threadIdx.x;
    float4 added[8] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < eights) added[i] = __ldcs(from + i * 128);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      sums[i].x += added[i].x;
      sums[i].y += added[i].y;
      sums[i].z += added[i].z;
      sums[i].w += added[i].w;
    }
  }
  char* const to =
      const_cast<char*>(rows_of(gradient, p, strides, r.batch, r.key_head, r.seq.token_k));
  store_sums<T>(sums, r.value ? 1.f : p.scale, false,
                {.to = to + r.first * static_cast<int64_t>(strides.row_bytes()) + r.column * 2,
                 .row_bytes = strides.row_bytes(),
                 .rows = r.count,
                 .columns = (r.value ? p.head_dim_v : p.head_dim) - r.column});
}

}  // namespace flashmoe::cuda::sm90
