// The gradients of gate_up and down: products whose depth is the rows of an expert.
//
//   dGate_up[e] = dh^T x          dDown[e] = dOut^T (weighted act)
//
// Both operands lie across the depth: a row of a tile is a row of tokens, those of x and dOut
// gathered. Where rows lie is kept in shared memory, one entry a row and stage; it is looked up two
// steps ahead, so that nobody waits for an index.
//
// The rows of an expert are cut into slices, so that one expert with most of the rows keeps every
// SM busy. An expert of one slice is stored at once, one without rows as zeros; the sums of several
// slices go to the workspace in fp32, and moe_bwd_weights_sum adds them up in their order. The grid
// is slices x tiles of both gradients, tiles fastest: those share the rows in L2.
//
// Shared memory: the main loop's, and depth_table_bytes().
#pragma once

#include "cuda/moe/experts.cuh"
#include "cuda/moe/weight_tiles.cuh"
#include "cuda/tile/gemm.cuh"

namespace flashmoe::cuda::moe {

template <class Chip, class T, GemmTile kTile>
__device__ __forceinline__ void moe_bwd_weights(const BwdWeightsParams& p) {
  using G = Gemm<Chip, T, kTile, false, false>;
  extern __shared__ __align__(1024) char shared[];
  int* const sTable = reinterpret_cast<int*>(shared + G::kSharedBytes);
  const int tiles = weight_tiles(p);
  const int slot = blockIdx.x / tiles;
  const ExpertTile slice = p.slices[slot];
  if (slice.expert < 0) return;
  const WeightTile t = find_weight_tile(p, static_cast<int>(blockIdx.x) - slot * tiles);
  const WeightProduct& w = p.products[t.product];

  // Threads 0 .. depth - 1 look up rows of the left operand, those after them of the right one,
  // without a division: the main loop's MMAs are mixed with this.
  constexpr int kEntries = 2 * G::kDepth;
  static_assert(kEntries <= G::kThreads);
  const bool looks_up = threadIdx.x < kEntries;
  const bool gathered = (threadIdx.x < G::kDepth ? w.left : w.right).gathered;
  const Divider token_of(gathered ? max(p.top_k, 1) : 1);
  const int* __restrict__ const gPairs = p.pairs + slice.first;
  const auto look_up = [&](int step) {  // a pair, or a row as it is
    const int i = step * G::kDepth + threadIdx.x % G::kDepth;
    int found = slice.first + i;
    if (looks_up && gathered && i < slice.rows) found = gPairs[i];
    return found;
  };
  const auto entries_of = [&](int step) { return sTable + step % G::kStages * kEntries; };
  const auto write_entry = [&](int step, int found) {
    if (looks_up) entries_of(step)[threadIdx.x] = static_cast<int>(token_of(found));
  };
#pragma unroll
  for (int step = 0; step < G::kStages; ++step) write_entry(step, look_up(step));
  int next = look_up(G::kStages);
  __syncthreads();

  const char* const gLeft = static_cast<const char*>(w.left.data) + t.half_m * w.left.half_bytes;
  const char* const gRight = static_cast<const char*>(w.right.data) + t.half_n * w.right.half_bytes;
  typename G::Sums sums;
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  with_partial(p.partial, [&](auto partial) {
    constexpr bool kPartial = decltype(partial)::value;
    using LoaderA = TableLoader<Chip, typename G::LayoutA, G::kDepth, G::kThreads, kPartial>;
    using LoaderB = TableLoader<Chip, typename G::LayoutB, G::kDepth, G::kThreads, kPartial>;
    const int left_bytes = static_cast<int>(w.left.row_bytes);
    const int right_bytes = static_cast<int>(w.right.row_bytes);
    const LoaderA left(gLeft, left_bytes, t.first_m, w.left.columns);
    const LoaderB right(gRight, right_bytes, t.first_n, w.right.columns);
    const LoaderB far_right(gRight, right_bytes, t.first_n + G::kHalfN, w.right.columns);
    G::run(sums, smem, (slice.rows + G::kDepth - 1) / G::kDepth, [&](uint32_t stage, int step) {
      const int* const entries = entries_of(step);
      const int rows = slice.rows - step * G::kDepth;
      typename LoaderA::Places left_rows;
      typename LoaderB::Places right_rows;
      left.find(left_rows, entries);
      right.find(right_rows, entries + G::kDepth);
      left.load(stage, left_rows, rows);
      right.load(stage + G::kBytesA, right_rows, rows);
      far_right.load(stage + G::kBytesA + G::kBytesB, right_rows, rows);
      // The first kStages steps have their entries. From then on there is a barrier before each
      // step: the entries of the step that the next one's take the place of were read before it.
      if (step >= G::kStages - 1) {
        write_entry(step + 1, next);
        next = look_up(step + 2);  // needed in the next step only
      }
    });
  });
  float* const sSums = reinterpret_cast<float*>(shared);
  G::store(sSums, sums);

  constexpr int kChunks = G::kBlockN / 8;
  float* const gSums =
      p.slice_sums + (int64_t{slice.sum} * tiles + t.index) * (G::kBlockM * G::kBlockN);
#pragma unroll 4
  for (int i = threadIdx.x; i < G::kBlockM * kChunks; i += G::kThreads) {
    const int row = i / kChunks, col = i % kChunks * 8;
    float x[8];
    G::sums_at(x, sSums, row, col);
    if (slice.sum < 0) {
      store_weights<T>(p, t, slice.expert, row, col, x);
    } else {
      float4* const to = reinterpret_cast<float4*>(gSums + i * 8);
      to[0] = {x[0], x[1], x[2], x[3]};
      to[1] = {x[4], x[5], x[6], x[7]};
    }
  }
}

}  // namespace flashmoe::cuda::moe
