#include "cpu/targets.h"

#include <cstdlib>
#include <cstring>

#include "core/text.h"
#include "cpu/threads.h"

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif
#if defined(FLASHMOE_HAS_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace flashmoe::cpu {

extern const Target target_neon_bf16, target_neon, target_amx, target_avx512, target_avx2,
    target_sse2, target_generic;

namespace {

struct Entry {
  const Target* target;
  bool runnable;
  const char* needs;
};

#if defined(FLASHMOE_HAS_AMX)
// Whether this machine has AMX for bf16, and Linux lets this process use it: its registers are so
// large that one has to ask.
bool may_use_amx() {
  constexpr int kTileData = 18, kAsk = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24, kAvx512Bf16 = 1u << 5;
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & kAmxBf16) || !(d & kAmxTile)) return false;
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a & kAvx512Bf16)) return false;
  return syscall(SYS_arch_prctl, kAsk, kTileData) == 0;
}
#endif

std::vector<Entry> entries() {
  std::vector<Entry> list;
#if defined(FLASHMOE_HAS_NEON_BF16)
#if defined(HWCAP2_BF16)
  const bool bf16 = (getauxval(AT_HWCAP2) & HWCAP2_BF16) && (getauxval(AT_HWCAP) & HWCAP_ASIMDHP);
#else
  const bool bf16 = false;
#endif
  list.push_back({&target_neon_bf16, bf16, "Armv8.2 with fp16 and bf16"});
#endif
#if defined(FLASHMOE_HAS_NEON)
  list.push_back({&target_neon, true, "any 64-bit Arm"});
#endif
#if defined(FLASHMOE_HAS_AVX512)
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512cd");
#if defined(FLASHMOE_HAS_AMX)
  list.push_back({&target_amx, avx512 && may_use_amx(), "AVX-512 and AMX, with bf16"});
#endif
  list.push_back({&target_avx512, avx512, "AVX-512 F, BW, CD, DQ and VL"});
#endif
#if defined(FLASHMOE_HAS_AVX2)
  // Every CPU with AVX2 and FMA has F16C and BMI too, which this target uses.
  list.push_back({&target_avx2,
                  __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2"),
                  "AVX2 and FMA"});
#endif
#if defined(FLASHMOE_HAS_SSE2)
  list.push_back({&target_sse2, true, "any 64-bit x86"});
#endif
#if defined(FLASHMOE_HAS_GENERIC)
  list.push_back({&target_generic, true, "any CPU"});
#endif
  return list;
}

struct Choice {
  const Target* target = nullptr;
  std::string problem;
};

Choice choose() {
  const char* wanted = std::getenv("FLASHMOE_CPU_TARGET");
  Choice choice;
  std::string runnable;
  for (const Entry& entry : entries()) {
    if (!entry.runnable) continue;
    runnable += text(runnable.empty() ? "" : ", ", entry.target->name);
    const bool match = !wanted || !*wanted || !std::strcmp(wanted, entry.target->name);
    if (match && !choice.target) choice.target = entry.target;
  }
  if (!choice.target) {
    choice.problem = text("FLASHMOE_CPU_TARGET is ", wanted, "; this machine can run ", runnable);
    choice.target = entries().back().target;
  }
  return choice;
}

const Choice& choice() {
  static const Choice once = choose();
  return once;
}

}  // namespace

const Target& target() { return *choice().target; }

std::vector<TargetInfo> target_list() {
  std::vector<TargetInfo> list;
  for (const Entry& e : entries()) list.push_back({e.target->name, e.runnable, e.needs});
  return list;
}

std::vector<Candidate> candidates() {
  std::vector<Candidate> list;
  for (const Entry& entry : entries()) {
    const bool chosen = entry.target == &target();
    std::string verdict = "chosen: the best this CPU can run";
    if (!chosen) {
      verdict = entry.runnable ? "passed over: FLASHMOE_CPU_TARGET asks for another"
                               : text("passed over: this CPU lacks ", entry.needs);
    }
    list.push_back({text("cpu_", entry.target->name), std::move(verdict)});
    if (chosen) break;
  }
  return list;
}

Status check_device(const Device& device) {
  if (device.num_threads < 0) {
    return invalid("device.num_threads is ", device.num_threads, "; it must be at least 0");
  }
  if (!choice().problem.empty()) return invalid(choice().problem);
  return device.num_threads == 0 ? check_pool() : Status();
}

}  // namespace flashmoe::cpu

namespace flashmoe {

std::vector<std::string> cpu_targets() {
  std::vector<std::string> names;
  for (const cpu::TargetInfo& info : cpu::target_list()) {
    if (info.runnable) names.push_back(info.name);
  }
  return names;
}

std::string cpu_target() { return cpu::target().name; }

}  // namespace flashmoe
