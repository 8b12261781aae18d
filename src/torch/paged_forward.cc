// Attention over pages, with new memory for its results or with the caller's.
#include <tuple>

#include "execute.h"
#include "paged_call.h"

namespace flashmoe::ops {
namespace {

// `out` and `lse` are where the kernels write them; null is none.
void run_paged(const PagedArguments& a, const PagedCall& call, const AttentionPlan& plan, void* out,
               void* lse) {
  const Tensor query = bring_in(a.query, call.query);
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
  tensors.out = out;
  tensors.lse = lse;
  run_or_fail(plan, tensors, a.query);
}

std::tuple<Tensor, Tensor> paged_forward(const PagedForwardArguments& f) {
  const PagedArguments& a = f.call;
  check_same_device(a);
  const PagedCall call = paged_call(f, device_of(a.query));
  // Refused before anything is copied or allocated.
  const auto plan = plan_or_fail<AttentionPlan>(call.problem);
  const Tensor out = allocate(call.problem.out, a.query);
  const Tensor lse = allocate(call.problem.lse.value_or(contiguous(DType::kFloat32, {0})), a.query);
  run_paged(a, call, *plan, out.mutable_data_ptr(),
            f.return_lse ? lse.mutable_data_ptr() : nullptr);
  return {hand_out(out, call.out), lse};
}

// Allocates nothing but its workspace, where kernels can write to `out` as it lies.
std::tuple<> paged_out(const PagedOutArguments& f) {
  const PagedArguments& a = f.call;
  check_same_device(a, {{"out", &f.out}, {"lse", pointer_to(f.lse)}});
  const Device device = device_of(a.query);
  const Placement placement = place("out", f.out, device, needs_copy);
  const PagedCall call = paged_call(a, placement, spec_of("lse", f.lse), device);
  const auto plan = plan_or_fail<AttentionPlan>(call.problem);
  const Tensor out = room_for(f.out, placement);
  run_paged(a, call, *plan, out.mutable_data_ptr(), f.lse ? f.lse->mutable_data_ptr() : nullptr);
  take_back(out, f.out, placement);
  return {};
}

using Forward = Boxed<paged_forward>;
using Out = Boxed<paged_out>;

}  // namespace
}  // namespace flashmoe::ops

STABLE_TORCH_LIBRARY_IMPL(flashmoe, CPU, m) {
  m.impl("attention_paged", flashmoe::ops::Forward::call);
  m.impl("attention_paged_unchecked", flashmoe::ops::Forward::call);
  m.impl("attention_paged_out", flashmoe::ops::Out::call);
  m.impl("attention_paged_out_unchecked", flashmoe::ops::Out::call);
}

STABLE_TORCH_LIBRARY_IMPL(flashmoe, CUDA, m) {
  m.impl("attention_paged", flashmoe::ops::Forward::call);
  m.impl("attention_paged_unchecked", flashmoe::ops::Forward::call);
  m.impl("attention_paged_out", flashmoe::ops::Out::call);
  m.impl("attention_paged_out_unchecked", flashmoe::ops::Out::call);
}
