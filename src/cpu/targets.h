// Which of the compiled instruction sets this machine can run.
#pragma once

#include <string>
#include <vector>

namespace flashmoe::cpu {

struct TargetInfo {
  const char* name;
  bool runnable;      // on this machine
  const char* needs;  // what the CPU must have, for people
};

// Every target in this build, best first.
std::vector<TargetInfo> target_list();

// Empty unless FLASHMOE_CPU_TARGET names something that cannot be used; then why, and what can.
std::string target_problem();

}  // namespace flashmoe::cpu
