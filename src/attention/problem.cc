#include "attention/problem.h"

#include <cmath>
#include <limits>

#include "attention/dropout.h"
#include "attention/pages.h"
#include "core/check.h"
#include "core/text.h"

namespace flashmoe {
namespace {

Status check_query_key_value(const AttentionProblem& p) {
  const TensorSpec &q = p.query, &k = p.key, &v = p.value;
  FLASHMOE_RETURN_IF_ERROR(check_extent("query", q));
  FLASHMOE_RETURN_IF_ERROR(check_extent("key", k));
  FLASHMOE_RETURN_IF_ERROR(check_extent("value", v));
  if (!is_float(q.dtype)) {
    return invalid("query is ", dtype_name(q.dtype),
                   "; attention works in float64, float32, float16 and bfloat16");
  }
  FLASHMOE_RETURN_IF_ERROR(check_dtype("key", k, q.dtype, "like query"));
  FLASHMOE_RETURN_IF_ERROR(check_dtype("value", v, q.dtype, "like query"));

  if (p.ragged && q.rank != 3) {
    return invalid("query has shape ", shape_text(q),
                   "; a ragged batch is (tokens, heads, head_dim)");
  }
  if (!p.ragged && q.rank < 4) {
    return invalid("query has shape ", shape_text(q), "; at least 4 dimensions are needed, ",
                   "(batch, heads, length, head_dim). Add a batch dimension with unsqueeze(0)");
  }
  for (const auto& [name, spec] : {std::pair{"key", &k}, std::pair{"value", &v}}) {
    if (spec->rank != q.rank) {
      return invalid(name, " has ", spec->rank, " dimensions and query has ", q.rank,
                     "; they must have the same number");
    }
  }

  // Dense is (..., H, S, D), ragged is (T, H, D).
  const int head = p.ragged ? -2 : -3;
  const int length = p.ragged ? -3 : -2;
  for (int i = 0; i < q.rank - 3; ++i) {
    for (const auto& [name, spec] : {std::pair{"key", &k}, std::pair{"value", &v}}) {
      if (spec->shape[i] != q.shape[i]) {
        return invalid(name, " has shape ", shape_text(*spec), " and query ", shape_text(q),
                       ": dimension ", i, " is ", spec->shape[i], ", expected ", q.shape[i]);
      }
    }
  }
  if (k.size(head) != v.size(head)) {
    return invalid("value has ", v.size(head), " heads and key has ", k.size(head),
                   "; they must have the same number");
  }
  if (k.size(head) < 1 || q.size(head) < 1 || q.size(head) % k.size(head) != 0) {
    return invalid("query has ", q.size(head), " heads and key has ", k.size(head),
                   "; query heads must be a multiple of key heads, and at least 1");
  }
  if (k.size(length) != v.size(length)) {
    return invalid("value has length ", v.size(length), " and key has length ", k.size(length),
                   "; they must be equal");
  }
  if (q.size(-1) != k.size(-1)) {
    return invalid("key has head dim ", k.size(-1), " and query has head dim ", q.size(-1),
                   "; they must be equal");
  }
  for (const auto& [name, spec] : {std::pair{"query", &q}, std::pair{"value", &v}}) {
    if (spec->size(-1) < 1 || spec->size(-1) > kMaxHeadDim) {
      return invalid(name, " has head dim ", spec->size(-1), "; it must be from 1 to ",
                     kMaxHeadDim);
    }
  }
  return {};
}

Status check_ragged(const AttentionProblem& p) {
  const Ragged& r = *p.ragged;
  FLASHMOE_RETURN_IF_ERROR(check_extent("cu_seqlens_q", r.cu_seqlens_q));
  FLASHMOE_RETURN_IF_ERROR(check_extent("cu_seqlens_k", r.cu_seqlens_k));
  for (const auto& [name, spec] :
       {std::pair{"cu_seqlens_q", &r.cu_seqlens_q}, std::pair{"cu_seqlens_k", &r.cu_seqlens_k}}) {
    if (!is_int(spec->dtype)) {
      return invalid(name, " is ", dtype_name(spec->dtype), "; it must be int32 or int64");
    }
    if (spec->rank != 1 || spec->shape[0] < 1) {
      return invalid(name, " has shape ", shape_text(*spec),
                     "; it must be 1-dimensional with one entry more than there are sequences");
    }
  }
  if (r.cu_seqlens_q.shape[0] != r.cu_seqlens_k.shape[0]) {
    return invalid("cu_seqlens_k has ", r.cu_seqlens_k.shape[0], " entries and cu_seqlens_q has ",
                   r.cu_seqlens_q.shape[0],
                   "; both must have one entry more than there are sequences");
  }
  FLASHMOE_RETURN_IF_ERROR(
      check_dtype("cu_seqlens_k", r.cu_seqlens_k, r.cu_seqlens_q.dtype, "like cu_seqlens_q"));
  if (r.max_seqlen_q < 0)
    return invalid("max_seqlen_q is ", r.max_seqlen_q, "; it must be at least 0");
  if (r.max_seqlen_k < 0)
    return invalid("max_seqlen_k is ", r.max_seqlen_k, "; it must be at least 0");
  if (p.key_lengths) {
    return invalid(
        "key_lengths and cu_seqlens are both given; a ragged batch has its lengths in cu_seqlens");
  }
  return {};
}

// Sizes of `spec`, aligned at the end with `sizes`, are equal or 1.
bool broadcasts(const TensorSpec& spec, const int64_t* sizes, int num_sizes) {
  if (spec.rank > num_sizes) return false;
  for (int i = 0; i < spec.rank; ++i) {
    const int64_t size = sizes[num_sizes - spec.rank + i];
    if (spec.shape[i] != size && spec.shape[i] != 1) return false;
  }
  return true;
}

Status check_bias(const AttentionProblem& p) {
  const TensorSpec& bias = *p.bias;
  FLASHMOE_RETURN_IF_ERROR(check_extent("bias", bias));
  if (bias.dtype != p.query.dtype && bias.dtype != DType::kFloat32 && bias.dtype != DType::kBool) {
    return invalid("bias is ", dtype_name(bias.dtype), "; it must be ", dtype_name(p.query.dtype),
                   " like query, float32, or bool for a mask");
  }
  TensorSpec want = p.query;
  if (p.ragged) {
    if (bias.rank == 2 && (bias.shape[1] == p.query.size(1) || bias.shape[1] == 1)) return {};
    return invalid("bias has shape ", shape_text(bias),
                   "; a ragged batch takes a packed bias of shape (",
                   "sum of n_i * m_i over the sequences, ", p.query.size(1), " or 1)");
  }
  want.shape[want.rank - 1] = p.key.size(-2);
  if (broadcasts(bias, want.shape.data(), want.rank)) return {};
  return invalid("bias has shape ", shape_text(bias), ", which does not broadcast to ",
                 shape_text(want), ", (..., query heads, query length, key length)");
}

Status check_sinks(const AttentionProblem& p) {
  const TensorSpec& sinks = *p.sinks;
  FLASHMOE_RETURN_IF_ERROR(check_extent("sinks", sinks));
  if (sinks.dtype != p.query.dtype && sinks.dtype != DType::kFloat32) {
    return invalid("sinks is ", dtype_name(sinks.dtype), "; it must be ", dtype_name(p.query.dtype),
                   " like query, or float32");
  }
  const int64_t heads = p.query.size(p.ragged || p.paged ? -2 : -3);
  if (sinks.rank == 1 && sinks.shape[0] == heads) return {};
  return invalid("sinks has shape ", shape_text(sinks), ", expected (", heads,
                 ",), one for each query head");
}

// Scores are fp32 but for fp64: numbers that overflow there would make every result a NaN.
Status check_range(const AttentionOptions& o, const TensorSpec& query) {
  if (query.dtype == DType::kFloat64) return {};
  constexpr double kMost = std::numeric_limits<float>::max();
  constexpr double kLeast = std::numeric_limits<float>::min();
  const double scale = std::abs(o.scale.value_or(1));
  if (scale > kMost) {
    return invalid("scale is ", *o.scale, "; scores are float32, so at most ", kMost);
  }
  if (o.softcap > 0 && !(o.softcap >= kLeast && o.softcap <= kMost && scale / o.softcap <= kMost)) {
    return invalid("softcap is ", o.softcap, "; scores are float32, in which it must be from ",
                   kLeast, " to ", kMost, ", and scale / softcap finite");
  }
  return {};
}

Status check_options(const AttentionOptions& o) {
  if (o.window_left < -1 || o.window_right < -1) {
    return invalid("window is (", o.window_left, ", ", o.window_right,
                   "); each side must be at least 0, or -1 for no limit");
  }
  if (o.scale && !std::isfinite(*o.scale))
    return invalid("scale is ", *o.scale, "; it must be finite");
  if (!std::isfinite(o.softcap) || o.softcap < 0) {
    return invalid("softcap is ", o.softcap, "; it must be positive, or 0 for none");
  }
  if (!(o.dropout_p >= 0 && o.dropout_p <= 1)) {
    return invalid("dropout_p is ", o.dropout_p, "; it must be from 0 to 1");
  }
  return {};
}

Status check_seed(const AttentionProblem& p) {
  if (!p.seed) {
    if (p.options.dropout_p == 0) return {};
    return invalid("seed is missing; dropout_p is ", p.options.dropout_p,
                   ", and dropout needs one");
  }
  FLASHMOE_RETURN_IF_ERROR(check_extent("seed", *p.seed));
  FLASHMOE_RETURN_IF_ERROR(check_dtype("seed", *p.seed, DType::kInt64, "for dropout"));
  if (element_count(*p.seed) != 1) {
    return invalid("seed has shape ", shape_text(*p.seed), "; it must be one number");
  }
  return {};
}

Status check_results(const AttentionProblem& p) {
  const TensorSpec& q = p.query;
  FLASHMOE_RETURN_IF_ERROR(check_extent("out", p.out));
  FLASHMOE_RETURN_IF_ERROR(check_dtype("out", p.out, q.dtype, "like query"));
  FLASHMOE_RETURN_IF_ERROR(check_shape("out", p.out, q, q.rank - 1, {p.value.size(-1)}));
  if (p.pass == Pass::kForward) FLASHMOE_RETURN_IF_ERROR(check_writable("out", p.out));
  const DType lse_dtype = q.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  if (p.lse) {
    FLASHMOE_RETURN_IF_ERROR(check_extent("lse", *p.lse));
    FLASHMOE_RETURN_IF_ERROR(check_dtype("lse", *p.lse, lse_dtype, "(float64 for float64 inputs)"));
    FLASHMOE_RETURN_IF_ERROR(check_shape("lse", *p.lse, q, q.rank - 1, {}));
    if (p.pass == Pass::kForward) FLASHMOE_RETURN_IF_ERROR(check_writable("lse", *p.lse));
  }
  return {};
}

Status check_backward(const AttentionProblem& p) {
  if (p.grad_bias && p.bias && p.bias->dtype == DType::kBool) {
    return invalid("grad_bias is asked for, but bias is bool: a mask has no gradient");
  }
  return check_gradients({
      {"grad_out", &p.grad_out, &p.out, false},
      {"grad_lse", &p.grad_lse, &*p.lse, false},
      {"grad_query", &p.grad_query, &p.query},
      {"grad_key", &p.grad_key, &p.key},
      {"grad_value", &p.grad_value, &p.value},
      {"grad_bias", &p.grad_bias, if_any(p.bias)},
      {"grad_sinks", &p.grad_sinks, if_any(p.sinks)},
  });
}

Status check_tangents(const AttentionProblem& p) {
  if (p.options.dropout_p > 0) {
    return unsupported("dropout has no forward-mode and no second derivatives yet; with ",
                       "dropout_p=0 they are there");
  }
  const bool results = p.pass == Pass::kTangent;
  FLASHMOE_RETURN_IF_ERROR(check_gradients({
      {"tangent_query", &p.tangent_query, &p.query, false},
      {"tangent_key", &p.tangent_key, &p.key, false},
      {"tangent_value", &p.tangent_value, &p.value, false},
      {"tangent_bias", &p.tangent_bias, if_any(p.bias), false},
      {"tangent_sinks", &p.tangent_sinks, if_any(p.sinks), false},
      {"tangent_out", &p.tangent_out, &p.out, results},
      {"tangent_lse", &p.tangent_lse, &*p.lse, results},
  }));
  if (results) return {};
  if (p.grad_out && !p.tangent_out) {
    return invalid("tangent_out is missing; with grad_out the second pass needs the one of the ",
                   "tangent pass");
  }
  if (!p.tangent_lse) {
    return invalid("tangent_lse is missing; the second pass needs the one of the tangent pass");
  }
  return {};
}

}  // namespace

Status check(const AttentionProblem& p) {
  FLASHMOE_RETURN_IF_ERROR(p.paged ? check_paged(p) : check_query_key_value(p));
  if (p.ragged) FLASHMOE_RETURN_IF_ERROR(check_ragged(p));
  if (p.bias) FLASHMOE_RETURN_IF_ERROR(check_bias(p));
  if (p.sinks) FLASHMOE_RETURN_IF_ERROR(check_sinks(p));
  if (p.key_lengths) {
    const TensorSpec& lengths = *p.key_lengths;
    FLASHMOE_RETURN_IF_ERROR(check_extent("key_lengths", lengths));
    if (!is_int(lengths.dtype)) {
      return invalid("key_lengths is ", dtype_name(lengths.dtype), "; it must be int32 or int64");
    }
    TensorSpec lead = p.query;
    lead.rank -= 3;
    if (!broadcasts(lengths, lead.shape.data(), lead.rank)) {
      return invalid("key_lengths has shape ", shape_text(lengths),
                     ", which does not broadcast to the batch ", shape_text(lead));
    }
  }
  FLASHMOE_RETURN_IF_ERROR(check_options(p.options));
  FLASHMOE_RETURN_IF_ERROR(check_range(p.options, p.query));
  FLASHMOE_RETURN_IF_ERROR(check_seed(p));
  FLASHMOE_RETURN_IF_ERROR(check_results(p));
  if (p.pass == Pass::kForward) return {};
  if (!p.lse) return invalid("lse is missing; this pass needs the one of the forward pass");
  if (!by_queries(p.pass)) FLASHMOE_RETURN_IF_ERROR(check_backward(p));
  return p.pass == Pass::kBackward ? Status() : check_tangents(p);
}

Geometry geometry(const AttentionProblem& p) {
  Geometry g;
  g.ragged = p.ragged.has_value();
  g.paged = p.paged.has_value();
  const int head = g.packed() ? -2 : -3;
  if (g.paged) {
    g.batch = p.paged->block_table.shape[0];
    g.len_q = p.paged->cu_seqlens_q ? p.paged->max_seqlen_q : 1;
    g.len_k = p.paged->max_seqlen_k;
    g.page = p.key.size(1);
  } else if (g.ragged) {
    g.batch = p.ragged->cu_seqlens_q.shape[0] - 1;
    g.len_q = p.ragged->max_seqlen_q;
    g.len_k = p.ragged->max_seqlen_k;
  } else {
    g.num_lead = p.query.rank - 3;
    for (int i = 0; i < g.num_lead; ++i) g.batch *= g.lead[i] = p.query.shape[i];
    g.len_q = p.query.size(-2);
    g.len_k = p.key.size(-2);
  }
  g.heads_q = p.query.size(head);
  g.heads_k = p.key.size(head);
  g.group = g.heads_q / g.heads_k;
  g.head_dim = p.query.size(-1);
  g.head_dim_v = p.value.size(-1);
  const AttentionOptions& o = p.options;
  g.left = o.window_left;
  g.right = o.causal ? 0 : o.window_right;
  g.scale = o.scale ? *o.scale : 1 / std::sqrt(static_cast<double>(g.head_dim));
  g.softcap = o.softcap;
  g.dropped = dropout::dropped_of(o.dropout_p);
  g.kept_scale = dropout::kept_scale(g.dropped);
  return g;
}

}  // namespace flashmoe
