// The C functions of caches: attention over their pages, and writing to them.
#include <cstring>

#include "c_api/border.h"
#include "flashmoe/attention.h"
#include "flashmoe/cache.h"

namespace flashmoe::c_api {
namespace {

DType int_dtype_of(int32_t dtype) {
  return dtype == FLASH_ATTENTION_INT64 ? DType::kInt64 : DType::kInt32;
}

DType cache_dtype_of(int32_t dtype, DType input) {
  return dtype == FLASH_ATTENTION_CACHE_E4M3 ? DType::kFloat8E4M3 : input;
}

std::optional<TensorSpec> scale_spec(const float* data, int32_t per_head, int64_t heads) {
  if (!data) return std::nullopt;
  return per_head ? contiguous(DType::kFloat32, {heads}) : contiguous(DType::kFloat32, {});
}

// Values that C lets through and a problem cannot hold.
template <class Args>
Status check_dtypes(const Args& args) {
  if (args.cache_dtype != FLASH_ATTENTION_CACHE_LIKE_INPUT &&
      args.cache_dtype != FLASH_ATTENTION_CACHE_E4M3) {
    return invalid("cache_dtype is ", args.cache_dtype,
                   "; it must be FLASH_ATTENTION_CACHE_LIKE_INPUT (0) or _CACHE_E4M3 (1)");
  }
  if (args.int_dtype != FLASH_ATTENTION_INT32 && args.int_dtype != FLASH_ATTENTION_INT64) {
    return invalid("int_dtype is ", args.int_dtype,
                   "; it must be FLASH_ATTENTION_INT32 (0) or FLASH_ATTENTION_INT64 (1)");
  }
  return {};
}

template <class Args>
Status check_args(const Args* args, const char* init) {
  if (!args) return invalid("args is NULL");
  if (Status s = check_struct_size(args->struct_size, sizeof(Args), init); !s.ok()) return s;
  return check_dtypes(*args);
}

template <class Args>
int init_args(Args* args, size_t struct_size, const char* init) noexcept {
  return guarded([&]() -> Status {
    if (!args) return invalid("args is NULL");
    if (Status s = check_struct_size(struct_size, sizeof(Args), init); !s.ok()) return s;
    std::memset(args, 0, sizeof *args);
    args->struct_size = struct_size;
    args->device = FLASH_ATTENTION_HOST;
    return {};
  });
}

AttentionProblem problem_of(const flash_attention_paged_args& a, DType dtype) {
  const DType ints = int_dtype_of(a.int_dtype), cache = cache_dtype_of(a.cache_dtype, dtype);
  const Shape out{a.tokens, a.heads_q, a.head_dim_v}, lse{a.tokens, a.heads_q};
  int64_t starts = 0;
  if (__builtin_add_overflow(a.sequences, 1, &starts)) starts = a.sequences;
  AttentionProblem p;
  p.query = spec_of(a.query, dtype, {a.tokens, a.heads_q, a.head_dim});
  p.key = spec_of(a.k_cache, cache, {a.blocks, a.page, a.heads_k, a.head_dim});
  p.value = spec_of(a.v_cache, cache, {a.blocks, a.page, a.heads_k, a.head_dim_v});
  p.paged = Paged{.block_table = spec_of(a.block_table, ints, {a.sequences, a.blocks_of_sequence}),
                  .seq_lens = spec_of(a.seq_lens, ints, {a.sequences}),
                  .cu_seqlens_q = optional_spec(a.cu_seqlens_q, ints, {starts}),
                  .max_seqlen_q = a.max_seqlen_q,
                  .max_seqlen_k = a.max_seqlen_k,
                  .k_scale = scale_spec(a.k_scale, a.k_scale_per_head, a.heads_k),
                  .v_scale = scale_spec(a.v_scale, a.v_scale_per_head, a.heads_k)};
  p.sinks = optional_spec(a.sinks, DType::kFloat32, {a.heads_q});
  p.out = spec_of(a.out, dtype, out);
  p.lse = optional_spec(a.lse, DType::kFloat32, lse);
  p.options = {.causal = a.causal != 0,
               .window_left = a.window_left,
               .window_right = a.window_right,
               .scale = a.has_scale ? std::optional(a.scale) : std::nullopt,
               .softcap = a.softcap};
  return p;
}

AttentionTensors tensors_of(const flash_attention_paged_args& a) {
  AttentionTensors t;
  t.query = a.query.data;
  t.key = a.k_cache.data;
  t.value = a.v_cache.data;
  t.block_table = a.block_table.data;
  t.seq_lens = a.seq_lens.data;
  t.cu_seqlens_q = a.cu_seqlens_q.data;
  t.sinks = a.sinks.data;
  t.k_scale = a.k_scale;
  t.v_scale = a.v_scale;
  t.out = a.out.data;
  t.lse = a.lse.data;
  return t;
}

Result<AttentionPlan> plan_of(const flash_attention_paged_args* args, DType dtype) {
  if (Status s = check_args(args, "flash_attention_paged_args_init"); !s.ok()) return s;
  const Result<Device> device = device_of(args->device);
  if (!device.ok()) return device.status();
  AttentionProblem problem = problem_of(*args, dtype);
  problem.device = device.value();
  return plan(problem);
}

int call(const flash_attention_paged_args* args, DType dtype) noexcept {
  return guarded([&]() -> Status {
    const Result<AttentionPlan> plan = plan_of(args, dtype);
    if (!plan.ok()) return plan.status();
    return run_with_workspace(plan.value(), tensors_of(*args), *args);
  });
}

AppendProblem problem_of(const flash_kv_cache_append_args& a, DType dtype) {
  const DType cache = cache_dtype_of(a.cache_dtype, dtype);
  AppendProblem p;
  p.key = spec_of(a.key, dtype, {a.tokens, a.heads, a.head_dim});
  p.value = spec_of(a.value, dtype, {a.tokens, a.heads, a.head_dim_v});
  p.key_cache = spec_of(a.k_cache, cache, {a.blocks, a.page, a.heads, a.head_dim});
  p.value_cache = spec_of(a.v_cache, cache, {a.blocks, a.page, a.heads, a.head_dim_v});
  p.slots = spec_of(a.slot_mapping, int_dtype_of(a.int_dtype), {a.tokens});
  p.k_scale = scale_spec(a.k_scale, a.k_scale_per_head, a.heads);
  p.v_scale = scale_spec(a.v_scale, a.v_scale_per_head, a.heads);
  return p;
}

int call(const flash_kv_cache_append_args* args, DType dtype) noexcept {
  return guarded([&]() -> Status {
    if (Status s = check_args(args, "flash_kv_cache_append_args_init"); !s.ok()) return s;
    const Result<Device> device = device_of(args->device);
    if (!device.ok()) return device.status();
    AppendProblem problem = problem_of(*args, dtype);
    problem.device = device.value();
    const Result<AppendPlan> planned = plan(problem);
    if (!planned.ok()) return planned.status();
    const AppendTensors tensors{args->key.data,     args->value.data,        args->k_cache.data,
                                args->v_cache.data, args->slot_mapping.data, args->k_scale,
                                args->v_scale};
    return run(planned.value(), tensors, {.stream = args->stream});
  });
}

}  // namespace
}  // namespace flashmoe::c_api

