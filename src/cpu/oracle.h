// What the float64 oracles of all operators are made of: tensors of any dtype and strides as dense
// arrays of doubles, and back, rounded once.
#pragma once

#include <new>
#include <optional>
#include <stdexcept>
#include <vector>

#include "core/check.h"
#include "core/text.h"
#include "cpu/half.h"

namespace flashmoe::cpu::oracle {

using Array = std::vector<double>;  // dense, row-major

inline double read(DType dtype, const void* data, int64_t offset) {
  switch (dtype) {
    case DType::kFloat64:
      return static_cast<const double*>(data)[offset];
    case DType::kFloat32:
      return static_cast<const float*>(data)[offset];
    case DType::kFloat16:
      return Float16::to_double(static_cast<const uint16_t*>(data)[offset]);
    case DType::kBFloat16:
      return BFloat16::to_double(static_cast<const uint16_t*>(data)[offset]);
    case DType::kFloat8E4M3:
      return Float8E4M3::to_double(static_cast<const uint8_t*>(data)[offset]);
    case DType::kInt32:
      return static_cast<const int32_t*>(data)[offset];
    case DType::kInt64:
      return static_cast<double>(static_cast<const int64_t*>(data)[offset]);
    case DType::kBool:
      return static_cast<const uint8_t*>(data)[offset] != 0;
  }
  return 0;
}

inline void write(DType dtype, void* data, int64_t offset, double x) {
  switch (dtype) {
    case DType::kFloat64:
      static_cast<double*>(data)[offset] = x;
      break;
    case DType::kFloat32:
      static_cast<float*>(data)[offset] = static_cast<float>(x);
      break;
    case DType::kFloat16:
      static_cast<uint16_t*>(data)[offset] = Float16::from_double(x);
      break;
    case DType::kBFloat16:
      static_cast<uint16_t*>(data)[offset] = BFloat16::from_double(x);
      break;
    case DType::kFloat8E4M3:
      static_cast<uint8_t*>(data)[offset] = Float8E4M3::from_double(x);
      break;
    case DType::kInt32:
      static_cast<int32_t*>(data)[offset] = static_cast<int32_t>(x);
      break;
    case DType::kInt64:
      static_cast<int64_t*>(data)[offset] = static_cast<int64_t>(x);
      break;
    case DType::kBool:
      static_cast<uint8_t*>(data)[offset] = x != 0;
      break;
  }
}

// Calls visit(offset) for every element in row-major order.
template <class Visit>
void visit_elements(const TensorSpec& spec, Visit&& visit, int dim = 0, int64_t offset = 0) {
  if (dim == 0 && element_count(spec) == 0) return;  // (2^40, 0) should not take a day
  if (dim == spec.rank) return visit(offset);
  for (int64_t i = 0; i < spec.shape[dim]; ++i) {
    visit_elements(spec, visit, dim + 1, offset + i * spec.stride[dim]);
  }
}

inline Array load(const TensorSpec& spec, const void* data) {
  Array array;
  visit_elements(spec, [&](int64_t offset) { array.push_back(read(spec.dtype, data, offset)); });
  return array;
}

inline void store(const TensorSpec& spec, void* data, const Array& array) {
  auto next = array.begin();
  visit_elements(spec, [&](int64_t offset) { write(spec.dtype, data, offset, *next++); });
}

// An absent tensor is an empty array.
inline Array load(const std::optional<TensorSpec>& spec, const void* data) {
  return spec ? load(*spec, data) : Array();
}

inline void store(const std::optional<TensorSpec>& spec, void* data, const Array& array) {
  if (spec) store(*spec, data, array);
}

inline Array filled(const TensorSpec& spec, double x) {
  Array array;
  visit_elements(spec, [&](int64_t) { array.push_back(x); });
  return array;
}

inline double dot(const double* a, const double* b, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

// y += x * factor
inline void add(double* y, const double* x, double factor, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] += factor * x[i];
}

// Runs `oracle`, which keeps copies of tensors that may be too large for that.
template <class Oracle>
Status with_memory(Oracle&& oracle) {
  const Status failed =
      unsupported("the reference keeps a float64 copy of every tensor, and memory ran out");
  try {
    oracle();
  } catch (const std::bad_alloc&) {
    return failed;
  } catch (const std::length_error&) {
    return failed;
  }
  return {};
}

}  // namespace flashmoe::cpu::oracle
