// Stands in for the CUDA driver. Knows kernels whose names begin with "attention"; where launches
// are looked on at, all.
//
// FAKE_LIBCUDA_LACKS: 0, everything is there; 1, as CUDA 12.0, without what came later; 2, damaged:
// a driver that says 12.4 but cannot launch.
#include "fake_libcuda.h"

#include <chrono>
#include <cstdio>
#include <mutex>
#include <set>
#include <string>
#include <thread>

#include "emulator/machine.h"

#pragma GCC visibility push(default)

using namespace flashmoe::cuda;

namespace {

std::mutex mutex;
std::set<std::string> kernel_names;  // a CUkernel points to one of these

// A fixed array: the test counts allocations.
constexpr int kMaxContexts = 8;
thread_local CUcontext contexts[kMaxContexts];
thread_local int depth = 0;

fake::Context* current() {
  return depth ? reinterpret_cast<fake::Context*>(contexts[depth - 1]) : nullptr;
}

}  // namespace

extern "C" {

CUresult cuDriverGetVersion(int* version) {
  *version = fake_cuda.version;
  return CUDA_SUCCESS;
}

CUresult cuInit(unsigned int) {
  ++fake_cuda.inits;
  std::this_thread::sleep_for(std::chrono::milliseconds(fake_cuda.init_milliseconds));
  return fake_cuda.init_result;
}

CUresult cuGetErrorName(CUresult error, const char** text) {
  switch (error) {
    case CUDA_ERROR_INVALID_VALUE:
      *text = "CUDA_ERROR_INVALID_VALUE";
      return CUDA_SUCCESS;
    case CUDA_ERROR_NO_DEVICE:
      *text = "CUDA_ERROR_NO_DEVICE";
      return CUDA_SUCCESS;
    case CUDA_ERROR_NO_BINARY_FOR_GPU:
      *text = "CUDA_ERROR_NO_BINARY_FOR_GPU";
      return CUDA_SUCCESS;
    case CUDA_ERROR_NOT_FOUND:
      *text = "CUDA_ERROR_NOT_FOUND";
      return CUDA_SUCCESS;
    default:  // as the real one does with numbers it does not know
      *text = nullptr;
      return CUDA_ERROR_INVALID_VALUE;
  }
}

CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "the driver's own words";
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int* count) {
  *count = fake_cuda.devices;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char* name, int size, CUdevice device) {
  std::snprintf(name, static_cast<size_t>(size), "Fake %d", device);
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      *value = fake_cuda.compute_capabilities[device] / 10;
      break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
      *value = fake_cuda.compute_capabilities[device] % 10;
      break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
      *value = fake::max_shared_bytes(fake_cuda.compute_capabilities[device]);
      break;
    default:  // a different number for each attribute, so that a mix-up shows
      *value = 1000 * (device + 1) + attribute;
  }
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  ++fake_cuda.retained[device];
  *context = reinterpret_cast<CUcontext>(&fake_cuda.primary[device]);
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = depth ? contexts[depth - 1] : nullptr;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice* device) {
  if (!depth) return CUDA_ERROR_INVALID_CONTEXT;
  *device = current()->device;
  return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent_v2(CUcontext context) {
  if (depth == kMaxContexts) return CUDA_ERROR_OUT_OF_MEMORY;
  contexts[depth++] = context;
  return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent_v2(CUcontext* context) {
  if (!depth) return CUDA_ERROR_INVALID_CONTEXT;
  *context = contexts[--depth];
  return CUDA_SUCCESS;
}

CUresult cuLibraryLoadData(CUlibrary* library, const void* code, CUjit_option*, void**,
                           unsigned int num_jit_options, CUlibraryOption*, void**,
                           unsigned int num_options) {
  if (num_jit_options || num_options) return CUDA_ERROR_INVALID_VALUE;
  std::this_thread::sleep_for(std::chrono::milliseconds(5));  // time for other threads to come too
  ++fake_cuda.libraries;
  fake_cuda.loaded = code;
  *library = reinterpret_cast<CUlibrary>(const_cast<void*>(code));
  return fake_cuda.load_result;
}

CUresult cuLibraryGetKernel(CUkernel* kernel, CUlibrary, const char* name) {
  ++fake_cuda.kernels;
  if (!fake_cuda.on_launch && std::strncmp(name, "attention", 9) != 0) return CUDA_ERROR_NOT_FOUND;
  std::lock_guard lock(mutex);
  const std::string& kept = *kernel_names.insert(name).first;
  *kernel = reinterpret_cast<CUkernel>(const_cast<std::string*>(&kept));
  return CUDA_SUCCESS;
}

CUresult cuKernelGetFunction(CUfunction* function, CUkernel kernel) {
  if (!depth) return CUDA_ERROR_INVALID_CONTEXT;
  ++fake_cuda.functions;
  *function = reinterpret_cast<CUfunction>(kernel);
  return fake_cuda.function_result;
}

CUresult cuKernelGetAttribute(int* value, CUfunction_attribute attribute, CUkernel, CUdevice) {
  const bool shared = attribute == CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
  *value = shared ? fake_cuda.static_shared_bytes : 100 + attribute;
  return CUDA_SUCCESS;
}

CUresult cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel,
                              CUdevice device) {
  if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return CUDA_ERROR_INVALID_VALUE;
  ++fake_cuda.opt_ins;
  fake_cuda.opt_in_bytes[device] = value;
  return CUDA_SUCCESS;
}

CUresult cuStreamIsCapturing(CUstream, CUstreamCaptureStatus* status) {
  *status = fake_cuda.capturing ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}

#if FAKE_LIBCUDA_LACKS < 2
CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** params,
                          void** extra) {
  if (!depth) return CUDA_ERROR_INVALID_CONTEXT;
  if (extra || config->numAttrs > 4) return CUDA_ERROR_INVALID_VALUE;
  if (fake_cuda.launch_result != CUDA_SUCCESS) return fake_cuda.launch_result;
  std::lock_guard lock(mutex);
  fake::Launch& launch = fake_cuda.launch;
  launch.config = *config;
  for (unsigned int i = 0; i < config->numAttrs; ++i) launch.attributes[i] = config->attrs[i];
  launch.kernel = function;
  std::memcpy(launch.params, params[0], fake::kParamsBytes);
  launch.device = current()->device;
  if (fake_cuda.on_launch) {
    const auto* name = reinterpret_cast<const std::string*>(function);
    fake_cuda.on_launch(name->c_str(), *config, params[0]);
  }
  ++fake_cuda.launches;
  return CUDA_SUCCESS;
}
#endif

