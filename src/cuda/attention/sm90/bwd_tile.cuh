// The backward pass for Hopper: the tile, the task of a CTA, and the thread that has shared memory
// filled.
#pragma once

#include <type_traits>

#include "cuda/attention/sequence.cuh"
#include "cuda/attention/sm90/bwd_dq.cuh"
#include "cuda/attention/sm90/params.h"
#include "cuda/attention/sm90/tiles.h"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/grid.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/special_registers.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/tile/dtype.cuh"
#include "cuda/tma/operand.cuh"
#include "cuda/tma/pipeline.cuh"

namespace flashmoe::cuda::sm90 {

using tma::fill, tma::Ring, tma::Slot, tma::Tile, tma::warp_uniform;

// A block of keys of one (batch, key head), and the blocks of queries that see it.
struct alignas(16) BwdTask {
  Sequence seq;
  int64_t first_row;  // of the sequence in the workspace
  int64_t round_row;  // and where there is room for a round only
  int batch, key_head, first_key;
  int sequence;                    // the batch's, ragged as well
  int query_begin, query_end;      // in whole blocks
  int tiles;                       // blocks of queries, of all heads of the group
  uint32_t index;                  // which task of the CTA this is
  uint32_t first_tile, last_tile;  // and which of its blocks of queries
  uint8_t keys_parity;             // of the barriers of K and V
  bool last;                       // there is no more task, nor is this any
};

// A block of queries in shared memory: what all threads are to know of it.
struct alignas(16) BwdRows {
  int64_t row;  // among the sums of dQ
  int first;    // query
  int flags;
  // The first 64 keys of the block need a mask, the second 64 do, any of them do. And that its dQ
  // is stored, not added: these are the first keys that it sees.
  static constexpr int kMasked = 1, kMaskedAny = 4, kStores = 8;
};

template <class T, Sm90BwdTile kTile_>
struct BwdConfig {
  using Type = T;
  static constexpr bool kBf16 = std::is_same_v<T, Bf16>;
  static constexpr Sm90BwdTile kTile = kTile_;
  static constexpr bool kTwoCta = kTile.two_cta();
  static constexpr int kDim = kTile.head_dim, kSumDim = kTile.dq_accum_dim(),
                       kStages = kTile.kStages;
  static constexpr int kBlockQ = kTile.block_q, kBlockK = kTile.block_k;
  static constexpr int kGroups = 2;  // warpgroups that compute
  static constexpr int kParts = kPartsOfBlock;
  static constexpr int kCluster = kTile.cluster();
  using Rows = Tile<kBlockQ, kDim>;
  using Keys = Tile<kBlockK / kCluster, kDim>;
  using Pairs = Tile<kBlockQ, kBlockK>;  // dS
  using Grads = Tile<64, kDim>;          // dK or dV of 64 keys
  // Wide: columns of dQ that a CTA has, the first from column kFirst * rank on, the second from
  // column 128 + kSecond * rank on; and of the other CTA's K those blocks of 64 that they are in.
  static constexpr int kFirst = kDim > 192 ? 128 : 64, kSecond = kDim > 192 ? 0 : 32;
  using Other = Tile<64, 128>;
  static constexpr uint32_t kTermBytes = kBlockQ * 8;
  // dQ of a warpgroup on its way out: 64 rows x 64 columns.
  static constexpr uint32_t kSumBytes = 64 * 64 * 4;

