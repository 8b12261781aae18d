// The epilogue of the sm90 forward pass: O through shared memory to TMA, lse, and rows that are
// computed once more because a mask hides a NaN or infinity from them.
#pragma once

#include <type_traits>

#include "cuda/attention/score.cuh"
#include "cuda/attention/sm90/bias_rows.cuh"
#include "cuda/attention/sm90/fwd_warpgroup.cuh"
#include "cuda/attention/softmax.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/tile/e4m3.cuh"

namespace flashmoe::cuda::sm90 {

template <class C>
class FwdEpilogue {
  using Type = typename C::Type;
  using Smem = typename C::Smem;

  // What has so many bytes in memory.
  template <size_t kBytes>
  using Number = std::conditional_t<kBytes == 1, E4m3, Type>;

 public:
  __device__ __forceinline__ explicit FwdEpilogue(const FwdWarpgroup<C>& wg) : wg_(wg), p_(wg.p) {}

  // What the thread's two rows of O are multiplied with, and their lse.
  struct Ends {
    float inverse[2], lse[2];
  };
  __device__ __forceinline__ Ends end_rows(const RowState& rows) const {
    Ends ends;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const RowEnd end = end_row(quad_sum(rows.sum[half]), rows.reference[half],
                                 sink_of_row(wg_.fragment_row(half)));
      ends.inverse[half] = __fdividef(end.share, end.sum);
      if constexpr (requires { C::kFp8; }) ends.inverse[half] *= wg_.scales.value;
      ends.lse[half] = end.lse;
    }
    return ends;
  }

