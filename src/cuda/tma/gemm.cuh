// The main loop of a matrix product with wgmma: a producer warpgroup fills a ring of stages, two
// consumer warpgroups multiply. CTAs are persistent: they go through tiles of the result.
//
//                     B   64 of the depth x block_n, two halves of columns
//                    +-------------+-------------+
//                    |  from one   |   another   |     a stage of the ring
//                    +-------------+-------------+
//   A                +-------------+-------------+
//   block_m x 64     |  part 0, 64 rows          |     cooperative: consumer i has part i
//                    +-------------+-------------+     ping-pong: a consumer has all parts of a
//                    |  part 1                   |     tile, and the other one the next tile
//                    +-------------+-------------+
//
//   ping-pong     consumer 0   MMAs of tile 0 | epilogue      | MMAs of tile 2 | ...
//                 consumer 1                  | MMAs of tile 1 | epilogue      | ...
//
// Cooperative tiles are larger: 128 x 256 takes three quarters of the bytes from L2 that two of
// 128 x 128 take. Ping-pong hides the epilogue, which pays where the depth is short.
//
// Whoever produces knows where rows lie and whose they are; the halves of B may come from two
// places. Tiles are kept as they came: `Along` the depth (a row of the tile for each row of A or
// column of B) or `Across` it (a row for each of the depth), and wgmma reads either. Sums leave
// through shared memory, 64 x 64 at a time, so that global memory sees whole rows of 128 bytes.
//
// Shared memory: TmaGemmTile::shared_bytes(). Registers of a thread: producer 56, consumers 224, of
// which the sums take 128.
#pragma once

#include <cstddef>
#include <type_traits>
#include <utility>

#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/tile/dtype.cuh"
#include "cuda/tma/gemm_tile.h"
#include "cuda/tma/operand.cuh"
#include "cuda/tma/pipeline.cuh"
#include "cuda/tma/warpgroup.cuh"

namespace flashmoe::cuda::tma {

// kCopied: producers also copy by cp.async, all their threads, and not by TMA alone.
template <class T, TmaGemmTile kTile_, bool kAlongA_, bool kAlongB_, bool kCopied_>
struct Gemm {
  using Type = T;
  static constexpr TmaGemmTile kTile = kTile_;
  static constexpr bool kAlongA = kAlongA_, kAlongB = kAlongB_, kCopied = kCopied_;
  static constexpr bool kBf16 = std::is_same_v<T, Bf16>, kPingPong = kTile.ping_pong;
  static constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n, kHalfN = kBlockN / 2;
  static constexpr int kDepth = kTile.kDepth, kStages = kTile.stages;
  static constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;

  using TileA = std::conditional_t<kAlongA, Tile<kBlockM, kDepth>, Tile<kDepth, kBlockM>>;
  using TileB = std::conditional_t<kAlongB, Tile<kBlockN, kDepth>, Tile<kDepth, kBlockN>>;
  // 64 rows of A are a run of bytes either way.
  static constexpr uint32_t kPartBytes = kWarpgroupRows * kDepth * T::kBytes;
  static constexpr int kParts = kPingPong ? kBlockM / kWarpgroupRows : 1;  // of a consumer
  static_assert(kPingPong || kBlockM == 2 * kWarpgroupRows);
  // Whether a tile may have no step of the depth at all: where that is the rows of an expert.
  static constexpr bool kMayBeEmpty = !kAlongA;
  static_assert(!kMayBeEmpty || !kPingPong);

  // As wgmma lays out its accumulators: piece q of 64 columns is sums[part][32 q] to [32 q + 31].
  using Sums = float[kParts][kBlockN / 2];
  static constexpr int kPieces = kBlockN / 64;

  // Named barriers (0 is __syncthreads()).
  enum NamedBarrier : int {
    kTurn = 1,    // [2] Ping-pong: the other consumer arrives, the consumer waits.
    kOutlet = 3,  // [2] All threads of a consumer, around its use of sOut.
  };
  struct Smem {
    TileA sA[kStages];
    TileB sB[kStages];
    char sOut[2][TmaGemmTile::kOutletBytes];  // of a consumer
    float sTable[2][kBlockN];                 // of a consumer: numbers for its epilogue
    // full: one thread of the producer, which also expects the bytes of TMA, and with kCopied each
    // of its threads, when its copies are there; consumers wait. empty: each warp of the consumers
    // that read the stage; the producer waits.
    Slot::Barriers stages[kStages];
  };
  static_assert(sizeof(Smem) <= kTile.shared_bytes() && offsetof(Smem, sOut) % 1024 == 0);