  static constexpr uint32_t kSmemK = 0, kSmemV = Keys::kBytes;
  static constexpr uint32_t kSmemQ = kSmemV + Keys::kBytes;  // and dO: see row_places()
  static constexpr uint32_t kSmemPairs = kSmemQ + 2 * kStages * Rows::kBytes;
  static constexpr uint32_t kSmemSums = kSmemPairs + (kTwoCta ? 1 : 2) * Pairs::kBytes;
  static constexpr uint32_t kSmemOther = kSmemSums;
  static constexpr uint32_t kSmemGrads = kSmemSums + kBlockQ * kSumDim * 4;
  static constexpr uint32_t kSmemTerms =
      kTwoCta ? kSmemOther + Other::kBytes : kSmemGrads + kGroups * Grads::kBytes;
  static constexpr uint32_t kSmemTasks = kSmemTerms + kStages * kTermBytes;
  static constexpr uint32_t kSmemRows = kSmemTasks + 2 * sizeof(BwdTask);
  static constexpr uint32_t kSmemBarriers = kSmemRows + kStages * sizeof(BwdRows);
  static_assert(kSmemTasks + kBwdControlBytes == kTile.shared_bytes());
  static_assert(kTile.shared_bytes() <= 227 * 1024);
  static constexpr uint32_t kSmemTicket = kSmemBarriers + 14 * sizeof(Slot::Barriers);
  static_assert(kSmemTicket + 4 <= kSmemTasks + kBwdControlBytes);
  static_assert(sizeof(BwdTask) % 16 == 0);
  static_assert(kBlockK == kKeysOfBlock && (!kTwoCta || kBlockQ == 64));
  static_assert(kTwoCta || kBlockQ * kSumDim * 4 == kGroups * kSumBytes);
  static_assert(Keys::kBytes % 1024 == 0 && Rows::kBytes % 1024 == 0 && Pairs::kBytes % 1024 == 0);
  static constexpr int kLoaderRegisters = kTwoCta ? 40 : 24;
  static constexpr int kRegisters = 240, kSecondRegisters = kTwoCta ? 224 : kRegisters;
  static_assert(kLoaderRegisters + kRegisters + kSecondRegisters <= 3 * registers_at_first(3));
};

// Where Q and dO of a block of queries go, by how many came before it: Q where the dO of two blocks
// ago was, which is done with before that block's Q is, and dO where that Q was.
struct RowPlaces {
  uint32_t q, grad_out;  // from kSmemQ on
};
template <class C>
__device__ __forceinline__ RowPlaces row_places(uint32_t turns) {
  static_assert(C::kStages == 2);
  const uint32_t q = turns % 2 * 2 + turns / 2 % 2;
  return {q * C::Rows::kBytes, (q ^ 1) * C::Rows::kBytes};
}

// Barriers. Who empties a place arrives with each warp.
template <class C>
struct BwdSlots {
  uint32_t barriers;
  static constexpr int kWarps = 4;  // of a warpgroup
  __device__ __forceinline__ Slot task(int i) const { return at(i); }
  __device__ __forceinline__ Slot k() const { return at(2); }
  __device__ __forceinline__ Slot v() const { return at(3); }
  __device__ __forceinline__ Slot q(int stage) const { return at(4 + stage); }
  __device__ __forceinline__ Slot grad_out(int stage) const { return at(6 + stage); }
  __device__ __forceinline__ Slot sums(int group) const { return at(8 + group); }
  // dS: two of them, or wide one.
  __device__ __forceinline__ Slot pairs(int stage = 0) const { return at(10 + stage); }
  // Not wide: that the other warpgroup has issued its products.
  __device__ __forceinline__ uint32_t products(int group) const { return at(12 + group).full; }
  // Wide: the other CTA's K, its dS, and the number of the next task.
  __device__ __forceinline__ Slot other_k() const { return at(11); }
  __device__ __forceinline__ Slot other_pairs() const { return at(12); }
  __device__ __forceinline__ Slot ticket() const { return at(13); }

  static constexpr int kHelpers = 2;  // threads beside the loading one that look at tasks
  __device__ __forceinline__ void init() const {
    const auto init = [](const Slot& slot, int full, int empty) {
      ptx::mbarrier_init(slot.full, full);
      ptx::mbarrier_init(slot.empty, empty);
    };
    constexpr int kEveryone = C::kGroups * kWarps;
    for (int i = 0; i < 2; ++i) {
      init(task(i), 1, C::kGroups * 128 + kHelpers);  // each thread for itself
      init(q(i), 1, C::kCluster * kEveryone);
      init(grad_out(i), 1, C::kCluster * (C::kTwoCta ? kWarps : kEveryone));
      init(sums(i), kWarps, 1);
    }
    if constexpr (C::kTwoCta) {
      init(pairs(), kWarps, C::kCluster * kWarps);
      init(other_k(), 1, kWarps);
      init(other_pairs(), 1, 1);
      init(ticket(), 1, 1);
    } else {
      for (int i = 0; i < 2; ++i) {
        init(pairs(i), kEveryone, kEveryone);
        ptx::mbarrier_init(products(i), kWarps);
      }
    }
    init(k(), 1, kEveryone);
    init(v(), 1, C::kTwoCta ? kWarps : kEveryone);
    ptx::fence_mbarrier_init();
  }

