// The families of attention kernels, as rows of one table. The planner and run() go through it and
// name none; tests, docs and `doctor` read it through cuda_families().
#pragma once

#include <initializer_list>
#include <span>
#include <string>
#include <string_view>

#include "cuda/attention/catalogue.h"
#include "cuda/runtime/chips.h"
#include "flashmoe/attention.h"

namespace flashmoe::cuda {

// What the planner knows of the device.
struct Gpu {
  int compute_capability = 0;
  Chip chip;
  int64_t multiprocessors = 0;
};
Gpu gpu_of(const Device& device);

struct Call;

struct Family {
  const char* name;
  int oldest, newest;  // compute capabilities it runs on; newest 0: every later one, by its PTX
  std::initializer_list<const char*> machine_code;  // chips it is compiled for
  const char* ptx;                                  // for chips to come; "": none
  std::initializer_list<DType> dtypes;

  // What no kernel of it can do of the problem; empty: nothing.
  std::string (*lacks)(const AttentionPlan& plan);
  // Why the next family that can run the problem is faster, as measured; empty: it is not.
  std::string (*slower)(const AttentionPlan& plan, const Gpu& gpu);
  // Why a kernel of it for packed tokens cannot run the problem; empty: it can.
  std::string (*cannot_pack)(const AttentionPlan& plan, const Kernel& kernel);
  // Why a smaller tile than the kernel's is faster; empty: none is.
  std::string (*too_large)(const AttentionPlan& plan, const Kernel& kernel, const Gpu& gpu);
  // Fills in launches and workspace. Kernel, family and tile are in the plan already.
  void (*lay_out)(AttentionPlan& plan, const Kernel& kernel, const Gpu& gpu);
  Status (*run)(const Call& call);
};

// Best first.
std::span<const Family> families();
const Family* find_family(std::string_view name);

// Whether this build has kernels of the family.
bool has_kernels(const Family& family);

}  // namespace flashmoe::cuda
