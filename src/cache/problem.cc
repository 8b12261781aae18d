#include "cache/problem.h"

#include "core/check.h"
#include "core/text.h"

namespace flashmoe {

Status check_cache(const char* key_name, const TensorSpec& key, const char* value_name,
                   const TensorSpec& value) {
  FLASHMOE_RETURN_IF_ERROR(check_extent(key_name, key));
  FLASHMOE_RETURN_IF_ERROR(check_extent(value_name, value));
  for (const auto& [name, spec] : {std::pair{key_name, &key}, std::pair{value_name, &value}}) {
    if (spec->rank != 4) {
      return invalid(name, " has shape ", shape_text(*spec),
                     "; a cache is (blocks, page, heads, head_dim)");
    }
  }
  if (!is_float(key.dtype) && key.dtype != DType::kFloat8E4M3) {
    return invalid(key_name, " is ", dtype_name(key.dtype),
                   "; a cache is float64, float32, float16, bfloat16 or float8_e4m3fn");
  }
  if (value.dtype != key.dtype) {
    return invalid(value_name, " is ", dtype_name(value.dtype), ", expected ",
                   dtype_name(key.dtype), " like ", key_name);
  }
  const char* const sizes[] = {"blocks", "rows in a page", "heads"};
  for (int i = 0; i < 3; ++i) {
    if (value.shape[i] == key.shape[i]) continue;
    return invalid(value_name, " has ", value.shape[i], " ", sizes[i], " and ", key_name, " has ",
                   key.shape[i], "; they must be equal");
  }
  if (key.size(1) < 1 || key.size(2) < 1) {
    return invalid(key_name, " has shape ", shape_text(key),
                   "; a page has at least 1 row and 1 head");
  }
  return {};
}

Status check_scale(const char* name, const std::optional<TensorSpec>& scale,
                   const TensorSpec& cache) {
  if (!scale) return {};
  FLASHMOE_RETURN_IF_ERROR(check_extent(name, *scale));
  if (cache.dtype != DType::kFloat8E4M3) {
    return invalid(name, " is given, but the cache is ", dtype_name(cache.dtype),
                   "; only float8_e4m3fn is scaled");
  }
  FLASHMOE_RETURN_IF_ERROR(check_dtype(name, *scale, DType::kFloat32, "whatever the inputs are"));
  if (scale->rank == 0 || (scale->rank == 1 && scale->shape[0] == cache.size(2))) return {};
  return invalid(name, " has shape ", shape_text(*scale), "; it must be () or one for each of ",
                 cache.size(2), " key heads, (", cache.size(2), ",)");
}

Status check(const AppendProblem& p) {
  FLASHMOE_RETURN_IF_ERROR(check_cache("k_cache", p.key_cache, "v_cache", p.value_cache));
  const int64_t heads = p.key_cache.size(2);
  const std::tuple<const char*, const TensorSpec*, const TensorSpec*> pairs[] = {
      {"key", &p.key, &p.key_cache}, {"value", &p.value, &p.value_cache}};
  for (const auto& [name, spec, cache] : pairs) {
    FLASHMOE_RETURN_IF_ERROR(check_extent(name, *spec));
    if (!is_float(spec->dtype)) {
      return invalid(name, " is ", dtype_name(spec->dtype),
                     "; it must be float64, float32, float16 or bfloat16");
    }
    if (spec->rank != 3) {
      return invalid(name, " has shape ", shape_text(*spec), "; it is (tokens, heads, head_dim)");
    }
    FLASHMOE_RETURN_IF_ERROR(check_shape(name, *spec, p.key, 1, {heads, cache->size(-1)}));
  }
  FLASHMOE_RETURN_IF_ERROR(check_dtype("value", p.value, p.key.dtype, "like key"));
  if (p.key_cache.dtype != p.key.dtype && p.key_cache.dtype != DType::kFloat8E4M3) {
    return invalid("k_cache is ", dtype_name(p.key_cache.dtype), "; it must be ",
                   dtype_name(p.key.dtype), " like key, or float8_e4m3fn");
  }
  FLASHMOE_RETURN_IF_ERROR(check_writable("k_cache", p.key_cache));
  FLASHMOE_RETURN_IF_ERROR(check_writable("v_cache", p.value_cache));
  FLASHMOE_RETURN_IF_ERROR(check_extent("slot_mapping", p.slots));
  if (!is_int(p.slots.dtype)) {
    return invalid("slot_mapping is ", dtype_name(p.slots.dtype), "; it must be int32 or int64");
  }
  FLASHMOE_RETURN_IF_ERROR(check_shape("slot_mapping", p.slots, p.key, 1, {}));
  FLASHMOE_RETURN_IF_ERROR(check_scale("k_scale", p.k_scale, p.key_cache));
  return check_scale("v_scale", p.v_scale, p.value_cache);
}

}  // namespace flashmoe
