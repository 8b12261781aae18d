#include "mma_registers.h"

#include <algorithm>

namespace emulator {

constexpr char kNoFence[] =
    "a thread touched registers of an MMA before it, and no wgmma.fence came between";

MmaRegisters::Array& MmaRegisters::array_at(const void* memory) {
  const auto* const byte = static_cast<const char*>(memory);
  const auto array = std::find_if(arrays_.begin(), arrays_.end(),
                                  [&](const Array& one) { return one.memory == byte; });
  return array == arrays_.end() ? arrays_.emplace_back(Array{byte}) : *array;
}

std::string MmaRegisters::add(const float* sums, int count, bool adds, uint32_t group,
                              const std::string& wrong) {
  Array& array = array_at(sums);
  if (array.touched) return kNoFence;
  if (!adds) {
    for (const uint32_t one : array.groups) {
      if (one <= array.seen) seen_before_.insert(one);
    }
    array = {array.memory};
  }
  array.bytes = count * static_cast<int>(sizeof(float));
  if (array.groups.empty() || array.groups.back() != group) array.groups.push_back(group);
  if (!wrong.empty()) array.wrong = wrong;
  return {};
}

std::string MmaRegisters::read(const uint32_t* registers, uint32_t group) {
  Array& array = array_at(registers);
  if (array.touched) return kNoFence;
  array = {array.memory, 4 * static_cast<int>(sizeof(uint32_t)), true, false, {group}};
  return {};
}

void MmaRegisters::fence() {
  for (Array& array : arrays_) array.touched = false;
}
void MmaRegisters::done(uint32_t group) { done_ = std::max(done_, group); }

std::string MmaRegisters::access(const void* memory, bool writes) {
  const auto* const byte = static_cast<const char*>(memory);
  for (Array& array : arrays_) {
    if (byte < array.memory || byte >= array.memory + array.bytes) continue;
    std::vector<uint32_t>& groups = array.groups;
    if (array.operand && !writes) return {};
    if (!groups.empty() && groups.back() > done_) {
      return "a thread touched registers of an MMA that it had not waited for";
    }
    array.touched = true;
    if (writes) {
      // What the thread has not looked at is lost.
      while (!groups.empty() && groups.back() > array.seen) groups.pop_back();
      array.wrong.clear();
    } else if (!groups.empty()) {
      array.seen = groups.back();
    }
    return array.wrong;
  }
  return {};
}

bool MmaRegisters::spoil(uint32_t group, const std::string& why) {
  bool looked = seen_before_.count(group) > 0;
  for (Array& array : arrays_) {
    if (!std::binary_search(array.groups.begin(), array.groups.end(), group)) continue;
    looked = looked || group <= array.seen;
    array.wrong = why;
  }
  return looked;
}

}  // namespace emulator
