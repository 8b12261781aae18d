// The torch ops: torch tensors to a problem, plan, run. Nothing but conversion, and only torch's
// stable ABI, so that one binary serves every torch from 2.10 on.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>

#include "flashmoe/attention.h"

namespace flashmoe {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// The Python border: from here on an error is an exception, RuntimeError in Python.
[[noreturn]] void fail(const std::string& message) { throw std::runtime_error(message); }

void raise_if_error(const Status& status) {
  if (!status.ok()) fail(status.message());
}

DType dtype_of(const char* name, const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Double:
      return DType::kFloat64;
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::Half:
      return DType::kFloat16;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Int:
      return DType::kInt32;
    case ScalarType::Long:
      return DType::kInt64;
    default:
      fail(std::string(name) + " has dtype torch." +
           torch::headeronly::toString(tensor.scalar_type()) +
           "; attention works in float64, float32, float16 and bfloat16, with int32 or int64 "
           "lengths");
  }
}

TensorSpec spec_of(const char* name, const Tensor& tensor) {
  TensorSpec spec;
  spec.dtype = dtype_of(name, tensor);
  if (tensor.dim() > kMaxRank) {
    fail(std::string(name) + " has " + std::to_string(tensor.dim()) + " dimensions; at most " +
         std::to_string(kMaxRank) + " are supported");
  }
  spec.rank = static_cast<int>(tensor.dim());
  for (int i = 0; i < spec.rank; ++i) {
    spec.shape[i] = tensor.size(i);
    spec.stride[i] = tensor.stride(i);
  }
  return spec;
}

std::optional<TensorSpec> spec_of(const char* name, const OptionalTensor& tensor) {
  return tensor ? std::optional(spec_of(name, *tensor)) : std::nullopt;
}

const void* data_of(const OptionalTensor& tensor) {
  return tensor ? tensor->const_data_ptr() : nullptr;
}

int device_type(const Tensor& tensor) {
  int32_t type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &type));
  return type;
}

// The arguments every attention op has, in the order of the schema.
struct Arguments {
  const Tensor &query, &key, &value;
  const OptionalTensor &bias, &key_lengths, &cu_seqlens_q, &cu_seqlens_k;
  int64_t max_seqlen_q, max_seqlen_k;
  bool causal;
  int64_t window_left, window_right;
  std::optional<double> scale;
  double softcap;
};

void check_same_device(const Arguments& a) {
  const auto check = [&](const char* name, const Tensor& tensor) {
    if (device_type(tensor) != device_type(a.query) ||
        tensor.get_device_index() != a.query.get_device_index()) {
      fail(std::string(name) + " is on another device than query; move it with .to(query.device)");
    }
  };
  check("key", a.key);
  check("value", a.value);
  if (a.bias) check("bias", *a.bias);
  if (a.key_lengths) check("key_lengths", *a.key_lengths);
  if (a.cu_seqlens_q) check("cu_seqlens_q", *a.cu_seqlens_q);
  if (a.cu_seqlens_k) check("cu_seqlens_k", *a.cu_seqlens_k);
}

// All of the problem but its results.
AttentionProblem problem_of(const Arguments& a) {
  check_same_device(a);
  AttentionProblem p;
  if (a.query.is_cuda()) p.device.type = DeviceType::kCuda;
  p.device.num_threads = static_cast<int>(torch::stable::get_num_threads());
  p.query = spec_of("query", a.query);
  p.key = spec_of("key", a.key);
  p.value = spec_of("value", a.value);
  p.bias = spec_of("bias", a.bias);
  p.key_lengths = spec_of("key_lengths", a.key_lengths);
  if (a.cu_seqlens_q.has_value() != a.cu_seqlens_k.has_value()) {
    fail("cu_seqlens_q and cu_seqlens_k must be given together");
  }
  if (a.cu_seqlens_q) {
    p.ragged = Ragged{spec_of("cu_seqlens_q", *a.cu_seqlens_q),
                      spec_of("cu_seqlens_k", *a.cu_seqlens_k), a.max_seqlen_q, a.max_seqlen_k};
  }
  p.causal = a.causal;
  p.window_left = a.window_left;
  p.window_right = a.window_right;
  p.scale = a.scale;
  p.softcap = a.softcap;
  return p;
}

AttentionTensors tensors_of(const Arguments& a) {
  AttentionTensors t;
  t.query = a.query.const_data_ptr();
  t.key = a.key.const_data_ptr();
  t.value = a.value.const_data_ptr();
  t.bias = data_of(a.bias);
  t.key_lengths = data_of(a.key_lengths);
  t.cu_seqlens_q = data_of(a.cu_seqlens_q);
  t.cu_seqlens_k = data_of(a.cu_seqlens_k);
  return t;
}