  static __device__ __forceinline__ Slot slot(uint32_t smem, int stage) {
    return Slot(smem + offsetof(Smem, stages) + stage * sizeof(Slot::Barriers));
  }
  // By all threads of the CTA.
  static __device__ __forceinline__ void init_barriers(uint32_t smem) {
    if (threadIdx.x == 0) {
      for (int i = 0; i < kStages; ++i) {
        slot(smem, i).init(kCopied ? 1 + kWarpgroupThreads : 1,
                           (kPingPong ? 1 : 2) * kWarpgroupWarps);
      }
      ptx::fence_mbarrier_init();
    }
    __syncthreads();  // the barriers are initialised
  }

  // produce(producer) by the threads of the first warpgroup, consume(consumer) by the others.
  template <class Produce, class Consume>
  static __device__ __forceinline__ void run(uint32_t smem, const Produce& produce,
                                             const Consume& consume);
};

// A thread of the producer warpgroup: without kCopied only the first one is at work.
template <class G>
class GemmProducer {
 public:
  __device__ __forceinline__ explicit GemmProducer(uint32_t smem) : smem_(smem) {}

  // Waits until the next stage is empty and fills it: load(full, sA, sB) is given its barrier and
  // the addresses of its tiles. Thread 0 arrives with the bytes of TMA before it loads any.
  template <class Load>
  __device__ __forceinline__ void fill_stage(const Load& load) {
    const int at = ring_.at();
    const Slot slot = G::slot(smem_, at);
    ring_.wait_empty(slot);
    load(slot.full,
         static_cast<uint32_t>(smem_ + offsetof(typename G::Smem, sA) +
                               at * sizeof(typename G::TileA)),
         static_cast<uint32_t>(smem_ + offsetof(typename G::Smem, sB) +
                               at * sizeof(typename G::TileB)));
    if constexpr (G::kCopied) ptx::cp_async_mbarrier_arrive_noinc(slot.full);
    ring_.advance();
  }

 private:
  const uint32_t smem_;
  Ring<G::kStages> ring_;
};

// A consumer warpgroup.
template <class G>
class GemmConsumer {
  using Smem = typename G::Smem;
  using Sums = typename G::Sums;
  using Piece = Tile<64, 64>;

 public:
  __device__ __forceinline__ GemmConsumer(uint32_t smem, int index) : smem_(smem), index_(index) {}

  // Tiles blockIdx.x, blockIdx.x + gridDim.x, ... of `total`. find(number) is what is known of a
  // tile: a type with steps() of the depth and rows() that the result has, at least one. Then
  // finish(tile, sums), unless the consumer has no row of it.
  template <class Find, class Finish>
  __device__ __forceinline__ void for_each_tile(int total, const Find& find, const Finish& finish) {
    const int stride = gridDim.x;
    if constexpr (G::kPingPong) {
      // A round is a tile of each consumer. In the last one the second may have none: it takes its
      // turn all the same.
      if (index_ == 1) pass_turn();
#pragma unroll 1
      for (int first = blockIdx.x; first < total; first += 2 * stride) {
        const int second = first + stride, mine = index_ == 0 ? first : second;
        const bool works = mine < total;
        const auto tile = find(works ? mine : first);
        if (index_ == 1) ring_.advance(tile.steps());  // all tiles have as many
        // Until the other consumer has seen all stages of its tile. Without that this one might be
        // two rounds of the ring ahead, where a parity says nothing.
        wait_turn();
        if (works) {
          Sums sums;
          multiply(sums, tile.steps(), [&] { pass_turn(); });
          if (index_ == 0) ring_.advance(tile.steps());
          finish(tile, sums);
        } else {
          pass_turn();
        }
      }
      if (index_ == 0) wait_turn();  // the turn that is left over
    } else {
      if (static_cast<int>(blockIdx.x) >= total) return;
      auto next = find(blockIdx.x);
#pragma unroll 1
      for (int number = blockIdx.x; number < total; number += stride) {
        const auto tile = next;
        next = find(min(number + stride, total - 1));  // early: it takes a while to come
        if (index_ * kWarpgroupRows < tile.rows()) {
          Sums sums;
          multiply(sums, tile.steps(), [] {});
          finish(tile, sums);
        } else {
          pass_stages(tile.steps());
        }
      }
    }
  }

  // The first row of part `part`, in the tile.
  __device__ __forceinline__ int first_row(int part) const {
    return (G::kPingPong ? part : index_) * kWarpgroupRows;
  }

  // kBlockN numbers for the epilogue, number(i) each, from which add_columns() and table() read.
  template <class Number>
  __device__ __forceinline__ void load_table(const Number& number) const {
    sync();  // nobody reads that of the tile before any more
    for (int i = warpgroup_thread(); i < G::kBlockN; i += kWarpgroupThreads) {
      ptx::st_shared_f32(table_at() + i * 4, number(i));
    }
    sync();
  }
  __device__ __forceinline__ float table(int i) const {
    return ptx::ld_shared_f32(table_at() + i * 4);
  }
  // Adds the table's number of each column.
  __device__ __forceinline__ void add_columns(Sums& sums) const {
    const uint32_t from = table_at() + fragment_column() * 4;
#pragma unroll
    for (int j = 0; j < G::kBlockN / 8; ++j) {
      const float2 x = ptx::ld_shared_v2_f32(from + j * 32);
#pragma unroll
      for (int part = 0; part < G::kParts; ++part) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[part][4 * j + i] += i % 2 ? x.y : x.x;
      }
    }
  }

