#include "flashmoe/c_api.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <memory>
#include <new>

#include "core/text.h"
#include "flashmoe/attention.h"

namespace flashmoe {
namespace {

constexpr std::align_val_t kWorkspaceAlignment{64};

struct FreeWorkspace {
  void operator()(void* memory) const { ::operator delete(memory, kWorkspaceAlignment); }
};

// Never allocates when it is cleared, so that success cannot fail.
thread_local std::string last_error;

int code_of(const Status& status) {
  switch (status.code()) {
    case StatusCode::kOk:
      return FLASH_ATTENTION_OK;
    case StatusCode::kInvalidArgument:
      return FLASH_ATTENTION_INVALID_ARGUMENT;
    case StatusCode::kUnsupported:
      return FLASH_ATTENTION_UNSUPPORTED;
  }
  return FLASH_ATTENTION_UNSUPPORTED;
}

// Runs `call`, which returns a Status, and keeps exceptions on this side of the border.
template <class Call>
int guarded(Call&& call) noexcept {
  last_error.clear();
  try {
    Status status = call();
    if (!status.ok()) last_error = status.message();
    return code_of(status);
  } catch (const std::bad_alloc&) {
    last_error = "out of memory";  // short enough to need none
    return FLASH_ATTENTION_OUT_OF_MEMORY;
  } catch (...) {
    last_error = "internal error";
    return FLASH_ATTENTION_INTERNAL_ERROR;
  }
}

Status check_struct_size(uint64_t struct_size) {
  if (struct_size == sizeof(flash_attention_args)) return {};
  return invalid("struct_size is ", struct_size, "; this library (version ", version(), ") has ",
                 sizeof(flash_attention_args),
                 ". Call flash_attention_args_init(&args, sizeof args), and use the header of the "
                 "library you link");
}

using Shape = std::array<int64_t, 4>;

TensorSpec spec_of(const flash_attention_tensor& tensor, DType dtype, const Shape& shape,
                   int rank = 4) {
  TensorSpec spec;
  spec.dtype = dtype;
  spec.rank = rank;
  std::copy_n(shape.begin(), rank, spec.shape.begin());
  std::copy_n(tensor.strides, rank, spec.stride.begin());
  if (std::any_of(tensor.strides, tensor.strides + rank, [](int64_t s) { return s != 0; })) {
    return spec;
  }
  int64_t step = 1;
  for (int i = rank - 1; i >= 0; --i) {
    spec.stride[i] = step;
    // Where this overflows the tensor has no elements, or plan() will say that it has too many.
    if (__builtin_mul_overflow(step, shape[i], &step)) step = std::numeric_limits<int64_t>::max();
  }
  return spec;
}

// Absent when the pointer is null.
std::optional<TensorSpec> optional_spec(const flash_attention_tensor& tensor, DType dtype,
                                        const Shape& shape, int rank = 4) {
  if (!tensor.data) return std::nullopt;
  return spec_of(tensor, dtype, shape, rank);
}

AttentionProblem problem_of(const flash_attention_args& a, DType dtype, Pass pass) {
  const Shape query{a.batch, a.heads_q, a.len_q, a.head_dim};
  const Shape key{a.batch, a.heads_k, a.len_k, a.head_dim};
  const Shape value{a.batch, a.heads_k, a.len_k, a.head_dim_v};
  const Shape out{a.batch, a.heads_q, a.len_q, a.head_dim_v};
  Shape bias{a.batch, a.heads_q, a.len_q, a.len_k};
  if (std::any_of(a.bias_shape, a.bias_shape + 4, [](int64_t n) { return n != 0; })) {
    std::copy_n(a.bias_shape, 4, bias.begin());
  }
  const DType bias_dtype = a.bias_dtype == FLASH_ATTENTION_BIAS_FP32 ? DType::kFloat32 : dtype;

  AttentionProblem p;
  p.pass = pass;
  p.query = spec_of(a.query, dtype, query);
  p.key = spec_of(a.key, dtype, key);
  p.value = spec_of(a.value, dtype, value);
  p.bias = optional_spec(a.bias, bias_dtype, bias);
  if (a.key_lengths) p.key_lengths = contiguous(DType::kInt32, {a.batch});
  p.out = spec_of(a.out, dtype, out);
  p.lse = optional_spec(a.lse, DType::kFloat32, out, 3);
  if (a.batch == 0 || a.len_q == 0)
    p.lse = spec_of(a.lse, DType::kFloat32, out, 3);  // needs no memory
  if (pass == Pass::kBackward) {
    p.grad_out = optional_spec(a.grad_out, dtype, out);
    p.grad_lse = optional_spec(a.grad_lse, DType::kFloat32, out, 3);
    p.grad_query = optional_spec(a.grad_query, dtype, query);
    p.grad_key = optional_spec(a.grad_key, dtype, key);
    p.grad_value = optional_spec(a.grad_value, dtype, value);
    p.grad_bias = optional_spec(a.grad_bias, bias_dtype, bias);
  }
  p.options = {.causal = a.causal != 0,
               .window_left = a.window_left,
               .window_right = a.window_right,
               .scale = a.has_scale ? std::optional(a.scale) : std::nullopt,
               .softcap = a.softcap,
               .deterministic = a.deterministic != 0};
  return p;
}

AttentionTensors tensors_of(const flash_attention_args& a) {
  AttentionTensors t;
  t.query = a.query.data;
  t.key = a.key.data;
  t.value = a.value.data;
  t.bias = a.bias.data;
  t.key_lengths = a.key_lengths;
  t.out = a.out.data;
  t.lse = a.lse.data;
  t.grad_out = a.grad_out.data;
  t.grad_lse = a.grad_lse.data;
  t.grad_query = a.grad_query.data;
  t.grad_key = a.grad_key.data;
  t.grad_value = a.grad_value.data;
  t.grad_bias = a.grad_bias.data;
  return t;
}

// What plan() cannot see: values that C lets through and AttentionProblem cannot hold.
Result<AttentionPlan> plan_of(const flash_attention_args* args, DType dtype, Pass pass) {
  if (!args) return invalid("args is NULL");
  if (Status status = check_struct_size(args->struct_size); !status.ok()) return status;
  if (args->bias_dtype != FLASH_ATTENTION_BIAS_LIKE_INPUT &&
      args->bias_dtype != FLASH_ATTENTION_BIAS_FP32) {
    return invalid("bias_dtype is ", args->bias_dtype,
                   "; it must be FLASH_ATTENTION_BIAS_LIKE_INPUT (0) or _BIAS_FP32 (1)");
  }
  const int64_t* bias_end = args->bias_shape + 4;
  if (!args->bias.data && std::find(args->bias_shape, bias_end, 0) == bias_end) {
    return invalid("bias_shape is given, but bias.data is NULL");
  }
  if (args->device < FLASH_ATTENTION_HOST) {
    return invalid("device is ", args->device, "; it must be -1 for host memory, or a CUDA device");
  }
  AttentionProblem problem = problem_of(*args, dtype, pass);
  if (args->device != FLASH_ATTENTION_HOST) {
    const Result<std::vector<Device>> devices = cuda_devices();
    if (!devices.ok()) return devices.status();
    if (args->device >= static_cast<int64_t>(devices.value().size())) {
      return invalid("device is ", args->device, "; the driver shows ", devices.value().size());
    }
    problem.device = devices.value()[args->device];
  }
  return plan(problem);
}

Status run_with_workspace(const AttentionPlan& plan, const flash_attention_args& args) {
  const AttentionTensors tensors = tensors_of(args);
  const Launch launch{.stream = args.stream};
  if (args.workspace) {
    if (args.workspace_bytes < plan.workspace_bytes) {
      return invalid("workspace_bytes is ", args.workspace_bytes, "; this call needs ",
                     plan.workspace_bytes);
    }
    if (reinterpret_cast<uintptr_t>(args.workspace) % static_cast<size_t>(kWorkspaceAlignment)) {
      return invalid("workspace is not 64-byte aligned");
    }
    return run(plan, tensors, args.workspace, launch);
  }
  if (plan.workspace_bytes == 0) return run(plan, tensors, nullptr, launch);
  if (plan.problem.device.type == DeviceType::kCuda) {
    return invalid("workspace is NULL; this call needs ", plan.workspace_bytes,
                   " bytes of device memory");
  }
  const std::unique_ptr<void, FreeWorkspace> workspace(
      ::operator new(plan.workspace_bytes, kWorkspaceAlignment));
  return run(plan, tensors, workspace.get(), launch);
}

int call(const flash_attention_args* args, DType dtype, Pass pass) noexcept {
  return guarded([&]() -> Status {
    const Result<AttentionPlan> plan = plan_of(args, dtype, pass);
    if (!plan.ok()) return plan.status();
    return run_with_workspace(plan.value(), *args);
  });
}

}  // namespace

const char* version() { return FLASHMOE_VERSION; }

}  // namespace flashmoe

