// Writing keys and values to a cache.
#include <tuple>

#include "execute.h"
#include "paged_arguments.h"

namespace flashmoe::ops {
namespace {

std::tuple<> cache_append(const AppendArguments& a) {
  check_same_device({"key", &a.key}, {{"value", &a.value},
                                      {"k_cache", &a.k_cache},
                                      {"v_cache", &a.v_cache},
                                      {"slot_mapping", &a.slot_mapping},
                                      {"k_scale", pointer_to(a.k_scale)},
                                      {"v_scale", pointer_to(a.v_scale)}});
  AppendProblem problem;
  problem.device = device_of(a.key);
  problem.key = spec_of("key", a.key);
  problem.value = spec_of("value", a.value);
  problem.key_cache = cache_spec("k_cache", a.k_cache);
  problem.value_cache = cache_spec("v_cache", a.v_cache);
  problem.slots = spec_of("slot_mapping", a.slot_mapping);
  problem.k_scale = scale_spec("k_scale", a.k_scale);
  problem.v_scale = scale_spec("v_scale", a.v_scale);
  const auto plan = plan_or_fail<AppendPlan>(problem);

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