 private:
  __device__ __forceinline__ Slot at(int i) const {
    return Slot(barriers + i * sizeof(Slot::Barriers));
  }
};

// The order of the tasks. Blocks of keys add to the sums of a block of queries in ascending order,
// where sums are deterministic, and the first of them stores: so each waits for tasks with lower
// tickets only, which someone already has, and the lowest that is not done waits for nobody.
//
// That there is little to wait for:
// - All go through their blocks of queries from the last to the first. With causal masks and
//   windows, who has a later block of keys begins at the same block of queries or a later one, and
//   so is behind by as much as it takes to hand on the sums, once, when it begins. (From the first
//   to the last it would be ahead of those that it waits for.) Blocks of keys that most queries see
//   go first, which is good for the end as well.
// - Heads go together, as few as the second-level cache holds: see heads_per_wave() on the host.
// - A ticket is taken when the loads of the task before are all on their way, no earlier: who waits
//   for a task that lies behind another one waits for both.
template <class C>
__device__ __forceinline__ void find_task(BwdTask& w, int number, const Sm90BwdParams& p) {
  w.last = number >= p.num_tasks;
  if (w.last) return;
  if (p.blocks) {
    const RaggedBlock block = p.blocks[number / p.heads];
    w.last = block.kind == RaggedKind::kEmpty;  // and so are all that follow
    if (w.last) return;
    w.batch = 0;
    w.key_head = p.first_head + number % p.heads;
    w.first_key = block.block * C::kBlockK;
    w.seq = find_sequence(block);
    if (block.kind == RaggedKind::kRest) {  // keys that nobody sees
      w.seq.valid = true;
      w.seq.len_q = 0;
    }
    w.sequence = block.sequence;
  } else {
    const int heads = p.num_tasks / p.key_blocks, together = p.heads_per_wave;
    const int first_head = number / (together * p.key_blocks) * together;
    const int these = min(together, heads - first_head);
    number -= first_head * p.key_blocks;
    const int block = number / these, index = first_head + number % these;
    w.batch = p.first_batch + index / p.heads;
    w.key_head = p.first_head + index % p.heads;
    w.first_key = block * C::kBlockK;
    w.seq = find_sequence(p, w.batch);
    w.sequence = w.batch;
  }
  const Sequence seq = w.seq;
  w.first_row = workspace_row(p, seq, w.sequence);
  w.round_row = w.first_row - round_rows(p);
  // Row i sees key j when i + shift - left <= j <= i + shift + right.
  const int last_key = min(w.first_key + C::kBlockK, seq.len_k) - 1;
  const int first = max(w.first_key - seq.shift - p.right, 0);
  const int last = min(last_key - seq.shift + p.left, seq.len_q - 1);
  const bool seen = seq.valid && first <= last && w.first_key <= last_key;
  w.query_begin = first / C::kBlockQ * C::kBlockQ;
  w.query_end = seen ? (last / C::kBlockQ + 1) * C::kBlockQ : w.query_begin;
  w.tiles = (w.query_end - w.query_begin) / C::kBlockQ * p.group;
}

// Whether among 64 keys there are some of the next sequence, ragged.
__device__ __forceinline__ bool ends_within(const BwdTask& w, int first_key,
                                            const Sm90BwdParams& p) {
  return p.blocks && first_key + 64 > w.seq.len_k;
}

// f(head, first query) for the blocks of queries of a task, in their order.
template <class C, class F>
__device__ __forceinline__ void for_each_tile(const BwdTask& w, const Sm90BwdParams& p,
                                              const F& f) {
#pragma unroll 1
  for (int head = w.key_head * p.group; head < (w.key_head + 1) * p.group; ++head) {
#pragma unroll 1
    for (int first = w.query_end; first > w.query_begin;) f(head, first -= C::kBlockQ);
  }
}

// f(task) for all tasks of the CTA, by one of the threads beside the loading one.
template <class C, class F>
__device__ __forceinline__ void for_each_task_helper(char* shared, const BwdSlots<C>& slots,
                                                     const F& f) {
  Ring<2> tasks;
#pragma unroll 1
  for (;; tasks.advance()) {
    const Slot slot = slots.task(tasks.at());
    tasks.wait_full(slot);
    const BwdTask& w = reinterpret_cast<const BwdTask*>(shared + C::kSmemTasks)[tasks.at()];
    if (w.last) break;
    f(w);
    ptx::mbarrier_arrive(slot.empty);
  }
}

// The sums of dQ of a block of queries whose first row this is: 64 rows x 64 columns, then the next
// 64 columns or rows. Each has 128 threads x 4 floats for each 8 columns, as wgmma leaves them.
template <class C>
__device__ __forceinline__ float* query_sums(int64_t row, uint32_t part, const Sm90BwdParams& p) {
  return p.dq_accum + row * C::kSumDim + part * (64 * 64);
}

// Blocks of keys add to a block of queries one after the other where sums are deterministic; where
// not, all wait for the first, which stores. Each has two parts: `dq_semaphore` counts them.
template <class C>
struct Turn {
  int64_t row;  // where the block's sums begin
  int* turn;
  int parts_before;  // to wait for
  bool stores, passes_on;