  // O / sum, and lse.
  __device__ __forceinline__ void store(const float (&rO)[C::kDim / 2], const Ends& ends) const {
    bool finite[2] = {true, true};
    const bool hides = hides_keys();
    if (hides) find_finite(finite, rO);
    const Place place = find_place();
    bool again = false;  // whether rows of the warpgroup are computed once more
    const uint32_t sO = C::out_at(wg_.smem, wg_.tasks.count());
    const int r = wg_.index * kWarpgroupRows + warpgroup_warp() * 16 + lane() % 16;
#pragma unroll
    for (int first = 0; first < C::Rows::kBlocks; first += C::kOutStages) {
      if (!C::kJoinsTasks) {
        if (warpgroup_thread() == 0) ptx::cp_async_bulk_wait_group_read();
        wg_.sync();  // TMA has read what sO held before
      }
#pragma unroll
      for (int i = 4 * first; i < min(4 * (first + C::kOutStages), C::kDim / 16); ++i) {
        uint32_t x[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float times = ends.inverse[j % 2];
          x[j] = Type::pack(rO[8 * i + 2 * j] * times, rO[8 * i + 2 * j + 1] * times);
        }
        const uint32_t block = sO + (i / 4 - first) * C::Out::kBytes;
        ptx::stmatrix_x4(block + C::Out::at(r, (16 * i + lane() / 16 * 8) % 64), x);
      }
      ptx::fence_proxy_async_shared();
      // The warpgroup's rows are in sO.
      again = ptx::bar_red_or(wg_.epilogue_barrier(), kWarpgroupThreads, !(finite[0] && finite[1]));
#pragma unroll
      for (int i = first; i < min(first + C::kOutStages, C::Rows::kBlocks); ++i) {
        store_block(place, sO + (i - first) * C::Out::kBytes, 64 * i);
      }
    }
    // lse after the fences, which would wait for its stores.
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = wg_.fragment_row(half);
      if (lane() % 4 == 0) write_lse(r, ends.lse[half]);
    }
    if (again) compute_again(finite);
  }

 private:
  // Where the warpgroup's rows of O go.
  struct Place {
    int first, token, head, batch;  // the first row, in the sequence and as out_map counts
    bool whole;                     // whether no row of another sequence is among them
  };
  __device__ __forceinline__ Place find_place() const {
    const FwdTask& task = wg_.task();
    const int first = wg_.first_row();
    return {first, static_cast<int>(task.seq.token_q) + (first >> p_.pack), task.head, task.batch,
            !p_.blocks || first + kWarpgroupRows <= task.seq.len_q};
  }
  // 64 columns of the warpgroup's rows from sO: by TMA, but by ordinary stores where a ragged
  // sequence ends within them and rows of the next one follow.
  __device__ __forceinline__ void store_block(const Place& place, uint32_t sO, int column) const {
    if (place.whole) {
      if (warpgroup_thread() == 0) {
        ptx::tma_store(sO + wg_.index * kWarpgroupRows * C::Out::kRowBytes, &p_.out_map, column, 0,
                       place.token, place.head, place.batch);
        ptx::cp_async_bulk_commit_group();
      }
      return;
    }
    const int first = place.first;
    const int rows = min(wg_.task().seq.len_q - first, kWarpgroupRows);
    const int columns = min(p_.head_dim_v - column, C::Out::kBlockCols);
#pragma unroll 1
    for (int i = warpgroup_thread(); i < rows * C::Out::kChunks; i += kWarpgroupThreads) {
      const int row = i / C::Out::kChunks, c = i % C::Out::kChunks * 8;
      const uint16_t* from = static_cast<const uint16_t*>(
          __cvta_shared_to_generic(sO + C::Out::at(wg_.index * kWarpgroupRows + row, c)));
      uint16_t* to = out_row(first + row) + column + c;
      if (c + 8 <= columns) {
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
      } else {
        for (int left = columns - c; left > 0; --left) *to++ = *from++;
      }
    }
  }

  __device__ __forceinline__ uint16_t* out_row(int row) const {
    return static_cast<uint16_t*>(p_.out) + wg_.row_offset(p_.out_strides, row);
  }
  __device__ __forceinline__ void write_lse(int row, float lse) const {
    if (!p_.lse || wg_.query(row) >= wg_.task().seq.len_q) return;
    const int head = row & ((1 << p_.pack) - 1);
    p_.lse[wg_.task().lse + head * p_.lse_strides.head + wg_.query(row) * p_.lse_strides.row] = lse;
  }

  // Rows of no sequence have none.
  __device__ __forceinline__ float sink_of_row(int row) const {
    if (!p_.sinks || wg_.task().seq.rest) return -INFINITY;
    return sink_of<Type>(p_, wg_.head(row));
  }

  // A probability of 0 times a hidden NaN is NaN: rows of O that are not finite are computed once
  // more where there is a mask. Lengths that are wrong give NaN.
  __device__ __forceinline__ bool hides_keys() const {
    return C::kBias || p_.left < kNoLimit || p_.right < kNoLimit || p_.key_lengths || p_.blocks;
  }
  // Whether what the thread has of its two rows is finite. A number that is not leaves a NaN in a
  // sum of zeros: an instruction for each.
  __device__ __forceinline__ void find_finite(bool (&finite)[2],
                                              const float (&rO)[C::kDim / 2]) const {
    float zeros[4] = {};
#pragma unroll
    for (int i = 0; i < C::kDim / 2; ++i) zeros[i % 4] = fmaf(rO[i], 0.f, zeros[i % 4]);
    const bool valid = wg_.task().seq.valid;
    finite[0] = valid && zeros[0] + zeros[1] == 0;
    finite[1] = valid && zeros[2] + zeros[3] == 0;
  }
  __device__ __forceinline__ void compute_again(const bool (&finite)[2]) const {
    const uint32_t upper = __ballot_sync(0xffffffffu, !finite[0]);
    const uint32_t lower = __ballot_sync(0xffffffffu, !finite[1]);
    if (warpgroup_thread() == 0) ptx::cp_async_bulk_wait_group();
    wg_.sync();  // TMA has written O
    recompute_rows(upper, lower);
  }

  __device__ __forceinline__ float bias_at(int query, int key) const {
    const FwdTask& task = wg_.task();
    const int64_t first = offset(p_, p_.bias_strides, task.batch, task.head, 0);
    return bias_number<Type, C::kTile.bias>(p_.bias, first + query * p_.bias_strides.row + key);
  }

  // Rows of the warp key by key, from the keys that each sees. `upper` has four bits for each of
  // the first eight rows, `lower` for the others. Slow, and rarely needed.
  __device__ __forceinline__ void recompute_rows(uint32_t upper, uint32_t lower) const {
    const FwdTask& task = wg_.task();
    constexpr int kColumns = (C::kDim + 31) / 32;  // of a lane
    const int key_head = task.head / p_.group;
    const auto number = [](const auto* row, int column, int dim) {
      return column < dim ? Number<sizeof(*row)>::unpack(row[column]) : 0.f;
    };
    // Not through KeyRows: that shortens this path by 16 instructions, and ptxas then allocates the
    // registers of the main loop anew.
    const auto key_row = [&](const void* tensor, const Strides& strides, int key) {
      if constexpr (requires { C::kPaged; }) {
        return C::key_row(tensor, key_head, task, key, p_);
      } else {
        return static_cast<const uint16_t*>(tensor) +
               offset(p_, strides, task.batch, key_head, task.seq.token_k) + key * strides.row;
      }
    };
#pragma unroll 1
    for (int i = 0; i < 16; ++i) {
      const int r = task.first_row + wg_.index * kWarpgroupRows + warpgroup_warp() * 16 + i;
      if (wg_.query(r) >= task.seq.len_q) break;
      if (((i < 8 ? upper : lower) >> (i % 8 * 4) & 0xf) == 0) continue;
      const uint16_t* q =
          static_cast<const uint16_t*>(p_.query) + wg_.row_offset(p_.query_strides, r);
      float o[kColumns] = {}, reference = -INFINITY, sum = 0;
      const int end = task.seq.valid ? task.seq.end(wg_.query(r), p_) : 0;
#pragma unroll 1
      for (int key = task.seq.begin(wg_.query(r), p_); key < end; ++key) {
        const float bias = C::kBias ? bias_at(r, key) : 0.f;
        if (bias == -INFINITY) continue;  // hidden, as by a mask
        const auto* k = key_row(p_.key, p_.key_strides, key);
        const auto* v = key_row(p_.value, p_.value_strides, key);
        float s = 0;
        for (int c = lane(); c < p_.head_dim; c += 32) {
          s += number(q, c, p_.head_dim) * number(k, c, p_.head_dim);
        }
        if constexpr (requires { C::kFp8; }) s *= C::key_scale(key_head, p_);
        s = ScoreRule<Sm90FwdParams>(p_).score(warp_sum(s));
        if (C::kBias) s += bias * kLog2e;
        const float raised = fmaxf(reference, s);
        const float finite = raised == -INFINITY ? 0.f : raised;
        const float correction = ptx::ex2_approx_ftz(reference - finite);
        const float weight = ptx::ex2_approx_ftz(s - finite);
        reference = raised;
        sum = sum * correction + weight;
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          o[j] = o[j] * correction + weight * number(v, lane() + 32 * j, p_.head_dim_v);
        }
      }
      const RowEnd row_end = end_row(sum, reference, sink_of_row(r));
      float inverse = __fdividef(row_end.share, row_end.sum), lse = row_end.lse;
      if constexpr (requires { C::kFp8; }) inverse *= wg_.scales.value;
      if (!task.seq.valid) inverse = lse = NAN;
      if (lane() == 0) write_lse(r, lse);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const int column = lane() + 32 * j;
        const uint32_t rounded = Type::pack(o[j] * inverse, 0) & 0xffff;
        if (column < p_.head_dim_v) out_row(r)[column] = static_cast<uint16_t>(rounded);
      }
    }
  }

  const FwdWarpgroup<C>& wg_;
  const Sm90FwdParams& p_;
};

}  // namespace flashmoe::cuda::sm90
