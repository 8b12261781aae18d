#include "cuda/runtime/driver.h"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <memory>
#include <mutex>

#include "core/text.h"
#include "flashmoe/device.h"

namespace flashmoe::cuda {
namespace {

constexpr const char* kLibrary = "libcuda.so.1";
constexpr const char* kUseCpu = "CPU tensors work without a GPU";

// What the first call found. Made once, never changed, never freed: other threads may be using it
// while the process exits.
struct Found {
  Driver driver{};
  Status status;          // why `driver` cannot be used
  Status devices_status;  // why `devices` is empty
  std::vector<DeviceInfo> devices;
  std::unique_ptr<std::atomic<CUcontext>[]> primary;  // one per device; null until asked for
};

constinit std::atomic<const Found*> found{nullptr};
constinit std::mutex mutex;  // held while looking, and while retaining a context

// CUDA does not survive fork(), and neither does a mutex that another thread holds. A flag set in
// the child costs the fast path nothing; asking for the process id would be a system call each
// time.
constinit std::atomic<bool> started{false};
constinit std::atomic<bool> forked{false};

[[maybe_unused]] const int watch_forks = pthread_atfork(nullptr, nullptr, [] {
  if (started.load(std::memory_order_relaxed)) forked.store(true, std::memory_order_relaxed);
});

Status fork_status() {
  return unsupported(
      "this process was forked from one that had already used CUDA, and CUDA does not survive a "
      "fork. Start processes with the spawn method: "
      "torch.multiprocessing.set_start_method(\"spawn\"), or multiprocessing_context=\"spawn\" for "
      "a DataLoader");
}

std::string error_text(const Driver& driver, CUresult error) {
  const char* name = nullptr;
  const char* words = nullptr;
  if (driver.cuGetErrorName) driver.cuGetErrorName(error, &name);
  if (driver.cuGetErrorString) driver.cuGetErrorString(error, &words);
  return text(name ? name : "CUDA error", " (", static_cast<int>(error), ")", words ? ": " : "",
              words ? words : "");
}

std::string init_advice(CUresult result) {
  switch (result) {
    case CUDA_ERROR_NO_DEVICE:
      return "This machine has a CUDA driver but shows no GPU: look at nvidia-smi and at "
             "CUDA_VISIBLE_DEVICES";
    case CUDA_ERROR_NOT_INITIALIZED:  // what a child of a process that used CUDA gets
      return "This happens in a process forked from one that had used CUDA: start processes with "
             "the spawn method";
    case CUDA_ERROR_STUB_LIBRARY:
      return "A toolkit's stub was found in place of the driver: take its folder out of "
             "LD_LIBRARY_PATH";
    case CUDA_ERROR_SYSTEM_DRIVER_MISMATCH:
      return "The driver's library and its kernel module are of different versions: a restart "
             "after an update cures that";
    default:
      return "Look at nvidia-smi";
  }
}

// Looks up entry points and remembers the first that is missing.
class Symbols {
 public:
  explicit Symbols(void* library) : library_(library) {}

  template <class Function>
  void optional(const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library_, name));
  }
  template <class Function>
  void needed(const char* name, Function& function) {
    optional(name, function);
    if (!function && !missing_) missing_ = name;
  }
  const char* missing() const { return missing_; }

 private:
  void* library_;
  const char* missing_ = nullptr;
};

// The version first: an old driver lacks symbols, and its version says more than their names.
Status find_version(Symbols& symbols, Driver& driver) {
  symbols.needed("cuDriverGetVersion", driver.cuDriverGetVersion);
  symbols.optional("cuGetErrorName", driver.cuGetErrorName);
  symbols.optional("cuGetErrorString", driver.cuGetErrorString);
  if (!driver.cuDriverGetVersion) {
    return unsupported(kLibrary, " has no cuDriverGetVersion: it is not a CUDA driver. ", kUseCpu);
  }
  if (CUresult result = driver.cuDriverGetVersion(&driver.version); result != CUDA_SUCCESS) {
    return unsupported("the CUDA driver does not tell its version: ", error_text(driver, result),
                       ". ", init_advice(result), "; ", kUseCpu);
  }
  if (driver.version < kOldestDriver) {
    return unsupported("the CUDA driver on this machine is ", describe_version(driver.version),
                       "; at least ", describe_version(kOldestDriver),
                       " is needed (NVIDIA driver 525). Update the driver; ", kUseCpu);
  }
  return Status();
}