  __device__ __forceinline__ Turn(const BwdTask& w, int head, int first, const Sm90BwdParams& p) {
    row = head * p.dq_accum_rows + w.round_row + first;
    turn = p.dq_semaphore + row / C::kBlockQ;
    // All blocks of keys from the first that a row of the block sees.
    const int begin = w.seq.begin(first, p) / C::kBlockK, block = w.first_key / C::kBlockK;
    parts_before = C::kParts * (block - begin);
    stores = parts_before == 0;
    passes_on = p.deterministic || stores;
    if (!p.deterministic) parts_before = min(parts_before, C::kParts);
  }
  __device__ __forceinline__ void wait() const {
    if (parts_before == 0) return;
    while (ptx::ld_acquire(turn) < parts_before) {
    }
  }
  __device__ __forceinline__ void pass_on() const {
    if (passes_on) ptx::red_release_add(turn, 1);
  }
};

template <class C>
__device__ __forceinline__ BwdRows find_rows(const BwdTask& w, int head, int first,
                                             const Sm90BwdParams& p) {
  const auto masked = [&](int first_key, int count) {
    const int last_key = first_key + count - 1;
    return last_key >= w.seq.len_k || first + w.seq.shift + p.right < last_key ||
           first + C::kBlockQ - 1 + w.seq.shift - p.left > first_key;
  };
  const Turn<C> turn(w, head, first, p);
  int flags = turn.stores ? BwdRows::kStores : 0;
  if (masked(w.first_key, 64)) flags |= BwdRows::kMasked;
  if (masked(w.first_key + 64, 64)) flags |= BwdRows::kMasked << 1;
  // Ragged, others' rows follow the last: they are as good as masked.
  const bool followed = p.blocks && first + C::kBlockQ > w.seq.len_q;
  if (followed || masked(w.first_key, C::kBlockK)) flags |= BwdRows::kMaskedAny;
  return {turn.row, first, flags};
}

// The number of the next task. Of a cluster, the first CTA takes a ticket and tells the other.
template <class C>
class Tickets {
 public:
  __device__ __forceinline__ Tickets(uint32_t smem, const BwdSlots<C>& slots, int rank)
      : at_(smem + C::kSmemTicket), slot_(slots.ticket()), rank_(rank) {}

  __device__ __forceinline__ int take(const Sm90BwdParams& p) {
    if constexpr (C::kCluster == 1) return atomicAdd(p.tile_counter, 1);
    parity_ ^= 1;
    int number;
    if (rank_ == 0) {
      number = atomicAdd(p.tile_counter, 1);
      ptx::mbarrier_wait(slot_.empty, parity_ ^ 1);
      ptx::st_shared_cluster_u32(ptx::mapa(at_, 1), number);
      ptx::mbarrier_arrive_release_cluster(ptx::mapa(slot_.full, 1));
    } else {
      ptx::mbarrier_wait_cluster(slot_.full, parity_);
      number = ptx::ld_shared_u32(at_);
      ptx::mbarrier_arrive_cluster(ptx::mapa(slot_.empty, 0));
    }
    return number;
  }