// Specs of the results as a fresh contiguous tensor would have them, for planning before
// allocating.
TensorSpec result_spec(TensorSpec like, int rank, std::initializer_list<int64_t> tail,
                       DType dtype) {
  like.rank = rank;
  for (int64_t size : tail) like.shape[like.rank++] = size;
  like.dtype = dtype;
  int64_t step = 1;
  for (int i = like.rank - 1; i >= 0; --i) {
    like.stride[i] = step;
    step *= like.shape[i] > 0 ? like.shape[i] : 1;
  }
  return like;
}

DType lse_dtype(const AttentionProblem& p) {
  return p.query.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

void add_result_specs(AttentionProblem& p) {
  const int rank = p.query.rank;
  if (rank < 1 || p.value.rank < 1) return;  // the planner says what is wrong
  p.out = result_spec(p.query, rank - 1, {p.value.size(-1)}, p.query.dtype);
  p.lse = result_spec(p.query, rank - 1, {}, lse_dtype(p));
}

AttentionPlan plan_or_fail(const AttentionProblem& problem) {
  Result<AttentionPlan> result = plan(problem);
  raise_if_error(result.status());
  return std::move(result.value());
}

void run_or_fail(const AttentionPlan& plan, const AttentionTensors& tensors, const Tensor& like) {
  const int64_t bytes = static_cast<int64_t>(plan.workspace_bytes);
  const Tensor workspace = torch::stable::new_empty(like, {bytes}, ScalarType::Byte);
  Launch launch;
  launch.parallel = [](int tasks, const std::function<void(int)>& task) {
    torch::stable::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) task(static_cast<int>(i));
    });
  };
  raise_if_error(run(plan, tensors, workspace.mutable_data_ptr(), launch));
}

torch::headeronly::IntHeaderOnlyArrayRef sizes_of(const TensorSpec& spec) {
  return {spec.shape.data(), static_cast<size_t>(spec.rank)};
}

std::tuple<Tensor, Tensor> attention_forward(
    const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& bias,
    const OptionalTensor& key_lengths, const OptionalTensor& cu_seqlens_q,
    const OptionalTensor& cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k, bool causal,
    int64_t window_left, int64_t window_right, std::optional<double> scale, double softcap) {
  const Arguments a{query,        key,          value,        bias,         key_lengths,
                    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal,
                    window_left,  window_right, scale,        softcap};
  AttentionProblem problem = problem_of(a);
  add_result_specs(problem);
  raise_if_error(plan(problem).status());  // refuse before anything is allocated

  // Like the query's layout, so that (B, S, H, D) storage in gives the same storage out.
  const bool same_dim = problem.query.size(-1) == problem.value.size(-1);
  Tensor out = same_dim ? torch::stable::empty_like(query)
                        : torch::stable::new_empty(query, sizes_of(problem.out));
  Tensor lse = torch::stable::new_empty(
      query, sizes_of(*problem.lse),
      lse_dtype(problem) == DType::kFloat64 ? ScalarType::Double : ScalarType::Float);
  problem.out = spec_of("out", out);
  problem.lse = spec_of("lse", lse);

  AttentionTensors tensors = tensors_of(a);
  tensors.out = out.mutable_data_ptr();
  tensors.lse = lse.mutable_data_ptr();
  run_or_fail(plan_or_fail(problem), tensors, query);
  return {out, lse};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const OptionalTensor& grad_out, const OptionalTensor& grad_lse, const Tensor& query,
    const Tensor& key, const Tensor& value, const OptionalTensor& bias,
    const OptionalTensor& key_lengths, const OptionalTensor& cu_seqlens_q,
    const OptionalTensor& cu_seqlens_k, const Tensor& out, const Tensor& lse, int64_t max_seqlen_q,
    int64_t max_seqlen_k, bool causal, int64_t window_left, int64_t window_right,
    std::optional<double> scale, double softcap, bool deterministic, bool needs_query,
    bool needs_key, bool needs_value, bool needs_bias) {
  const Arguments a{query,        key,          value,        bias,         key_lengths,
                    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal,
                    window_left,  window_right, scale,        softcap};
  AttentionProblem problem = problem_of(a);
  problem.pass = Pass::kBackward;
  problem.deterministic = deterministic;
  problem.out = spec_of("out", out);
  problem.lse = spec_of("lse", lse);
  problem.grad_out = spec_of("grad_out", grad_out);
  problem.grad_lse = spec_of("grad_lse", grad_lse);
  raise_if_error(plan(problem).status());

  AttentionTensors tensors = tensors_of(a);
  tensors.out = const_cast<void*>(out.const_data_ptr());
  tensors.lse = const_cast<void*>(lse.const_data_ptr());
  tensors.grad_out = data_of(grad_out);
  tensors.grad_lse = data_of(grad_lse);
  // A gradient nobody needs is an empty tensor.
  const auto gradient = [&](bool needed, const Tensor& like, std::optional<TensorSpec>& spec,
                            void*& data) {
    if (!needed) return torch::stable::new_empty(like, {0});
    Tensor grad = torch::stable::empty_like(like);
    spec = spec_of("gradient", grad);
    data = grad.mutable_data_ptr();
    return grad;
  };
  Tensor dq = gradient(needs_query, query, problem.grad_query, tensors.grad_query);
  Tensor dk = gradient(needs_key, key, problem.grad_key, tensors.grad_key);
  Tensor dv = gradient(needs_value, value, problem.grad_value, tensors.grad_value);
  Tensor db =
      gradient(needs_bias && bias, bias ? *bias : query, problem.grad_bias, tensors.grad_bias);
  run_or_fail(plan_or_fail(problem), tensors, query);
  return {dq, dk, dv, db};
}