  // 64 x 64 numbers, value(i) as wgmma lays them out, rounded to the dtype: store(i, row, column,
  // chunk) is called for four chunks of eight, those of rows thread / 8 + 16 i. kTurned: of their
  // transpose.
  template <bool kTurned = false, class Value, class Store>
  __device__ __forceinline__ void send(const Value& value, const Store& store) {
    const uint32_t to = outlet() + buffer_;
    // Where a lane's row of an 8 x 8 matrix goes: matrices are 8 rows apart, then 8 columns.
    const int first = warpgroup_warp() * 16 + lane() / 8 % 2 * 8, second = lane() / 16 * 8;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t x[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        x[j] = G::Type::pack(value(8 * i + 2 * j), value(8 * i + 2 * j + 1));
      }
      if constexpr (kTurned) {
        ptx::stmatrix_x4_trans(to + Piece::at(16 * i + second + lane() % 8, first), x);
      } else {
        ptx::stmatrix_x4(to + Piece::at(first + lane() % 8, 16 * i + second), x);
      }
    }
    // The piece is there. What the other buffer held was read before it by every thread.
    sync();
    buffer_ ^= Piece::kBytes;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = outlet_row(i), c = outlet_column();
      store(i, r, c, ptx::ld_shared_v4(to + Piece::at(r, c)));
    }
  }
  static __device__ __forceinline__ int outlet_row(int i) {
    return warpgroup_thread() / 8 + 16 * i;
  }
  static __device__ __forceinline__ int outlet_column() { return warpgroup_thread() % 8 * 8; }

  // The same in fp32: put_floats() them, then take_floats() with take(i, row, column, numbers). A
  // row is eight units of 32 bytes, unit u of row r at unit u ^ (r % 8): fragments are written
  // without bank conflicts. Eight threads read a row's units, each half a unit at a time, those
  // halves that lie in different banks.
  template <class Value>
  __device__ __forceinline__ void put_floats(const Value& value) const {
    sync();  // nobody reads the piece before any more
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = fragment_row() + 8 * half;
        ptx::st_shared_v2_f32(outlet() + row * 256 + ((j ^ row) % 8) * 32 + fragment_column() * 4,
                              {value(4 * j + 2 * half), value(4 * j + 2 * half + 1)});
      }
    }
    sync();  // the piece is there
  }
  template <class Take>
  __device__ __forceinline__ void take_floats(const Take& take) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = outlet_row(i), unit = (warpgroup_thread() ^ r) % 8;
      const int flip = (unit ^ unit / 4) % 2;
      const uint32_t from = outlet() + r * 256 + unit * 32;
      const float4 first = ptx::ld_shared_v4_f32(from + flip * 16);
      const float4 second = ptx::ld_shared_v4_f32(from + (flip ^ 1) * 16);
      const float4 low = flip ? second : first, high = flip ? first : second;
      float x[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
      take(i, r, outlet_column(), x);
    }
  }
  // put_floats() of piece `number` of all parts, which is not known when this is compiled. (A loop
  // over constants would do, but the compiler makes an array in local memory of it.)
  __device__ __forceinline__ void put_piece(const Sums& sums, int number) const {
    put_piece(sums, number, std::make_index_sequence<G::kParts * G::kPieces>());
  }

 private:
  template <size_t... kPiece>
  __device__ __forceinline__ void put_piece(const Sums& sums, int number,
                                            std::index_sequence<kPiece...>) const {
    const auto put = [&](auto piece) {
      constexpr int kNumber = decltype(piece)::value, kPart = kNumber / G::kPieces;
      constexpr int kFirst = kNumber % G::kPieces * 32;
      if (number == kNumber) put_floats([&](int i) { return sums[kPart][kFirst + i]; });
    };
    (put(std::integral_constant<int, kPiece>()), ...);
  }
  __device__ __forceinline__ uint32_t outlet() const {
    return smem_ + offsetof(Smem, sOut) + index_ * TmaGemmTile::kOutletBytes;
  }
  __device__ __forceinline__ uint32_t table_at() const {
    return smem_ + offsetof(Smem, sTable) + index_ * G::kBlockN * 4;
  }
  __device__ __forceinline__ void sync() const {
    ptx::bar_sync(G::kOutlet + index_, kWarpgroupThreads);
  }
  __device__ __forceinline__ void wait_turn() const {
    ptx::bar_sync(G::kTurn + index_, 2 * kWarpgroupThreads);
  }
  __device__ __forceinline__ void pass_turn() const {
    ptx::bar_arrive(G::kTurn + (index_ ^ 1), 2 * kWarpgroupThreads);
  }

  // Sums of `steps` stages. issued() is called when the last MMAs are under way.
  template <class Issued>
  __device__ __forceinline__ void multiply(Sums& sums, int steps, const Issued& issued) {
    if constexpr (G::kMayBeEmpty) {
#pragma unroll
      for (auto& part : sums) {
#pragma unroll
        for (float& x : part) x = 0;
      }
      if (steps == 0) return;
    }
    issue<!G::kMayBeEmpty>(sums);
#pragma unroll 1
    for (int step = 1; step < steps; ++step) {
      const Slot before = G::slot(smem_, ring_.at());
      ring_.advance();
      issue<false>(sums);
      ptx::wgmma_wait_group<1>();
      warp_arrive(before.empty);
    }
    issued();
#pragma unroll
    for (auto& part : sums) ptx::wgmma_wait_group<0>(part);
    warp_arrive(G::slot(smem_, ring_.at()).empty);
    ring_.advance();
  }

  // Lets stages go by, of a tile that has no row for this consumer.
  __device__ __forceinline__ void pass_stages(int steps) {
#pragma unroll 1
    for (int step = 0; step < steps; ++step, ring_.advance()) {
      const Slot slot = G::slot(smem_, ring_.at());
      ring_.wait_full(slot);
      warp_arrive(slot.empty);
    }
  }

  // The MMAs of the next stage, as soon as it is there. kBegins: sums begin with it.
  template <bool kBegins>
  __device__ __forceinline__ void issue(Sums& sums) const {
    const int at = ring_.at();
    ring_.wait_full(G::slot(smem_, at));
    // What threads have copied is ordered with wgmma by whoever has waited for it.
    if constexpr (G::kCopied) ptx::fence_proxy_async_shared();
    const uint32_t sA = smem_ + offsetof(Smem, sA) + at * sizeof(typename G::TileA) +
                        (G::kPingPong ? 0 : index_ * G::kPartBytes);
    const uint32_t sB = smem_ + offsetof(Smem, sB) + at * sizeof(typename G::TileB);
    const uint32_t a = warp_uniform(G::TileA::descriptor(sA));
    const uint32_t b = warp_uniform(G::TileB::descriptor(sB));
    ptx::wgmma_fence();
#pragma unroll
    for (int part = 0; part < G::kParts; ++part) {
      const uint32_t of_part = a + part * (G::kPartBytes / 16);
      mma<kBegins>(sums[part], of_part, b, 0);
#pragma unroll
      for (int k = 1; k < G::kDepth / 16; ++k) mma<false>(sums[part], of_part, b, k);
    }
    ptx::wgmma_commit_group();
  }

  // 16 of the depth.
  template <bool kBegins>
  static __device__ __forceinline__ void mma(float (&sums)[G::kBlockN / 2], uint32_t a, uint32_t b,
                                             int k) {
    using Mma = ptx::Wgmma<G::kBf16, G::kBlockN>;
    using A = typename G::TileA;
    using B = typename G::TileB;
    if constexpr (!G::kAlongA) {
      static_assert(!G::kAlongB);
      static_assert(!kBegins);
      Mma::ss_tatb(sums, A::across(a, k), B::across(b, k));
    } else if constexpr (G::kAlongB) {
      if constexpr (kBegins) {
        Mma::ss_first(sums, A::along(a, k), B::along(b, k));
      } else {
        Mma::ss(sums, A::along(a, k), B::along(b, k), true);
      }
    } else {
      if constexpr (kBegins) {
        Mma::ss_tb_first(sums, A::along(a, k), B::across(b, k));
      } else {
        Mma::ss_tb(sums, A::along(a, k), B::across(b, k));
      }
    }
  }

  const uint32_t smem_;
  const int index_;
  Ring<G::kStages> ring_;
  uint32_t buffer_ = 0;  // of sOut, for send()
};

template <class T, TmaGemmTile kTile, bool kAlongA, bool kAlongB, bool kCopied>
template <class Produce, class Consume>
__device__ __forceinline__ void Gemm<T, kTile, kAlongA, kAlongB, kCopied>::run(
    uint32_t smem, const Produce& produce, const Consume& consume) {
  const int warpgroup = warp_uniform(static_cast<int>(threadIdx.x) / kWarpgroupThreads);
  init_barriers(smem);
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    if (kCopied || threadIdx.x == 0) produce(GemmProducer<Gemm>(smem));
  } else {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    consume(GemmConsumer<Gemm>(smem, warpgroup - 1));
  }
}

}  // namespace flashmoe::cuda::tma
