// What distinguishes one main loop with TMA and wgmma from another. Read by nvcc and by the host
// compiler.
#pragma once

namespace flashmoe::cuda {

// A producer warpgroup and two consumer warpgroups.
struct TmaGemmTile {
  int block_m, block_n;  // rows and columns of the result
  int stages;            // of the ring, a power of 2
  int ping_pong;         // consumers take turns with whole tiles, instead of half of each tile

  static constexpr int kDepth = 64;  // of a stage: 128 bytes, a row of the swizzle
  static constexpr int kThreads = 384;
  // Of a consumer: 64 x 64 sums on their way out in fp32, or twice rounded.
  static constexpr int kOutletBytes = 64 * 64 * 4;
  static constexpr int kBarrierBytes = 128;

  constexpr int stage_bytes() const { return (block_m + block_n) * kDepth * 2; }
  constexpr int shared_bytes() const {
    return stages * stage_bytes() + 2 * (kOutletBytes + block_n * 4) + kBarrierBytes;
  }
};

}  // namespace flashmoe::cuda
