// Which of the compiled instruction sets this machine can run.
#pragma once

#include <string>
#include <vector>

#include "flashmoe/device.h"
#include "flashmoe/plan.h"

namespace flashmoe::cpu {

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
