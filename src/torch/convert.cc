#include "convert.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>

#include <string>

#include "error.h"

// Not in a torch without CUDA: weak, and asked for only when there is a CUDA tensor.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device,
                                                                                   void** stream);

namespace flashmoe::ops {
namespace {

using torch::headeronly::ScalarType;

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
    case ScalarType::Bool:
      return DType::kBool;
    case ScalarType::Float8_e4m3fn:
      return DType::kFloat8E4M3;
    default:
      fail(std::string(name) + " has dtype torch." +
           torch::headeronly::toString(tensor.scalar_type()) +
           "; only float64, float32, float16 and bfloat16 work, float8_e4m3fn for a cache, int32 "
           "or int64 for lengths and ids, and bool for a mask");
  }
}

// torch's own number for a dtype.
int32_t dtype_number(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return aoti_torch_dtype_float64();
    case DType::kFloat32:
      return aoti_torch_dtype_float32();
    case DType::kFloat16:
      return aoti_torch_dtype_float16();
    case DType::kBFloat16:
      return aoti_torch_dtype_bfloat16();
    case DType::kInt32:
      return aoti_torch_dtype_int32();
    case DType::kInt64:
      return aoti_torch_dtype_int64();
    case DType::kBool:
      return aoti_torch_dtype_bool();
    case DType::kFloat8E4M3:
      return aoti_torch_dtype_float8_e4m3fn();
  }
  fail("a tensor of unknown dtype is asked for");
}

int32_t device_type(const Tensor& tensor) {
  int32_t type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &type));
  return type;
}

// By the C function: torch::stable::new_empty and empty_like go through the dispatcher, which looks
// the op up by its name in every call. A small forward call took 28 us with them, and takes 11.
Tensor empty_strided(int rank, const int64_t* shape, const int64_t* stride, int32_t dtype,
                     const Tensor& like) {
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(rank, shape, stride, dtype, device_type(like),
                                                  like.get_device_index(), &made));
  return Tensor(made);
}

}  // namespace

TensorSpec spec_of(const char* name, const Tensor& tensor) {
  TensorSpec spec;
  spec.dtype = dtype_of(name, tensor);
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  if (sizes.size() > kMaxRank) {
    fail(std::string(name) + " has " + std::to_string(sizes.size()) + " dimensions; at most " +
         std::to_string(kMaxRank) + " are supported");
  }
  spec.rank = static_cast<int>(sizes.size());
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
    fail("a tensor is on cuda:" + std::to_string(ordinal) + ", and the driver shows " +
         std::to_string(found.value().size()) + " devices");
  }
  return found.value()[ordinal];
}

Device device_named(const std::string& name, const Tensor& tensor) {
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
  return device_of(tensor);
}

void check_same_device(NamedTensor first, std::initializer_list<NamedTensor> others) {
  const int32_t type = device_type(*first.second), index = first.second->get_device_index();
  for (const auto& [name, tensor] : others) {
    if (!tensor || (device_type(*tensor) == type && tensor->get_device_index() == index)) continue;
    fail(std::string(name) + " is on another device than " + first.first + "; move it with .to(" +
         first.first + ".device)");
  }
}

void* stream_of(const Tensor& tensor) {
  if (!tensor.is_cuda() || !aoti_torch_get_current_cuda_stream) return nullptr;
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return stream;
}

Tensor allocate(const TensorSpec& spec, const Tensor& like) {
  const auto make = [&](const TensorSpec& s) {
    return empty_strided(s.rank, s.shape.data(), s.stride.data(), dtype_number(s.dtype), like);
  };
  const int64_t width = spec.rank > 1 ? spec.size(-1) : 0;
  const int64_t pitch = spec.rank > 1 ? spec.step(-2) : 0;
  const bool padded =
      dtype_bytes(spec.dtype) == 2 && width > 0 && width % 8 > 0 && pitch == (width + 7) / 8 * 8;
  if (!padded) return make(spec);
  // The last row has its padding too: a copy of 16 bytes that ends in it stays inside. It is read
  // and not used; zeros, so that a tool that looks for reads of what nobody wrote finds none.
  TensorSpec whole = spec;
  whole.shape[spec.rank - 1] = pitch;
  Tensor rows = make(whole);
  Tensor padding = torch::stable::narrow(rows, spec.rank - 1, width, pitch - width);
  torch::stable::zero_(padding);
  return torch::stable::narrow(rows, spec.rank - 1, 0, width);
}

Tensor allocate_bytes(size_t bytes, const Tensor& like) {
  const int64_t size = static_cast<int64_t>(bytes), step = 1;
  return empty_strided(1, &size, &step, aoti_torch_dtype_uint8(), like);
}

Tensor allocate_gradient(const std::optional<TensorSpec>& spec, DType dtype, const Tensor& like,
                         void*& address) {
  if (!spec) return allocate(contiguous(dtype, {0}), like);
  const Tensor gradient = allocate(*spec, like);
  address = gradient.mutable_data_ptr();
  return gradient;
}

}  // namespace flashmoe::ops
