// What a warp of the packed kernels knows of its 16 rows: how they lie in shared memory, and which
// tokens of the other side they see.
#pragma once

#include "cuda/attention/sm90/params.h"
#include "cuda/attention/sm90/warpgroup.cuh"

namespace flashmoe::cuda::sm90 {

inline constexpr int kPackedRows = 16;  // of a warp

// Where this lane's row of an ldmatrix begins in 16 rows of a tile. Columns 16 s to 16 s + 15 are
// at that address ^ 32 s. Matrices are in the order of the left operand of mma.sync, and of the
// right one where the depth is rows (ldmatrix with .trans): first all rows of 8 columns.
__device__ __forceinline__ uint32_t packed_lane_offset() {
  return lane() % 16 * 128 + (lane() / 16 ^ lane() % 8) * 16;
}
// The same for the right operand where the depth is columns: first all columns of 8 rows, so that
// the two registers that mma.sync reads are neighbours and need not be moved.
__device__ __forceinline__ uint32_t packed_right_offset() {
  return (lane() % 8 + lane() / 16 * 8) * 128 + (lane() / 8 % 2 ^ lane() % 8) * 16;
}

// Bit n: whether a row sees token n of the kCount from `first` on, counted from the first column of
// a fragment that the lane holds.
template <int kCount>
__device__ __forceinline__ uint32_t seen_tokens(const RowBounds& bounds, int first) {
  const auto from = [](int n) { return __funnelshift_lc(0, ~0u, max(n, 0)); };
  const uint32_t seen = from(bounds.begin() - first) & ~from(bounds.end - first);
  return (seen & ~from(kCount)) >> (lane() % 4 * 2);
}

}  // namespace flashmoe::cuda::sm90