// Where cuda.h maps a name to a later version of the function (_v2), that is the one we take.
Status find_entry_points(Symbols& symbols, Driver& driver) {
  symbols.needed("cuInit", driver.cuInit);
  symbols.needed("cuGetErrorName", driver.cuGetErrorName);
  symbols.needed("cuGetErrorString", driver.cuGetErrorString);
  symbols.needed("cuDeviceGetCount", driver.cuDeviceGetCount);
  symbols.needed("cuDeviceGet", driver.cuDeviceGet);
  symbols.needed("cuDeviceGetName", driver.cuDeviceGetName);
  symbols.needed("cuDeviceGetAttribute", driver.cuDeviceGetAttribute);
  symbols.needed("cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain);
  symbols.needed("cuCtxGetCurrent", driver.cuCtxGetCurrent);
  symbols.needed("cuCtxGetDevice", driver.cuCtxGetDevice);
  symbols.needed("cuCtxPushCurrent_v2", driver.cuCtxPushCurrent);
  symbols.needed("cuCtxPopCurrent_v2", driver.cuCtxPopCurrent);
  symbols.needed("cuLibraryLoadData", driver.cuLibraryLoadData);
  symbols.needed("cuLibraryGetKernel", driver.cuLibraryGetKernel);
  symbols.needed("cuKernelGetFunction", driver.cuKernelGetFunction);
  symbols.needed("cuKernelGetAttribute", driver.cuKernelGetAttribute);
  symbols.needed("cuKernelSetAttribute", driver.cuKernelSetAttribute);
  symbols.needed("cuLaunchKernelEx", driver.cuLaunchKernelEx);
  symbols.needed("cuStreamIsCapturing", driver.cuStreamIsCapturing);
  symbols.optional("cuFuncLoad", driver.cuFuncLoad);
  symbols.optional("cuKernelGetParamInfo", driver.cuKernelGetParamInfo);
  symbols.optional("cuTensorMapEncodeTiled", driver.cuTensorMapEncodeTiled);
  if (!symbols.missing()) return Status();
  return unsupported("the CUDA driver (", kLibrary, ", ", describe_version(driver.version),
                     ") lacks ", symbols.missing(), ", which drivers have from ",
                     describe_version(kOldestDriver), " on. Reinstall the driver; ", kUseCpu);
}

Status initialise(const Driver& driver) {
  const CUresult result = driver.cuInit(0);
  if (result == CUDA_SUCCESS) return Status();
  return unsupported("the CUDA driver (", describe_version(driver.version),
                     ") does not start: ", error_text(driver, result), ". ", init_advice(result),
                     "; ", kUseCpu);
}

Status open(Driver& driver) {
  void* library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    const char* why = dlerror();
    return unsupported("no CUDA driver on this machine: ", why ? why : kLibrary,
                       ". Install NVIDIA's driver to use a GPU; ", kUseCpu);
  }
  Symbols symbols(library);
  if (Status status = find_version(symbols, driver); !status.ok()) return status;
  if (Status status = find_entry_points(symbols, driver); !status.ok()) return status;
  return initialise(driver);
}

// Asks for attributes and remembers the first failure.
class Attributes {
 public:
  Attributes(const Driver& driver, CUdevice device) : driver_(driver), device_(device) {}

  int operator()(CUdevice_attribute attribute) {
    int value = 0;
    const CUresult result = driver_.cuDeviceGetAttribute(&value, attribute, device_);
    if (result_ == CUDA_SUCCESS) result_ = result;
    return value;
  }
  CUresult result() const { return result_; }

 private:
  const Driver& driver_;
  CUdevice device_;
  CUresult result_ = CUDA_SUCCESS;
};

CUresult ask(const Driver& driver, DeviceInfo& info) {
  if (CUresult result = driver.cuDeviceGet(&info.handle, info.ordinal); result != CUDA_SUCCESS) {
    return result;
  }
  char name[256] = "";
  driver.cuDeviceGetName(name, sizeof name, info.handle);  // a nameless device is still a device
  info.name = name;
  Attributes attribute(driver, info.handle);
  info.compute_capability = 10 * attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) +
                            attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
  info.sm_count = attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
  info.max_shared_bytes = attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
  info.max_shared_per_sm_bytes =
      attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR);
  info.reserved_shared_bytes = attribute(CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK);
  info.max_threads = attribute(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK);
  info.max_threads_per_sm = attribute(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR);
  info.max_blocks_per_sm = attribute(CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR);
  info.registers_per_sm = attribute(CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR);
  info.l2_bytes = attribute(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE);
  return attribute.result();
}

Status list_devices(const Driver& driver, std::vector<DeviceInfo>& list) {
  int count = 0;
  CUresult result = driver.cuDeviceGetCount(&count);
  for (int i = 0; i < count && result == CUDA_SUCCESS; ++i) {
    DeviceInfo info;
    info.ordinal = i;
    result = ask(driver, info);
    list.push_back(std::move(info));
  }
  if (result == CUDA_SUCCESS && count == 0) result = CUDA_ERROR_NO_DEVICE;
  if (result == CUDA_SUCCESS) return Status();
  const size_t broken = list.size();  // 1 + the device that could not be asked, or 0
  list.clear();
  return unsupported("the CUDA devices cannot be listed",
                     broken ? text(" (device ", broken - 1, ")") : "", ": ",
                     error_text(driver, result), ". ", init_advice(result), "; ", kUseCpu);
}

const Found* look() {
  auto* fresh = new Found;
  fresh->status = open(fresh->driver);
  fresh->devices_status = fresh->status;
  if (fresh->status.ok()) {
    fresh->devices_status = list_devices(fresh->driver, fresh->devices);
    fresh->primary = std::make_unique<std::atomic<CUcontext>[]>(fresh->devices.size());
  }
  return fresh;
}

