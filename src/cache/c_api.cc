// The C functions of caches: attention over their pages, and writing to them.
#include "c_api/border.h"
#include "flashmoe/attention.h"
#include "flashmoe/cache.h"

namespace flashmoe::c_api {
namespace {

struct PagedAttention {
  using Args = flash_attention_paged_args;
  static constexpr const char* kInit = "flash_attention_paged_args_init";
  static Status check(const Args& args);
  static AttentionProblem problem(const Args& a, DType dtype, Pass);
  static AttentionTensors tensors(const Args& a);
};

struct Append {
  using Args = flash_kv_cache_append_args;
  static constexpr const char* kInit = "flash_kv_cache_append_args_init";
  static Status check(const Args& args);
  static AppendProblem problem(const Args& a, DType dtype, Pass);
  static AppendTensors tensors(const Args& a);
};

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

Status PagedAttention::check(const Args& args) { return check_dtypes(args); }

AttentionProblem PagedAttention::problem(const Args& a, DType dtype, Pass) {
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

AttentionTensors PagedAttention::tensors(const Args& a) {
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

Status Append::check(const Args& args) { return check_dtypes(args); }

AppendProblem Append::problem(const Args& a, DType dtype, Pass) {
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

AppendTensors Append::tensors(const Args& a) {
  return {a.key.data,          a.value.data, a.k_cache.data, a.v_cache.data,
          a.slot_mapping.data, a.k_scale,    a.v_scale};
}

}  // namespace
}  // namespace flashmoe::c_api

using flashmoe::DType;
namespace c_api = flashmoe::c_api;

int flash_attention_paged_args_init(flash_attention_paged_args* args, size_t struct_size) {
  return c_api::init_args(args, struct_size, c_api::PagedAttention::kInit);
}

int flash_attention_paged_forward_fp16(const flash_attention_paged_args* args) {
  return c_api::call<c_api::PagedAttention>(args, DType::kFloat16);
}

int flash_attention_paged_forward_bf16(const flash_attention_paged_args* args) {
  return c_api::call<c_api::PagedAttention>(args, DType::kBFloat16);
}

int flash_attention_paged_workspace_bytes(const flash_attention_paged_args* args, int dtype,
                                          uint64_t* bytes) {
  return c_api::workspace_bytes<c_api::PagedAttention>(args, dtype, FLASH_ATTENTION_FORWARD, bytes);
}

int flash_kv_cache_append_args_init(flash_kv_cache_append_args* args, size_t struct_size) {
  return c_api::init_args(args, struct_size, c_api::Append::kInit);
}

int flash_kv_cache_append_fp16(const flash_kv_cache_append_args* args) {
  return c_api::call<c_api::Append>(args, DType::kFloat16);
}

int flash_kv_cache_append_bf16(const flash_kv_cache_append_args* args) {
  return c_api::call<c_api::Append>(args, DType::kBFloat16);
}
