// Devices, what this build has for them, and where a call runs. Knows no operator.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "flashmoe/export.h"
#include "flashmoe/status.h"
#include "flashmoe/tensor.h"

namespace flashmoe {

enum class DeviceType { kCpu, kCuda };

// Where the tensors live and what that device can do. Filled by the caller, never probed by the
// planner, so a laptop can ask what another machine would run.
struct Device {
  DeviceType type = DeviceType::kCpu;
  int num_threads = 0;  // CPU: threads that will work on the call; 0 = the library's own pool
  int ordinal = 0;      // CUDA: which one, as the driver counts
  int compute_capability = 0;  // CUDA: 75, 80, 86, 89, 90, ...
  int multiprocessors = 0;     // CUDA: 0 = as many as the usual card of that capability has

  bool operator==(const Device&) const = default;
};

// Runs task(0) .. task(tasks - 1), several at once, and returns when all are done. Give your own to
// run on your threads; the default is a pool of the library's (FLASHMOE_NUM_THREADS sets its size).
using ParallelFor = std::function<void(int tasks, const std::function<void(int)>& task)>;

// Where a plan is run.
struct Launch {
  void* stream = nullptr;     // CUDA: a CUstream; ignored on the CPU
  ParallelFor parallel = {};  // CPU: where the threads come from
};

// CPU instruction sets this build has kernels for, best first, and the one in use.
FLASHMOE_API std::vector<std::string> cpu_targets();
FLASHMOE_API std::string cpu_target();

// CUDA devices of this machine, or why there are none.
FLASHMOE_API Result<std::vector<Device>> cuda_devices();

// A family of CUDA kernels: those that use one generation's instructions.
struct CudaFamily {
  std::string name;                       // "sm80"
  int oldest = 0, newest = 0;             // compute capabilities it runs on; newest 0: no limit
  std::vector<std::string> machine_code;  // chips it is compiled for: "sm_80", "sm_90"
  std::string ptx;                        // "compute_80", for chips to come; empty: none
  std::vector<DType> dtypes;
  std::vector<int> head_dims;  // attention: sizes of head dim that kernels are compiled for
  bool in_build = false;       // whether this build has kernels of it
};
// Every family the library knows, best first.
FLASHMOE_API std::vector<CudaFamily> cuda_families();

// A CUDA kernel of this build, as the planner sees it.
struct CudaKernel {
  std::string name, family, image;
  std::string symbol;              // its name in the image
  std::vector<std::string> chips;  // for which this build has machine code of it: "sm_80", "sm_90"
  std::string role;                // "attention_fwd", "moe_up", ...: docs/design.md has them
  DType dtype = DType::kFloat16;
  // The tile: queries x keys of attention, rows x columns of a product. 0 for kernels without one;
  // head_dim is attention's alone.
  int head_dim = 0, block_q = 0, block_k = 0;
  int threads = 0, shared_bytes = 0;
};
FLASHMOE_API std::vector<CudaKernel> cuda_kernels();

FLASHMOE_API const char* version();

}  // namespace flashmoe
