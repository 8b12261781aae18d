#include "call.h"

#include "error.h"
#include "layout.h"

namespace flashmoe::ops {
namespace {

// A bias is read where it lies, but CUDA kernels do not read boolean masks: these become numbers in
// the query's dtype first, broadcast as they were.
std::optional<Placement> place_bias(const Arguments& a, const Device& device) {
  if (!a.bias) return std::nullopt;
  const TensorSpec outside = spec_of("bias", *a.bias);
  if (device.type != DeviceType::kCuda || outside.dtype != DType::kBool) {
    return Placement{outside, outside, false};
  }
  const DType dtype = spec_of("query", a.query).dtype;
  return Placement{outside, mask_as_numbers(outside, dtype, a.cu_seqlens_q.has_value()), true};
}

// Everything but query, key, value and what a pass adds. Lengths and sinks are read with whatever
// strides they have.
AttentionProblem problem_of(const Arguments& a, const Device& device) {
  AttentionProblem p;
  p.device = device;
  p.sinks = spec_of("sinks", a.sinks);
  p.key_lengths = spec_of("key_lengths", a.key_lengths);
  if (a.cu_seqlens_q.has_value() != a.cu_seqlens_k.has_value()) {
    fail("cu_seqlens_q and cu_seqlens_k must be given together");
  }
  if (a.cu_seqlens_q) {
    p.ragged = Ragged{spec_of("cu_seqlens_q", *a.cu_seqlens_q),
                      spec_of("cu_seqlens_k", *a.cu_seqlens_k), a.max_seqlen_q, a.max_seqlen_k};
  }
  p.options = a.options;
  // Other dtypes and the CPU know nothing of it: one plan for both.
  p.options.allow_tf32 &=
      device.type == DeviceType::kCuda && spec_of("query", a.query).dtype == DType::kFloat32;
  p.seed = spec_of("seed", a.seed);
  return p;
}

}  // namespace

TensorSpec out_spec(const TensorSpec& query, const TensorSpec& value) {
  if (query.rank == 0 || value.rank == 0) return {};  // the planner says what is wrong
  if (query.size(-1) == value.size(-1)) return packed_like(query);
  TensorSpec out = query;
  out.shape[out.rank - 1] = value.size(-1);
  return packed(out);
}

std::optional<TensorSpec> lse_spec(TensorSpec query) {
  if (query.rank == 0) return std::nullopt;
  --query.rank;
  query.shape[query.rank] = query.stride[query.rank] = 0;  // specs are compared as a whole
  query.dtype = query.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  return packed(query);
}

ForwardCall forward_call(const Arguments& a, const Device& device) {
  ForwardCall call;
  call.query = place("query", a.query, device, needs_copy);
  call.key = place("key", a.key, device, needs_copy);
  call.value = place("value", a.value, device, needs_copy);
  call.out = place(out_spec(call.query.outside, call.value.outside), device, needs_copy);

  call.bias = place_bias(a, device);

  call.problem = problem_of(a, device);
  call.problem.bias = inside(call.bias);
  call.problem.options.deterministic = false;  // it always is: one plan for both
  call.problem.query = call.query.inside;
  call.problem.key = call.key.inside;
  call.problem.value = call.value.inside;
  call.problem.out = call.out.inside;
  call.problem.lse = lse_spec(call.query.outside);
  return call;
}

BackwardCall backward_call(const Arguments& a, const BackwardInputs& in, const Device& device) {
  BackwardCall call;
  call.query = place("query", a.query, device, needs_copy);
  call.key = place("key", a.key, device, needs_copy);
  call.value = place("value", a.value, device, needs_copy);
  call.bias = place_bias(a, device);
  call.out = in.out;
  call.grad_out = in.grad_out;
  const auto gradient = [&](bool wanted, const Placement& of) -> std::optional<Placement> {
    if (!wanted) return std::nullopt;
    return place(packed_like(of.outside), device, needs_copy);
  };
  call.grad_query = gradient(in.needs_query, call.query);
  call.grad_key = gradient(in.needs_key, call.key);
  call.grad_value = gradient(in.needs_value, call.value);

  AttentionProblem& p = call.problem = problem_of(a, device);
  p.bias = inside(call.bias);
  if (in.needs_bias && p.bias) call.grad_bias = packed_like(call.bias->outside);
  if (in.needs_sinks && p.sinks) p.grad_sinks = packed_like(*p.sinks);
  p.pass = Pass::kBackward;
  p.query = call.query.inside;
  p.key = call.key.inside;
  p.value = call.value.inside;
  p.out = call.out.inside;
  p.lse = in.lse;
  p.grad_out = inside(call.grad_out);
  p.grad_lse = in.grad_lse;
  p.grad_query = inside(call.grad_query);
  p.grad_key = inside(call.grad_key);
  p.grad_value = inside(call.grad_value);
  p.grad_bias = call.grad_bias;
  return call;
}

TangentPlacements place_tangents(const Tangents& tangents, const Device& device,
                                 AttentionProblem& problem) {
  const TangentPlacements there = {
      .query = place("tangent_query", tangents.query, device, needs_copy),
      .key = place("tangent_key", tangents.key, device, needs_copy),
      .value = place("tangent_value", tangents.value, device, needs_copy)};
  problem.tangent_query = inside(there.query);
  problem.tangent_key = inside(there.key);
  problem.tangent_value = inside(there.value);
  problem.tangent_bias = spec_of("tangent_bias", tangents.bias);
  problem.tangent_sinks = spec_of("tangent_sinks", tangents.sinks);
  return there;
}

Tangents bring_in(const Tangents& tangents, const TangentPlacements& placements,
                  AttentionTensors& tensors) {
  const Tangents there = {.query = bring_in(tangents.query, placements.query),
                          .key = bring_in(tangents.key, placements.key),
                          .value = bring_in(tangents.value, placements.value),
                          .bias = start_aligned(tangents.bias),
                          .sinks = tangents.sinks};
  tensors.tangent_query = data_of(there.query);
  tensors.tangent_key = data_of(there.key);
  tensors.tangent_value = data_of(there.value);
  tensors.tangent_bias = data_of(there.bias);
  tensors.tangent_sinks = data_of(there.sinks);
  return there;
}

}  // namespace flashmoe::ops
