// The producer of the sm90 forward pass: one thread that loads Q, K and V by TMA as soon as a stage
// is empty, also across tasks, and hands tasks to the consumers. A bias that TMA cannot load is
// loaded by the other warps of its warpgroup.
#pragma once

#include "cuda/attention/sm90/bias_rows.cuh"
#include "cuda/attention/sm90/fwd_scheduler.cuh"
#include "cuda/tma/pipeline.cuh"

namespace flashmoe::cuda::sm90 {

template <class C>
class FwdProducer {
  using Smem = typename C::Smem;

 public:
  __device__ __forceinline__ FwdProducer(Smem& shared, uint32_t smem, const Sm90FwdParams& p)
      : shared_(shared), smem_(smem), p_(p) {}

  __device__ __forceinline__ void run() {
    for (const TensorMap* map : {&p_.query_map, &p_.key_map, &p_.value_map, &p_.out_map}) {
      ptx::prefetch_tensormap(map);
    }
    if (C::kBias && !C::kBiasRows) ptx::prefetch_tensormap(&p_.bias_map);
    const FwdScheduler<C> scheduler{p_};
    tma::Ring<2> tasks;
    int number = scheduler.first();
#pragma unroll 1
    for (;; tasks.advance()) {
      FwdTask& task = shared_.tasks[tasks.at()];
      tasks.wait_empty(C::slot(smem_, C::kTaskBarrier + tasks.at()));
      scheduler.find_task(number, task);
      ptx::mbarrier_arrive(C::slot(smem_, C::kTaskBarrier + tasks.at()).full);
      if (!task.more) return;
      number = scheduler.next(number, tasks.count());  // early: the counter takes a while to answer
      load(task);
    }
  }

 private:
  __device__ __forceinline__ void load(const FwdTask& task) {
    const int key_head = task.head / p_.group, token_k = static_cast<int>(task.seq.token_k);
#pragma unroll 1
    for (int n = task.key_end - 1; n >= task.key_begin; --n, keys_.advance()) {
      const uint32_t stage = keys_.at() * sizeof(typename C::Keys);
      const tma::Slot k = C::slot(smem_, C::kKBarrier + keys_.at());
      const tma::Slot v = C::slot(smem_, C::kVBarrier + keys_.at());
      const int row = token_k + n * C::kBlockK;
      keys_.wait_empty(k);
      tma::fill<typename C::Keys>(k, smem_ + offsetof(Smem, sK) + stage, p_.key_map, row, key_head,
                                  task.batch);
      if (n == task.key_end - 1) {  // after the first K, whose stage is empty earlier
        const tma::Slot q = C::slot(smem_, C::kQBarrier);
        queries_.wait_empty(q);
        tma::fill<typename C::Rows>(q, smem_ + offsetof(Smem, sQ), p_.query_map, 0,
                                    task.first_token(p_), task.head, task.batch);
        queries_.advance();
      }
      if constexpr (C::kBias && !C::kBiasRows) load_bias(task, n);
      keys_.wait_empty(v);
      tma::fill<typename C::Keys>(v, smem_ + offsetof(Smem, sV) + stage, p_.value_map, row,
                                  key_head, task.batch);
    }
  }

  // The bias of tile n of keys.
  __device__ __forceinline__ void load_bias(const FwdTask& task, int n) {
    using Tile = typename C::BiasTile;
    const tma::Slot slot = C::slot(smem_, C::kBiasBarrier + keys_.at());
    const uint32_t to = smem_ + offsetof(Smem, sBias) + keys_.at() * sizeof(Tile);
    keys_.wait_empty(slot);
    ptx::mbarrier_arrive_expect_tx(slot.full, Tile::kBytes);
#pragma unroll
    for (int i = 0; i < Tile::kBlocks; ++i) {
      ptx::tma_load(to + i * Tile::kBlockBytes, &p_.bias_map, slot.full,
                    n * C::kBlockK + i * Tile::kBlockCols, task.bias_row);
    }
  }

  Smem& shared_;
  const uint32_t smem_;
  const Sm90FwdParams& p_;
  tma::Ring<1> queries_;
  tma::Ring<C::kStages> keys_;
};

// A thread of the warps that load a bias whose rows begin anywhere: see bias_rows.cuh.
template <class C>
class FwdBiasLoader {
  using Smem = typename C::Smem;
  using Tile = typename C::BiasTile;

 public:
  __device__ __forceinline__ FwdBiasLoader(const Smem& shared, uint32_t smem,
                                           const Sm90FwdParams& p)
      : shared_(shared), smem_(smem), p_(p) {}

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (tma::Ring<2> tasks;; tasks.advance()) {
      const tma::Slot slot = C::slot(smem_, C::kTaskBarrier + tasks.at());
      tasks.wait_full(slot);
      const FwdTask& task = shared_.tasks[tasks.at()];
      if (!task.more) return;
      load(task);
      ptx::mbarrier_arrive(slot.empty);
    }
  }

 private:
  __device__ __forceinline__ void load(const FwdTask& task) {
    const int64_t stride = p_.bias_strides.row;
    const int64_t first =
        offset(p_, p_.bias_strides, task.batch, task.head, 0) + task.first_row * stride;
    const char* const rows = static_cast<const char*>(p_.bias) + first * Tile::kElementBytes;
#pragma unroll 1
    for (int n = task.key_end - 1; n >= task.key_begin; --n, keys_.advance()) {
      const tma::Slot slot = C::slot(smem_, C::kBiasBarrier + keys_.at());
      const int first_key = n * C::kBlockK;
      keys_.wait_empty(slot);
      Tile::template load<C::kLoaderThreads, 32>(
          smem_ + offsetof(Smem, sBias) + keys_.at() * sizeof(Tile),
          rows + int64_t{first_key} * Tile::kElementBytes, stride, p_.len_q - task.first_row,
          p_.len_k - first_key);
      ptx::cp_async_mbarrier_arrive_noinc(slot.full);
    }
  }

  const Smem& shared_;
  const uint32_t smem_;
  const Sm90FwdParams& p_;
  tma::Ring<C::kStages> keys_;
};

}  // namespace flashmoe::cuda::sm90