 private:
  const uint32_t at_;
  const Slot slot_;
  const int rank_;
  int parity_ = 1;
};

// fill() with rows that all CTAs of a cluster need: each has its share copied to all of them.
template <class C, uint32_t kMoreBytes = 0>
__device__ __forceinline__ void fill_everywhere(const Slot& slot, uint32_t shared, int rank,
                                                const TensorMap& map, int token, int head,
                                                int batch) {
  if constexpr (C::kCluster == 1) {
    fill<typename C::Rows, kMoreBytes>(slot, shared, map, token, head, batch);
  } else {
    constexpr int kShare = C::kBlockQ / C::kCluster;
    ptx::mbarrier_arrive_expect_tx(slot.full, C::Rows::kBytes + kMoreBytes);
#pragma unroll
    for (int i = 0; i < C::Rows::kBlocks; ++i) {
      ptx::tma_load_multicast((1 << C::kCluster) - 1,
                              shared + i * C::Rows::kBlockBytes + rank * kShare * 128, &map,
                              slot.full, 64 * i, token + rank * kShare, head, batch);
    }
  }
}

// The thread that fills shared memory, and finds out what the others are to work on.
template <class C>
__device__ __forceinline__ void load_all(char* shared, const BwdSlots<C>& slots,
                                         const Sm90BwdParams& p) {
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const int rank = C::kCluster > 1 ? ptx::cluster_ctarank() : 0;
  Ring<C::kStages> ring;
  Tickets<C> tickets(smem, slots, rank);
#pragma unroll 1
  for (uint32_t index = 0;; ++index) {
    const Ring<2> tasks(index);
    BwdTask* const both = reinterpret_cast<BwdTask*>(shared + C::kSmemTasks);
    BwdTask& w = both[tasks.at()];
    tasks.wait_empty(slots.task(tasks.at()));
    const BwdTask& before = both[tasks.at() ^ 1];
    w.keys_parity = index == 0 ? 0 : before.keys_parity ^ (before.tiles > 0);
    find_task<C>(w, tickets.take(p), p);
    w.index = index;
    w.first_tile = ring.count();
    w.last_tile = ring.count() + w.tiles - 1;
    ptx::mbarrier_arrive(slots.task(tasks.at()).full);
    if (w.last) break;
    for_each_tile<C>(w, p, [&](int head, int first) {
      const Slot q = slots.q(ring.at()), grad_out = slots.grad_out(ring.at());
      const RowPlaces places = row_places<C>(ring.count());
      const bool begins = head == w.key_head * p.group && first == w.query_end - C::kBlockQ;
      const int token_q = static_cast<int>(w.seq.token_q) + first;
      const auto token_k = [&](int rank) {
        return static_cast<int>(w.seq.token_k) + w.first_key + 64 * rank;
      };
      // K and V, one before the first dO and one after it: wide, K is free first, else V.
      const auto load_keys = [&](bool k) {
        const Slot slot = k ? slots.k() : slots.v();
        ptx::mbarrier_wait(slot.empty, w.keys_parity ^ 1);
        fill<typename C::Keys, 0, !C::kTwoCta>(slot, smem + (k ? C::kSmemK : C::kSmemV),
                                               k ? p.key_map : p.value_map, token_k(rank),
                                               w.key_head, w.batch);
      };
      ring.wait_empty(grad_out);  // in all CTAs of the cluster
      fill_everywhere<C>(q, smem + C::kSmemQ + places.q, rank, p.query_map, token_q, head, w.batch);
      if (begins) load_keys(C::kTwoCta);
      ring.wait_empty(q);
      reinterpret_cast<BwdRows*>(shared + C::kSmemRows)[ring.at()] =
          find_rows<C>(w, head, first, p);
      fill_everywhere<C, C::kTermBytes>(grad_out, smem + C::kSmemQ + places.grad_out, rank,
                                        p.grad_out_map, p.grad_out ? token_q : kNoLimit, head,
                                        w.batch);
      ptx::cp_async_bulk_load(smem + C::kSmemTerms + ring.at() * C::kTermBytes,
                              p.lse_delta + 2 * (head * p.rows + w.first_row + first),
                              C::kTermBytes, grad_out.full);
      if (begins) {
        load_keys(!C::kTwoCta);
        if constexpr (C::kTwoCta) {
          const Slot other = slots.other_k();
          ptx::mbarrier_wait(other.empty, w.keys_parity ^ 1);
          ptx::mbarrier_arrive_expect_tx(other.full, C::Other::kBytes);
          const int columns[] = {C::kFirst * rank, C::kSecond > 0 ? 128 : C::kFirst * rank + 64};
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            ptx::tma_load(smem + C::kSmemOther + i * C::Other::kBlockBytes, &p.key_map, other.full,
                          columns[i], token_k(1 - rank), w.key_head, w.batch);
          }
        }
      }
      ring.advance();
    });
    index = w.index;  // there is no register to keep it
  }
}

}  // namespace flashmoe::cuda::sm90
