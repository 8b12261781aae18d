// The producer of the sm90 backward pass: one thread that takes tasks from the scheduler and loads
// K, V, Q, dO, lse, delta and a bias by TMA as soon as their stages are empty, also across tasks.
#pragma once

#include "cuda/attention/sm90/bwd_dq.cuh"
#include "cuda/attention/sm90/bwd_scheduler.cuh"
#include "cuda/tma/operand.cuh"
#include "cuda/tma/pipeline.cuh"

namespace flashmoe::cuda::sm90 {

// What all threads are to know of a tile of queries in shared memory.
struct alignas(16) QueryTileInfo {
  int64_t row;  // where its sums begin in the dQ accumulator
  int first;    // query
  int flags;
  // kMasked << i: the i-th 64 keys need a mask. kMaskedAny: any of the keys do. kStores: these are
  // the first keys that the tile sees, so its dQ is stored, not added. kFirstHead: its head is the
  // first of its group.
  static constexpr int kMasked = 1, kMaskedAny = 16, kStores = 32, kFirstHead = 64;
  // With a bias: the head of the tile, from this bit on.
  static constexpr int kHeadBit = 8;
};

template <class C>
__device__ __forceinline__ QueryTileInfo find_query_tile(const BwdTask& task, int head, int first,
                                                         const Sm90BwdParams& p) {
  const auto masked = [&](int first_key, int count) {
    const int last_key = first_key + count - 1;
    // Past the last row is the bias of another head, which may be anything.
    if (C::kBias && first + C::kBlockQ > task.seq.len_q) return true;
    return last_key >= task.seq.len_k || first + task.seq.shift + p.right < last_key ||
           first + C::kBlockQ - 1 + task.seq.shift - p.left > first_key;
  };
  const SumOrder<C> order(task, head, first, p);
  int flags = order.stores ? QueryTileInfo::kStores : 0;
#pragma unroll
  for (int i = 0; i < C::kBlockK / 64; ++i) {
    if (masked(task.first_key + 64 * i, 64)) flags |= QueryTileInfo::kMasked << i;
  }
  // Ragged, rows of the next sequence follow the last: they count as masked.
  const bool followed = p.blocks && first + C::kBlockQ > task.seq.len_q;
  // Anything may be behind a bias of -inf.
  if (C::kBias || followed || masked(task.first_key, C::kBlockK)) {
    flags |= QueryTileInfo::kMaskedAny;
  }
  if (head == task.key_head * p.group) flags |= QueryTileInfo::kFirstHead;
  if (C::kBias) flags |= head << QueryTileInfo::kHeadBit;
  return {order.row, first, flags};
}

// Where Q and dO of a tile of queries go, by how many tiles came before it: Q where the dO of two
// tiles before was, which is done with before that tile's Q is, and dO where that Q was.
struct RowPlaces {
  uint32_t q, grad_out;  // offsets from Smem::sRows
};
template <class C>
__device__ __forceinline__ RowPlaces row_places(uint32_t count) {
  static_assert(C::kStages == 2);
  const uint32_t q = count % 2 * 2 + count / 2 % 2;
  return {q * C::Rows::kBytes, (q ^ 1) * C::Rows::kBytes};
}

// tma::fill() for rows that all CTAs of a cluster need: each CTA loads its share to all of them.
template <class C, uint32_t kMoreBytes = 0>
__device__ __forceinline__ void fill_cluster(const tma::Slot& slot, uint32_t shared, int rank,
                                             const TensorMap& map, int token, int head, int batch) {
  if constexpr (C::kCluster == 1) {
    tma::fill<typename C::Rows, kMoreBytes>(slot, shared, map, token, head, batch);
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

// The bias of a tile of queries and the task's keys.
template <class C>
__device__ __forceinline__ void load_bias(uint32_t smem, const tma::Ring<C::kStages>& ring,
                                          const BwdTask& task, int head, int first,
                                          const Sm90BwdParams& p) {
  using Tile = typename C::BiasTile;
  const tma::Slot slot = C::slot(smem, C::kBiasBarrier + ring.at());
  const uint32_t to = smem + offsetof(typename C::Smem, sBias) + ring.at() * sizeof(Tile);
  const int row = task.bias_row + (head - task.key_head * p.group) * task.bias_head_rows + first;
  ring.wait_empty(slot);
  ptx::mbarrier_arrive_expect_tx(slot.full, Tile::kBytes);
#pragma unroll
  for (int i = 0; i < Tile::kBlocks; ++i) {
    ptx::tma_load(to + i * Tile::kBlockBytes, &p.bias_map, slot.full,
                  task.first_key + i * Tile::kBlockCols, row);
  }
}

template <class C>
__device__ __forceinline__ void produce(typename C::Smem& shared, uint32_t smem,
                                        const Sm90BwdParams& p) {
  using Smem = typename C::Smem;
  const int rank = C::kCluster > 1 ? ptx::cluster_ctarank() : 0;
  tma::Ring<C::kStages> ring;
  BwdScheduler<C> scheduler(smem, rank);
#pragma unroll 1
  for (uint32_t index = 0;; ++index) {
    const tma::Ring<2> tasks(index);
    BwdTask& task = shared.tasks[tasks.at()];
    tasks.wait_empty(C::slot(smem, C::kTaskBarrier + tasks.at()));
    const BwdTask& before = shared.tasks[tasks.at() ^ 1];
    task.keys_parity = index == 0 ? 0 : before.keys_parity ^ (before.tiles > 0);
    find_task<C>(task, scheduler.next(index, p), p);
    task.index = index;
    task.first_tile = ring.count();
    task.last_tile = ring.count() + task.tiles - 1;
    ptx::mbarrier_arrive(C::slot(smem, C::kTaskBarrier + tasks.at()).full);
    if (task.last) break;
    for_each_query_tile<C>(task, p, [&](int head, int first) {
      const tma::Slot q = C::slot(smem, C::kQBarrier + ring.at());
      const tma::Slot grad_out = C::slot(smem, C::kGradOutBarrier + ring.at());
      const RowPlaces places = row_places<C>(ring.count());
      const bool begins = ring.count() == task.first_tile;
      const int token_q = static_cast<int>(task.seq.token_q) + first;
      const auto token_k = [&](int rank) {
        return static_cast<int>(task.seq.token_k) + task.first_key + 64 * rank;
      };
      // K and V, one before the first dO and one after it: K, which is needed first, where both are
      // free. Between two tasks V is free first, of two CTAs K.
      const bool k_first = C::kTwoCta || index == 0;
      const auto load_keys = [&](bool k) {
        const tma::Slot slot = C::slot(smem, k ? C::kKBarrier : C::kVBarrier);
        const uint32_t to = smem + (k ? offsetof(Smem, sK) : offsetof(Smem, sV));
        const TensorMap& map = k ? p.key_map : p.value_map;
        ptx::mbarrier_wait(slot.empty, task.keys_parity ^ 1);
        if constexpr (C::kKeyBox == 64 && C::Keys::kBlocks == 1) {
          ptx::mbarrier_arrive_expect_tx(slot.full, C::Keys::kBytes);
#pragma unroll
          for (int i = 0; i < C::kBlockK / 64; ++i) {
            ptx::tma_load_evict_first(to + i * 64 * C::Keys::kRowBytes, &map, slot.full, 0,
                                      token_k(i), task.key_head, task.batch);
          }
        } else {
          tma::fill<typename C::Keys, 0, !C::kTwoCta>(slot, to, map, token_k(rank), task.key_head,
                                                      task.batch);
        }
      };
      if constexpr (C::kBias && !C::kBiasRows) load_bias<C>(smem, ring, task, head, first, p);
      ring.wait_empty(grad_out);  // in all CTAs of the cluster: Q goes where a dO was
      fill_cluster<C>(q, smem + offsetof(Smem, sRows) + places.q, rank, p.query_map, token_q, head,
                      task.batch);
      if (begins) load_keys(k_first);
      ring.wait_empty(q);
      shared.query_tiles[ring.at()] = find_query_tile<C>(task, head, first, p);
      fill_cluster<C, C::kLseDeltaBytes>(grad_out, smem + offsetof(Smem, sRows) + places.grad_out,
                                         rank, p.grad_out_map, p.grad_out ? token_q : kNoLimit,
                                         head, task.batch);
      if (begins && index == 0) scheduler.wait_for_kernel_ahead();
      ptx::cp_async_bulk_load(smem + offsetof(Smem, lse_delta) + ring.at() * C::kLseDeltaBytes,
                              p.lse_delta + 2 * (head * p.rows + task.first_row + first),
                              C::kLseDeltaBytes, grad_out.full);
      if (begins) {
        load_keys(!k_first);
        if constexpr (C::kTwoCta) {
          const tma::Slot peer_k = C::slot(smem, C::kPeerKBarrier);
          ptx::mbarrier_wait(peer_k.empty, task.keys_parity ^ 1);
          ptx::mbarrier_arrive_expect_tx(peer_k.full, C::PeerKeys::kBytes);
          const int columns[] = {C::kDqFirst * rank,
                                 C::kDqSecond > 0 ? 128 : C::kDqFirst * rank + 64};
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            ptx::tma_load(smem + offsetof(Smem, sPeerK) + i * C::PeerKeys::kBlockBytes, &p.key_map,
                          peer_k.full, columns[i], token_k(1 - rank), task.key_head, task.batch);
          }
        }
      }
      ring.advance();
    });
    index = task.index;  // reloaded: there is no register to keep it
  }
}

}  // namespace flashmoe::cuda::sm90
