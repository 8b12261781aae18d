// What would run of attention over pages, and why. Only shapes matter, so meta tensors do.
#include <string>
#include <tuple>

#include "call.h"
#include "error.h"
#include "paged_call.h"

namespace flashmoe::ops {
namespace {

std::tuple<std::string> explain_paged(const ExplainPagedArguments& e) {
  const PagedArguments& a = e.call;
  const Device device = device_named(e.device, a.query);
  const TensorSpec query = spec_of("query", a.query);
  const TensorSpec out = out_spec(query, cache_spec("v_cache", a.v_cache));
  const PagedCall call = paged_call(a, place(out, device, needs_copy),
                                    e.return_lse ? lse_spec(query) : std::nullopt, device);
  raise_if_error(plan(call.problem).status());
  return explain(call.problem) + copies_text({{"query", &call.query}}, {{"out", &call.out}});
}

}  // namespace
}  // namespace flashmoe::ops

STABLE_TORCH_LIBRARY_IMPL(flashmoe, CompositeExplicitAutograd, m) {
  m.impl("explain_paged", flashmoe::ops::Boxed<flashmoe::ops::explain_paged>::call);
}
