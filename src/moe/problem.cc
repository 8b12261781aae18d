#include "moe/problem.h"

#include <limits>
#include <string>

#include "core/check.h"
#include "core/text.h"

namespace flashmoe {
namespace {

// Rows are counted in int32, in `routing` and on devices.
constexpr int64_t kMaxRows = std::numeric_limits<int32_t>::max();

Status check_float(const char* name, const TensorSpec& spec) {
  if (is_float(spec.dtype)) return {};
  return invalid(name, " is ", dtype_name(spec.dtype),
                 "; a mixture of experts works in float64, float32, float16 and bfloat16");
}

// `shape` names the dimensions: "(tokens, width)".
Status check_rank(const char* name, const TensorSpec& spec, int rank, const char* shape) {
  if (spec.rank == rank) return {};
  return invalid(name, " has shape ", shape_text(spec), "; it must be ", shape);
}

Status check_sizes(const char* name, const TensorSpec& spec, std::initializer_list<int64_t> sizes) {
  return check_shape(name, spec, {}, 0, sizes);
}

const char* weight_reason(DType dtype) {
  return dtype == DType::kFloat64 ? "for float64 tensors" : "for tensors of any dtype but float64";
}

Status check_x(const MoeProblem& p) {
  FLASHMOE_RETURN_IF_ERROR(check_extent("x", p.x));
  FLASHMOE_RETURN_IF_ERROR(check_float("x", p.x));
  return check_rank("x", p.x, 2, "(tokens, width)");
}

Status check_expert_weights(const MoeProblem& p) {
  const TensorSpec &gate_up = p.gate_up, &down = p.down;
  const int64_t d = p.x.shape[1];
  for (const auto& [name, spec, shape] :
       {std::tuple{"gate_up", &gate_up, "(experts, 2 inner or inner, width)"},
        std::tuple{"down", &down, "(experts, width, inner)"}}) {
    FLASHMOE_RETURN_IF_ERROR(check_extent(name, *spec));
    FLASHMOE_RETURN_IF_ERROR(check_dtype(name, *spec, p.x.dtype, "like x"));
    FLASHMOE_RETURN_IF_ERROR(check_rank(name, *spec, 3, shape));
  }
  if (gate_up.shape[2] != d) {
    return invalid("gate_up has shape ", shape_text(gate_up), "; its last dimension must be ", d,
                   ", the width of x");
  }
  if (down.shape[0] != gate_up.shape[0]) {
    return invalid("down has ", down.shape[0], " experts and gate_up has ", gate_up.shape[0],
                   "; they must have the same number");
  }
  if (down.shape[1] != d) {
    return invalid("down has shape ", shape_text(down), "; its second dimension must be ", d,
                   ", the width of x");
  }
  const int64_t n = down.shape[2], want = has_gate(p.activation) ? 2 * n : n;
  if (gate_up.shape[1] != want) {
    return invalid("gate_up has ", gate_up.shape[1], " rows and down has ", n, " columns; ",
                   activation_name(p.activation), " needs ", want, " rows",
                   has_gate(p.activation) ? ", those of the gate first" : ", there is no gate");
  }
  if (p.up_bias) {
    FLASHMOE_RETURN_IF_ERROR(check_extent("up_bias", *p.up_bias));
    FLASHMOE_RETURN_IF_ERROR(check_dtype("up_bias", *p.up_bias, p.x.dtype, "like x"));
    FLASHMOE_RETURN_IF_ERROR(
        check_sizes("up_bias", *p.up_bias, {gate_up.shape[0], gate_up.shape[1]}));
  }
  if (p.down_bias) {
    FLASHMOE_RETURN_IF_ERROR(check_extent("down_bias", *p.down_bias));
    FLASHMOE_RETURN_IF_ERROR(check_dtype("down_bias", *p.down_bias, p.x.dtype, "like x"));
    FLASHMOE_RETURN_IF_ERROR(check_sizes("down_bias", *p.down_bias, {down.shape[0], d}));
  }
  return {};
}

Status check_routing(const MoeProblem& p) {
  FLASHMOE_RETURN_IF_ERROR(check_extent("ids", p.ids));
  if (!is_int(p.ids.dtype)) {
    return invalid("ids is ", dtype_name(p.ids.dtype), "; it must be int32 or int64");
  }
  FLASHMOE_RETURN_IF_ERROR(check_rank("ids", p.ids, 2, "(tokens, experts a token)"));
  const int64_t tokens = p.x.shape[0], top_k = p.ids.shape[1];
  FLASHMOE_RETURN_IF_ERROR(check_sizes("ids", p.ids, {tokens, top_k}));
  if (tokens > 0 && top_k > kMaxRows / tokens) {
    return invalid("ids has shape ", shape_text(p.ids), "; at most 2^31 - 1 pairs of a token and ",
                   "an expert can be counted. Call it for a part of the tokens at a time");
  }
  if (p.weights) {
    FLASHMOE_RETURN_IF_ERROR(check_extent("weights", *p.weights));
    FLASHMOE_RETURN_IF_ERROR(
        check_dtype("weights", *p.weights, weight_dtype(p.x.dtype), weight_reason(p.x.dtype)));
    FLASHMOE_RETURN_IF_ERROR(check_sizes("weights", *p.weights, {tokens, top_k}));
  }
  return {};
}

Status check_pass(Pass pass) {
  if (pass == Pass::kForward || pass == Pass::kBackward) return {};
  return unsupported("experts and their router have no forward mode and no second derivatives");
}

// What the forward pass leaves for the backward pass.
Status check_kept(const MoeProblem& p) {
  const bool backward = p.pass == Pass::kBackward;
  if (backward && (!p.pre || !p.routing)) {
    return invalid(p.pre ? "routing" : "pre",
                   " is missing; the backward pass needs the one of the forward pass");
  }
  if (p.pre.has_value() != p.routing.has_value()) {
    return invalid(p.pre ? "pre" : "routing", " is given without ", p.pre ? "routing" : "pre",
                   "; the backward pass needs both");
  }
  if (!p.pre) return {};
  const MoeSizes s = sizes(p);
  FLASHMOE_RETURN_IF_ERROR(check_extent("pre", *p.pre));
  FLASHMOE_RETURN_IF_ERROR(check_dtype("pre", *p.pre, p.x.dtype, "like x"));
  FLASHMOE_RETURN_IF_ERROR(check_sizes("pre", *p.pre, {s.rows, s.gates, s.inner}));
  const TensorSpec want = contiguous(DType::kInt32, {routing_elems(s.tokens, s.top_k, s.experts)});
  FLASHMOE_RETURN_IF_ERROR(check_extent("routing", *p.routing));
  FLASHMOE_RETURN_IF_ERROR(check_dtype("routing", *p.routing, want.dtype, "always"));
  FLASHMOE_RETURN_IF_ERROR(check_shape("routing", *p.routing, want, want.rank, {}));
  if (want.shape[0] > 1 && p.routing->stride[0] != 1) {
    return invalid("routing has stride ", p.routing->stride[0], "; it must be contiguous");
  }
  return backward ? Status() : check_writable("pre", *p.pre);
}

}  // namespace

Status check(const MoeProblem& p) {
  FLASHMOE_RETURN_IF_ERROR(check_pass(p.pass));
  FLASHMOE_RETURN_IF_ERROR(check_x(p));
  FLASHMOE_RETURN_IF_ERROR(check_expert_weights(p));
  FLASHMOE_RETURN_IF_ERROR(check_routing(p));
  FLASHMOE_RETURN_IF_ERROR(check_kept(p));
  if (p.pass == Pass::kForward) {
    FLASHMOE_RETURN_IF_ERROR(check_extent("out", p.out));
    FLASHMOE_RETURN_IF_ERROR(check_dtype("out", p.out, p.x.dtype, "like x"));
    FLASHMOE_RETURN_IF_ERROR(check_shape("out", p.out, p.x, p.x.rank, {}));
    return check_writable("out", p.out);
  }
  return check_gradients({
      {"grad_out", &p.grad_out, &p.x, false},
      {"grad_x", &p.grad_x, &p.x},
      {"grad_gate_up", &p.grad_gate_up, &p.gate_up},
      {"grad_down", &p.grad_down, &p.down},
      {"grad_up_bias", &p.grad_up_bias, if_any(p.up_bias)},
      {"grad_down_bias", &p.grad_down_bias, if_any(p.down_bias)},
      {"grad_weights", &p.grad_weights, if_any(p.weights)},
  });
}

Status check(const RouteProblem& p) {
  FLASHMOE_RETURN_IF_ERROR(check_pass(p.pass));
  FLASHMOE_RETURN_IF_ERROR(check_extent("logits", p.logits));
  FLASHMOE_RETURN_IF_ERROR(check_float("logits", p.logits));
  FLASHMOE_RETURN_IF_ERROR(check_rank("logits", p.logits, 2, "(tokens, experts)"));
  const int64_t tokens = p.logits.shape[0], experts = p.logits.shape[1];
  const DType dtype = weight_dtype(p.logits.dtype);
  const char* why = weight_reason(p.logits.dtype);
  if (p.bias) {
    FLASHMOE_RETURN_IF_ERROR(check_extent("bias", *p.bias));
    FLASHMOE_RETURN_IF_ERROR(check_dtype("bias", *p.bias, dtype, why));
    FLASHMOE_RETURN_IF_ERROR(check_sizes("bias", *p.bias, {experts}));
  }
  FLASHMOE_RETURN_IF_ERROR(check_extent("ids", p.ids));
  FLASHMOE_RETURN_IF_ERROR(check_dtype("ids", p.ids, DType::kInt32, "always"));
  FLASHMOE_RETURN_IF_ERROR(check_rank("ids", p.ids, 2, "(tokens, experts a token)"));
  const int64_t top_k = p.ids.shape[1];
  FLASHMOE_RETURN_IF_ERROR(check_sizes("ids", p.ids, {tokens, top_k}));
  if (top_k > experts) {
    return invalid("k is ", top_k, "; logits has ", experts, " experts to choose from");
  }
  if (experts > kMaxRows) {
    return invalid("logits has ", experts, " experts; ids counts up to 2^31 - 1");
  }
  if (p.pass == Pass::kForward) {
    FLASHMOE_RETURN_IF_ERROR(check_extent("weights", p.weights));
    FLASHMOE_RETURN_IF_ERROR(check_dtype("weights", p.weights, dtype, why));
    FLASHMOE_RETURN_IF_ERROR(check_sizes("weights", p.weights, {tokens, top_k}));
    FLASHMOE_RETURN_IF_ERROR(check_writable("ids", p.ids));
    return check_writable("weights", p.weights);
  }
  const TensorSpec weights = contiguous(dtype, {tokens, top_k});
  return check_gradients({{"grad_weights", &p.grad_weights, &weights, false},
                          {"grad_logits", &p.grad_logits, &p.logits}});
}

MoeSizes sizes(const MoeProblem& p) {
  MoeSizes s;
  s.tokens = p.x.shape[0];
  s.width = p.x.shape[1];
  s.top_k = p.ids.shape[1];
  s.experts = p.down.shape[0];
  s.inner = p.down.shape[2];
  s.gates = has_gate(p.activation) ? 2 : 1;
  s.rows = s.tokens * s.top_k;
  return s;
}

}  // namespace flashmoe
