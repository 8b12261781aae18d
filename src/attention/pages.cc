#include "attention/pages.h"

#include "attention/problem.h"
#include "cache/problem.h"
#include "core/check.h"
#include "core/text.h"

namespace flashmoe {
namespace {

Status check_alone(const AttentionProblem& p) {
  if (p.ragged) {
    return invalid("cu_seqlens_k and block_table are both given; keys in pages have their lengths ",
                   "in seq_lens");
  }
  if (p.key_lengths) {
    return invalid("key_lengths and block_table are both given; keys in pages have their lengths ",
                   "in seq_lens");
  }
  if (p.bias) return invalid("bias and block_table are both given; pages take no bias");
  if (p.pass == Pass::kBackward) {
    return invalid("block_table is given for a backward pass; attention over pages has none");
  }
  return {};
}

Status check_tokens(const AttentionProblem& p) {
  const TensorSpec &q = p.query, &k = p.key;
  FLASHMOE_RETURN_IF_ERROR(check_extent("query", q));
  if (!is_float(q.dtype)) {
    return invalid("query is ", dtype_name(q.dtype),
                   "; attention works in float64, float32, float16 and bfloat16");
  }
  if (q.rank != 3) {
    return invalid("query has shape ", shape_text(q),
                   "; over pages it is (tokens, heads, head_dim)");
  }
  FLASHMOE_RETURN_IF_ERROR(check_cache("k_cache", k, "v_cache", p.value));
  if (k.dtype != q.dtype && k.dtype != DType::kFloat8E4M3) {
    return invalid("k_cache is ", dtype_name(k.dtype), "; a cache is ", dtype_name(q.dtype),
                   " like query, or float8_e4m3fn");
  }
  if (q.size(1) < 1 || q.size(1) % k.size(2) != 0) {
    return invalid("query has ", q.size(1), " heads and k_cache has ", k.size(2),
                   "; query heads must be a multiple of key heads, and at least 1");
  }
  if (q.size(-1) != k.size(-1)) {
    return invalid("k_cache has head dim ", k.size(-1), " and query has head dim ", q.size(-1),
                   "; they must be equal");
  }
  for (const auto& [name, spec] : {std::pair{"query", &q}, std::pair{"v_cache", &p.value}}) {
    if (spec->size(-1) < 1 || spec->size(-1) > kMaxPagedHeadDim) {
      return invalid(name, " has head dim ", spec->size(-1), "; over pages it must be from 1 to ",
                     kMaxPagedHeadDim);
    }
  }
  return {};
}

Status check_integers(const char* name, const TensorSpec& spec) {
  FLASHMOE_RETURN_IF_ERROR(check_extent(name, spec));
  if (is_int(spec.dtype)) return {};
  return invalid(name, " is ", dtype_name(spec.dtype), "; it must be int32 or int64");
}

Status check_table(const AttentionProblem& p) {
  const Paged& paged = *p.paged;
  const TensorSpec& table = paged.block_table;
  FLASHMOE_RETURN_IF_ERROR(check_integers("block_table", table));
  if (table.rank != 2) {
    return invalid("block_table has shape ", shape_text(table),
                   "; it must be (sequences, blocks of a sequence)");
  }
  const int64_t sequences = table.size(0);
  FLASHMOE_RETURN_IF_ERROR(check_integers("seq_lens", paged.seq_lens));
  if (paged.seq_lens.rank != 1 || paged.seq_lens.shape[0] != sequences) {
    return invalid("seq_lens has shape ", shape_text(paged.seq_lens), "; block_table has ",
                   sequences, " sequences, so it must be (", sequences, ",)");
  }
  if (paged.cu_seqlens_q) {
    const TensorSpec& cu = *paged.cu_seqlens_q;
    FLASHMOE_RETURN_IF_ERROR(check_integers("cu_seqlens_q", cu));
    if (cu.rank != 1 || cu.shape[0] - 1 != sequences) {
      return invalid("cu_seqlens_q has shape ", shape_text(cu), "; block_table has ", sequences,
                     " sequences, and it must have one entry more");
    }
    if (paged.max_seqlen_q < 0) {
      return invalid("max_seqlen_q is ", paged.max_seqlen_q, "; it must be at least 0");
    }
  } else if (p.query.size(0) != sequences) {
    return invalid("query has ", p.query.size(0), " tokens and block_table has ", sequences,
                   " sequences; without cu_seqlens_q each sequence has one token");
  }
  if (paged.max_seqlen_k < 0) {
    return invalid("max_seqlen_k is ", paged.max_seqlen_k, "; it must be at least 0");
  }
  return {};
}

}  // namespace

Status check_paged(const AttentionProblem& p) {
  FLASHMOE_RETURN_IF_ERROR(check_alone(p));
  FLASHMOE_RETURN_IF_ERROR(check_tokens(p));
  FLASHMOE_RETURN_IF_ERROR(check_table(p));
  FLASHMOE_RETURN_IF_ERROR(check_scale("k_scale", p.paged->k_scale, p.key));
  return check_scale("v_scale", p.paged->v_scale, p.value);
}

}  // namespace flashmoe
