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

// Not in a torch without CUDA: weak, and asked for only when there is a CUDA tensor.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device,
                                                                                   void** stream);

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
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  for (int i = 0; i < spec.rank; ++i) {
    spec.shape[i] = sizes[i];
    spec.stride[i] = strides[i];
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

// Where a tensor lives, as the planner wants to know it.
Device device_of(const Tensor& tensor) {
  Device device;
  if (!tensor.is_cuda()) {
    device.num_threads = static_cast<int>(torch::stable::get_num_threads());
    return device;
  }
  // Asked anew each time: in a forked process the answer is an error, before torch touches the
  // device.
  const Result<std::vector<Device>> found = cuda_devices();
  raise_if_error(found.status());
  const int ordinal = tensor.get_device_index();
  if (ordinal < 0 || ordinal >= static_cast<int>(found.value().size())) {
    fail("query is on cuda:" + std::to_string(ordinal) + ", and the driver shows " +
         std::to_string(found.value().size()) + " devices");
  }
  return found.value()[ordinal];
}

// torch's current stream on the tensor's device; null on the CPU.
void* stream_of(const Tensor& tensor) {
  if (!tensor.is_cuda() || !aoti_torch_get_current_cuda_stream) return nullptr;
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return stream;
}

// The tensor, or a contiguous copy of it where the device's kernels cannot use it as it lies.
Tensor usable(const char* name, const Tensor& tensor, const Device& device) {
  if (device.type == DeviceType::kCpu) return tensor;
  const bool aligned = reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0;
  if (aligned && !needs_copy(spec_of(name, tensor), device)) return tensor;
  Tensor copy = torch::stable::new_empty(tensor, tensor.sizes());
  torch::stable::copy_(copy, tensor);
  return copy;
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

using Named = std::pair<const char*, const Tensor*>;
using NamedOptional = std::pair<const char*, const OptionalTensor*>;

void check_same_device(const Tensor& query, std::initializer_list<Named> tensors,
                       std::initializer_list<NamedOptional> optionals) {
  const int type = device_type(query), index = query.get_device_index();
  const auto check = [&](const char* name, const Tensor& tensor) {
    if (device_type(tensor) != type || tensor.get_device_index() != index) {
      fail(std::string(name) + " is on another device than query; move it with .to(query.device)");
    }
  };
  for (const auto& [name, tensor] : tensors) check(name, *tensor);
  for (const auto& [name, tensor] : optionals) {
    if (*tensor) check(name, **tensor);
  }
}

// All of the problem but its results.
AttentionProblem problem_of(const Arguments& a, const Device& device) {
  AttentionProblem p;
  p.device = device;
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

// A gradient as it will be allocated, where it is wanted and there is something to differentiate.
std::optional<TensorSpec> fresh_spec(bool wanted, const std::optional<TensorSpec>& like) {
  if (!wanted || !like) return std::nullopt;
  return result_spec(*like, like->rank, {}, like->dtype);
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

// The plan of a problem, made once and kept for the next calls alike: a model asks for the same few
// over and over. One small cache per thread, so that no call waits for another.
AttentionPlan& plan_or_fail(const AttentionProblem& problem) {
  struct Entry {
    AttentionProblem problem;
    AttentionPlan plan;
  };
  constexpr size_t kEntries = 16;
  thread_local std::vector<Entry> entries;
  thread_local size_t oldest = 0;
  for (Entry& entry : entries) {
    if (entry.problem == problem) return entry.plan;
  }
  Result<AttentionPlan> result = plan(problem);
  raise_if_error(result.status());
  if (entries.size() < kEntries) {
    entries.push_back({problem, std::move(result.value())});
    return entries.back().plan;
  }
  Entry& entry = entries[oldest++ % kEntries];
  entry = {problem, std::move(result.value())};
  return entry.plan;
}

void run_or_fail(const AttentionPlan& plan, const AttentionTensors& tensors, const Tensor& like) {
  Launch launch;
  launch.stream = stream_of(like);
  if (plan.workspace_bytes == 0) {
    raise_if_error(run(plan, tensors, nullptr, launch));
    return;
  }
  const int64_t bytes = static_cast<int64_t>(plan.workspace_bytes);
  const Tensor workspace = torch::stable::new_empty(like, {bytes}, ScalarType::Byte);
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
  check_same_device(query, {{"key", &key}, {"value", &value}},
                    {{"bias", &bias},
                     {"key_lengths", &key_lengths},
                     {"cu_seqlens_q", &cu_seqlens_q},
                     {"cu_seqlens_k", &cu_seqlens_k}});
  const Device device = device_of(query);
  const Tensor q = usable("query", query, device), k = usable("key", key, device),
               v = usable("value", value, device);
  const Arguments a{q,
                    k,
                    v,
                    bias,
                    key_lengths,
                    cu_seqlens_q,
                    cu_seqlens_k,
                    max_seqlen_q,
                    max_seqlen_k,
                    causal,
                    window_left,
                    window_right,
                    scale,
                    softcap};
  AttentionProblem problem = problem_of(a, device);
  add_result_specs(problem);
  AttentionPlan& plan = plan_or_fail(problem);  // refused before anything is allocated

  // Like the query's layout, so that (B, S, H, D) storage in gives the same storage out.
  const bool same_dim = plan.head_dim == plan.head_dim_v;
  Tensor out = same_dim ? torch::stable::empty_like(query)
                        : torch::stable::new_empty(query, sizes_of(problem.out));
  Tensor lse = torch::stable::new_empty(
      query, sizes_of(*problem.lse),
      problem.lse->dtype == DType::kFloat64 ? ScalarType::Double : ScalarType::Float);
  const bool through_copy = needs_copy(spec_of("out", out), device);
  const Tensor target = through_copy ? torch::stable::new_empty(query, sizes_of(problem.out)) : out;
  plan.problem.out = spec_of("out", target);

  AttentionTensors tensors = tensors_of(a);
  tensors.out = target.mutable_data_ptr();
  tensors.lse = lse.mutable_data_ptr();
  run_or_fail(plan, tensors, query);
  if (through_copy) torch::stable::copy_(out, target);
  return {out, lse};
}

// attention_forward under the name that has autograd (registered in Python): what traced graphs
// hold.
std::tuple<Tensor, Tensor> attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                     const OptionalTensor& bias, const OptionalTensor& key_lengths,
                                     const OptionalTensor& cu_seqlens_q,
                                     const OptionalTensor& cu_seqlens_k, int64_t max_seqlen_q,
                                     int64_t max_seqlen_k, bool causal, int64_t window_left,
                                     int64_t window_right, std::optional<double> scale,
                                     double softcap, bool) {
  return attention_forward(query, key, value, bias, key_lengths, cu_seqlens_q, cu_seqlens_k,
                           max_seqlen_q, max_seqlen_k, causal, window_left, window_right, scale,
                           softcap);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const OptionalTensor& grad_out, const OptionalTensor& grad_lse, const Tensor& query,
    const Tensor& key, const Tensor& value, const OptionalTensor& bias,
    const OptionalTensor& key_lengths, const OptionalTensor& cu_seqlens_q,
    const OptionalTensor& cu_seqlens_k, const Tensor& out, const Tensor& lse, int64_t max_seqlen_q,
    int64_t max_seqlen_k, bool causal, int64_t window_left, int64_t window_right,
    std::optional<double> scale, double softcap, bool deterministic, bool needs_query,
    bool needs_key, bool needs_value, bool needs_bias) {
  check_same_device(query, {{"key", &key}, {"value", &value}, {"out", &out}, {"lse", &lse}},
                    {{"bias", &bias},
                     {"key_lengths", &key_lengths},
                     {"cu_seqlens_q", &cu_seqlens_q},
                     {"cu_seqlens_k", &cu_seqlens_k},
                     {"grad_out", &grad_out},
                     {"grad_lse", &grad_lse}});
  const Arguments a{query,        key,          value,        bias,         key_lengths,
                    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal,
                    window_left,  window_right, scale,        softcap};
  AttentionProblem problem = problem_of(a, device_of(query));
  problem.pass = Pass::kBackward;
  problem.deterministic = deterministic;
  problem.out = spec_of("out", out);
  problem.lse = spec_of("lse", lse);
  problem.grad_out = spec_of("grad_out", grad_out);
  problem.grad_lse = spec_of("grad_lse", grad_lse);
  problem.grad_query = fresh_spec(needs_query, problem.query);
  problem.grad_key = fresh_spec(needs_key, problem.key);
  problem.grad_value = fresh_spec(needs_value, problem.value);
  problem.grad_bias = fresh_spec(needs_bias, problem.bias);
  AttentionPlan& plan = plan_or_fail(problem);

  AttentionTensors tensors = tensors_of(a);
  tensors.out = const_cast<void*>(out.const_data_ptr());
  tensors.lse = const_cast<void*>(lse.const_data_ptr());
  tensors.grad_out = data_of(grad_out);
  tensors.grad_lse = data_of(grad_lse);
  // A gradient nobody needs is an empty tensor.
  const auto gradient = [](const Tensor& like, std::optional<TensorSpec>& spec, void*& data) {
    if (!spec) return torch::stable::new_empty(like, {0});
    Tensor grad = torch::stable::empty_like(like);
    spec = spec_of("gradient", grad);
    data = grad.mutable_data_ptr();
    return grad;
  };
  Tensor dq = gradient(query, plan.problem.grad_query, tensors.grad_query);
  Tensor dk = gradient(key, plan.problem.grad_key, tensors.grad_key);
  Tensor dv = gradient(value, plan.problem.grad_value, tensors.grad_value);
  Tensor db = gradient(bias ? *bias : query, plan.problem.grad_bias, tensors.grad_bias);
  run_or_fail(plan, tensors, query);
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
  return device_of(query);
}

// A tensor as it would be after the copy it needs; the copied ones' names are gathered.
TensorSpec spec_after_copy(const char* name, const Tensor& tensor, const Device& device,
                           std::string& copied) {
  const TensorSpec spec = spec_of(name, tensor);
  if (!needs_copy(spec, device)) return spec;
  copied += (copied.empty() ? "" : ", ") + std::string(name);
  return result_spec(spec, spec.rank, {}, spec.dtype);
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
  const Device where = device_named(device, query);
  AttentionProblem problem = problem_of(a, where);
  std::string copied;
  problem.query = spec_after_copy("query", query, where, copied);
  problem.key = spec_after_copy("key", key, where, copied);
  problem.value = spec_after_copy("value", value, where, copied);
  problem.deterministic = deterministic;
  add_result_specs(problem);
  if (backward) {
    problem.pass = Pass::kBackward;
    problem.grad_out = problem.out;
    problem.grad_query = fresh_spec(true, problem.query);
    problem.grad_key = fresh_spec(true, problem.key);
    problem.grad_value = fresh_spec(true, problem.value);
    problem.grad_bias = fresh_spec(true, problem.bias);
  }
  raise_if_error(plan(problem).status());
  return explain(problem) + "  copies     " +
         (copied.empty() ? "none" : copied + ", made contiguous once") + "\n";
}

std::string quoted(const std::string& text) { return "\"" + text + "\""; }

std::string json_list(const std::vector<std::string>& items) {
  std::string list;
  for (const std::string& item : items) list += (list.empty() ? "" : ", ") + item;
  return "[" + list + "]";
}

std::string json_kernel(const CudaKernel& k) {
  const auto number = [](const char* name, int value) {
    return ", " + quoted(name) + ": " + std::to_string(value);
  };
  return "{\"name\": " + quoted(k.name) + ", \"family\": " + quoted(k.family) +
         ", \"image\": " + quoted(k.image) + ", \"dtype\": " + quoted(dtype_name(k.dtype)) +
         ", \"causal\": " + (k.causal ? "true" : "false") + number("head_dim", k.head_dim) +
         number("block_q", k.block_q) + number("block_k", k.block_k) +
         number("threads", k.threads) + number("shared_bytes", k.shared_bytes) + "}";
}

// JSON, for `doctor` and the benchmark's records.
std::string build_info() {
  std::vector<std::string> targets, families, kernels;
  for (const std::string& name : cpu_targets()) targets.push_back(quoted(name));
  for (const CudaKernel& k : cuda_kernels()) {
    if (families.empty() || families.back() != quoted(k.family))
      families.push_back(quoted(k.family));
    kernels.push_back(json_kernel(k));
  }
  const auto devices = cuda_devices();
  return "{\"version\": " + quoted(version()) + ", \"cpu_target\": " + quoted(cpu_target()) +
         ", \"cpu_targets\": " + json_list(targets) + ", \"families\": " + json_list(families) +
         ", \"kernels\": " + json_list(kernels) +
         ", \"cuda_problem\": " + quoted(devices.ok() ? "" : devices.status().message()) + "}";
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
  m.def("attention(" FLASHMOE_TENSORS FLASHMOE_OPTIONS
        ", bool deterministic) -> (Tensor out, Tensor lse)");
  m.def("attention_backward(Tensor? grad_out, Tensor? grad_lse, " FLASHMOE_TENSORS
        "Tensor out, Tensor lse, " FLASHMOE_OPTIONS
        ", bool deterministic, bool needs_query, bool needs_key, bool needs_value, bool needs_bias)"
        " -> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_bias)");
  m.def("explain(" FLASHMOE_TENSORS FLASHMOE_OPTIONS
        ", bool backward, bool deterministic, str device) -> str");
  m.def("build_info() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(flashmoe, CPU, m) {
  m.impl("attention", TORCH_BOX(&flashmoe::attention));
  m.impl("attention_forward", TORCH_BOX(&flashmoe::attention_forward));
  m.impl("attention_backward", TORCH_BOX(&flashmoe::attention_backward));
}

// CUDA tensors come here too: the planner says what can run there, and why not.
STABLE_TORCH_LIBRARY_IMPL(flashmoe, CUDA, m) {
  m.impl("attention", TORCH_BOX(&flashmoe::attention));
  m.impl("attention_forward", TORCH_BOX(&flashmoe::attention_forward));
  m.impl("attention_backward", TORCH_BOX(&flashmoe::attention_backward));
}

// Questions about shapes; meta tensors do.
STABLE_TORCH_LIBRARY_IMPL(flashmoe, CompositeExplicitAutograd, m) {
  m.impl("explain", TORCH_BOX(&flashmoe::explain_attention));
  m.impl("build_info", TORCH_BOX(&flashmoe::build_info));
}
