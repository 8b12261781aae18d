// Tensors that own their memory, in every layout a caller could come with.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "cpu/oracle.h"
#include "flashmoe/device.h"
#include "flashmoe/tensor.h"

namespace testing {

using flashmoe::DType;
using flashmoe::TensorSpec;
using flashmoe::cpu::oracle::read;
using flashmoe::cpu::oracle::write;
using Random = std::mt19937_64;
using Values = std::vector<double>;  // row-major

// Where calls run.
inline flashmoe::Device device_under_test;
inline flashmoe::Device device_with_threads(int num_threads) {
  flashmoe::Device device = device_under_test;
  if (device.type == flashmoe::DeviceType::kCpu) device.num_threads = num_threads;
  return device;
}

inline int64_t uniform(Random& random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}
inline bool chance(Random& random, double probability) {
  return std::bernoulli_distribution(probability)(random);
}

// The largest relative error of rounding to nearest.
inline double unit_roundoff(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return 0x1p-53;
    case DType::kFloat32:
      return 0x1p-24;
    case DType::kFloat16:
      return 0x1p-11;
    default:
      return 0x1p-8;
  }
}

inline int64_t element_count(const std::vector<int64_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

struct Layout {
  std::vector<int> order;        // dimensions, outermost in memory first
  std::vector<int64_t> spacing;  // by dimension: 1 = dense, n = every n-th place, 0 = broadcast
  std::vector<bool> reversed;    // negative stride
};

inline Layout dense_layout(int rank) {
  Layout layout{std::vector<int>(rank), std::vector<int64_t>(rank, 1), std::vector<bool>(rank)};
  std::iota(layout.order.begin(), layout.order.end(), 0);
  return layout;
}

// Half of them dense; the others permuted, with gaps, reversed and, where only read, broadcast.
inline Layout random_layout(Random& random, int rank, bool only_read) {
  Layout layout = dense_layout(rank);
  if (rank == 0 || chance(random, 0.5)) return layout;
  const int movable =
      chance(random, 0.7) ? rank - 1 : rank;  // mostly the last dimension stays last
  std::shuffle(layout.order.begin(), layout.order.begin() + movable, random);
  for (int i = 0; i < rank; ++i) {
    if (chance(random, 0.2)) layout.spacing[i] = uniform(random, 2, 3);
    if (only_read && chance(random, 0.08)) layout.spacing[i] = 0;
    layout.reversed[i] = chance(random, 0.05);
  }
  return layout;
}

// The heap block ends where the last element does, so that AddressSanitizer sees a read or write
// beyond it, and starts out as 0xFF bytes: NaN in every float dtype.
class Tensor {
 public:
  Tensor() = default;
  Tensor(DType dtype, const std::vector<int64_t>& shape, const Layout& layout) {
    spec_.dtype = dtype;
    spec_.rank = static_cast<int>(shape.size());
    std::copy(shape.begin(), shape.end(), spec_.shape.begin());
    int64_t step = 1, last = 0;
    for (int n = spec_.rank - 1; n >= 0; --n) {
      const int dim = layout.order[n];
      const int64_t stride = step * layout.spacing[dim];
      const int64_t reach = std::max<int64_t>(shape[dim] - 1, 0) * stride;
      spec_.stride[dim] = layout.reversed[dim] ? -stride : stride;
      if (layout.reversed[dim]) first_ += reach;
      last += reach;
      if (layout.spacing[dim] != 0) step *= shape[dim] * layout.spacing[dim];
    }
    count_ = element_count(shape);
    bytes_ = count_ == 0 ? 0 : (last + 1) * flashmoe::dtype_bytes(dtype);
    memory_.reset(new std::byte[bytes_]);
    poison();
  }
  Tensor(DType dtype, const std::vector<int64_t>& shape)
      : Tensor(dtype, shape, dense_layout(static_cast<int>(shape.size()))) {}

  explicit operator bool() const { return memory_ != nullptr; }
  const TensorSpec& spec() const { return spec_; }
  std::vector<int64_t> shape() const {
    return {spec_.shape.begin(), spec_.shape.begin() + spec_.rank};
  }
  int64_t count() const { return count_; }
  size_t bytes() const { return bytes_; }
  const std::byte* memory() const { return memory_.get(); }
  void* data() const {
    return memory_ ? memory_.get() + first_ * flashmoe::dtype_bytes(spec_.dtype) : nullptr;
  }

  void poison() {
    if (bytes_ > 0) std::memset(memory_.get(), 0xFF, bytes_);
  }

  Values values() const {
    Values result;
    for (int64_t offset : offsets()) result.push_back(read(spec_.dtype, data(), offset));
    return result;
  }
  void set(const Values& values) {
    auto next = values.begin();
    for (int64_t offset : offsets()) write(spec_.dtype, data(), offset, *next++);
  }

  // True when every byte that belongs to no element is still poison.
  bool gaps_untouched() const {
    std::vector<bool> element(bytes_);
    const int64_t size = flashmoe::dtype_bytes(spec_.dtype);
    for (int64_t offset : offsets()) {
      std::fill_n(element.begin() + (first_ + offset) * size, size, true);
    }
    for (size_t i = 0; i < bytes_; ++i) {
      if (!element[i] && memory_[i] != std::byte{0xFF}) return false;
    }
    return true;
  }

 private:
  std::vector<int64_t> offsets() const {
    std::vector<int64_t> result;
    for (int64_t n = 0; n < count_; ++n) {
      int64_t rest = n, offset = 0;
      for (int i = spec_.rank - 1; i >= 0; --i) {
        offset += rest % spec_.shape[i] * spec_.stride[i];
        rest /= spec_.shape[i];
      }
      result.push_back(offset);
    }
    return result;
  }

  TensorSpec spec_;
  int64_t count_ = 0;
  int64_t first_ = 0;  // place of element (0, ..., 0)
  size_t bytes_ = 0;
  std::unique_ptr<std::byte[]> memory_;
};

// The same numbers, dense; absent if it is.
inline Tensor dense_copy(const Tensor& t, DType dtype) {
  if (!t) return Tensor();
  Tensor result(dtype, t.shape());
  result.set(t.values());
  return result;
}

inline std::optional<TensorSpec> maybe_spec(const Tensor& t) {
  return t ? std::optional<TensorSpec>(t.spec()) : std::nullopt;
}

// " query(2,4,17,8 step 544,136,8,1)"; nothing where there is no tensor.
inline std::string describe(const char* name, const Tensor& t) {
  if (!t) return "";
  std::ostringstream s;
  s << " " << name << "(";
  for (int i = 0; i < t.spec().rank; ++i) s << (i ? "," : "") << t.spec().shape[i];
  s << " step";
  for (int i = 0; i < t.spec().rank; ++i) s << (i ? "," : " ") << t.spec().stride[i];
  s << ")";
  return s.str();
}

// " ids 1 0 7"
inline std::string describe_integers(const char* name, const Tensor& t) {
  if (!t) return "";
  std::ostringstream s;
  s << " " << name;
  for (double x : t.values()) s << " " << x;
  return s.str();
}

inline Values random_values(Random& random, int64_t count, double spread = 1) {
  std::normal_distribution<double> normal(0, spread);
  Values values(count);
  for (double& x : values) x = normal(random);
  return values;
}

}  // namespace testing
