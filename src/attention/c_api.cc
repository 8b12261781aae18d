#include "flashmoe/c_api.h"

#include <algorithm>
#include <cstring>

#include "c_api/border.h"
#include "flashmoe/attention.h"

namespace flashmoe::c_api {
namespace {

Status check_size(uint64_t struct_size) {
  return check_struct_size(struct_size, sizeof(flash_attention_args), "flash_attention_args_init");
}

AttentionProblem problem_of(const flash_attention_args& a, DType dtype, Pass pass) {
  const Shape query{a.batch, a.heads_q, a.len_q, a.head_dim};
  const Shape key{a.batch, a.heads_k, a.len_k, a.head_dim};
  const Shape value{a.batch, a.heads_k, a.len_k, a.head_dim_v};
  const Shape out{a.batch, a.heads_q, a.len_q, a.head_dim_v};
  const Shape lse{a.batch, a.heads_q, a.len_q};
  Shape bias{a.batch, a.heads_q, a.len_q, a.len_k};
  if (std::any_of(a.bias_shape, a.bias_shape + 4, [](int64_t n) { return n != 0; })) {
    bias.assign(a.bias_shape, a.bias_shape + 4);
  }
  const DType bias_dtype = a.bias_dtype == FLASH_ATTENTION_BIAS_FP32 ? DType::kFloat32 : dtype;

  AttentionProblem p;
  p.pass = pass;
  p.query = spec_of(a.query, dtype, query);
  p.key = spec_of(a.key, dtype, key);
  p.value = spec_of(a.value, dtype, value);
  p.bias = optional_spec(a.bias, bias_dtype, bias);
  if (a.key_lengths) p.key_lengths = contiguous(DType::kInt32, {a.batch});
  p.out = spec_of(a.out, dtype, out);
  p.lse = optional_spec(a.lse, DType::kFloat32, lse);
  if (a.batch == 0 || a.len_q == 0)
    p.lse = spec_of(a.lse, DType::kFloat32, lse);  // needs no memory
  if (pass == Pass::kBackward) {
    p.grad_out = optional_spec(a.grad_out, dtype, out);
    p.grad_lse = optional_spec(a.grad_lse, DType::kFloat32, lse);
    p.grad_query = optional_spec(a.grad_query, dtype, query);
    p.grad_key = optional_spec(a.grad_key, dtype, key);
    p.grad_value = optional_spec(a.grad_value, dtype, value);
    p.grad_bias = optional_spec(a.grad_bias, bias_dtype, bias);
  }
  p.options = {.causal = a.causal != 0,
               .window_left = a.window_left,
               .window_right = a.window_right,
               .scale = a.has_scale ? std::optional(a.scale) : std::nullopt,
               .softcap = a.softcap,
               .deterministic = a.deterministic != 0};
  return p;
}

AttentionTensors tensors_of(const flash_attention_args& a) {
  AttentionTensors t;
  t.query = a.query.data;
  t.key = a.key.data;
  t.value = a.value.data;
  t.bias = a.bias.data;
  t.key_lengths = a.key_lengths;
  t.out = a.out.data;
  t.lse = a.lse.data;
  t.grad_out = a.grad_out.data;
  t.grad_lse = a.grad_lse.data;
  t.grad_query = a.grad_query.data;
  t.grad_key = a.grad_key.data;
  t.grad_value = a.grad_value.data;
  t.grad_bias = a.grad_bias.data;
  return t;
}

// What plan() cannot see: values that C lets through and AttentionProblem cannot hold.
Result<AttentionPlan> plan_of(const flash_attention_args* args, DType dtype, Pass pass) {
  if (!args) return invalid("args is NULL");
  if (Status status = check_size(args->struct_size); !status.ok()) return status;
  if (args->bias_dtype != FLASH_ATTENTION_BIAS_LIKE_INPUT &&
      args->bias_dtype != FLASH_ATTENTION_BIAS_FP32) {
    return invalid("bias_dtype is ", args->bias_dtype,
                   "; it must be FLASH_ATTENTION_BIAS_LIKE_INPUT (0) or _BIAS_FP32 (1)");
  }
  const int64_t* bias_end = args->bias_shape + 4;
  if (!args->bias.data && std::find(args->bias_shape, bias_end, 0) == bias_end) {
    return invalid("bias_shape is given, but bias.data is NULL");
  }
  const Result<Device> device = device_of(args->device);
  if (!device.ok()) return device.status();
  AttentionProblem problem = problem_of(*args, dtype, pass);
  problem.device = device.value();
  return plan(problem);
}

int call(const flash_attention_args* args, DType dtype, Pass pass) noexcept {
  return guarded([&]() -> Status {
    const Result<AttentionPlan> plan = plan_of(args, dtype, pass);
    if (!plan.ok()) return plan.status();
    return run_with_workspace(plan.value(), tensors_of(*args), *args);
  });
}

}  // namespace
}  // namespace flashmoe::c_api

using flashmoe::DType;
using flashmoe::Pass;
namespace c_api = flashmoe::c_api;

int flash_attention_args_init(flash_attention_args* args, size_t struct_size) {
  return c_api::guarded([&]() -> flashmoe::Status {
    if (!args) return flashmoe::invalid("args is NULL");
    if (flashmoe::Status s = c_api::check_size(struct_size); !s.ok()) return s;
    std::memset(args, 0, sizeof *args);
    args->struct_size = struct_size;
    args->window_left = args->window_right = -1;
    args->device = FLASH_ATTENTION_HOST;
    return {};
  });
}

int flash_attention_forward_fp16(const flash_attention_args* args) {
  return c_api::call(args, DType::kFloat16, Pass::kForward);
}

int flash_attention_forward_bf16(const flash_attention_args* args) {
  return c_api::call(args, DType::kBFloat16, Pass::kForward);
}

int flash_attention_backward_fp16(const flash_attention_args* args) {
  return c_api::call(args, DType::kFloat16, Pass::kBackward);
}

int flash_attention_backward_bf16(const flash_attention_args* args) {
  return c_api::call(args, DType::kBFloat16, Pass::kBackward);
}

int flash_attention_workspace_bytes(const flash_attention_args* args, int dtype, int pass,
                                    uint64_t* bytes) {
  return c_api::workspace_bytes(dtype, pass, bytes,
                                [&](DType d, Pass p) { return c_api::plan_of(args, d, p); });
}

const char* flash_attention_last_error(void) { return c_api::last_error().c_str(); }

const char* flash_attention_version(void) { return flashmoe::version(); }
