// Attention as a node of torch's own graph, in C++: a node in Python costs a quarter of the host
// time of a small call's forward and backward pass.
//
// The stable ABI has no autograd, so no extension can write such a node. But ATen has one whose
// kernels are left to others: `_scaled_dot_product_fused_attention_overrideable` records what its
// backward op needs, and neither has a kernel for the CPU or CUDA of its own. These are ours. They
// take what the plainest calls have: a bias, a causal mask (with our alignment) and a scale.
//
// The backward op's derivative is ours as well: where someone may differentiate again, it is the op
// attention_gradients, whose autograd is in Python.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>

#include <array>
#include <optional>
#include <tuple>
#include <vector>

#include "attention_passes.h"
#include "boxed.h"
#include "error.h"

namespace flashmoe::ops {
namespace {

using torch::stable::detail::from;
using torch::stable::detail::to;

AttentionOptions plain_options(bool causal, std::optional<double> scale) {
  return {.causal = causal,
          .window_left = -1,
          .window_right = -1,
          .scale = scale,
          .softcap = 0,
          .deterministic = false,
          .allow_tf32 = false,
          .dropout_p = 0};
}

// In the order of ATen's schema.
struct NodeArguments {
  Tensor query, key, value;
  OptionalTensor bias;
  double dropout_p;
  bool causal, return_debug_mask;
  std::optional<double> scale;

  static NodeArguments read(ArgumentReader& in) {
    return {.query = in.next<Tensor>(),
            .key = in.next<Tensor>(),
            .value = in.next<Tensor>(),
            .bias = in.next<OptionalTensor>(),
            .dropout_p = in.next<double>(),
            .causal = in.next<bool>(),
            .return_debug_mask = in.next<bool>(),
            .scale = in.next<std::optional<double>>()};
  }
};

// out, lse, and seven results that have no meaning here: lengths, and what dropout draws.
using NodeResults =
    std::tuple<Tensor, Tensor, Tensor, Tensor, int64_t, int64_t, Tensor, Tensor, Tensor>;

NodeResults node_forward(const NodeArguments& a) {
  if (a.dropout_p != 0 || a.return_debug_mask) {
    fail("flashmoe_science's node of attention has no dropout; call flash_attention()");
  }
  const auto [out, lse] = forward({.query = a.query,
                                   .key = a.key,
                                   .value = a.value,
                                   .bias = a.bias,
                                   .max_seqlen_q = 0,
                                   .max_seqlen_k = 0,
                                   .options = plain_options(a.causal, a.scale)});
  return {out, lse, Tensor(), Tensor(), 0, 0, Tensor(), Tensor(), Tensor()};
}

struct NodeBackwardArguments {
  Tensor grad_out, query, key, value, bias;  // the bias undefined where there is none
  std::vector<bool> needs;                   // query, key, value, bias
  Tensor out, lse, cu_seqlens_q, cu_seqlens_k;
  int64_t max_seqlen_q, max_seqlen_k;
  double dropout_p;
  bool causal;
  Tensor seed, offset;
  std::optional<double> scale;

  static NodeBackwardArguments read(ArgumentReader& in) {
    return {.grad_out = in.next<Tensor>(),
            .query = in.next<Tensor>(),
            .key = in.next<Tensor>(),
            .value = in.next<Tensor>(),
            .bias = in.next<Tensor>(),
            .needs = in.next<std::vector<bool>>(),
            .out = in.next<Tensor>(),
            .lse = in.next<Tensor>(),
            .cu_seqlens_q = in.next<Tensor>(),
            .cu_seqlens_k = in.next<Tensor>(),
            .max_seqlen_q = in.next<int64_t>(),
            .max_seqlen_k = in.next<int64_t>(),
            .dropout_p = in.next<double>(),
            .causal = in.next<bool>(),
            .seed = in.next<Tensor>(),
            .offset = in.next<Tensor>(),
            .scale = in.next<std::optional<double>>()};
  }
};

// Whether forward mode asks how a result moves along with the tensor.
bool has_tangent(const Tensor& tensor) {
  std::array<StableIValue, 2> stack{from(tensor), from(int64_t{0})};
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::_unpack_dual", "", stack.data(), TORCH_ABI_VERSION));
  const Tensor primal = to<Tensor>(stack[0]), tangent = to<Tensor>(stack[1]);
  return tangent.defined();
}

// What a plain call tells its backward pass, in the order of the op attention_backward_plain.
struct PlainBackwardArguments {
  Tensor grad_out, query, key, value;
  OptionalTensor bias{};
  Tensor out, lse;
  bool causal;
  std::optional<double> scale;
  bool needs_query, needs_key, needs_value, needs_bias;

  static PlainBackwardArguments read(ArgumentReader& in) {
    return {.grad_out = in.next<Tensor>(),
            .query = in.next<Tensor>(),
            .key = in.next<Tensor>(),
            .value = in.next<Tensor>(),
            .bias = in.next<OptionalTensor>(),
            .out = in.next<Tensor>(),
            .lse = in.next<Tensor>(),
            .causal = in.next<bool>(),
            .scale = in.next<std::optional<double>>(),
            .needs_query = in.next<bool>(),
            .needs_key = in.next<bool>(),
            .needs_value = in.next<bool>(),
            .needs_bias = in.next<bool>()};
  }

  static PlainBackwardArguments of(const NodeBackwardArguments& n) {
    if (n.needs.size() != 4) fail("the backward pass of attention's node has four gradients");
    return {.grad_out = n.grad_out,
            .query = n.query,
            .key = n.key,
            .value = n.value,
            .bias = n.bias.defined() ? OptionalTensor(n.bias) : std::nullopt,
            .out = n.out,
            .lse = n.lse,
            .causal = n.causal,
            .scale = n.scale,
            .needs_query = n.needs[0],
            .needs_key = n.needs[1],
            .needs_value = n.needs[2],
            .needs_bias = n.needs[3]};
  }

