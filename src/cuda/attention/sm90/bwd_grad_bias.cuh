// The gradient of a bias that is not shared, on its way out of the sm90 backward pass: it is dS,
// which is in shared memory in 16 bits as an operand of dQ. One warp beside the producer sends it
// from there, by TMA where the gradient's rows are whole chunks of 16 bytes, and else by ordinary
// stores; and it writes what no tile of dS has. Where a bias comes by rows (bias_rows.cuh) that
// warp loads it, and consumers store dS from their registers, each number by itself: lanes have
// eight neighbouring keys of four queries at a time, and L2 puts the parts of lines together.
#pragma once

#include <type_traits>

#include "cuda/attention/bias.cuh"
#include "cuda/attention/sm90/bias_rows.cuh"
#include "cuda/attention/sm90/bwd_scheduler.cuh"
#include "cuda/attention/sm90/bwd_warpgroup.cuh"
#include "cuda/attention/sm90/warpgroup.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/tma/pipeline.cuh"

namespace flashmoe::cuda::sm90 {

// f(query, key) for all pairs of a tile, by a warp; those of neighbouring lanes are neighbours in
// memory.
template <int kQueries, int kKeys, class F>
__device__ __forceinline__ void for_each_pair(const BiasRows& grad, const F& f) {
  const auto along = [&](int outer, int inner, const auto& pair) {
#pragma unroll 1
    for (int i = 0; i < outer; ++i) {
#pragma unroll 4
      for (int j = lane(); j < inner; j += 32) pair(i, j);
    }
  };
  if (grad.row == 1) {
    along(kKeys, kQueries, [&](int key, int query) { f(query, key); });
  } else {
    along(kQueries, kKeys, f);
  }
}

// The eight numbers that begin `skip` before the `chunk`th eight of a row of dS, in shared memory
// at `from`: those of the chunk before, and of this one.
template <class C>
__device__ __forceinline__ uint4 read_ds(uint32_t from, int row, int chunk, int skip) {
  constexpr int kChunks = C::kBlockK / 8;
  const auto chunk_at = [&](int c) {
    const bool exists = c >= 0 && c < kChunks;
    return exists ? ptx::ld_shared_v4(from + C::ScoreTile::at(row, 8 * c)) : uint4{0, 0, 0, 0};
  };
  const uint4 a = chunk_at(chunk - 1), b = chunk_at(chunk);
  // From number 8 - skip of the sixteen on: four words on, two, one, and half a word.
  const int begin = 8 - skip;
  uint32_t w[9] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w, 0};
#pragma unroll
  for (int i = 0; i < 5; ++i) w[i] = begin & 8 ? w[i + 4] : w[i];
#pragma unroll
  for (int i = 0; i < 7; ++i) w[i] = begin & 4 ? w[i + 2] : w[i];
#pragma unroll
  for (int i = 0; i < 5; ++i) w[i] = begin & 2 ? w[i + 1] : w[i];
  const int odd = begin % 2 * 16;
  return {__funnelshift_r(w[0], w[1], odd), __funnelshift_r(w[1], w[2], odd),
          __funnelshift_r(w[2], w[3], odd), __funnelshift_r(w[3], w[4], odd)};
}

// store_ds_numbers() where a row's keys are neighbours in memory: in the chunks of 16 bytes there,
// of which a row's first and last may be its own in part only.
template <class C>
__device__ __forceinline__ void store_ds_rows(uint32_t from, const BiasRows& grad, int first,
                                              int rows, int first_key, int keys) {
  constexpr int kChunks = C::kBlockK / 8 + 1;
  keys = min(keys, C::kBlockK);
  rows = min(rows, C::kBlockQ);
  // Two at a time take registers that consumers need above D = 64.
#pragma unroll(C::kDim > 64 ? 1 : 2)
  for (int i = lane(); i < rows * kChunks; i += 32) {
    const int row = i / kChunks, chunk = i % kChunks;
    char* const begin = grad.at(first + row, first_key);
    const int skip = static_cast<int>(reinterpret_cast<uintptr_t>(begin) / 2 % 8);
    const int key = 8 * chunk - skip;  // the chunk's first, which may be before the row's
    if (key >= keys) continue;
    const uint4 eight = read_ds<C>(from, row, chunk, skip);
    char* const to = begin + key * 2;
    if (key >= 0 && key + 8 <= keys) {
      *reinterpret_cast<uint4*>(to) = eight;
      continue;
    }
    const uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (key + j < 0 || key + j >= keys) continue;
      reinterpret_cast<uint16_t*>(to)[j] = static_cast<uint16_t>(words[j / 2] >> (j % 2 * 16));
    }
  }
}

