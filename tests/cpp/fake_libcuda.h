// A CUDA driver for machines without one: what the tests tell it, and what it saw. The program
// defines `fake_cuda`; fake_libcuda.cc, opened as libcuda.so.1, finds it there.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>

#include "cuda/runtime/driver.h"
#include "cuda/runtime/driver_types.h"

namespace fake {

using namespace flashmoe::cuda;

inline constexpr int kDevices = 2;
inline constexpr int kParamsBytes = 64;          // of every kernel's argument
inline constexpr int kStaticSharedBytes = 1024;  // of every kernel, if nobody says otherwise
// That one block may have.
inline int max_shared_bytes(int compute_capability) {
  return (compute_capability == 75 ? 64 : compute_capability == 80 ? 163 : 227) << 10;
}

// What a CUcontext points to here.
struct Context {
  int device;
};

struct Launch {
  CUlaunchConfig config;
  CUlaunchAttribute attributes[4];
  const void* kernel;
  char params[kParamsBytes];
  int device;  // of the context that was current
};

struct Cuda {
  // What to answer.
  int version = 12040;
  int devices = kDevices;
  int compute_capabilities[kDevices] = {80, 90};
  CUresult init_result = CUDA_SUCCESS;
  int init_milliseconds = 0;
  CUresult load_result = CUDA_SUCCESS;      // cuLibraryLoadData
  CUresult function_result = CUDA_SUCCESS;  // cuKernelGetFunction
  CUresult launch_result = CUDA_SUCCESS;
  bool capturing = false;
  int static_shared_bytes = kStaticSharedBytes;
  // Of kernels whose arguments have sizes of their own: sees each launch, of the kernel with that
  // name in the image. The size of an argument is not told then.
  void (*on_launch)(const char* symbol, const CUlaunchConfig& config, const void* params) = nullptr;
  Context primary[kDevices] = {{0}, {1}};

  // What was asked.
  std::atomic<int> inits{0}, libraries{0}, kernels{0}, functions{0}, function_loads{0};
  std::atomic<int> retained[kDevices]{};
  std::atomic<int> opt_ins{0}, opt_in_bytes[kDevices]{};
  std::atomic<int> launches{0};
  const void* loaded = nullptr;  // the last image
  Launch launch{};               // the last

  struct {
    CUtensorMapDataType dtype;
    uint32_t rank;
    void* address;
    uint64_t sizes[5], strides[5];
    uint32_t box[5], steps[5];
    CUtensorMapSwizzle swizzle;
  } tensor_map{};
};

// What a program does with contexts of its own.
inline const void* current_context(const Driver& driver) {
  CUcontext context = nullptr;
  driver.cuCtxGetCurrent(&context);
  return context;
}
inline void make_current(const Driver& driver, Context& context) {
  driver.cuCtxPushCurrent(reinterpret_cast<CUcontext>(&context));
}

}  // namespace fake

extern "C" __attribute__((visibility("default"))) fake::Cuda fake_cuda;