// `device` "" is the tensors' own; "cpu" and "sm_90" ask for another machine.
Device device_named(const std::string& name, const Tensor& query) {
  Device device;
  device.num_threads = static_cast<int>(torch::stable::get_num_threads());
  if (name == "cpu") return device;
  if (name.rfind("sm_", 0) == 0 && name.size() >= 5 &&
      name.find_first_not_of("0123456789", 3) == std::string::npos) {
    device.type = DeviceType::kCuda;
    device.compute_capability = std::stoi(name.substr(3, 4));
    return device;
  }
  if (!name.empty()) fail("device is '" + name + "'; it must be 'cpu' or a chip like 'sm_90'");
  if (query.is_cuda()) device.type = DeviceType::kCuda;
  return device;
}

std::string explain_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                              const OptionalTensor& bias, const OptionalTensor& key_lengths,
                              const OptionalTensor& cu_seqlens_q,
                              const OptionalTensor& cu_seqlens_k, int64_t max_seqlen_q,
                              int64_t max_seqlen_k, bool causal, int64_t window_left,
                              int64_t window_right, std::optional<double> scale, double softcap,
                              bool backward, bool deterministic, std::string device) {
  const Arguments a{query,        key,          value,        bias,         key_lengths,
                    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal,
                    window_left,  window_right, scale,        softcap};
  AttentionProblem problem = problem_of(a);
  problem.device = device_named(device, query);
  problem.deterministic = deterministic;
  add_result_specs(problem);
  if (backward) {
    problem.pass = Pass::kBackward;
    problem.grad_out = problem.out;
    problem.grad_query = result_spec(problem.query, problem.query.rank, {}, problem.query.dtype);
    problem.grad_key = result_spec(problem.key, problem.key.rank, {}, problem.key.dtype);
    problem.grad_value = result_spec(problem.value, problem.value.rank, {}, problem.value.dtype);
    if (problem.bias)
      problem.grad_bias = result_spec(*problem.bias, problem.bias->rank, {}, problem.bias->dtype);
  }
  raise_if_error(plan(problem).status());
  return explain(problem);
}

// JSON, for `doctor` and the benchmark's records.
std::string build_info() {
  std::string targets;
  for (const std::string& name : cpu_targets())
    targets += (targets.empty() ? "\"" : ", \"") + name + "\"";
  return std::string("{\"version\": \"") + version() + "\", \"cpu_target\": \"" + cpu_target() +
         "\", \"cpu_targets\": [" + targets + "], \"families\": []}";
}

}  // namespace
}  // namespace flashmoe

// The arguments of Arguments, in its order.
#define FLASHMOE_TENSORS                                                        \
  "Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? key_lengths, " \
  "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
#define FLASHMOE_OPTIONS                                                        \
  "SymInt max_seqlen_q, SymInt max_seqlen_k, bool causal, SymInt window_left, " \
  "SymInt window_right, float? scale, float softcap"

STABLE_TORCH_LIBRARY(flashmoe, m) {
  m.def("attention_forward(" FLASHMOE_TENSORS FLASHMOE_OPTIONS ") -> (Tensor out, Tensor lse)");
  m.def("attention_backward(Tensor? grad_out, Tensor? grad_lse, " FLASHMOE_TENSORS
        "Tensor out, Tensor lse, " FLASHMOE_OPTIONS
        ", bool deterministic, bool needs_query, bool needs_key, bool needs_value, bool needs_bias)"
        " -> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_bias)");
  m.def("explain(" FLASHMOE_TENSORS FLASHMOE_OPTIONS
        ", bool backward, bool deterministic, str device) -> str");
  m.def("build_info() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(flashmoe, CPU, m) {
  m.impl("attention_forward", TORCH_BOX(&flashmoe::attention_forward));
  m.impl("attention_backward", TORCH_BOX(&flashmoe::attention_backward));
}

// CUDA tensors come here too: the planner says what can run there, and why not.
STABLE_TORCH_LIBRARY_IMPL(flashmoe, CUDA, m) {
  m.impl("attention_forward", TORCH_BOX(&flashmoe::attention_forward));
  m.impl("attention_backward", TORCH_BOX(&flashmoe::attention_backward));
}

// Questions about shapes; meta tensors do.
STABLE_TORCH_LIBRARY_IMPL(flashmoe, CompositeExplicitAutograd, m) {
  m.impl("explain", TORCH_BOX(&flashmoe::explain_attention));
  m.impl("build_info", TORCH_BOX(&flashmoe::build_info));
}
