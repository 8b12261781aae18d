#include "c_api/border.h"

#include <algorithm>
#include <limits>

namespace flashmoe::c_api {

std::string& last_error() {
  thread_local std::string message;
  return message;
}

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

Status check_struct_size(uint64_t struct_size, size_t expected, const char* init) {
  if (struct_size == expected) return {};
  return invalid("struct_size is ", struct_size, "; this library (version ", version(), ") has ",
                 expected, ". Call ", init,
                 "(&args, sizeof args), and use the header of the library you link");
}

TensorSpec spec_of(const int64_t* strides, DType dtype, const Shape& shape) {
  TensorSpec spec;
  spec.dtype = dtype;
  spec.rank = static_cast<int>(shape.size());
  std::copy(shape.begin(), shape.end(), spec.shape.begin());
  std::copy_n(strides, spec.rank, spec.stride.begin());
  if (std::any_of(strides, strides + spec.rank, [](int64_t s) { return s != 0; })) return spec;
  int64_t step = 1;
  for (int i = spec.rank - 1; i >= 0; --i) {
    spec.stride[i] = step;
    // Where this overflows the tensor has no elements, or plan() will say that it has too many.
    if (__builtin_mul_overflow(step, spec.shape[i], &step)) {
      step = std::numeric_limits<int64_t>::max();
    }
  }
  return spec;
}

Result<Device> device_of(int64_t device) {
  if (device < FLASH_ATTENTION_HOST) {
    return invalid("device is ", device, "; it must be -1 for host memory, or a CUDA device");
  }
  if (device == FLASH_ATTENTION_HOST) return Device{};
  const Result<std::vector<Device>> devices = cuda_devices();
  if (!devices.ok()) return devices.status();
  if (device >= static_cast<int64_t>(devices.value().size())) {
    return invalid("device is ", device, "; the driver shows ", devices.value().size());
  }
  return devices.value()[device];
}

Result<DType> dtype_of(int dtype) {
  if (dtype == FLASH_ATTENTION_FP16) return DType::kFloat16;
  if (dtype == FLASH_ATTENTION_BF16) return DType::kBFloat16;
  return invalid("dtype is ", dtype,
                 "; it must be FLASH_ATTENTION_FP16 (0) or FLASH_ATTENTION_BF16 (1)");
}

Result<Pass> pass_of(int pass) {
  if (pass == FLASH_ATTENTION_FORWARD) return Pass::kForward;
  if (pass == FLASH_ATTENTION_BACKWARD) return Pass::kBackward;
  return invalid("pass is ", pass,
                 "; it must be FLASH_ATTENTION_FORWARD (0) or FLASH_ATTENTION_BACKWARD (1)");
}

}  // namespace flashmoe::c_api

namespace flashmoe {

const char* version() { return FLASHMOE_VERSION; }

}  // namespace flashmoe
