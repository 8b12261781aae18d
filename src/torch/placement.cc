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

std::string names_of_moved(std::initializer_list<NamedPlacement> placements) {
  std::string names;
  for (const auto& [name, placement] : placements) {
    if (placement && placement->moved) names += (names.empty() ? "" : ", ") + std::string(name);
  }
  return names;
}

}  // namespace

Placement place(const char* name, const Tensor& tensor, const Device& device, NeedsCopy needs) {
  const Placement there = place(spec_of(name, tensor), device, needs);
  if (there.moved || device.type == DeviceType::kCpu || starts_aligned(tensor)) return there;
  return {there.outside, padded(there.outside), true};
}

Placement place(const TensorSpec& outside, const Device& device, NeedsCopy needs) {
  if (!needs(outside, device)) return {outside, outside, false};
  return {outside, padded(outside), true};
}

Tensor bring_in(const Tensor& tensor, const Placement& placement) {
  return placement.moved ? copy_of(tensor, placement.inside) : tensor;
}

Tensor hand_out(const Tensor& written, const Placement& placement) {
  return placement.moved ? copy_of(written, placement.outside) : written;
}

Tensor room_for(const Tensor& tensor, const Placement& placement) {
  return placement.moved ? allocate(placement.inside, tensor) : tensor;
}

void take_back(const Tensor& written, Tensor tensor, const Placement& placement) {
  if (placement.moved) torch::stable::copy_(tensor, written);
}

OptionalTensor start_aligned(const OptionalTensor& tensor) {
  if (!tensor || !tensor->is_cuda() || starts_aligned(*tensor)) return tensor;
  const TensorSpec spec = spec_of("bias", *tensor);
  return spec.dtype == DType::kBool ? tensor : copy_of(*tensor, packed_like(spec));
}

std::optional<Placement> place(const char* name, const OptionalTensor& tensor, const Device& device,
                               NeedsCopy needs) {
  return tensor ? std::optional(place(name, *tensor, device, needs)) : std::nullopt;
}

OptionalTensor bring_in(const OptionalTensor& tensor, const std::optional<Placement>& placement) {
  return tensor && placement ? std::optional(bring_in(*tensor, *placement)) : tensor;
}

Tensor hand_out(const Tensor& written, const std::optional<Placement>& placement) {
  return placement ? hand_out(written, *placement) : written;
}

std::optional<TensorSpec> inside(const std::optional<Placement>& placement) {
  return placement ? std::optional(placement->inside) : std::nullopt;
}

std::string copies_text(std::initializer_list<NamedPlacement> in,
                        std::initializer_list<NamedPlacement> out) {
  const std::string before = names_of_moved(in), after = names_of_moved(out);
  std::string text;
  if (!before.empty()) text = before + " once, before the kernel";
  if (!after.empty()) text += (before.empty() ? "" : "; ") + after + " once, after it";
  return "  copies     " + (text.empty() ? "none" : text) + "\n";
}

}  // namespace flashmoe::ops
