#include "flashmoe/c_api.h"

#include <algorithm>

#include "c_api/border.h"
#include "flashmoe/attention.h"

namespace flashmoe::c_api {
namespace {

struct Attention {
  using Args = flash_attention_args;
  static constexpr const char* kInit = "flash_attention_args_init";
  static Status check(const Args& args);
  static AttentionProblem problem(const Args& a, DType dtype, Pass pass);
  static AttentionTensors tensors(const Args& a);
};

DType bias_dtype_of(const flash_attention_args& a, DType input) {
  if (a.bias_dtype == FLASH_ATTENTION_BIAS_FP32) return DType::kFloat32;
  return a.bias_dtype == FLASH_ATTENTION_BIAS_MASK ? DType::kBool : input;
}

Status Attention::check(const Args& args) {
  if (args.bias_dtype < FLASH_ATTENTION_BIAS_LIKE_INPUT ||
      args.bias_dtype > FLASH_ATTENTION_BIAS_MASK) {
    return invalid("bias_dtype is ", args.bias_dtype,
                   "; it must be FLASH_ATTENTION_BIAS_LIKE_INPUT (0), _BIAS_FP32 (1) or "
                   "_BIAS_MASK (2)");
  }
  const int64_t* bias_end = args.bias_shape + 4;
  if (!args.bias.data && std::find(args.bias_shape, bias_end, 0) == bias_end) {
    return invalid("bias_shape is given, but bias.data is NULL");
  }
  return {};
}

AttentionProblem Attention::problem(const Args& a, DType dtype, Pass pass) {
  const Shape query{a.batch, a.heads_q, a.len_q, a.head_dim};
  const Shape key{a.batch, a.heads_k, a.len_k, a.head_dim};
  const Shape value{a.batch, a.heads_k, a.len_k, a.head_dim_v};
  const Shape out{a.batch, a.heads_q, a.len_q, a.head_dim_v};
  const Shape lse{a.batch, a.heads_q, a.len_q};
  Shape bias{a.batch, a.heads_q, a.len_q, a.len_k};
  if (std::any_of(a.bias_shape, a.bias_shape + 4, [](int64_t n) { return n != 0; })) {
    bias.assign(a.bias_shape, a.bias_shape + 4);
  }
  const DType bias_dtype = bias_dtype_of(a, dtype);

  AttentionProblem p;
  p.pass = pass;
  p.query = spec_of(a.query, dtype, query);
  p.key = spec_of(a.key, dtype, key);
  p.value = spec_of(a.value, dtype, value);
  p.bias = optional_spec(a.bias, bias_dtype, bias);
  if (a.key_lengths) p.key_lengths = contiguous(DType::kInt32, {a.batch});
  p.sinks = optional_spec(a.sinks, DType::kFloat32, {a.heads_q});
  if (a.seed) p.seed = contiguous(DType::kInt64, {});
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
    p.grad_sinks = optional_spec(a.grad_sinks, DType::kFloat32, {a.heads_q});
  }
  p.options = {.causal = a.causal != 0,
               .window_left = a.window_left,
               .window_right = a.window_right,
               .scale = a.has_scale ? std::optional(a.scale) : std::nullopt,
               .softcap = a.softcap,
               .deterministic = a.deterministic != 0,
               .dropout_p = a.dropout_p};
  return p;
}

AttentionTensors Attention::tensors(const Args& a) {
  AttentionTensors t;
  t.query = a.query.data;
  t.key = a.key.data;
  t.value = a.value.data;
  t.bias = a.bias.data;
  t.key_lengths = a.key_lengths;
  t.sinks = a.sinks.data;
  t.seed = a.seed;
  t.out = a.out.data;
  t.lse = a.lse.data;
  t.grad_out = a.grad_out.data;
  t.grad_lse = a.grad_lse.data;
  t.grad_query = a.grad_query.data;
  t.grad_key = a.grad_key.data;
  t.grad_value = a.grad_value.data;
  t.grad_bias = a.grad_bias.data;
  t.grad_sinks = a.grad_sinks.data;
  return t;
}

}  // namespace
}  // namespace flashmoe::c_api

using flashmoe::DType;
using flashmoe::Pass;
namespace c_api = flashmoe::c_api;

int flash_attention_args_init(flash_attention_args* args, size_t struct_size) {
  return c_api::init_args(args, struct_size, c_api::Attention::kInit);
}

int flash_attention_forward_fp16(const flash_attention_args* args) {
  return c_api::call<c_api::Attention>(args, DType::kFloat16, Pass::kForward);
}

int flash_attention_forward_bf16(const flash_attention_args* args) {
  return c_api::call<c_api::Attention>(args, DType::kBFloat16, Pass::kForward);
}

int flash_attention_backward_fp16(const flash_attention_args* args) {
  return c_api::call<c_api::Attention>(args, DType::kFloat16, Pass::kBackward);
}

int flash_attention_backward_bf16(const flash_attention_args* args) {
  return c_api::call<c_api::Attention>(args, DType::kBFloat16, Pass::kBackward);
}

int flash_attention_workspace_bytes(const flash_attention_args* args, int dtype, int pass,
                                    uint64_t* bytes) {
  return c_api::workspace_bytes<c_api::Attention>(args, dtype, pass, bytes);
}

const char* flash_attention_last_error(void) { return c_api::last_error().c_str(); }

const char* flash_attention_version(void) { return flashmoe::version(); }
