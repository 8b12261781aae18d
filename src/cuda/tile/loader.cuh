// Tiles of a product's operand on their way to shared memory, step by step of the depth. Where a
// thread's chunks of 16 bytes come from and go to is worked out once; a step adds to it.
//
//   AlongLoader     a row of the tile for each row of the result, with the depth in it
//   AcrossLoader    a row of the tile for each of the depth, at equal distances
//   TableLoader     the same, with the rows' places in a table in shared memory
//
// Past the end of the depth there are zeros. Rows (or columns) that the result does not have repeat
// one that it has: what is computed of them is never stored, and no predicate is needed. With
// kPartial rows may end within a chunk, of which nothing is read beyond.
#pragma once

#include "cuda/ptx/arithmetic.cuh"
#include "cuda/ptx/special_registers.cuh"
#include "cuda/tile/copy.cuh"
#include "cuda/tile/swizzle.cuh"

namespace flashmoe::cuda {

// A thread's place in a tile of kRows rows: it has chunk `chunk` of rows row, row + kStep, ...
template <class Layout, int kRows, int kThreads>
struct LoaderPlace {
  using Walk = RowWalk<Layout, kRows, kThreads>;
  static constexpr int kStep = Walk::kStep, kSteps = Walk::kSteps;
  // Rows kStep apart are mixed alike, so that their places differ by a constant.
  static_assert(kStep % 8 == 0 && (kRows % kStep == 0 || kSteps == 1));
  static_assert(Walk::kLanes == Layout::kChunks);

  int row, column;  // of its first chunk; in elements
  uint32_t to;      // from the beginning of the tile on

  __device__ __forceinline__ LoaderPlace() {
    const Walk walk(threadIdx.x);
    row = walk.row;
    column = walk.chunk * Layout::kChunkElements;
    to = Layout::at(walk.row, walk.chunk);
  }
  __device__ __forceinline__ bool is_idle() const { return kRows < kStep && row >= kRows; }

  // Copies chunk i, of which `count` elements exist; without kPartial all of them or none.
  template <class Chip, bool kPartial>
  __device__ __forceinline__ void copy(uint32_t tile, int i, const char* from, int count) const {
    const uint32_t shared = tile + to + i * kStep * Layout::kRowBytes;
    if constexpr (kPartial) {
      Chip::copy_part(shared, from, max(min(count * Layout::kElementBytes, 16), 0));
    } else {
      Chip::copy_16(shared, from, count > 0);
    }
  }
};

template <class Chip, class Layout, int kRows, int kThreads, bool kPartial>
class AlongLoader {
 public:
  // row_at(i) is where row i begins, for i below `rows`, of which there is at least one.
  template <class RowAt>
  __device__ __forceinline__ AlongLoader(int rows, const RowAt& row_at) {
#pragma unroll
    for (int i = 0; i < Place::kSteps; ++i) {
      from_[i] = row_at(min(place_.row + i * Place::kStep, rows - 1)) +
                 place_.column * Layout::kElementBytes;
    }
  }
  // [at, at + kCols) of the depth, of which there are `depth`.
  __device__ __forceinline__ void load(uint32_t tile, int at, int depth) const {
    if (place_.is_idle()) return;
    const int64_t bytes = int64_t{at} * Layout::kElementBytes;
#pragma unroll
    for (int i = 0; i < Place::kSteps; ++i) {
      place_.template copy<Chip, kPartial>(tile, i, from_[i] + bytes, depth - at - place_.column);
    }
  }

 private:
  using Place = LoaderPlace<Layout, kRows, kThreads>;
  Place place_;
  const char* from_[Place::kSteps];
};

// What both loaders across the depth know: this thread's column, or one that exists.
template <class Layout, int kRows, int kThreads>
struct AcrossPlace : LoaderPlace<Layout, kRows, kThreads> {
  const char* from;  // the column in row 0
  int count;         // elements that exist of its chunk

  // `first` is the tile's first column of `columns`, of which there is at least one.
  __device__ __forceinline__ AcrossPlace(const char* data, int first, int columns) {
    const int mine = first + this->column;
    from = data + int64_t{mine < columns ? mine : 0} * Layout::kElementBytes;
    count = mine < columns ? columns - mine : columns;
  }
};

template <class Chip, class Layout, int kRows, int kThreads, bool kPartial>
class AcrossLoader {
 public:
  __device__ __forceinline__ AcrossLoader(const char* data, int row_bytes, int first, int columns)
      : place_(data, first, columns), row_bytes_(row_bytes) {
    place_.from += int64_t{place_.row} * row_bytes;
  }
  // [at, at + kRows) of the depth, of which there are `depth`.
  __device__ __forceinline__ void load(uint32_t tile, int at, int depth) const {
    if (place_.is_idle()) return;
    const char* from = place_.from + int64_t{at} * row_bytes_;
#pragma unroll
    for (int i = 0; i < Place::kSteps; ++i) {
      const bool there = at + place_.row + i * Place::kStep < depth;
      place_.template copy<Chip, kPartial>(tile, i, from + int64_t{i * Place::kStep} * row_bytes_,
                                           there ? place_.count : 0);
    }
  }

 private:
  using Place = AcrossPlace<Layout, kRows, kThreads>;
  Place place_;
  int row_bytes_;
};

template <class Chip, class Layout, int kRows, int kThreads, bool kPartial>
class TableLoader {
 public:
  __device__ __forceinline__ TableLoader(const char* data, int row_bytes, int first, int columns)
      : place_(data, first, columns), row_bytes_(row_bytes) {}
  // Which rows of `data` are this thread's, of a table with kRows entries. All are read
  // before the first is needed, and by tiles of the same rows once.
  static constexpr int kSteps = LoaderPlace<Layout, kRows, kThreads>::kSteps;
  using Places = int[kSteps];
  __device__ __forceinline__ void find(Places& places, const int* table) const {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      places[i] = table[place_.is_idle() ? 0 : place_.row + i * Place::kStep];
    }
  }
  // The rows that were found, of which the first `rows` exist.
  __device__ __forceinline__ void load(uint32_t tile, const Places& places, int rows) const {
    if (place_.is_idle()) return;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      place_.template copy<Chip, kPartial>(tile, i,
                                           ptx::mad_wide(places[i], row_bytes_, place_.from),
                                           place_.row + i * Place::kStep < rows ? place_.count : 0);
    }
  }

 private:
  using Place = AcrossPlace<Layout, kRows, kThreads>;
  Place place_;
  int row_bytes_;
};

}  // namespace flashmoe::cuda
