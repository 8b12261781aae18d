#include "placement.h"

#include <torch/csrc/stable/ops.h>

#include "layout.h"

namespace flashmoe::ops {
namespace {

// Kernels read and write 16 bytes at a time.
bool starts_aligned(const Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0;
}

Tensor copy_of(const Tensor& tensor, const TensorSpec& spec) {
  Tensor copy = allocate(spec, tensor);
  torch::stable::copy_(copy, tensor);
  return copy;
}

}  // namespace

Placement place(const char* name, const Tensor& tensor, const Device& device) {
  const Placement there = place(spec_of(name, tensor), device);
  if (there.moved || device.type == DeviceType::kCpu || starts_aligned(tensor)) return there;
  return {there.outside, padded(there.outside), true};
}

Placement place(const TensorSpec& outside, const Device& device) {
  if (!needs_copy(outside, device)) return {outside, outside, false};
  return {outside, padded(outside), true};
}

Tensor bring_in(const Tensor& tensor, const Placement& placement) {
  return placement.moved ? copy_of(tensor, placement.inside) : tensor;
}

Tensor hand_out(const Tensor& written, const Placement& placement) {
  return placement.moved ? copy_of(written, placement.outside) : written;
}

OptionalTensor start_aligned(const OptionalTensor& tensor) {
  if (!tensor || !tensor->is_cuda() || starts_aligned(*tensor)) return tensor;
  return copy_of(*tensor, packed_like(spec_of("bias", *tensor)));
}

std::optional<Placement> place(const char* name, const OptionalTensor& tensor,
                               const Device& device) {
  return tensor ? std::optional(place(name, *tensor, device)) : std::nullopt;
}

OptionalTensor bring_in(const OptionalTensor& tensor, const std::optional<Placement>& placement) {
  return tensor && placement ? std::optional(bring_in(*tensor, *placement)) : tensor;
}

Tensor hand_out(const Tensor& written, const std::optional<Placement>& placement) {
  return placement ? hand_out(written, *placement) : written;
}

}  // namespace flashmoe::ops
