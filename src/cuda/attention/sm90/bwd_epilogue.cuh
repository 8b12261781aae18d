// The epilogue of the sm90 backward pass: dK and dV through shared memory to TMA, and dQ where it
// is complete.
#pragma once

#include "cuda/attention/sm90/bwd_convert_dq.cuh"
#include "cuda/attention/sm90/bwd_warpgroup.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/tma.cuh"

namespace flashmoe::cuda::sm90 {

// Whether a ragged sequence ends within 64 keys, so that keys of the next one follow.
__device__ __forceinline__ bool ends_within(const BwdTask& task, int first_key,
                                            const Sm90BwdParams& p) {
  return p.blocks && first_key + 64 > task.seq.len_k;
}

// dK or dV of 64 keys to shared memory: a C::Grads tile.
template <class C>
__device__ __forceinline__ void write_gradient(uint32_t to, const float (&x)[C::kDim / 2],
                                               float times) {
  const int r = warpgroup_warp() * 16 + lane() % 16;
#pragma unroll
  for (int i = 0; i < C::kDim / 16; ++i) {
    uint32_t four[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      four[j] = C::Type::pack(x[8 * i + 2 * j] * times, x[8 * i + 2 * j + 1] * times);
    }
    const uint32_t at = C::Grads::at(r, 16 * (i % 4) + lane() / 16 * 8);
    ptx::stmatrix_x4(to + i / 4 * C::Grads::kBlockBytes + at, four);
  }
}

// The C::Grads tile at `from` to global memory: by TMA, but by ordinary stores where a ragged
// sequence ends within the 64 keys. Shared memory is free again once the warps are through, and the
// first thread has waited for TMA.
template <class C>
__device__ __forceinline__ void store_gradient(const BwdWarpgroup<C>& wg, const BwdTask& task,
                                               const void* gradient, const Strides& strides,
                                               const TensorMap& map, int dim, uint32_t from,
                                               int first_key) {
  if (!gradient) return;
  if (!ends_within(task, first_key, wg.p)) {
    if (warpgroup_thread() > 0) return;
    const int token = static_cast<int>(task.seq.token_k) + first_key;
#pragma unroll
    for (int i = 0; i < C::Grads::kBlocks; ++i) {
      ptx::tma_store_evict_first(from + i * C::Grads::kBlockBytes, &map, 64 * i, token,
                                 task.key_head, task.batch);
    }
    ptx::cp_async_bulk_commit_group();
    return;
  }
  const char* const to =
      rows_of(gradient, wg.p, strides, task.batch, task.key_head, task.seq.token_k);
  const int rows = task.seq.len_k - first_key;
#pragma unroll 1
  for (int i = warpgroup_thread(); i < rows * dim; i += kWarpgroupThreads) {
    const int r = i / dim, column = i % dim;
    const uint32_t at = from + column / 64 * C::Grads::kBlockBytes + C::Grads::at(r, column % 64);
    reinterpret_cast<uint16_t*>(const_cast<char*>(
        to + (first_key + r) * static_cast<int64_t>(strides.row_bytes())))[column] =
        ptx::ld_shared_u16(at);
  }
}

// Waits until sdS is free that dV and dK of the consumer leave from: dQ and the bias's gradient
// were read from it.
template <class C>
__device__ __forceinline__ void wait_grads(const BwdWarpgroup<C>& wg) {
  const int stage = wg.index / C::kGradsOfStage;
  const uint32_t count = wg.ring.count();
  const tma::Ring<2> next(count + (count + stage) % 2);  // the tile that would be there next
  next.wait_empty(wg.slot(C::kDsBarrier + stage));
}

// dK or dV of a consumer's keys as a part of their sum, in the order of the accumulators: see
// Sm90BwdParams::splits.
template <class C>
__device__ __forceinline__ void store_part(const BwdWarpgroup<C>& wg, const float (&x)[C::kDim / 2],
                                           const void* gradient, int part) {
  if (!gradient) return;
  const int64_t row = int64_t{part} * C::kBlockK + wg.first_key();
  float* const to = wg.p.grad_parts + row * C::kDqAccumDim + warpgroup_thread() * 4;
#pragma unroll
  for (int i = 0; i < C::kDim / 8; ++i) {
    *reinterpret_cast<float4*>(to + i * 512) =
        float4{x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]};
  }
}

