#include "cuda/runtime/launch.h"

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

#include "core/text.h"
#include "cuda/runtime/driver.h"

namespace flashmoe::cuda {
namespace {

constexpr int64_t kNotReady = -1;

// A resolved kernel. Its handle is good in every context: the launch takes the context from the
// stream.
struct Kernel {
  std::string name;
  const void* image_data;
  CUkernel handle;
  size_t params_bytes;  // size of its argument; 0: the driver does not tell (before 12.4)
  // Per device, the dynamic shared memory it may use; kNotReady until it is loaded there.
  std::unique_ptr<std::atomic<int64_t>[]> shared_bytes;
  Kernel* next;  // in its bucket; never changes once others can see it

  bool is(const KernelId& id) const { return image_data == id.image->data && name == id.name; }
  // `device` is a valid ordinal.
  bool ready(int device, uint32_t shared) const {
    return shared_bytes[device].load(std::memory_order_acquire) >= static_cast<int64_t>(shared);
  }
};

struct Library {
  const void* image_data;
  CUlibrary handle;
};

// Kernels are only ever added, so readers walk the buckets without a lock; writers hold the mutex.
// A few hundred kernels at most: 256 buckets keep the chains at one or two.
constinit std::array<std::atomic<Kernel*>, 256> buckets{};
constinit std::mutex mutex;                 // guards what follows, and adding to the buckets
std::vector<Library>* libraries = nullptr;  // never freed: threads may outlive static destructors

// By the name's text, not its address: an id may have been put together at run time.
std::atomic<Kernel*>& bucket_of(const KernelId& id) {
  return buckets[std::hash<std::string_view>{}(id.name) % buckets.size()];
}

Kernel* find(const KernelId& id) {
  if (id.found) {  // of this image, unless the process has GPUs of several kinds
    Kernel* const found = static_cast<Kernel*>(id.found->load(std::memory_order_acquire));
    if (found && found->image_data == id.image->data) return found;
  }
  Kernel* kernel = bucket_of(id).load(std::memory_order_acquire);
  while (kernel && !kernel->is(id)) kernel = kernel->next;
  if (kernel && id.found) id.found->store(kernel, std::memory_order_release);
  return kernel;
}

// What one call works with.
struct Call {
  const Driver& driver;
  const DeviceInfo& device;
  KernelId id;          // with the image that is for the device
  const Image& images;  // all that were to choose from

