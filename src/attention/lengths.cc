#include "attention/lengths.h"

#include "core/check.h"
#include "core/text.h"

namespace flashmoe {
namespace {

Status check_key_lengths(const AttentionProblem& problem, const void* data) {
  const TensorSpec& spec = *problem.key_lengths;
  const int64_t len_k = problem.key.size(-2);
  const int64_t count = element_count(spec);
  if (count > 0 && !data) return invalid("key_lengths is a null pointer");
  for (int64_t i = 0; i < count; ++i) {
    const int64_t length = read_int(spec, data, i);
    if (length < 0 || length > len_k) {
      return invalid("key_lengths[", i, "] is ", length, "; it must be from 0 to the key length, ",
                     len_k);
    }
  }
  return {};
}

// `side` is 'q' or 'k'; `tokens` is how many there are in memory.
Status check_cu_seqlens(char side, const TensorSpec& spec, const void* data, int64_t tokens,
                        int64_t max_seqlen) {
  const std::string name = text("cu_seqlens_", side);
  if (!data) return invalid(name, " is a null pointer");
  if (const int64_t first = read_int(spec, data, 0); first != 0) {
    return invalid(name, "[0] is ", first, "; the first sequence starts at 0");
  }
  int64_t begin = 0;
  for (int64_t i = 1; i < spec.shape[0]; ++i) {
    const int64_t end = read_int(spec, data, i);
    if (end < begin) {
      return invalid(name, "[", i, "] is ", end, " and ", name, "[", i - 1, "] is ", begin,
                     "; cumulative lengths must not fall");
    }
    if (end > tokens) {
      return invalid(name, "[", i, "] is ", end, "; there are only ", tokens, " tokens");
    }
    if (end - begin > max_seqlen) {
      return invalid("max_seqlen_", side, " is ", max_seqlen, ", but sequence ", i - 1, " has ",
                     end - begin, " tokens (", name, "[", i - 1, "] is ", begin, ", ", name, "[", i,
                     "] is ", end, ")");
    }
    begin = end;
  }
  return {};
}

// Both cu_seqlens are known to be good.
Status check_packed_bias(const AttentionProblem& problem, const AttentionTensors& tensors) {
  const TensorSpec &cu_q = problem.ragged->cu_seqlens_q, &cu_k = problem.ragged->cu_seqlens_k;
  int64_t rows = 0;
  for (int64_t i = 1; i < cu_q.shape[0]; ++i) {
    const int64_t n =
        read_int(cu_q, tensors.cu_seqlens_q, i) - read_int(cu_q, tensors.cu_seqlens_q, i - 1);
    const int64_t m =
        read_int(cu_k, tensors.cu_seqlens_k, i) - read_int(cu_k, tensors.cu_seqlens_k, i - 1);
    int64_t block = 0;
    if (__builtin_mul_overflow(n, m, &block) || __builtin_add_overflow(rows, block, &rows)) {
      return invalid("bias would need more than 2^63 rows: sequence ", i - 1, " has ", n,
                     " queries and ", m, " keys");
    }
  }
  if (problem.bias->shape[0] != rows) {
    return invalid("bias has ", problem.bias->shape[0],
                   " rows; these cu_seqlens need sum of n_i * m_i = ", rows);
  }
  return {};
}

}  // namespace

int64_t read_int(const TensorSpec& spec, const void* data, int64_t index) {
  int64_t offset = 0;
  for (int i = spec.rank - 1; i >= 0; --i) {
    offset += index % spec.shape[i] * spec.stride[i];
    index /= spec.shape[i];
  }
  return spec.dtype == DType::kInt32 ? static_cast<const int32_t*>(data)[offset]
                                     : static_cast<const int64_t*>(data)[offset];
}

Status check_lengths(const AttentionProblem& problem, const AttentionTensors& tensors) {
  if (problem.key_lengths) {
    if (Status s = check_key_lengths(problem, tensors.key_lengths); !s.ok()) return s;
  }
  if (!problem.ragged) return {};
  const Ragged& ragged = *problem.ragged;
  Status status = check_cu_seqlens('q', ragged.cu_seqlens_q, tensors.cu_seqlens_q,
                                   problem.query.size(0), ragged.max_seqlen_q);
  if (!status.ok()) return status;
  status = check_cu_seqlens('k', ragged.cu_seqlens_k, tensors.cu_seqlens_k, problem.key.size(0),
                            ragged.max_seqlen_k);
  if (!status.ok() || !problem.bias) return status;
  return check_packed_bias(problem, tensors);
}

}  // namespace flashmoe
