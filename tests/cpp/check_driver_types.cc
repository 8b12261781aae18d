// Our declarations of the driver API against the toolkit's: compiles or does not. Built where a
// cuda.h is found.
#include <cuda.h>

// After cuda.h on purpose: its macros (cuCtxPushCurrent -> cuCtxPushCurrent_v2) then rename the
// members of Driver too, and each is compared with the version that new programs get.
#include <string_view>
#include <type_traits>

#include "cuda/runtime/driver.h"
#include "cuda/runtime/driver_types.h"

namespace ours = flashmoe::cuda;

namespace {

#define SAME_NUMBER(name) static_assert(static_cast<int>(::name) == static_cast<int>(ours::name))

SAME_NUMBER(CUDA_SUCCESS);
SAME_NUMBER(CUDA_ERROR_INVALID_VALUE);
SAME_NUMBER(CUDA_ERROR_OUT_OF_MEMORY);
SAME_NUMBER(CUDA_ERROR_NOT_INITIALIZED);
SAME_NUMBER(CUDA_ERROR_STUB_LIBRARY);
SAME_NUMBER(CUDA_ERROR_NO_DEVICE);
SAME_NUMBER(CUDA_ERROR_INVALID_DEVICE);
SAME_NUMBER(CUDA_ERROR_INVALID_CONTEXT);
SAME_NUMBER(CUDA_ERROR_NO_BINARY_FOR_GPU);
SAME_NUMBER(CUDA_ERROR_UNSUPPORTED_PTX_VERSION);
SAME_NUMBER(CUDA_ERROR_NOT_FOUND);
SAME_NUMBER(CUDA_ERROR_ILLEGAL_ADDRESS);
SAME_NUMBER(CUDA_ERROR_ASSERT);
SAME_NUMBER(CUDA_ERROR_HARDWARE_STACK_ERROR);
SAME_NUMBER(CUDA_ERROR_LAUNCH_FAILED);
SAME_NUMBER(CUDA_ERROR_NOT_SUPPORTED);
SAME_NUMBER(CUDA_ERROR_SYSTEM_NOT_READY);
SAME_NUMBER(CUDA_ERROR_SYSTEM_DRIVER_MISMATCH);
SAME_NUMBER(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
SAME_NUMBER(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
SAME_NUMBER(CUDA_ERROR_UNKNOWN);

SAME_NUMBER(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK);
SAME_NUMBER(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
SAME_NUMBER(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE);
SAME_NUMBER(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR);
SAME_NUMBER(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
SAME_NUMBER(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
SAME_NUMBER(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR);
SAME_NUMBER(CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR);
SAME_NUMBER(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
SAME_NUMBER(CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR);
SAME_NUMBER(CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK);

SAME_NUMBER(CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK);
SAME_NUMBER(CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES);
SAME_NUMBER(CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES);
SAME_NUMBER(CU_FUNC_ATTRIBUTE_NUM_REGS);
SAME_NUMBER(CU_FUNC_ATTRIBUTE_PTX_VERSION);
SAME_NUMBER(CU_FUNC_ATTRIBUTE_BINARY_VERSION);
SAME_NUMBER(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);

SAME_NUMBER(CU_STREAM_CAPTURE_STATUS_NONE);
SAME_NUMBER(CU_STREAM_CAPTURE_STATUS_ACTIVE);
SAME_NUMBER(CU_STREAM_CAPTURE_STATUS_INVALIDATED);

SAME_NUMBER(CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
SAME_NUMBER(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);

SAME_NUMBER(CU_TENSOR_MAP_DATA_TYPE_FLOAT16);
SAME_NUMBER(CU_TENSOR_MAP_DATA_TYPE_BFLOAT16);
SAME_NUMBER(CU_TENSOR_MAP_INTERLEAVE_NONE);
SAME_NUMBER(CU_TENSOR_MAP_SWIZZLE_NONE);
SAME_NUMBER(CU_TENSOR_MAP_SWIZZLE_32B);
SAME_NUMBER(CU_TENSOR_MAP_SWIZZLE_64B);
SAME_NUMBER(CU_TENSOR_MAP_SWIZZLE_128B);
SAME_NUMBER(CU_TENSOR_MAP_L2_PROMOTION_NONE);
SAME_NUMBER(CU_TENSOR_MAP_L2_PROMOTION_L2_64B);
SAME_NUMBER(CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
SAME_NUMBER(CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
SAME_NUMBER(CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
SAME_NUMBER(CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA);

// Ours may be aligned more strictly.
#define SAME_LAYOUT(type) \
  static_assert(sizeof(::type) == sizeof(ours::type) && alignof(::type) <= alignof(ours::type))
#define SAME_OFFSET(type, member) \
  static_assert(offsetof(::type, member) == offsetof(ours::type, member))

SAME_LAYOUT(CUresult);
SAME_LAYOUT(CUdevice);
SAME_LAYOUT(CUlaunchAttributeValue);
SAME_LAYOUT(CUlaunchAttribute);
SAME_LAYOUT(CUlaunchConfig);
SAME_LAYOUT(CUtensorMap);
SAME_OFFSET(CUlaunchAttribute, id);
SAME_OFFSET(CUlaunchAttribute, value);
SAME_OFFSET(CUlaunchAttributeValue, clusterDim.y);
SAME_OFFSET(CUlaunchAttributeValue, programmaticStreamSerializationAllowed);
SAME_OFFSET(CUlaunchConfig, gridDimX);
SAME_OFFSET(CUlaunchConfig, gridDimY);
SAME_OFFSET(CUlaunchConfig, gridDimZ);
SAME_OFFSET(CUlaunchConfig, blockDimX);
SAME_OFFSET(CUlaunchConfig, blockDimY);
SAME_OFFSET(CUlaunchConfig, blockDimZ);
SAME_OFFSET(CUlaunchConfig, sharedMemBytes);
SAME_OFFSET(CUlaunchConfig, hStream);
SAME_OFFSET(CUlaunchConfig, attrs);
SAME_OFFSET(CUlaunchConfig, numAttrs);

// Signatures: as many arguments, each of the same size and as much a pointer. The types themselves
// differ by namespace.
template <class Theirs, class Ours>
constexpr bool alike =
    sizeof(Theirs) == sizeof(Ours) && std::is_pointer_v<Theirs> == std::is_pointer_v<Ours>;

template <class... Theirs, class... Ours>
constexpr bool same_call(CUresult (*)(Theirs...), ours::CUresult (*)(Ours...)) {
  if constexpr (sizeof...(Theirs) == sizeof...(Ours)) return (alike<Theirs, Ours> && ...);
  return false;
}

// The name is also the symbol that driver.cc looks up.
#define TEXT_OF(name) #name
#define SYMBOL_OF(name) TEXT_OF(name)
#define SAME_CALL(name, symbol)                                                                 \
  static_assert(same_call(decltype (&::name)(nullptr), decltype(ours::Driver::name)(nullptr))); \
  static_assert(std::string_view(SYMBOL_OF(name)) == symbol)

SAME_CALL(cuInit, "cuInit");
SAME_CALL(cuDriverGetVersion, "cuDriverGetVersion");
SAME_CALL(cuGetErrorName, "cuGetErrorName");
SAME_CALL(cuGetErrorString, "cuGetErrorString");
SAME_CALL(cuDeviceGetCount, "cuDeviceGetCount");
SAME_CALL(cuDeviceGet, "cuDeviceGet");
SAME_CALL(cuDeviceGetName, "cuDeviceGetName");
SAME_CALL(cuDeviceGetAttribute, "cuDeviceGetAttribute");
SAME_CALL(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain");
SAME_CALL(cuCtxGetCurrent, "cuCtxGetCurrent");
SAME_CALL(cuCtxGetDevice, "cuCtxGetDevice");
SAME_CALL(cuCtxPushCurrent, "cuCtxPushCurrent_v2");
SAME_CALL(cuCtxPopCurrent, "cuCtxPopCurrent_v2");
SAME_CALL(cuLibraryLoadData, "cuLibraryLoadData");
SAME_CALL(cuLibraryGetKernel, "cuLibraryGetKernel");
SAME_CALL(cuKernelGetFunction, "cuKernelGetFunction");
SAME_CALL(cuKernelGetAttribute, "cuKernelGetAttribute");
SAME_CALL(cuKernelSetAttribute, "cuKernelSetAttribute");
SAME_CALL(cuLaunchKernelEx, "cuLaunchKernelEx");
SAME_CALL(cuStreamIsCapturing, "cuStreamIsCapturing");
SAME_CALL(cuTensorMapEncodeTiled, "cuTensorMapEncodeTiled");
#if CUDA_VERSION >= 12040
SAME_CALL(cuFuncLoad, "cuFuncLoad");
SAME_CALL(cuKernelGetParamInfo, "cuKernelGetParamInfo");
#endif

}  // namespace
