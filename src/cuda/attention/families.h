// The families of attention kernels, as rows of one table. The planner and run() go through it and
// name none; tests, docs and `doctor` read it through cuda_families().
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "cuda/attention/catalogue.h"
#include "cuda/runtime/families.h"
#include "flashmoe/attention.h"

namespace flashmoe::cuda {

struct Call;

struct Family {
  const char* name;  // of the ChipFamily, whose facts these kernels share with other operators'

  // What no kernel of it can do of the problem; empty: nothing.
  std::string (*lacks)(const AttentionPlan& plan);
  // Why the next family that can run the problem is faster, as measured; empty: it is not.
  std::string (*slower)(const AttentionPlan& plan, const Gpu& gpu);
  // Why a kernel of it for packed tokens or whole heads cannot run the problem; empty: it can.
  std::string (*cannot_serve)(const AttentionPlan& plan, const Kernel& kernel);
  // Why a smaller tile than the kernel's is faster, or one that has a part of a head; empty: none
  // is.
  std::string (*too_large)(const AttentionPlan& plan, const Kernel& kernel, const Gpu& gpu);
  // Fills in launches and workspace. Kernel, family and tile are in the plan already.
  void (*lay_out)(AttentionPlan& plan, const Kernel& kernel, const Gpu& gpu);
  Status (*run)(const Call& call);

  const ChipFamily& chips() const { return *find_chip_family(name); }
};

// Best first.
std::span<const Family> families();
const Family* find_family(std::string_view name);

// Whether this build has kernels of the family, and for that dtype.
bool has_kernels(const Family& family);
bool has_kernels(const Family& family, DType dtype);

}  // namespace flashmoe::cuda