// dS of a tile, in shared memory at `from`, to rows [first, first + rows) and `keys` keys.
template <class C>
__device__ __forceinline__ void store_ds_numbers(uint32_t from, const BiasRows& grad, int first,
                                                 int rows, int first_key, int keys) {
  for_each_pair<C::kBlockQ, C::kBlockK>(grad, [&](int query, int key) {
    if (query >= rows || key >= keys) return;
    *reinterpret_cast<uint16_t*>(grad.at(first + query, first_key + key)) =
        ptx::ld_shared_u16(from + C::ScoreTile::at(query, key));
  });
}

// dS of a tile of queries from the consumer's registers; number(i) is that of accumulator i, a
// Number. Keys are neighbours in memory, and the stride of rows fits in 32 bits.
template <class C, class Number, class F>
__device__ __forceinline__ void store_ds_registers(const BwdWarpgroup<C>& wg, const BwdTask& task,
                                                   const F& number) {
  const Sm90BwdParams& p = wg.p;
  if (!p.grad_bias) return;
  const int first = wg.first_query(), query = first + fragment_column();
  const int key = task.first_key + wg.first_key() + fragment_row();
  const int row = static_cast<int>(p.grad_bias_strides.row);
  Number* const to = static_cast<Number*>(p.grad_bias) + task.grad_bias +
                     wg.head() * p.grad_bias_strides.head + int64_t{query} * row + key;
  const auto store = [&](auto whole) {
#pragma unroll
    for (int i = 0; i < C::kBlockQ / 8; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        // Accumulator 4 i + j is of query 8 i + j % 2 and key j / 2 * 8.
        const bool exists = 8 * i + j % 2 < p.len_q - query && j / 2 * 8 < p.len_k - key;
        if (decltype(whole)::value || exists) {
          to[int64_t{row} * (8 * i + j % 2) + j / 2 * 8] = number(4 * i + j);
        }
      }
    }
  };
  if (first + C::kBlockQ <= p.len_q && task.first_key + C::kBlockK <= p.len_k) {
    store(std::true_type());
  } else {
    store(std::false_type());
  }
}

// Sets rows [first, end) of the task's keys, number by number.
template <class C>
__device__ __forceinline__ void fill_numbers(const BiasRows& grad, int first, int end,
                                             int first_key, int keys, float value) {
#pragma unroll 1
  for (; first < end; first += C::kBlockQ) {
    for_each_pair<C::kBlockQ, C::kBlockK>(grad, [&](int query, int key) {
      if (first + query >= end || key >= keys) return;
      write_bias<typename C::Type>(grad, first + query, first_key + key, value);
    });
  }
}

// fill_numbers() where keys are neighbours in memory: first the whole chunks of 16 bytes of each
// row, then what is left at its ends, by a lane for each row.
template <class C>
__device__ __forceinline__ void fill_rows(const BiasRows& grad, int first, int end, int first_key,
                                          int keys, float value) {
  constexpr int kBytes = C::BiasTile::kElementBytes, kChunks = C::kBlockK * kBytes / 16;
  using Number = std::conditional_t<C::kFloatBias, float, uint16_t>;
  const uint32_t word = C::kFloatBias ? __float_as_uint(value) : C::Type::pack(value, value);
  const auto number = [&] {
    if constexpr (C::kFloatBias) {
      return value;
    } else {
      return static_cast<uint16_t>(word);
    }
  };
  const int row_bytes = min(keys, C::kBlockK) * kBytes;
  // Bytes before the first whole chunk of a row that begins there.
  const auto before_chunks = [](const char* begin) {
    return static_cast<int>(-reinterpret_cast<uintptr_t>(begin) % 16);
  };
#pragma unroll 1
  for (int row = first + lane() / kChunks; row < end; row += 32 / kChunks) {
    char* const begin = grad.at(row, first_key);
    const int at = before_chunks(begin) + lane() % kChunks * 16;
    if (at + 16 <= row_bytes) *reinterpret_cast<uint4*>(begin + at) = {word, word, word, word};
  }
#pragma unroll 1
  for (int row = first + lane(); row < end; row += 32) {
    char* const begin = grad.at(row, first_key);
    const int chunks_begin = min(before_chunks(begin), row_bytes);
    const int chunks_end = chunks_begin + (row_bytes - chunks_begin) / 16 * 16;
    const auto fill = [&](int at, int to) {
#pragma unroll 1
      for (; at < to; at += kBytes) *reinterpret_cast<Number*>(begin + at) = number();
    };
    fill(0, chunks_begin);
    fill(chunks_end, row_bytes);
  }
}

