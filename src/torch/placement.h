// Where kernels find a tensor: as it lies, or in a copy whose rows they can address.
#pragma once

#include <initializer_list>
#include <string>
#include <utility>

#include "convert.h"

namespace flashmoe::ops {

// Whether an operator's kernels want such a tensor copied first: needs_copy of attention.h.
using NeedsCopy = bool (*)(const TensorSpec&, const Device&);

struct Placement {
  TensorSpec outside;  // as torch has it
  TensorSpec inside;   // as the kernels see it
  bool moved = false;  // by one copy, before the kernels read it or after they have written it
};

// A tensor that is there already, which also may begin at an address that kernels cannot use.
Placement place(const char* name, const Tensor& tensor, const Device& device, NeedsCopy needs);

// A tensor that will be allocated to lie like that.
Placement place(const TensorSpec& outside, const Device& device, NeedsCopy needs);

// The tensor that kernels read: itself, or its copy.
Tensor bring_in(const Tensor& tensor, const Placement& placement);

// The tensor that torch gets: what the kernels wrote, or a copy of it where torch wants it.
Tensor hand_out(const Tensor& written, const Placement& placement);

// The same for a result that has its place already: the tensor that kernels write, itself or room
// for it; and what they wrote taken to it.
Tensor room_for(const Tensor& tensor, const Placement& placement);
void take_back(const Tensor& written, Tensor tensor, const Placement& placement);

// The tensor, or a packed copy where it begins at an address that kernels cannot use: for a bias,
// which may lie in any way else, and a mask anywhere.
OptionalTensor start_aligned(const OptionalTensor& tensor);

// The same for what a call may not have.
std::optional<Placement> place(const char* name, const OptionalTensor& tensor, const Device& device,
                               NeedsCopy needs);
OptionalTensor bring_in(const OptionalTensor& tensor, const std::optional<Placement>& placement);
Tensor hand_out(const Tensor& written, const std::optional<Placement>& placement);
std::optional<TensorSpec> inside(const std::optional<Placement>& placement);

// A line for explain(): which tensors are copied on their way in and out. Null: not in the call.
using NamedPlacement = std::pair<const char*, const Placement*>;
std::string copies_text(std::initializer_list<NamedPlacement> in,
                        std::initializer_list<NamedPlacement> out);
inline const Placement* pointer_to(const std::optional<Placement>& placement) {
  return placement ? &*placement : nullptr;
}

}  // namespace flashmoe::ops
