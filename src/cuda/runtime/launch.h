// From the name of a kernel to its launch. Images (fatbins embedded in the library) are loaded when
// one of their kernels is first prepared, once per process and for all its contexts; nothing is
// ever unloaded. All functions are thread-safe; none synchronises with the device.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "flashmoe/status.h"

namespace flashmoe::cuda {

// What an image was compiled for.
struct Target {
  const char* chip = "";       // "sm_80"
  int compute_capability = 0;  // 80: machine code that runs on 8.0, 8.6 and 8.9; 0: not known
  bool chip_only = false;      // sm_90a: on 9.0 and nowhere else
  bool ptx = false;            // also PTX, which the driver compiles for chips to come
};

struct Image {
  const char* name;  // "sm80_attention_fwd_fp16_d64"
  const void* data;  // a fatbin, 8-byte aligned; lives as long as the process
  size_t bytes;
  Target target = {};
  const Image* next = nullptr;  // the same kernels for another chip
};

// Of an image and those chained to it the one to load on a chip: with machine code for it, else
// with PTX; of several the one for the newest chip. If none is for it, the first: the driver then
// says what it thinks of that.
const Image& image_for(const Image& images, int compute_capability);

struct KernelId {
  const char* name;  // "sm80_attention_fwd_fp16_d64_128x128"
  const Image* image;
  const char* symbol = nullptr;  // the name that the image has for it; null: the same
  // Where launch() keeps what it found, so that a name is looked up once; null: nowhere.
  std::atomic<void*>* found = nullptr;
};

struct LaunchShape {
  uint32_t grid[3] = {1, 1, 1};  // a 0 launches nothing, and that is no error
  uint32_t threads = 1;          // of a block
  uint32_t shared_bytes = 0;     // dynamic shared memory of a block
  uint32_t cluster = 1;          // blocks along grid[0] that share an SM cluster (sm_90 on)
  // May start before the kernel ahead of it in the stream has ended, and waits for it itself. In a
  // graph only where the driver knows such edges; elsewhere it starts after that kernel.
  bool programmatic = false;
};

// What the compiler and the driver made of a kernel on one device.
struct KernelInfo {
  int registers = 0;  // per thread
  int static_shared_bytes = 0;
  int local_bytes = 0;     // per thread; spills live here
  int max_threads = 0;     // of a block
  int binary_version = 0;  // 80 for an sm_80 cubin, also on an sm_86 chip
  int ptx_version = 0;     // 80: compiled from compute_80
};

// Refuses an address that is not a multiple of 16 bytes.
Status check_aligned(const char* name, const void* data);

// Loads the kernel on `device` and lets it use `shared_bytes` of dynamic shared memory. Call it
// when a plan is first made: loading inside a graph capture may break the capture. Cheap when done.
Status prepare(const KernelId& kernel, int device, uint32_t shared_bytes);

// Launches on `stream` (a CUstream of `device`; null: its default stream), preparing the kernel
// first where nobody has. The context of `device` that is current is used; if none is, its primary
// context for the duration of the call. `params` is the kernel's only argument, passed by value and
// copied before the call returns.
Status launch(const KernelId& kernel, const LaunchShape& shape, int device, void* stream,
              const void* params, size_t params_bytes);

Result<KernelInfo> kernel_info(const KernelId& kernel, int device);

// The chips that an image and those chained to it hold code for: "sm_80, PTX compute_80, sm_90".
// Empty if that cannot be read.
std::string image_chips(const Image& image);

}  // namespace flashmoe::cuda
