// What distinguishes one main loop of a matrix product from another. Read by nvcc and by the host
// compiler.
#pragma once

namespace flashmoe::cuda {

struct GemmTile {
  int block_m, block_n;  // rows and columns of the result that a CTA computes
  int depth;             // of a stage
  int stages;            // in shared memory: one in use, the others on their way
  int warps_m, warps_n;  // warps that share out the rows, and those that share out the columns
  int ctas;              // that an SM's registers are to hold

  constexpr int threads() const { return warps_m * warps_n * 32; }
  // The result in fp32 takes the place of the stages. Its rows are 32 bytes apart in their banks,
  // so that a warp's fragments are stored without conflicts.
  constexpr int sums_pitch() const { return block_n + 8; }
  constexpr int stage_bytes() const { return (block_m + block_n) * depth * 2; }
  constexpr int shared_bytes() const {
    const int loop = stages * stage_bytes(), sums = block_m * sums_pitch() * 4;
    return loop > sums ? loop : sums;
  }
};

}  // namespace flashmoe::cuda
