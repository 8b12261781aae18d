// What would run, and why. Only shapes matter, so meta tensors do.
#include <torch/csrc/stable/ops.h>

#include <string>
#include <tuple>
#include <utility>

#include "call.h"
#include "error.h"

namespace flashmoe::ops {
namespace {

// `name` "" is the tensors' own device; "cpu" and "sm_90" ask for another machine.
Device device_named(const std::string& name, const Tensor& query) {
  Device device;
  device.num_threads = static_cast<int>(torch::stable::get_num_threads());
  if (name == "cpu") return device;
  if (name.rfind("sm_", 0) == 0 && name.size() >= 5 &&
      name.find_first_not_of("0123456789", 3) == std::string::npos) {
    device.type = DeviceType::kCuda;
    device.compute_capability = std::stoi(name.substr(3, 4));
    return device;
  }
  if (!name.empty()) fail("device is '" + name + "'; it must be 'cpu' or a chip like 'sm_90'");
  return device_of(query);
}

using NamedPlacement = std::pair<const char*, const Placement*>;

std::string names_of_moved(std::initializer_list<NamedPlacement> placements) {
  std::string names;
  for (const auto& [name, placement] : placements) {
    if (placement->moved) names += (names.empty() ? "" : ", ") + std::string(name);
  }
  return names;
}

std::string copies_text(const std::string& in, const std::string& out) {
  std::string text;
  if (!in.empty()) text = in + " once, before the kernel";
  if (!out.empty()) text += (in.empty() ? "" : "; ") + out + " once, after it";
  return "  copies     " + (text.empty() ? "none" : text) + "\n";
}

std::string explain_forward(const Arguments& a, const Device& device) {
  const ForwardCall call = forward_call(a, device);
  raise_if_error(plan(call.problem).status());
  return explain(call.problem) +
         copies_text(
             names_of_moved({{"query", &call.query}, {"key", &call.key}, {"value", &call.value}}),
             names_of_moved({{"out", &call.out}}));
}

// All gradients, of a loss of `out` alone; out and its gradient as the forward pass lays out.
std::string explain_backward(const Arguments& a, const Device& device) {
  const ForwardCall forward = forward_call(a, device);
  raise_if_error(plan(forward.problem).status());
  const Placement out = place(forward.out.outside, device);
  const BackwardCall call = backward_call(a,
                                          {.out = out,
                                           .lse = *forward.problem.lse,
                                           .grad_out = out,
                                           .grad_lse = std::nullopt,
                                           .needs_query = true,
                                           .needs_key = true,
                                           .needs_value = true,
                                           .needs_bias = true},
                                          device);
  raise_if_error(plan(call.problem).status());
  return explain(call.problem) + copies_text(names_of_moved({{"query", &call.query},
                                                             {"key", &call.key},
                                                             {"value", &call.value},
                                                             {"out", &call.out},
                                                             {"grad_out", &*call.grad_out}}),
                                             names_of_moved({{"grad_query", &*call.grad_query},
                                                             {"grad_key", &*call.grad_key},
                                                             {"grad_value", &*call.grad_value}}));
}

std::tuple<std::string> explain_attention(const ExplainArguments& a) {
  const Device device = device_named(a.device, a.call.query);
  return a.backward ? explain_backward(a.call, device) : explain_forward(a.call, device);
}

}  // namespace
}  // namespace flashmoe::ops

STABLE_TORCH_LIBRARY_IMPL(flashmoe, CompositeExplicitAutograd, m) {
  m.impl("explain", flashmoe::ops::Boxed<flashmoe::ops::explain_attention>::call);
}