using flashmoe::DType;
namespace c_api = flashmoe::c_api;

int flash_attention_paged_args_init(flash_attention_paged_args* args, size_t struct_size) {
  const int code = c_api::init_args(args, struct_size, "flash_attention_paged_args_init");
  if (code == FLASH_ATTENTION_OK) args->window_left = args->window_right = -1;
  return code;
}

int flash_attention_paged_forward_fp16(const flash_attention_paged_args* args) {
  return c_api::call(args, DType::kFloat16);
}

int flash_attention_paged_forward_bf16(const flash_attention_paged_args* args) {
  return c_api::call(args, DType::kBFloat16);
}

int flash_attention_paged_workspace_bytes(const flash_attention_paged_args* args, int dtype,
                                          uint64_t* bytes) {
  return c_api::workspace_bytes(dtype, FLASH_ATTENTION_FORWARD, bytes,
                                [&](DType d, flashmoe::Pass) { return c_api::plan_of(args, d); });
}

int flash_kv_cache_append_args_init(flash_kv_cache_append_args* args, size_t struct_size) {
  return c_api::init_args(args, struct_size, "flash_kv_cache_append_args_init");
}

int flash_kv_cache_append_fp16(const flash_kv_cache_append_args* args) {
  return c_api::call(args, DType::kFloat16);
}

int flash_kv_cache_append_bf16(const flash_kv_cache_append_args* args) {
  return c_api::call(args, DType::kBFloat16);
}
