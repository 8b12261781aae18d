// What the C functions of all operators share: errors, strides, devices, workspaces, and the way
// from the arguments of a call to its end.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <vector>

#include "core/text.h"
#include "flashmoe/c_api.h"
#include "flashmoe/device.h"
#include "flashmoe/plan.h"

namespace flashmoe::c_api {

// Of this thread. Never allocates when it is cleared, so that success cannot fail.
std::string& last_error();

int code_of(const Status& status);

// Runs `call`, which returns a Status, and keeps exceptions on this side of the border.
template <class Call>
int guarded(Call&& call) noexcept {
  last_error().clear();
  try {
    Status status = call();
    if (!status.ok()) last_error() = status.message();
    return code_of(status);
  } catch (const std::bad_alloc&) {
    last_error() = "out of memory";  // short enough to need none
    return FLASH_ATTENTION_OUT_OF_MEMORY;
  } catch (...) {
    last_error() = "internal error";
    return FLASH_ATTENTION_INTERNAL_ERROR;
  }
}

// `init` is the function that sets it.
Status check_struct_size(uint64_t struct_size, size_t expected, const char* init);

// The struct of a call, as `init` leaves it: everything off, on the host.
template <class Args>
int init_args(Args* args, size_t struct_size, const char* init) noexcept {
  return guarded([&]() -> Status {
    if (!args) return invalid("args is NULL");
    if (Status s = check_struct_size(struct_size, sizeof(Args), init); !s.ok()) return s;
    std::memset(args, 0, sizeof *args);
    args->struct_size = struct_size;
    args->device = FLASH_ATTENTION_HOST;
    if constexpr (requires { args->window_left; }) args->window_left = args->window_right = -1;
    return {};
  });
}

using Shape = std::vector<int64_t>;

// All strides 0 means contiguous.
TensorSpec spec_of(const int64_t* strides, DType dtype, const Shape& shape);

template <class Tensor>
TensorSpec spec_of(const Tensor& tensor, DType dtype, const Shape& shape) {
  return spec_of(tensor.strides, dtype, shape);
}

// Absent when the pointer is null.
template <class Tensor>
std::optional<TensorSpec> optional_spec(const Tensor& tensor, DType dtype, const Shape& shape) {
  if (!tensor.data) return std::nullopt;
  return spec_of(tensor, dtype, shape);
}

Result<Device> device_of(int64_t device);
Result<DType> dtype_of(int dtype);
Result<Pass> pass_of(int pass);

constexpr std::align_val_t kWorkspaceAlignment{64};

struct FreeWorkspace {
  void operator()(void* memory) const { ::operator delete(memory, kWorkspaceAlignment); }
};

// Runs a plan in the caller's workspace, or on the host in one of its own.
template <class Plan, class Tensors, class Args>
Status run_with_workspace(const Plan& plan, const Tensors& tensors, const Args& args) {
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

// The functions below are about one operator, a struct with
//   Args                        the C struct of its calls
//   kInit                       the name of the function that fills in its defaults
//   check(args)                 what plan() cannot see: values that C lets through and a problem
//                               cannot hold
//   problem(args, dtype, pass)  what is asked, but for the device
//   tensors(args)               and of which memory

// A Result with the plan of a call.
template <class Operator>
auto plan_of(const typename Operator::Args* args, DType dtype, Pass pass)
    -> decltype(plan(Operator::problem(*args, dtype, pass))) {
  if (!args) return invalid("args is NULL");
  if (Status s = check_struct_size(args->struct_size, sizeof *args, Operator::kInit); !s.ok()) {
    return s;
  }
  if (Status s = Operator::check(*args); !s.ok()) return s;
  const Result<Device> device = device_of(args->device);
  if (!device.ok()) return device.status();
  auto problem = Operator::problem(*args, dtype, pass);
  problem.device = device.value();
  return plan(problem);
}

template <class Operator>
int call(const typename Operator::Args* args, DType dtype, Pass pass = Pass::kForward) noexcept {
  return guarded([&]() -> Status {
    const auto planned = plan_of<Operator>(args, dtype, pass);
    if (!planned.ok()) return planned.status();
    if constexpr (requires { args->workspace; }) {
      return run_with_workspace(planned.value(), Operator::tensors(*args), *args);
    } else {
      return run(planned.value(), Operator::tensors(*args), {.stream = args->stream});
    }
  });
}

// How much workspace a call needs.
template <class Operator>
int workspace_bytes(const typename Operator::Args* args, int dtype, int pass,
                    uint64_t* bytes) noexcept {
  return guarded([&]() -> Status {
    const Result<DType> dtype_asked = dtype_of(dtype);
    if (!dtype_asked.ok()) return dtype_asked.status();
    const Result<Pass> pass_asked = pass_of(pass);
    if (!pass_asked.ok()) return pass_asked.status();
    if (!bytes) return invalid("bytes is NULL");
    const auto planned = plan_of<Operator>(args, dtype_asked.value(), pass_asked.value());
    if (!planned.ok()) return planned.status();
    *bytes = planned.value().workspace_bytes;
    return {};
  });
}

}  // namespace flashmoe::c_api
