// Between torch and the library: tensors as specs, devices, streams, and memory for a spec. Only
// torch's stable ABI, so that one binary serves every torch from 2.10 on.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <optional>
#include <string>
#include <utility>

#include "flashmoe/device.h"
#include "flashmoe/tensor.h"

namespace flashmoe::ops {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Shape, strides and dtype; `name` is for the error where the library has no such tensors.
TensorSpec spec_of(const char* name, const Tensor& tensor);
std::optional<TensorSpec> spec_of(const char* name, const OptionalTensor& tensor);

// Null where there is no tensor.
const void* data_of(const OptionalTensor& tensor);
inline const Tensor* pointer_to(const OptionalTensor& tensor) {
  return tensor ? &*tensor : nullptr;
}

// Where a tensor lives, as the planner wants to know it.
Device device_of(const Tensor& tensor);

// The device that explain() is asked about: `name` "" is the tensor's own; "cpu" and "sm_90" are
// another machine's.
Device device_named(const std::string& name, const Tensor& tensor);

// Fails unless all of them are where the first one is. Null is a tensor that a call does not have.
using NamedTensor = std::pair<const char*, const Tensor*>;
void check_same_device(NamedTensor first, std::initializer_list<NamedTensor> others);

// torch's current stream on the tensor's device; null on the CPU.
void* stream_of(const Tensor& tensor);

// Uninitialised memory on the device of `like`.
Tensor allocate(const TensorSpec& spec, const Tensor& like);
Tensor allocate_bytes(size_t bytes, const Tensor& like);

// Memory for a gradient, and its address; without elements and null where it is not wanted.
Tensor allocate_gradient(const std::optional<TensorSpec>& spec, DType dtype, const Tensor& like,
                         void*& address);

}  // namespace flashmoe::ops