// dV or dK of a consumer through shared memory at `sGrad`, where TMA may still read what was there
// before.
template <class C>
__device__ __forceinline__ void send_gradient(const BwdWarpgroup<C>& wg, const BwdTask& task,
                                              const float (&x)[C::kDim / 2], float times,
                                              const void* gradient, const Strides& strides,
                                              const TensorMap& map, int dim, uint32_t sGrad) {
  if (warpgroup_thread() == 0) ptx::cp_async_bulk_wait_group_read();
  wg.sync();  // TMA has read what was there before
  write_gradient<C>(sGrad, x, times);
  ptx::fence_proxy_async_shared();
  wg.sync();  // all of it is there
  store_gradient(wg, task, gradient, strides, map, dim, sGrad, task.first_key + wg.first_key());
}
template <class C>
__device__ __forceinline__ void send_grad_value(const BwdWarpgroup<C>& wg, const BwdTask& task,
                                                const float (&dv)[C::kDim / 2]) {
  const Sm90BwdParams& p = wg.p;
  if (C::kSplits && task.part != BwdTask::kWhole) {
    return store_part(wg, dv, p.grad_value, p.splits * p.split_tiles + task.part);
  }
  send_gradient(wg, task, dv, 1.f, p.grad_value, p.grad_value_strides, p.grad_value_map,
                p.head_dim_v, wg.opaque_smem() + C::grads_at(wg.index));
}
template <class C>
__device__ __forceinline__ void send_grad_key(const BwdWarpgroup<C>& wg, const BwdTask& task,
                                              const float (&dk)[C::kDim / 2]) {
  const Sm90BwdParams& p = wg.p;
  if (C::kSplits && task.part != BwdTask::kWhole) return store_part(wg, dk, p.grad_key, task.part);
  send_gradient(wg, task, dk, p.scale, p.grad_key, p.grad_key_strides, p.grad_key_map, p.head_dim,
                wg.opaque_smem() + C::grads_at(wg.index));
}

// dQ that is complete in the accumulators of a warpgroup, of 64 rows from `first` on. Of each 32
// columns a thread stores eight of each of two rows: the four threads that share rows transpose
// them.
template <class C, int kCount>
__device__ __forceinline__ void store_dq_rows(const float (&dq)[kCount], const BwdTask& task,
                                              int head, int first, const Sm90BwdParams& p) {
  const char* const rows = rows_of(p.grad_query, p, p.grad_query_strides, task.batch, head, 0);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first + fragment_row() + 8 * half;
    const int64_t at = row * static_cast<int64_t>(p.grad_query_strides.row_bytes());
#pragma unroll
    for (int from = 0; from < kCount; from += 16) {
      uint32_t eight[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* two = dq + from + 4 * i + 2 * half;
        eight[i] = C::Type::pack(two[0] * p.scale, two[1] * p.scale);
      }
      transpose_4x4(eight, lane());
      const int column = 2 * from + lane() % 4 * 8;
      if (row >= task.seq.len_q || column >= p.head_dim) continue;
      store_eight(const_cast<char*>(rows) + at + column * 2,
                  uint4{eight[0], eight[1], eight[2], eight[3]}, p.head_dim - column);
    }
  }
}

// dK and dV of keys that no query sees, or of lengths that are wrong. (Of parts the kernel that
// adds them up knows without reading.)
template <class C>
__device__ void fill_gradients(const BwdWarpgroup<C>& wg, const BwdTask& task) {
  const Sm90BwdParams& p = wg.p;
  if (C::kSplits && task.part != BwdTask::kWhole) return;
  const uint16_t value = task.seq.valid ? 0 : C::Type::kNan;
  const auto fill = [&](void* gradient, const Strides& strides, int dim) {
    if (!gradient) return;
    const char* to = rows_of(gradient, p, strides, task.batch, task.key_head, task.seq.token_k);
    const int first_key = task.first_key + (C::kCluster > 1 ? wg.first_key() : 0);
    const int end = min(first_key + C::kBlockK / C::kCluster, p.blocks ? task.seq.len_k : p.len_k);
#pragma unroll 1
    for (int r = first_key + wg.index; r < end; r += C::kWarpgroups) {
      uint16_t* const numbers = reinterpret_cast<uint16_t*>(
          const_cast<char*>(to) + r * static_cast<int64_t>(strides.row_bytes()));
      for (int i = warpgroup_thread(); i < dim; i += kWarpgroupThreads) numbers[i] = value;
    }
  };
  fill(p.grad_key, p.grad_key_strides, p.head_dim);
  fill(p.grad_value, p.grad_value_strides, p.head_dim_v);
}

// compute(task) for all tasks of the CTA that any query sees, until all their gradients are stored.
template <class C, class Compute>
__device__ __forceinline__ void consume_tasks(BwdWarpgroup<C>& wg, const Compute& compute) {
  wg.for_each_task([&](const BwdTask& task) {
    if (task.tiles == 0) {
      fill_gradients(wg, task);
    } else {
      compute(task);
    }
  });
  if (warpgroup_thread() == 0) ptx::cp_async_bulk_wait_group();
}

}  // namespace flashmoe::cuda::sm90
