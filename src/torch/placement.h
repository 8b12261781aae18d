// Where kernels find a tensor: as it lies, or in a copy whose rows they can address.
#pragma once

#include "convert.h"

namespace flashmoe::ops {

struct Placement {
  TensorSpec outside;  // as torch has it
  TensorSpec inside;   // as the kernels see it
  bool moved = false;  // by one copy, before the kernels read it or after they have written it
};

// A tensor that is there already, which also may begin at an address that kernels cannot use.
Placement place(const char* name, const Tensor& tensor, const Device& device);

// A tensor that will be allocated to lie like that.
Placement place(const TensorSpec& outside, const Device& device);

// The tensor that kernels read: itself, or its copy.
Tensor bring_in(const Tensor& tensor, const Placement& placement);

// The tensor that torch gets: what the kernels wrote, or a copy of it where torch wants it.
Tensor hand_out(const Tensor& written, const Placement& placement);

// The tensor, or a packed copy where it begins at an address that kernels cannot use: for a bias,
// which may lie in any way else.
OptionalTensor start_aligned(const OptionalTensor& tensor);

// The same for what a call may not have.
std::optional<Placement> place(const char* name, const OptionalTensor& tensor,
                               const Device& device);
OptionalTensor bring_in(const OptionalTensor& tensor, const std::optional<Placement>& placement);
Tensor hand_out(const Tensor& written, const std::optional<Placement>& placement);

}  // namespace flashmoe::ops