  Call(const Driver& driver, const DeviceInfo& device, const KernelId& id)
      : driver(driver), device(device), id(id), images(*id.image) {
    this->id.image = &image_for(images, device.compute_capability);
  }
};

std::string chips_advice(const Call& call) {
  const std::string chips = image_chips(call.images);
  return text(". The image holds code for ", chips.empty() ? "other chips" : chips,
              " and none that this device can run. Use a build of flashmoe with kernels for it, "
              "another GPU, or CPU tensors");
}

// Errors that say nothing about this launch: they stick to the context from then on.
bool from_earlier_work(CUresult result) {
  return result == CUDA_ERROR_ILLEGAL_ADDRESS || result == CUDA_ERROR_ASSERT ||
         (result >= CUDA_ERROR_HARDWARE_STACK_ERROR && result <= CUDA_ERROR_LAUNCH_FAILED);
}

std::string advice(const Call& call, CUresult result) {
  if (result == CUDA_ERROR_NO_BINARY_FOR_GPU) return chips_advice(call);
  if (result == CUDA_ERROR_UNSUPPORTED_PTX_VERSION) {
    return text(". The kernel has to be compiled from PTX, which is newer than the driver (",
                describe_version(call.driver.version), "): update the driver");
  }
  if (result == CUDA_ERROR_NOT_FOUND) {
    return ". The image has no kernel of that name: library and kernels are of different builds";
  }
  if (from_earlier_work(result)) {
    return ". Work launched earlier on this device failed, and every later call reports it. "
           "CUDA_LAUNCH_BLOCKING=1 shows which";
  }
  if (result >= CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED &&
      result <= CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD) {
    return ". Run the call once before capturing it in a graph, so that its kernel is loaded";
  }
  return "";
}

Status failed(const char* doing, const Call& call, CUresult result, const std::string& how = "") {
  return unsupported("cannot ", doing, " kernel ", call.id.name, " of image ", call.id.image->name,
                     " on ", describe_device(call.device), how, ": ", describe_error(result),
                     advice(call, result));
}

// With the mutex held.
Status load_library(const Call& call, CUlibrary& library) {
  if (!libraries) libraries = new std::vector<Library>;
  for (const Library& known : *libraries) {
    if (known.image_data == call.id.image->data) {
      library = known.handle;
      return Status();
    }
  }
  const CUresult result = call.driver.cuLibraryLoadData(&library, call.id.image->data, nullptr,
                                                        nullptr, 0, nullptr, nullptr, 0);
  if (result != CUDA_SUCCESS) return failed("load", call, result);
  libraries->push_back({call.id.image->data, library});
  return Status();
}

size_t argument_bytes(const Call& call, CUkernel handle) {
  size_t offset = 0, size = 0;
  if (!call.driver.cuKernelGetParamInfo) return 0;
  const CUresult result = call.driver.cuKernelGetParamInfo(handle, 0, &offset, &size);
  return result == CUDA_SUCCESS ? size : 0;
}

// With the mutex held.
Status resolve(const Call& call, Kernel*& kernel) {
  kernel = find(call.id);
  if (kernel) return Status();
  CUlibrary library = nullptr;
  CUkernel handle = nullptr;
  if (Status status = load_library(call, library); !status.ok()) return status;
  const char* symbol = call.id.symbol ? call.id.symbol : call.id.name;
  const CUresult result = call.driver.cuLibraryGetKernel(&handle, library, symbol);
  if (result != CUDA_SUCCESS) return failed("find", call, result);

  const Result<std::vector<DeviceInfo>> all = devices();
  if (!all.ok()) return all.status();
  const size_t count = all.value().size();
  auto ready = std::make_unique<std::atomic<int64_t>[]>(count);
  for (size_t i = 0; i < count; ++i) ready[i].store(kNotReady, std::memory_order_relaxed);
  std::atomic<Kernel*>& bucket = bucket_of(call.id);
  kernel = new Kernel{call.id.name,     call.id.image->data,
                      handle,           argument_bytes(call, handle),
                      std::move(ready), bucket.load(std::memory_order_relaxed)};
  bucket.store(kernel, std::memory_order_release);
  return Status();
}

// Brings the code into the current context now. The driver would otherwise do it at the first
// launch, which may be inside a graph capture.
Status load_on_device(const Call& call, const Kernel& kernel) {
  CUfunction function = nullptr;
  CUresult result = call.driver.cuKernelGetFunction(&function, kernel.handle);
  if (result == CUDA_SUCCESS && call.driver.cuFuncLoad) result = call.driver.cuFuncLoad(function);
  return result == CUDA_SUCCESS ? Status() : failed("load", call, result);
}

Status allow_shared(const Call& call, const Kernel& kernel, uint32_t shared_bytes) {
  int fixed = 0;
  CUresult result = call.driver.cuKernelGetAttribute(&fixed, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
                                                     kernel.handle, call.device.handle);
  if (result != CUDA_SUCCESS) return failed("ask about", call, result);
  if (int64_t{shared_bytes} + fixed > call.device.max_shared_bytes) {
    return unsupported("kernel ", call.id.name, " of image ", call.id.image->name, " needs ",
                       shared_bytes, " bytes of dynamic and ", fixed,
                       " of static shared memory; a block on ", describe_device(call.device),
                       " has at most ", call.device.max_shared_bytes);
  }
  result = call.driver.cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                            static_cast<int>(shared_bytes), kernel.handle,
                                            call.device.handle);
  if (result == CUDA_SUCCESS) return Status();
  return failed("give shared memory to", call, result, text(" (", shared_bytes, " bytes)"));
}

// The slow path. One lock for all kernels: loading happens once each, and a thread that waits would
// mostly wait for the same image.
Status make_ready(const Call& call, uint32_t shared_bytes, Kernel*& kernel) {
  std::lock_guard lock(mutex);
  CurrentContext context;
  if (Status status = context.enter(call.device.ordinal); !status.ok()) return status;
  if (Status status = resolve(call, kernel); !status.ok()) return status;
  const int ordinal = call.device.ordinal;
  if (kernel->ready(ordinal, shared_bytes)) return Status();  // another thread was first
  if (!kernel->ready(ordinal, 0)) {
    if (Status status = load_on_device(call, *kernel); !status.ok()) return status;
  }
  if (shared_bytes > 0) {
    if (Status status = allow_shared(call, *kernel, shared_bytes); !status.ok()) return status;
  }
  kernel->shared_bytes[ordinal].store(shared_bytes, std::memory_order_release);
  return Status();
}

Status ready_kernel(const Call& call, uint32_t shared_bytes, Kernel*& kernel) {
  kernel = find(call.id);
  if (kernel && kernel->ready(call.device.ordinal, shared_bytes)) return Status();
  return make_ready(call, shared_bytes, kernel);
}

// Whether the stream is being captured in a graph, or cannot be asked.
bool is_captured(const Call& call, void* stream) {
  CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
  const CUresult result = call.driver.cuStreamIsCapturing(static_cast<CUstream>(stream), &capture);
  return result != CUDA_SUCCESS || capture != CU_STREAM_CAPTURE_STATUS_NONE;
}

// Whether a captured launch may be programmatic: graphs have edges for that from CUDA 12.3 on.
bool graphs_overlap(const Call& call) {
  constexpr int kProgrammaticEdges = 12030;
  return call.driver.version >= kProgrammaticEdges;
}

// Two attributes at most; an attribute that is not asked for is not passed, so that chips before
// sm_90, which know neither, never see one.
unsigned int set_attributes(const LaunchShape& shape, CUlaunchAttribute (&attributes)[2]) {
  unsigned int count = 0;
  if (shape.cluster > 1) {
    CUlaunchAttribute& attribute = attributes[count++];
    attribute.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    attribute.value.clusterDim = {shape.cluster, 1, 1};
  }
  if (shape.programmatic) {
    CUlaunchAttribute& attribute = attributes[count++];
    attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attribute.value.programmaticStreamSerializationAllowed = 1;
  }
  return count;
}

std::string shape_words(const LaunchShape& shape) {
  return text(" (grid ", shape.grid[0], " x ", shape.grid[1], " x ", shape.grid[2], ", ",
              shape.threads, " threads, ", shape.shared_bytes, " bytes of shared memory",
              shape.cluster > 1 ? text(", clusters of ", shape.cluster) : "",
              shape.programmatic ? ", programmatic" : "", ")");
}

Status launch_ready(const Call& call, const Kernel& kernel, LaunchShape shape, void* stream,
                    const void* params) {
  CurrentContext context;
  if (Status status = context.enter(call.device.ordinal); !status.ok()) return status;
  shape.programmatic = shape.programmatic && (graphs_overlap(call) || !is_captured(call, stream));
  CUlaunchAttribute attributes[2] = {};
  CUlaunchConfig config = {};
  config.gridDimX = shape.grid[0];
  config.gridDimY = shape.grid[1];
  config.gridDimZ = shape.grid[2];
  config.blockDimX = shape.threads;
  config.blockDimY = config.blockDimZ = 1;
  config.sharedMemBytes = shape.shared_bytes;
  config.hStream = static_cast<CUstream>(stream);
  config.attrs = attributes;
  config.numAttrs = set_attributes(shape, attributes);
  void* arguments[] = {const_cast<void*>(params)};  // the driver only reads it
  // A CUkernel may stand where a CUfunction is asked for: see cuLaunchKernelEx in the manual.
  const CUresult result = call.driver.cuLaunchKernelEx(
      &config, reinterpret_cast<CUfunction>(kernel.handle), arguments, nullptr);
  return result == CUDA_SUCCESS ? Status() : failed("launch", call, result, shape_words(shape));
}

// Loading while a stream is captured can fail in ways that do not mention the capture.
Status with_capture_hint(const Call& call, void* stream, Status status) {
  if (!is_captured(call, stream)) return status;
  return Status(status.code(), text(status.message(),
                                    ". The stream is being captured in a graph, and the kernel "
                                    "was not loaded before: run the call once before capturing"));
}

// The head of a fatbin and of each entry in it. The format is not documented; these fields have
// been where they are since CUDA 4, and an image that does not match is only described less well.
struct FatbinHeader {
  uint32_t magic;
  uint16_t version;
  uint16_t header_bytes;
  uint64_t content_bytes;
};

struct FatbinEntry {
  uint16_t kind;  // 1: PTX, 2: machine code
  uint16_t version;
  uint32_t header_bytes;
  uint64_t content_bytes;
  uint32_t other[3];
  uint32_t chip;  // 80
  uint32_t more[2];
  uint64_t flags;
};
static_assert(sizeof(FatbinHeader) == 16 && sizeof(FatbinEntry) == 48);

constexpr uint32_t kFatbinMagic = 0xBA55ED50;
constexpr uint64_t kChipOnly = 1 << 20;    // the "a" of sm_90a
constexpr uint64_t kFamilyOnly = 1 << 21;  // the "f" of sm_100f

std::string entry_text(const FatbinEntry& entry) {
  const char* suffix = entry.flags & kChipOnly ? "a" : entry.flags & kFamilyOnly ? "f" : "";
  return text(entry.kind == 1 ? "PTX compute_" : "sm_", entry.chip, suffix);
}

std::string chips_of(const Image& image) {
  const char* data = static_cast<const char*>(image.data);
  FatbinHeader header;
  FatbinEntry entry;
  if (image.bytes < sizeof header) return "";
  std::memcpy(&header, data, sizeof header);
  if (header.magic != kFatbinMagic) return "";

  std::string chips;
  uint64_t at = header.header_bytes;
  while (at + sizeof entry <= image.bytes) {
    std::memcpy(&entry, data + at, sizeof entry);
    if (entry.kind != 1 && entry.kind != 2) break;
    if (entry.content_bytes > image.bytes || entry.header_bytes < sizeof entry) break;
    chips += (chips.empty() ? "" : ", ") + entry_text(entry);
    at += entry.header_bytes + entry.content_bytes;
  }
  return chips;
}

}  // namespace

