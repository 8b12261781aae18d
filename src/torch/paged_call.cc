#include "paged_call.h"

#include "call.h"

namespace flashmoe::ops {
namespace {

// A size of a tensor that is not checked yet: the planner says what is wrong with it.
int64_t size_of(const TensorSpec& spec, int dim) { return dim < spec.rank ? spec.shape[dim] : 0; }

// Lengths are numbers on the device, and nobody waits for those: shapes bound them too. Unsigned: a
// product past 2^63 must only wrap around until it is refused.
int64_t most_keys(const TensorSpec& block_table, const TensorSpec& cache) {
  return static_cast<int64_t>(static_cast<uint64_t>(size_of(block_table, 1)) *
                              static_cast<uint64_t>(size_of(cache, 1)));
}

}  // namespace

PagedCall paged_call(const PagedArguments& a, const Placement& out,
                     const std::optional<TensorSpec>& lse, const Device& device) {
  PagedCall call;
  call.query = place("query", a.query, device, needs_copy);
  call.out = out;
  AttentionProblem& p = call.problem;
  p.device = device;
  p.query = call.query.inside;
  p.key = cache_spec("k_cache", a.k_cache);
  p.value = cache_spec("v_cache", a.v_cache);
  p.sinks = spec_of("sinks", a.sinks);
  p.out = out.inside;
  p.lse = lse;
  p.options = a.options;

  Paged& paged = p.paged.emplace();
  paged.block_table = spec_of("block_table", a.block_table);
  paged.seq_lens = spec_of("seq_lens", a.seq_lens);
  paged.cu_seqlens_q = spec_of("cu_seqlens_q", a.cu_seqlens_q);
  paged.max_seqlen_q = a.max_seqlen_q.value_or(a.cu_seqlens_q ? size_of(p.query, 0) : 1);
  paged.max_seqlen_k = a.max_seqlen_k.value_or(most_keys(paged.block_table, p.key));
  paged.k_scale = scale_spec("k_scale", a.k_scale);
  paged.v_scale = scale_spec("v_scale", a.v_scale);
  return call;
}

PagedCall paged_call(const PagedForwardArguments& f, const Device& device) {
  const TensorSpec query = spec_of("query", f.call.query);
  const TensorSpec out = out_spec(query, cache_spec("v_cache", f.call.v_cache));
  return paged_call(f.call, place(out, device, needs_copy),
                    f.return_lse ? lse_spec(query) : std::nullopt, device);
}

}  // namespace flashmoe::ops