// Sets rows [first, end) of the task's keys.
template <class C>
__device__ __forceinline__ void fill_grad_bias(const BiasRows& grad, int first, int end,
                                               int first_key, int keys, float value) {
  constexpr int kChunks = C::kBlockK / 8;  // of a row
  if (grad.chunks) {
    const uint32_t two = C::Type::pack(value, value);
    const int key = lane() % kChunks * 8;
    if (key >= keys) return;
#pragma unroll 1
    for (int row = first + lane() / kChunks; row < end; row += 32 / kChunks) {
      cuda::store_eight(grad, row, first_key + key, keys - key, {two, two, two, two});
    }
    return;
  }
  if constexpr (C::kBiasRows) {
    fill_rows<C>(grad, first, end, first_key, keys, value);
  } else {
    fill_numbers<C>(grad, first, end, first_key, keys, value);
  }
}

// Sets what no tile of dS has of the task's keys: queries that see none of them, or of lengths that
// are wrong.
template <class C>
__device__ __forceinline__ void fill_unseen(const BwdTask& task, const Sm90BwdParams& p) {
  if (C::kMask || !p.grad_bias) return;
  const float value = task.seq.valid ? 0.f : NAN;
  const int keys = p.len_k - task.first_key;
#pragma unroll 1
  for (int head = task.key_head * p.group; head < (task.key_head + 1) * p.group; ++head) {
    const int begin = min(task.query_begin, p.len_q);
    const BiasRows grad = find_grad_bias(p, task.seq, task.batch, head);
    fill_grad_bias<C>(grad, 0, begin, task.first_key, keys, value);
    fill_grad_bias<C>(grad, max(task.query_end, begin), p.len_q, task.first_key, keys, value);
  }
}

// The warp that loads a bias by rows.
template <class C>
__device__ __forceinline__ void load_bias_rows(typename C::Smem& shared, uint32_t smem,
                                               const Sm90BwdParams& p) {
  using Tile = typename C::BiasTile;
  constexpr int kFirstThread = 3 * 32;
  tma::Ring<C::kStages> ring;
  for_each_task<C>(shared, smem, [&](const BwdTask& task) {
    const int64_t stride = p.bias_strides.row;
    const int64_t batch = batch_offset(p, p.bias_strides.batch, task.batch);
    for_each_query_tile<C>(task, p, [&](int head, int first) {
      const tma::Slot slot = C::slot(smem, C::kBiasBarrier + ring.at());
      const int64_t where = batch + head * p.bias_strides.head + first * stride + task.first_key;
      const char* const from = static_cast<const char*>(p.bias) + where * Tile::kElementBytes;
      ring.wait_empty(slot);
      if (lane() == 0) {
        shared.sBias[ring.at()].shift[0] = Tile::shift(from);
        ptx::mbarrier_arrive(slot.full);
      }
      Tile::template load<32, kFirstThread>(
          smem + offsetof(typename C::Smem, sBias) + ring.at() * sizeof(typename C::BiasStage),
          from, stride, p.len_q - first, p.len_k - task.first_key);
      ptx::cp_async_mbarrier_arrive_noinc(slot.full);
      ring.advance();
    });
    fill_unseen<C>(task, p);
  });
}

// The warp. It takes part in the turns of dS also where no gradient is wanted.
template <class C>
__device__ __forceinline__ void store_grad_bias(const typename C::Smem& shared, uint32_t smem,
                                                const Sm90BwdParams& p) {
  tma::Ring<2> tiles;
  for_each_task<C>(shared, smem, [&](const BwdTask& task) {
    for_each_query_tile<C>(task, p, [&](int head, int first) {
      const tma::Slot ds = C::slot(smem, C::kDsBarrier + tiles.at());
      const uint32_t from =
          smem + offsetof(typename C::Smem, sdS) + tiles.at() * C::ScoreTile::kBytes;
      tiles.wait_full(ds);
      if (p.grad_bias && p.stores_grad_bias) {
        if (lane() == 0) {
#pragma unroll
          for (int i = 0; i < C::ScoreTile::kBlocks; ++i) {
            ptx::tma_store_evict_first(from + i * C::ScoreTile::kBlockBytes, &p.grad_bias_map,
                                       task.first_key + i * C::ScoreTile::kBlockCols, first, head,
                                       task.batch);
          }
          ptx::cp_async_bulk_commit_group();
          ptx::cp_async_bulk_wait_group_read();
        }
      } else if (p.grad_bias) {
        const BiasRows grad = find_grad_bias(p, task.seq, task.batch, head);
        const int rows = p.len_q - first, keys = p.len_k - task.first_key;
        if (grad.column == 1) {
          store_ds_rows<C>(from, grad, first, rows, task.first_key, keys);
        } else {
          store_ds_numbers<C>(from, grad, first, rows, task.first_key, keys);
        }
      }
      warp_arrive(ds.empty);
      tiles.advance();
    });
    fill_unseen<C>(task, p);
  });
  if (lane() == 0) ptx::cp_async_bulk_wait_group();
}

}  // namespace flashmoe::cuda::sm90