const Image& image_for(const Image& images, int compute_capability) {
  const Image* machine_code = nullptr;
  const Image* ptx = nullptr;
  for (const Image* image = &images; image; image = image->next) {
    const Target& target = image->target;
    const int own = target.compute_capability;
    const bool runs = target.chip_only
                          ? compute_capability == own
                          : compute_capability / 10 == own / 10 && compute_capability >= own;
    const auto newer = [&](const Image* than) {
      return !than || own > than->target.compute_capability;
    };
    if (runs && newer(machine_code)) machine_code = image;
    if (target.ptx && compute_capability >= own && newer(ptx)) ptx = image;
  }
  // The driver's own switch, which makes it ignore machine code: a way to try what chips to come
  // get.
  static const bool force_ptx = [] {
    const char* value = std::getenv("CUDA_FORCE_PTX_JIT");
    return value && !std::strcmp(value, "1");
  }();
  if (force_ptx && ptx) return *ptx;
  return machine_code ? *machine_code : ptx ? *ptx : images;
}

std::string image_chips(const Image& images) {
  std::string all;
  for (const Image* image = &images; image; image = image->next) {
    const std::string chips = chips_of(*image);
    if (!chips.empty()) all += (all.empty() ? "" : ", ") + chips;
  }
  return all;
}

