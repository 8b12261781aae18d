// Attention over pages. Results go where the caller wants them, so that a call with memory for them
// allocates none but its workspace.
#include <tuple>

#include "execute.h"
#include "paged_call.h"

namespace flashmoe::ops {
namespace {

void check_devices(const PagedForwardArguments& f) {
  const PagedArguments& a = f.call;
  check_same_device({"query", &a.query}, {{"k_cache", &a.k_cache},
                                          {"v_cache", &a.v_cache},
                                          {"block_table", &a.block_table},
                                          {"seq_lens", &a.seq_lens},
                                          {"cu_seqlens_q", pointer_to(a.cu_seqlens_q)},
                                          {"sinks", pointer_to(a.sinks)},
                                          {"k_scale", pointer_to(a.k_scale)},
                                          {"v_scale", pointer_to(a.v_scale)},
                                          {"out", &f.out},
                                          {"lse", pointer_to(f.lse)}});
}

std::tuple<> paged_forward(const PagedForwardArguments& f) {
  check_devices(f);
  const PagedArguments& a = f.call;
  const Device device = device_of(a.query);
  const PagedCall call =
      paged_call(a, place("out", f.out, device, needs_copy), spec_of("lse", f.lse), device);
  // Refused before anything is copied or written.
  const auto plan = plan_or_fail<AttentionPlan>(call.problem);

  const Tensor query = bring_in(a.query, call.query);
  const Tensor out = room_for(f.out, call.out);
  AttentionTensors tensors;
  tensors.query = query.const_data_ptr();
  tensors.key = a.k_cache.const_data_ptr();
  tensors.value = a.v_cache.const_data_ptr();
  tensors.cu_seqlens_q = data_of(a.cu_seqlens_q);
  tensors.sinks = data_of(a.sinks);
  tensors.block_table = a.block_table.const_data_ptr();
  tensors.seq_lens = a.seq_lens.const_data_ptr();
  tensors.k_scale = data_of(a.k_scale);
  tensors.v_scale = data_of(a.v_scale);
  tensors.out = out.mutable_data_ptr();
  if (f.lse) tensors.lse = f.lse->mutable_data_ptr();
  run_or_fail(*plan, tensors, a.query);
  take_back(out, f.out, call.out);
  return {};
}

}  // namespace
}  // namespace flashmoe::ops

STABLE_TORCH_LIBRARY_IMPL(flashmoe, CPU, m) {
  m.impl("attention_paged", flashmoe::ops::Boxed<flashmoe::ops::paged_forward>::call);
  m.impl("attention_paged_unchecked", flashmoe::ops::Boxed<flashmoe::ops::paged_forward>::call);
}

STABLE_TORCH_LIBRARY_IMPL(flashmoe, CUDA, m) {
  m.impl("attention_paged", flashmoe::ops::Boxed<flashmoe::ops::paged_forward>::call);
  m.impl("attention_paged_unchecked", flashmoe::ops::Boxed<flashmoe::ops::paged_forward>::call);
}
