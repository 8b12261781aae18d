// Between torch and the library: tensors as specs, devices, streams, and memory for a spec. Only
// torch's stable ABI, so that one binary serves every torch from 2.10 on.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "flashmoe/attention.h"

namespace flashmoe::ops {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Shape, strides and dtype; `name` is for the error where the library has no such tensors.
TensorSpec spec_of(const char* name, const Tensor& tensor);
std::optional<TensorSpec> spec_of(const char* name, const OptionalTensor& tensor);

// Null where there is no tensor.
const void* data_of(const OptionalTensor& tensor);

// Where a tensor lives, as the planner wants to know it.
Device device_of(const Tensor& tensor);

bool same_device(const Tensor& a, const Tensor& b);

// torch's current stream on the tensor's device; null on the CPU.
void* stream_of(const Tensor& tensor);

// Uninitialised memory on the device of `like`.
Tensor allocate(const TensorSpec& spec, const Tensor& like);
Tensor allocate_bytes(size_t bytes, const Tensor& like);

}  // namespace flashmoe::ops
