// The producer of the sm90 forward pass: one thread that loads Q, K and V by TMA as soon as a stage
// is empty, also across tasks, and one that finds tasks. A bias that TMA cannot load is loaded by
// the other warps of their warpgroup.
#pragma once

#include "cuda/attention/sm90/bias_rows.cuh"
#include "cuda/attention/sm90/fwd_scheduler.cuh"
#include "cuda/tma/pipeline.cuh"

namespace flashmoe::cuda::sm90 {

// Finds tasks and hands them to everyone who reads them.
template <class C>
class FwdTaskGiver {
 public:
  __device__ __forceinline__ FwdTaskGiver(typename C::Smem& shared, uint32_t smem,
                                          const Sm90FwdParams& p)
      : shared_(shared), smem_(smem), scheduler_{p} {}

  // Hands out task `number`. It is found before there is a place for it: that takes thousands of
  // cycles.
  __device__ __forceinline__ const FwdTask& give(int number, int bias_parity = 0) {
    FwdTask& task = shared_.tasks[ring_.at()];
    const tma::Slot slot = C::slot(smem_, C::kTaskBarrier + ring_.at());
    scheduler_.find_task(number, shared_.found);
    if constexpr (C::kBiasStays) shared_.found.bias_parity = bias_parity;
    ring_.wait_empty(slot);
    const auto* const from = reinterpret_cast<const uint4*>(&shared_.found);
#pragma unroll 1  // few registers
    for (int i = 0; i < static_cast<int>(sizeof(FwdTask) / sizeof(uint4)); ++i) {
      reinterpret_cast<uint4*>(&task)[i] = from[i];
    }
    ptx::mbarrier_arrive(slot.full);
    ring_.advance();
    return task;
  }
  // f(task) for each task of the CTA, when it has been handed out.
  template <class F>
  __device__ __forceinline__ void for_each(const F& f) {
    int number = blockIdx.x;
#pragma unroll 1
    for (;;) {
      const uint32_t count = ring_.count();
      const FwdTask& task = give(number);
      if (!task.more) return;
      if (count == 0) ptx::griddepcontrol_wait();  // for the counter
      number = scheduler_.next(number, count);     // early: the counter takes a while to answer
      f(task);
    }
  }
  // Waits until the last task that was handed out is done with.
  __device__ __forceinline__ void wait_for_last() const {
    const tma::Ring<2> after(ring_.count() + 1);  // the last task's place
    after.wait_empty(C::slot(smem_, C::kTaskBarrier + after.at()));
  }

 private:
  typename C::Smem& shared_;
  const uint32_t smem_;
  const FwdScheduler<C> scheduler_;
  tma::Ring<2> ring_;
};

// The thread that finds tasks, two ahead of the consumers, so that loads need not wait for it.
template <class C>
__device__ __forceinline__ void find_tasks(typename C::Smem& shared, uint32_t smem,
                                           const Sm90FwdParams& p) {
  FwdTaskGiver<C>(shared, smem, p).for_each([](const FwdTask&) {});
}

template <class C>
class FwdProducer {
  using Smem = typename C::Smem;
  static_assert(C::kKeyStages == C::kStages);  // one ring for both

 public:
  __device__ __forceinline__ FwdProducer(Smem& shared, uint32_t smem, const Sm90FwdParams& p,
                                         int team = 0)
      : shared_(shared), smem_(smem), p_(p), team_(team), giver_(shared, smem, p) {}

