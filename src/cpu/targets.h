// Which of the compiled instruction sets this machine can run.
#pragma once

#include <string>
#include <vector>

#include "cpu/target.h"
#include "flashmoe/device.h"
#include "flashmoe/plan.h"

namespace flashmoe::cpu {

// The best target this machine can run, or the one FLASHMOE_CPU_TARGET names. Decided once.
const Target& target();

// The kernels for tensors of that dtype.
template <class Kernels>
const Kernels& kernels_for(DType dtype, const Arithmetics<Kernels>& all) {
  return dtype == DType::kFloat64 ? all.fp64 : dtype == DType::kBFloat16 ? all.bf16 : all.fp32;
}

struct TargetInfo {
  const char* name;
  bool runnable;      // on this machine
  const char* needs;  // what the CPU must have, for people
};

// Every target in this build, best first.
std::vector<TargetInfo> target_list();

// The targets better than the one in use, and that one.
std::vector<Candidate> candidates();

// Whether a call can run as the device says. FLASHMOE_CPU_TARGET may name what cannot be used.
Status check_device(const Device& device);

}  // namespace flashmoe::cpu
