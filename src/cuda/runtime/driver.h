// The CUDA driver, opened when first needed: libcuda.so.1 belongs to the machine, not to us, and a
// machine without it gets an error in words and a working CPU backend. All functions are
// thread-safe, print nothing and need no current context.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/runtime/driver_types.h"
#include "flashmoe/status.h"

namespace flashmoe::cuda {

// CUDA 12.0 brought the library API (cuLibraryLoadData), which everything here stands on.
inline constexpr int kOldestDriver = 12000;

// The driver's entry points, under the driver's own names. Those named optional may be null.
struct Driver {
  int version = 0;  // newest CUDA it speaks: 12040 is 12.4

  CUresult (*cuInit)(unsigned int flags);
  CUresult (*cuDriverGetVersion)(int* version);
  CUresult (*cuGetErrorName)(CUresult error, const char** text);
  CUresult (*cuGetErrorString)(CUresult error, const char** text);

  CUresult (*cuDeviceGetCount)(int* count);
  CUresult (*cuDeviceGet)(CUdevice* device, int ordinal);
  CUresult (*cuDeviceGetName)(char* name, int size, CUdevice device);
  CUresult (*cuDeviceGetAttribute)(int* value, CUdevice_attribute attribute, CUdevice device);

  CUresult (*cuDevicePrimaryCtxRetain)(CUcontext* context, CUdevice device);
  CUresult (*cuCtxGetCurrent)(CUcontext* context);
  CUresult (*cuCtxGetDevice)(CUdevice* device);  // of the current context
  CUresult (*cuCtxPushCurrent)(CUcontext context);
  CUresult (*cuCtxPopCurrent)(CUcontext* context);

  CUresult (*cuLibraryLoadData)(CUlibrary* library, const void* code, CUjit_option* jit_options,
                                void** jit_values, unsigned int num_jit_options,
                                CUlibraryOption* options, void** values, unsigned int num_options);
  CUresult (*cuLibraryGetKernel)(CUkernel* kernel, CUlibrary library, const char* name);
  CUresult (*cuKernelGetFunction)(CUfunction* function, CUkernel kernel);
  CUresult (*cuKernelGetAttribute)(int* value, CUfunction_attribute attribute, CUkernel kernel,
                                   CUdevice device);
  CUresult (*cuKernelSetAttribute)(CUfunction_attribute attribute, int value, CUkernel kernel,
                                   CUdevice device);
  CUresult (*cuLaunchKernelEx)(const CUlaunchConfig* config, CUfunction function, void** params,
                               void** extra);
  CUresult (*cuStreamIsCapturing)(CUstream stream, CUstreamCaptureStatus* status);

  // Optional: later than CUDA 12.0, or of no use on older chips.
  CUresult (*cuFuncLoad)(CUfunction function);  // 12.4
  CUresult (*cuKernelGetParamInfo)(CUkernel kernel, size_t index, size_t* offset,
                                   size_t* size);  // 12.4
  CUresult (*cuTensorMapEncodeTiled)(CUtensorMap* map, CUtensorMapDataType dtype, uint32_t rank,
                                     void* address, const uint64_t* sizes, const uint64_t* strides,
                                     const uint32_t* box, const uint32_t* element_strides,
                                     CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                     CUtensorMapL2promotion promotion,
                                     CUtensorMapFloatOOBfill fill);
};

// The driver, opened and initialised, or why there is none. The first call decides for the life of
// the process; later ones cost a few nanoseconds.
Result<const Driver*> driver();

struct DeviceInfo {
  int ordinal = 0;             // as torch counts them: after CUDA_VISIBLE_DEVICES
  CUdevice handle = 0;         // the same device, as the driver wants it
  std::string name;            // "NVIDIA H200"
  int compute_capability = 0;  // 75, 80, 86, 89, 90, ..., 120
  int sm_count = 0;
  int max_shared_bytes = 0;  // of one block, static and dynamic together, after opting in
  int max_shared_per_sm_bytes = 0;
  int reserved_shared_bytes = 0;  // of each block, taken by the driver from the SM's
  int max_threads = 0;            // of one block
  int max_threads_per_sm = 0;
  int max_blocks_per_sm = 0;
  int registers_per_sm = 0;
  int64_t l2_bytes = 0;
};

// All devices, asked once per process.
Result<std::vector<DeviceInfo>> devices();
Result<DeviceInfo> device_info(int ordinal);

// The same without a copy, for code that runs on every call. Valid for the life of the process.
Result<const DeviceInfo*> find_device(int ordinal);

// The context that torch and the CUDA runtime use on this device. Retained once and kept.
Result<CUcontext> primary_context(int ordinal);

// Makes a context of a device current for as long as it lives, unless one already is: else the
// primary one. A thread that has not called the runtime has none, autograd's for example.
class CurrentContext {
 public:
  CurrentContext() = default;
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;
  ~CurrentContext();
  Status enter(int device);

 private:
  const Driver* driver_ = nullptr;  // set when there is something to pop
};

// "CUDA_ERROR_NO_DEVICE (100): no CUDA-capable device is detected"
std::string describe_error(CUresult error);

// "device 0 (NVIDIA H200, compute capability 9.0)"
std::string describe_device(const DeviceInfo& device);

// "12.4"
std::string describe_version(int version);

}  // namespace flashmoe::cuda