using flashmoe::DType;
using flashmoe::Pass;

int flash_attention_args_init(flash_attention_args* args, size_t struct_size) {
  return flashmoe::guarded([&]() -> flashmoe::Status {
    if (!args) return flashmoe::invalid("args is NULL");
    if (flashmoe::Status s = flashmoe::check_struct_size(struct_size); !s.ok()) return s;
    std::memset(args, 0, sizeof *args);
    args->struct_size = struct_size;
    args->window_left = args->window_right = -1;
    args->device = FLASH_ATTENTION_HOST;
    return {};
  });
}

int flash_attention_forward_fp16(const flash_attention_args* args) {
  return flashmoe::call(args, DType::kFloat16, Pass::kForward);
}

int flash_attention_forward_bf16(const flash_attention_args* args) {
  return flashmoe::call(args, DType::kBFloat16, Pass::kForward);
}

int flash_attention_backward_fp16(const flash_attention_args* args) {
  return flashmoe::call(args, DType::kFloat16, Pass::kBackward);
}

int flash_attention_backward_bf16(const flash_attention_args* args) {
  return flashmoe::call(args, DType::kBFloat16, Pass::kBackward);
}

int flash_attention_workspace_bytes(const flash_attention_args* args, int dtype, int pass,
                                    uint64_t* bytes) {
  return flashmoe::guarded([&]() -> flashmoe::Status {
    if (dtype != FLASH_ATTENTION_FP16 && dtype != FLASH_ATTENTION_BF16) {
      return flashmoe::invalid("dtype is ", dtype,
                               "; it must be FLASH_ATTENTION_FP16 (0) or FLASH_ATTENTION_BF16 (1)");
    }
    if (pass != FLASH_ATTENTION_FORWARD && pass != FLASH_ATTENTION_BACKWARD) {
      return flashmoe::invalid(
          "pass is ", pass,
          "; it must be FLASH_ATTENTION_FORWARD (0) or FLASH_ATTENTION_BACKWARD (1)");
    }
    if (!bytes) return flashmoe::invalid("bytes is NULL");
    const auto plan =
        flashmoe::plan_of(args, dtype == FLASH_ATTENTION_FP16 ? DType::kFloat16 : DType::kBFloat16,
                          pass == FLASH_ATTENTION_FORWARD ? Pass::kForward : Pass::kBackward);
    if (!plan.ok()) return plan.status();
    *bytes = plan.value().workspace_bytes;
    return {};
  });
}

const char* flash_attention_last_error(void) { return flashmoe::last_error.c_str(); }

const char* flash_attention_version(void) { return flashmoe::version(); }
