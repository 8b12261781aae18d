#include "attention/lengths.h"

#include "attention/problem.h"
#include "core/check.h"
#include "core/numbers.h"
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

// A sequence has as many keys as the maximum and its row of the table allow, and the blocks of
// those that its queries see exist. Entries of the table for other keys may be anything.
Status check_pages(const AttentionProblem& problem, const AttentionTensors& tensors) {
  const Paged& paged = *problem.paged;
  const Geometry g = geometry(problem);
  const int64_t blocks = problem.key.size(0), entries = paged.block_table.size(1);
  if (g.batch > 0 && !tensors.seq_lens) return invalid("seq_lens is a null pointer");
  for (int64_t i = 0; i < g.batch; ++i) {
    const int64_t keys = read_int(paged.seq_lens, tensors.seq_lens, i);
    if (keys < 0 || keys > g.len_k) {
      return invalid("seq_lens[", i, "] is ", keys, "; it must be from 0 to max_seqlen_k, ",
                     g.len_k);
    }
    if (ceil_div(keys, g.page) > entries) {
      return invalid("seq_lens[", i, "] is ", keys, "; block_table has ", entries,
                     " entries for a sequence, blocks of ", g.page, " keys each");
    }
    const int64_t rows = paged_rows(paged, tensors.cu_seqlens_q, i);
    if (rows == 0) continue;
    const KeyRange seen = {allowed_keys(0, rows, keys, g.left, g.right).begin,
                           allowed_keys(rows - 1, rows, keys, g.left, g.right).end};
    if (seen.begin >= seen.end) continue;
    if (!tensors.block_table) return invalid("block_table is a null pointer");
    for (int64_t n = seen.begin / g.page; n < ceil_div(seen.end, g.page); ++n) {
      const int64_t block = read_int(paged.block_table, tensors.block_table, i * entries + n);
      if (block < 0 || block >= blocks) {
        return invalid("block_table[", i, ", ", n, "] is ", block, "; the cache has ", blocks,
                       " blocks, and sequence ", i, " of ", keys, " keys needs this one");
      }
    }
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

int64_t paged_rows(const Paged& paged, const void* cu_seqlens_q, int64_t sequence) {
  if (!paged.cu_seqlens_q) return 1;
  return read_int(*paged.cu_seqlens_q, cu_seqlens_q, sequence + 1) -
         read_int(*paged.cu_seqlens_q, cu_seqlens_q, sequence);
}

Status check_lengths(const AttentionProblem& problem, const AttentionTensors& tensors) {
  if (problem.key_lengths) {
    if (Status s = check_key_lengths(problem, tensors.key_lengths); !s.ok()) return s;
  }
  if (problem.paged) {
    const Paged& paged = *problem.paged;
    if (paged.cu_seqlens_q) {
      FLASHMOE_RETURN_IF_ERROR(check_cu_seqlens('q', *paged.cu_seqlens_q, tensors.cu_seqlens_q,
                                                problem.query.size(0), paged.max_seqlen_q));
    }
    return check_pages(problem, tensors);
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
