#include "c_api/border.h"
#include "flashmoe/moe.h"

namespace flashmoe::c_api {
namespace {

struct Moe {
  using Args = flash_moe_args;
  static constexpr const char* kInit = "flash_moe_args_init";
  static Status check(const Args& args);
  static MoeProblem problem(const Args& a, DType dtype, Pass pass);
  static MoeTensors tensors(const Args& a);
};

Status Moe::check(const Args& args) {
  if (args.activation < FLASH_MOE_SWIGLU || args.activation > FLASH_MOE_RELU) {
    return invalid("activation is ", args.activation,
                   "; it must be from FLASH_MOE_SWIGLU (0) to FLASH_MOE_RELU (5)");
  }
  if (args.ids_dtype != FLASH_MOE_IDS_INT32 && args.ids_dtype != FLASH_MOE_IDS_INT64) {
    return invalid("ids_dtype is ", args.ids_dtype,
                   "; it must be FLASH_MOE_IDS_INT32 (0) or FLASH_MOE_IDS_INT64 (1)");
  }
  return {};
}

MoeProblem Moe::problem(const Args& a, DType dtype, Pass pass) {
  MoeProblem p;
  p.pass = pass;
  p.activation = static_cast<Activation>(a.activation);
  // Sizes are checked as those of tensors are: where these overflow, plan() says so.
  const int64_t gates = has_gate(p.activation) ? 2 : 1;
  int64_t up_rows = 0, rows = 0;
  if (__builtin_mul_overflow(gates, a.inner, &up_rows)) up_rows = a.inner;
  if (__builtin_mul_overflow(a.tokens, a.top_k, &rows)) rows = a.tokens;
  const Shape tokens{a.tokens, a.width}, pairs{a.tokens, a.top_k};
  const Shape up{a.experts, up_rows, a.width}, down{a.experts, a.width, a.inner};
  const Shape up_bias{a.experts, up_rows}, down_bias{a.experts, a.width};
  p.x = spec_of(a.x, dtype, tokens);
  p.gate_up = spec_of(a.gate_up, dtype, up);
  p.down = spec_of(a.down, dtype, down);
  p.up_bias = optional_spec(a.up_bias, dtype, up_bias);
  p.down_bias = optional_spec(a.down_bias, dtype, down_bias);
  p.ids = spec_of(a.ids, a.ids_dtype == FLASH_MOE_IDS_INT64 ? DType::kInt64 : DType::kInt32, pairs);
  p.weights = optional_spec(a.weights, DType::kFloat32, pairs);
  p.out = spec_of(a.out, dtype, tokens);
  // Without pairs, what is kept of them needs no memory.
  if (a.pre.data || (a.routing && rows == 0)) p.pre = spec_of(a.pre, dtype, {rows, gates, a.inner});
  if (a.routing) {
    int64_t elems = 0;
    if (__builtin_add_overflow(a.experts, rows, &elems)) elems = 0;
    p.routing = contiguous(DType::kInt32, {elems < INT64_MAX ? elems + 1 : elems});
  }
  if (pass == Pass::kForward) return p;
  p.grad_out = optional_spec(a.grad_out, dtype, tokens);
  p.grad_x = optional_spec(a.grad_x, dtype, tokens);
  p.grad_gate_up = optional_spec(a.grad_gate_up, dtype, up);
  p.grad_down = optional_spec(a.grad_down, dtype, down);
  p.grad_up_bias = optional_spec(a.grad_up_bias, dtype, up_bias);
  p.grad_down_bias = optional_spec(a.grad_down_bias, dtype, down_bias);
  p.grad_weights = optional_spec(a.grad_weights, DType::kFloat32, pairs);
  return p;
}

MoeTensors Moe::tensors(const Args& a) {
  MoeTensors t;
  t.x = a.x.data;
  t.gate_up = a.gate_up.data;
  t.down = a.down.data;
  t.up_bias = a.up_bias.data;
  t.down_bias = a.down_bias.data;
  t.ids = a.ids.data;
  t.weights = a.weights.data;
  t.out = a.out.data;
  t.pre = a.pre.data;
  t.routing = a.routing;
  t.grad_out = a.grad_out.data;
  t.grad_x = a.grad_x.data;
  t.grad_gate_up = a.grad_gate_up.data;
  t.grad_down = a.grad_down.data;
  t.grad_up_bias = a.grad_up_bias.data;
  t.grad_down_bias = a.grad_down_bias.data;
  t.grad_weights = a.grad_weights.data;
  return t;
}

}  // namespace
}  // namespace flashmoe::c_api

using flashmoe::DType;
using flashmoe::Pass;
namespace c_api = flashmoe::c_api;

int flash_moe_args_init(flash_moe_args* args, size_t struct_size) {
  return c_api::init_args(args, struct_size, c_api::Moe::kInit);
}

int flash_moe_forward_fp16(const flash_moe_args* args) {
  return c_api::call<c_api::Moe>(args, DType::kFloat16, Pass::kForward);
}

int flash_moe_forward_bf16(const flash_moe_args* args) {
  return c_api::call<c_api::Moe>(args, DType::kBFloat16, Pass::kForward);
}

int flash_moe_backward_fp16(const flash_moe_args* args) {
  return c_api::call<c_api::Moe>(args, DType::kFloat16, Pass::kBackward);
}

int flash_moe_backward_bf16(const flash_moe_args* args) {
  return c_api::call<c_api::Moe>(args, DType::kBFloat16, Pass::kBackward);
}

int flash_moe_workspace_bytes(const flash_moe_args* args, int dtype, int pass, uint64_t* bytes) {
  return c_api::workspace_bytes<c_api::Moe>(args, dtype, pass, bytes);
}

const char* flash_moe_last_error(void) { return c_api::last_error().c_str(); }