  __device__ __forceinline__ void run() {
    prefetch_maps();
    if constexpr (C::kBiasStays) {
      run_slabs();
    } else if constexpr (!C::kFindsAhead) {
      giver_.for_each([&](const FwdTask& task) { load(task); });
    } else {
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
  }

 private:
  __device__ __forceinline__ void prefetch_maps() const {
    for (const TensorMap* map : {&p_.query_map, &p_.key_map, &p_.value_map, &p_.out_map}) {
      ptx::prefetch_tensormap(map);
    }
    if (C::kBias && !C::kBiasRows) ptx::prefetch_tensormap(&p_.bias_map);
  }
  __device__ __forceinline__ void load(const FwdTask& task) {
    const int key_head = task.head / p_.group, token_k = static_cast<int>(task.seq.token_k);
    if (C::kQStages == 2) load_queries(task);
#pragma unroll 1
    for (int n = task.key_end - 1; n >= task.key_begin; --n, keys_.advance()) {
      const uint32_t stage = keys_.at() * sizeof(typename C::Keys);
      const tma::Slot k = C::slot(smem_, C::kKBarrier + keys_.at());
      const tma::Slot v = C::slot(smem_, C::kVBarrier + keys_.at());
      const int row = token_k + n * C::kBlockK;
      keys_.wait_empty(k);
      tma::fill<typename C::Keys>(k, smem_ + offsetof(Smem, sK) + stage, p_.key_map, row, key_head,
                                  task.batch);
      // After the first K, whose stage is empty earlier.
      if (C::kQStages == 1 && n == task.key_end - 1) load_queries(task);
      if constexpr (C::kBias && !C::kBiasRows && !C::kBiasStays) load_bias(task, n);
      keys_.wait_empty(v);
      tma::fill<typename C::Keys>(v, smem_ + offsetof(Smem, sV) + stage, p_.value_map, row,
                                  key_head, task.batch);
    }
  }

  __device__ __forceinline__ void load_queries(const FwdTask& task) {
    const tma::Slot q = C::slot(smem_, C::kQBarrier + queries_.at());
    queries_.wait_empty(q);
    tma::fill<typename C::Rows>(
        q, smem_ + offsetof(Smem, sQ) + queries_.at() * sizeof(typename C::Rows), p_.query_map, 0,
        task.first_token(p_), task.head, task.batch);
    queries_.advance();
  }

  // Where a bias stays. The CTA has tasks that follow each other, and those of a slab (a tile of
  // queries of a head, for all batches that share its bias) read the same bias. The teams take
  // turns: every other task is the team's.
  __device__ __forceinline__ void run_slabs() {
    const auto share = [&](uint32_t cta) {
      return static_cast<int>(int64_t{p_.num_tasks} * cta / gridDim.x);
    };
    const int begin = share(blockIdx.x), end = share(blockIdx.x + 1);
    int parity = 0;
#pragma unroll 1
    for (int first = begin; first < end; parity ^= 1) {
      const int slab_end = min((first / p_.bias_batches + 1) * p_.bias_batches, end);
      if (first > begin) change_slab(parity);
      if (team_ == 0) load_slab(first);
#pragma unroll 1
      for (int n = first + ((first - begin + team_) & 1); n < slab_end; n += C::kTeams) {
        load(giver_.give(n, parity));
      }
      first = slab_end;
    }
    giver_.give(p_.num_tasks);  // there is none any more
    // All of the bias has arrived, also what no task has read, before the CTA ends.
    if (begin < end) wait_slab(parity ^ 1);
  }
  __device__ __forceinline__ int bias_tiles() const {
    return (p_.len_k + C::kBlockK - 1) / C::kBlockK;
  }
  __device__ __forceinline__ void wait_slab(int parity) const {
    for (int n = 0; n < bias_tiles(); ++n) {
      ptx::mbarrier_wait(C::bias_full(smem_, team_, n), parity);
    }
  }
  // Waits until the bias of the slab before is there and done with. Its arrival is waited for by
  // both producers before either may load anew: so whoever waits for the next one finds its
  // mbarriers at most one phase behind.
  __device__ __forceinline__ void change_slab(int parity) {
    giver_.wait_for_last();
    wait_slab(parity ^ 1);
    const uint32_t empty = C::bias_empty(smem_, team_);
    ptx::mbarrier_arrive(empty);
    if (team_ == 0) ptx::mbarrier_wait(empty, parity ^ 1);
  }
  // The bias of the slab of task `number`, from the last tile of keys, which is read first.
  __device__ __forceinline__ void load_slab(int number) {
    using Tile = typename C::BiasTile;
    FwdTask task;
    FwdScheduler<C>{p_}.find_task(number, task);
#pragma unroll 1
    for (int n = bias_tiles() - 1; n >= 0; --n) {
      const uint32_t full = C::bias_full(smem_, team_, n);
      ptx::mbarrier_arrive_expect_tx(full, Tile::kBytes);
      ptx::tma_load(C::bias_at(smem_, team_) + n * Tile::kBytes, &p_.bias_map, full, n * C::kBlockK,
                    task.bias_row);
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
  const int team_;
  FwdTaskGiver<C> giver_;
  tma::Ring<C::kQStages> queries_;
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
