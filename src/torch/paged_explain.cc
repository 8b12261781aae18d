// What would run of attention over pages, and why. Only shapes matter, so meta tensors do.
#include <string>
#include <tuple>

#include "error.h"
#include "paged_call.h"

namespace flashmoe::ops {
namespace {

std::tuple<std::string> explain_paged(const ExplainPagedArguments& e) {
  const PagedCall call = paged_call(e.forward, device_named(e.device, e.forward.call.query));
  raise_if_error(plan(call.problem).status());
  return explain(call.problem) + copies_text({{"query", &call.query}}, {{"out", &call.out}});
}

}  // namespace
}  // namespace flashmoe::ops

STABLE_TORCH_LIBRARY_IMPL(flashmoe, CompositeExplicitAutograd, m) {
  m.impl("explain_paged", flashmoe::ops::Boxed<flashmoe::ops::explain_paged>::call);
}