Status check_aligned(const char* name, const void* data) {
  if (reinterpret_cast<uintptr_t>(data) % 16 == 0) return {};
  return invalid(name,
                 " begins at an address that is not a multiple of 16 bytes; call .clone() on it");
}

Status prepare(const KernelId& id, int device, uint32_t shared_bytes) {
  const Result<const Driver*> driver = cuda::driver();
  if (!driver.ok()) return driver.status();
  const Result<const DeviceInfo*> info = find_device(device);
  if (!info.ok()) return info.status();
  Kernel* kernel = nullptr;
  return ready_kernel({*driver.value(), *info.value(), id}, shared_bytes, kernel);
}

Status launch(const KernelId& id, const LaunchShape& shape, int device, void* stream,
              const void* params, size_t params_bytes) {
  const Result<const Driver*> driver = cuda::driver();
  if (!driver.ok()) return driver.status();
  const Result<const DeviceInfo*> info = find_device(device);
  if (!info.ok()) return info.status();
  const Call call{*driver.value(), *info.value(), id};

  Kernel* kernel = nullptr;
  if (Status status = ready_kernel(call, shape.shared_bytes, kernel); !status.ok()) {
    return with_capture_hint(call, stream, std::move(status));
  }
  if (kernel->params_bytes && kernel->params_bytes != params_bytes) {
    return invalid("kernel ", id.name, " of image ", id.image->name, " takes ",
                   kernel->params_bytes, " bytes of parameters and is given ", params_bytes,
                   ": library and kernels are of different builds");
  }
  if (shape.grid[0] == 0 || shape.grid[1] == 0 || shape.grid[2] == 0) return Status();
  return launch_ready(call, *kernel, shape, stream, params);
}

Result<KernelInfo> kernel_info(const KernelId& id, int device) {
  if (Status status = prepare(id, device, 0); !status.ok()) return status;
  const Call call{*driver().value(), *find_device(device).value(), id};
  const CUkernel handle = find(call.id)->handle;
  CUresult result = CUDA_SUCCESS;
  const auto ask = [&](CUfunction_attribute attribute, int& value) {
    if (result != CUDA_SUCCESS) return;
    result = call.driver.cuKernelGetAttribute(&value, attribute, handle, call.device.handle);
  };
  KernelInfo info;
  ask(CU_FUNC_ATTRIBUTE_NUM_REGS, info.registers);
  ask(CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, info.static_shared_bytes);
  ask(CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, info.local_bytes);
  ask(CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, info.max_threads);
  ask(CU_FUNC_ATTRIBUTE_BINARY_VERSION, info.binary_version);
  ask(CU_FUNC_ATTRIBUTE_PTX_VERSION, info.ptx_version);
  if (result != CUDA_SUCCESS) return failed("ask about", call, result);
  return info;
}

}  // namespace flashmoe::cuda
