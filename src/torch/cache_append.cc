// Writing keys and values to a cache.
#include <string>
#include <tuple>

#include "execute.h"
#include "paged_arguments.h"

namespace flashmoe::ops {
namespace {

std::tuple<> cache_append(const AppendArguments& a) {
  check_same_device(a);
  const auto plan = plan_or_fail<AppendPlan>(append_problem(a, device_of(a.key)));

  AppendTensors tensors;
  tensors.key = a.key.const_data_ptr();
  tensors.value = a.value.const_data_ptr();
  tensors.key_cache = a.k_cache.mutable_data_ptr();
  tensors.value_cache = a.v_cache.mutable_data_ptr();
  tensors.slots = a.slot_mapping.const_data_ptr();
  tensors.k_scale = data_of(a.k_scale);
  tensors.v_scale = data_of(a.v_scale);
  raise_if_error(run(*plan, tensors, launch_for(a.key)));
  return {};
}

// What would run, and why. Only shapes matter, so meta tensors do.
std::tuple<std::string> explain_append(const ExplainAppendArguments& e) {
  check_same_device(e.append);
  const AppendProblem problem = append_problem(e.append, device_named(e.device, e.append.key));
  raise_if_error(plan(problem).status());
  return explain(problem);
}

}  // namespace
}  // namespace flashmoe::ops

STABLE_TORCH_LIBRARY_IMPL(flashmoe, CPU, m) {
  m.impl("cache_append", flashmoe::ops::Boxed<flashmoe::ops::cache_append>::call);
  m.impl("cache_append_unchecked", flashmoe::ops::Boxed<flashmoe::ops::cache_append>::call);
}

STABLE_TORCH_LIBRARY_IMPL(flashmoe, CUDA, m) {
  m.impl("cache_append", flashmoe::ops::Boxed<flashmoe::ops::cache_append>::call);
  m.impl("cache_append_unchecked", flashmoe::ops::Boxed<flashmoe::ops::cache_append>::call);
}

STABLE_TORCH_LIBRARY_IMPL(flashmoe, CompositeExplicitAutograd, m) {
  m.impl("explain_append", flashmoe::ops::Boxed<flashmoe::ops::explain_append>::call);
}