#if FAKE_LIBCUDA_LACKS == 0
CUresult cuFuncLoad(CUfunction) {
  ++fake_cuda.function_loads;
  return CUDA_SUCCESS;
}

CUresult cuKernelGetParamInfo(CUkernel, size_t index, size_t* offset, size_t* size) {
  if (index != 0 || fake_cuda.on_launch) return CUDA_ERROR_INVALID_VALUE;
  *offset = 0;
  *size = fake::kParamsBytes;
  return CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType dtype, uint32_t rank,
                                void* address, const uint64_t* sizes, const uint64_t* strides,
                                const uint32_t* box, const uint32_t* steps, CUtensorMapInterleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                                CUtensorMapFloatOOBfill) {
  auto& seen = fake_cuda.tensor_map;
  seen.dtype = dtype;
  seen.rank = rank;
  seen.address = address;
  seen.swizzle = swizzle;
  for (uint32_t i = 0; i < rank; ++i) {
    seen.sizes[i] = sizes[i];
    seen.box[i] = box[i];
    seen.steps[i] = steps[i];
    if (i + 1 < rank) seen.strides[i] = strides[i];
  }
  emulator::TensorMapContents contents{};
  contents.magic = 0x7a5;
  contents.address = static_cast<char*>(address);
  contents.rank = static_cast<uint8_t>(rank);
  contents.element_bytes = 2;
  contents.swizzle = static_cast<uint8_t>(swizzle);
  for (uint32_t i = 0; i < rank; ++i) {
    contents.sizes[i] = sizes[i];
    contents.box[i] = static_cast<uint16_t>(box[i]);
    if (i + 1 < rank) contents.strides[i] = strides[i];
  }
  static_assert(sizeof contents <= sizeof *map);
  std::memcpy(map, &contents, sizeof contents);
  return CUDA_SUCCESS;
}
#endif

}  // extern "C"