  BackwardArguments whole() const {
    return {.grad_out = grad_out,
            .out = out,
            .lse = lse,
            .forward = {.query = query,
                        .key = key,
                        .value = value,
                        .bias = bias,
                        .max_seqlen_q = 0,
                        .max_seqlen_k = 0,
                        .options = plain_options(causal, scale)},
            .needs_query = needs_query,
            .needs_key = needs_key,
            .needs_value = needs_value,
            .needs_bias = needs_bias,
            .needs_sinks = false};
  }
};

// Of query, key, value and bias.
using PlainGradients = std::tuple<Tensor, Tensor, Tensor, Tensor>;

PlainGradients plain_backward(const PlainBackwardArguments& p) {
  const auto [dq, dk, dv, db, ds] = backward(p.whole());
  return {dq, dk, dv, db};
}

template <size_t N>
PlainGradients dispatch(const char* op, std::array<StableIValue, N>&& stack, size_t results) {
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(op, "", stack.data(), TORCH_ABI_VERSION));
  // Braces: from left to right.
  PlainGradients found{to<Tensor>(stack[0]), to<Tensor>(stack[1]), to<Tensor>(stack[2]),
                       to<Tensor>(stack[3])};
  for (size_t i = std::tuple_size_v<PlainGradients>; i < results; ++i) to<Tensor>(stack[i]);
  return found;
}

// plain_backward() through the dispatcher: so through what has yet to be done to a gradient before
// its numbers are those that memory holds (a lazy negation), and past whoever traces the call. By
// an op of its own: each argument costs the host time, and attention_backward has twice as many.
PlainGradients dispatched_backward(const PlainBackwardArguments& p) {
  return dispatch(
      "flashmoe::attention_backward_plain",
      std::array{from(p.grad_out), from(p.query), from(p.key), from(p.value), from(p.bias),
                 from(p.out), from(p.lse), from(p.causal), from(p.scale), from(p.needs_query),
                 from(p.needs_key), from(p.needs_value), from(p.needs_bias)},
      4);
}

// The op attention_gradients, through the dispatcher and so through its autograd.
PlainGradients differentiable_backward(const PlainBackwardArguments& p) {
  const BackwardArguments b = p.whole();
  const Arguments& a = b.forward;
  return dispatch("flashmoe::attention_gradients",
                  std::array{from(b.grad_out),
                             from(b.grad_lse),
                             from(b.out),
                             from(b.lse),
                             from(a.query),
                             from(a.key),
                             from(a.value),
                             from(a.bias),
                             from(a.sinks),
                             from(a.key_lengths),
                             from(a.cu_seqlens_q),
                             from(a.cu_seqlens_k),
                             from(a.max_seqlen_q),
                             from(a.max_seqlen_k),
                             from(a.options.causal),
                             from(a.options.window_left),
                             from(a.options.window_right),
                             from(a.options.scale),
                             from(a.options.softcap),
                             from(a.options.deterministic),
                             from(a.options.allow_tf32),
                             from(a.options.dropout_p),
                             from(a.seed),
                             from(b.needs_query),
                             from(b.needs_key),
                             from(b.needs_value),
                             from(b.needs_bias),
                             from(b.needs_sinks)},
                  5);
}

// Of the pass from a node's arguments to its gradients: those that were asked for.
PlainGradients gradients_by(const NodeBackwardArguments& n,
                            PlainGradients (*pass)(const PlainBackwardArguments&)) {
  if (!n.grad_out.defined()) return {};  // to autograd all are 0 then
  const auto [dq, dk, dv, db] = pass(PlainBackwardArguments::of(n));
  const auto wanted = [&](int i, const Tensor& x) { return n.needs[i] ? x : Tensor(); };
  return {wanted(0, dq), wanted(1, dk), wanted(2, dv), wanted(3, db)};
}

PlainGradients node_backward(const NodeBackwardArguments& n) {
  return gradients_by(n, plain_backward);
}

// What the graph calls. Nothing below autograd has seen the gradient yet that came in.
PlainGradients node_backward_autograd(const NodeBackwardArguments& n) {
  const bool again =
      n.grad_out.defined() && (aoti_torch_grad_mode_is_enabled() || has_tangent(n.grad_out));
  return gradients_by(n, again ? differentiable_backward : dispatched_backward);
}

constexpr const char* kForward = "_scaled_dot_product_fused_attention_overrideable";
constexpr const char* kBackward = "_scaled_dot_product_fused_attention_overrideable_backward";

}  // namespace
}  // namespace flashmoe::ops

#define FLASHMOE_NODE(KEY)                                                                         \
  STABLE_TORCH_LIBRARY_IMPL(flashmoe, KEY, m) {                                                    \
    m.impl("attention_backward_plain", flashmoe::ops::Boxed<flashmoe::ops::plain_backward>::call); \
  }                                                                                                \
  STABLE_TORCH_LIBRARY_IMPL(aten, KEY, m) {                                                        \
    m.impl(flashmoe::ops::kForward, flashmoe::ops::Boxed<flashmoe::ops::node_forward>::call);      \
    m.impl(flashmoe::ops::kBackward, flashmoe::ops::Boxed<flashmoe::ops::node_backward>::call);    \
  }                                                                                                \
  STABLE_TORCH_LIBRARY_IMPL(aten, Autograd##KEY, m) {                                              \
    m.impl(flashmoe::ops::kBackward,                                                               \
           flashmoe::ops::Boxed<flashmoe::ops::node_backward_autograd>::call);                     \
  }

FLASHMOE_NODE(CPU)
FLASHMOE_NODE(CUDA)