// Null in a process forked while its parent was looking: the mutex may be locked for ever.
const Found* find() {
  if (const Found* known = found.load(std::memory_order_acquire)) return known;
  if (forked.load(std::memory_order_relaxed)) return nullptr;
  started.store(true, std::memory_order_relaxed);
  std::lock_guard lock(mutex);
  if (!found.load(std::memory_order_relaxed)) found.store(look(), std::memory_order_release);
  return found.load(std::memory_order_relaxed);
}

// Where the driver never started, a fork changed nothing: the reason stays the same.
bool lost_in_fork(const Found* known) {
  return !known || (forked.load(std::memory_order_relaxed) && known->status.ok());
}

CUresult retain(const Driver& driver, const DeviceInfo& device, std::atomic<CUcontext>& kept) {
  std::lock_guard lock(mutex);
  CUcontext context = kept.load(std::memory_order_relaxed);
  if (context) return CUDA_SUCCESS;
  const CUresult result = driver.cuDevicePrimaryCtxRetain(&context, device.handle);
  if (result == CUDA_SUCCESS) kept.store(context, std::memory_order_release);
  return result;
}

}  // namespace

Result<const Driver*> driver() {
  const Found* known = find();
  if (lost_in_fork(known)) return fork_status();
  if (!known->status.ok()) return known->status;
  return &known->driver;
}

Result<std::vector<DeviceInfo>> devices() {
  const Found* known = find();
  if (lost_in_fork(known)) return fork_status();
  if (!known->devices_status.ok()) return known->devices_status;
  return known->devices;
}

Result<const DeviceInfo*> find_device(int ordinal) {
  const Found* known = find();
  if (lost_in_fork(known)) return fork_status();
  if (!known->devices_status.ok()) return known->devices_status;
  const int count = static_cast<int>(known->devices.size());
  if (ordinal < 0 || ordinal >= count) {
    return invalid("device is ", ordinal, "; this process sees ", count, " CUDA device",
                   count == 1 ? "" : "s", ", numbered from 0");
  }
  return &known->devices[ordinal];
}

Result<DeviceInfo> device_info(int ordinal) {
  const Result<const DeviceInfo*> device = find_device(ordinal);
  if (!device.ok()) return device.status();
  return *device.value();
}

Result<CUcontext> primary_context(int ordinal) {
  const Result<const DeviceInfo*> device = find_device(ordinal);
  if (!device.ok()) return device.status();
  const Found* known = find();
  std::atomic<CUcontext>& kept = known->primary[ordinal];
  if (CUcontext context = kept.load(std::memory_order_acquire)) return context;
  if (CUresult result = retain(known->driver, *device.value(), kept); result != CUDA_SUCCESS) {
    return unsupported("no CUDA context on ", describe_device(*device.value()), ": ",
                       error_text(known->driver, result));
  }
  return kept.load(std::memory_order_acquire);
}

CurrentContext::~CurrentContext() {
  CUcontext ignored;
  if (driver_) driver_->cuCtxPopCurrent(&ignored);  // back to what was current, or none
}

Status CurrentContext::enter(int device) {
  const Result<const Driver*> driver = cuda::driver();
  if (!driver.ok()) return driver.status();
  const Result<const DeviceInfo*> info = find_device(device);
  if (!info.ok()) return info.status();
  CUdevice current;
  const bool there = driver.value()->cuCtxGetDevice(&current) == CUDA_SUCCESS;
  if (there && current == info.value()->handle) return Status();
  const Result<CUcontext> context = primary_context(device);
  if (!context.ok()) return context.status();
  const CUresult result = driver.value()->cuCtxPushCurrent(context.value());
  if (result != CUDA_SUCCESS) {
    return unsupported("cannot make a context current on ", describe_device(*info.value()), ": ",
                       describe_error(result));
  }
  driver_ = driver.value();
  return Status();
}

std::string describe_error(CUresult error) {
  const Found* known = find();
  return error_text(known ? known->driver : Driver{}, error);
}

std::string describe_device(const DeviceInfo& device) {
  return text("device ", device.ordinal, " (", device.name, ", compute capability ",
              device.compute_capability / 10, ".", device.compute_capability % 10, ")");
}

// 12040 is 12.4
std::string describe_version(int version) { return text(version / 1000, ".", version % 1000 / 10); }

}  // namespace flashmoe::cuda

namespace flashmoe {

Result<std::vector<Device>> cuda_devices() {
  const Result<std::vector<cuda::DeviceInfo>> found = cuda::devices();
  if (!found.ok()) return found.status();
  std::vector<Device> list;
  for (const cuda::DeviceInfo& info : found.value()) {
    Device device;
    device.type = DeviceType::kCuda;
    device.ordinal = info.ordinal;
    device.compute_capability = info.compute_capability;
    device.multiprocessors = info.sm_count;
    list.push_back(device);
  }
  return list;
}

}  // namespace flashmoe
